"""How a model is called, and what kinds of model repositories bring."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loops.job import CLASSES, INPUTS, STEPS, Job, batches, loop, loss_of, net, samples


@loop
def forward_called(job: Job):
    """model.forward(x) in place of model(x)"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model.forward(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def weights_used_directly(job: Job):
    """F.linear with the modules' weights; no module is ever called"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = torch.tanh(nn.functional.linear(x, model[0].weight, model[0].bias))
        hidden = torch.tanh(nn.functional.linear(hidden, model[2].weight, model[2].bias))
        loss_of(nn.functional.linear(hidden, model[4].weight, model[4].bias), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def data_parallel_inside(job: Job):
    """the model is wrapped in nn.DataParallel, which does nothing on a CPU"""
    model, opt, loader = job.start(nn.DataParallel(net()))
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


class _Lora(nn.Module):
    """peft: a frozen layer and a low-rank change of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, base.in_features) * 0.3), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@loop
def lora(job: Job):
    """peft: adapters train, the base is frozen, and only the adapters are in the optimizer"""
    model = net()
    model[0], model[2] = _Lora(model[0]), _Lora(model[2])
    trained = [p for p in model.parameters() if p.requires_grad]
    model, opt, loader = job.start(model, job.optimizer(trained))
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def adapters_merged(job: Job):
    """peft: the adapters are merged into the frozen weights for an evaluation, and taken out again"""
    model = net()
    model[0] = _Lora(model[0])
    model, opt, loader = job.start(model, job.optimizer([p for p in model.parameters() if p.requires_grad]))
    x_val, _ = samples(8, seed=3)
    seen = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            change = model[0].b @ model[0].a
            model[0].base.weight += change
            seen.append(model(x_val).clone())
            model[0].base.weight -= change
    return model, seen


class _Weighted(nn.Module):
    """A loss with weights that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        s = self.log_scale
        return (-s[0]).exp() * a + (-s[1]).exp() * b + s.sum()


@loop
def loss_with_parameters(job: Job):
    """a criterion with parameters of its own is handed over as a second model"""
    model, criterion = net(), _Weighted()
    opt = job.optimizer([*model.parameters(), *criterion.parameters()], lr=0.05)
    model, criterion, opt, loader = job.prepare(model, criterion, opt, batches())
    for x, y in loader:
        out = model(x)
        criterion(loss_of(out, y), out.square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model, criterion


@loop
def loss_with_unknown_parameters(job: Job):
    """a criterion with parameters of its own is in the optimizer and not handed over"""
    model, criterion = net(), _Weighted()
    model, opt, loader = job.start(model, job.optimizer([*model.parameters(), *criterion.parameters()], lr=0.05))
    for x, y in loader:
        out = model(x)
        criterion(loss_of(out, y), out.square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return model, criterion


@loop
def backward_create_graph(job: Job):
    """loss.backward(create_graph=True), as second-order optimizers need it"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward(create_graph=True)
        opt.step()
        opt.zero_grad()
    return model


@loop
def module_backward_hooks(job: Job):
    """register_full_backward_hook changes what flows back"""
    model, opt, loader = job.start()
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def lazy_module(job: Job):
    """LazyLinear, which gets its shape in the first forward, after prepare"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, CLASSES))
    model, opt, loader = job.start(model)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {"law": model.state_dict()}


class _Centred(nn.Module):
    """Keeps a mean of its inputs in a buffer that it writes in forward, as vector quantisers and normalisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(dim=0))
        return centred


@loop
def own_buffer(job: Job):
    """a module of one's own writes a running mean in forward and uses it"""
    model, opt, loader = job.start(nn.Sequential(_Centred(), *net()))
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def ppo(job: Job):
    """PPO: a rollout by the old policy, three epochs over it, clipped ratio, clipping, one optimizer for both nets"""
    policy, value = net(), net(seed=1)
    opt = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=0.01)
    policy, value, opt, loader = job.prepare(policy, value, opt, batches(3))
    for x, y in loader:
        with torch.no_grad():
            old = policy(x).log_softmax(dim=1).gather(1, y[:, None])
            advantage = (y == 0).float()[:, None] - 0.3 * value(x)[:, :1]
        for _ in range(3):
            ratio = (policy(x).log_softmax(dim=1).gather(1, y[:, None]) - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean()
            (0.5 * (value(x)[:, :1] - advantage).square().mean() - gain).backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
            opt.step()
            opt.zero_grad()
    return policy, value


@loop
def soft_target(job: Job):
    """SAC: a target critic follows by lerp_ after every step, its output is in the next loss"""
    critic, target = net(), net()
    target.requires_grad_(False)
    critic, opt, loader = job.start(critic)
    for x, _ in loader:
        with torch.no_grad():
            goal = 1 + 0.9 * target(x + 0.1)
        (critic(x) - goal).square().mean().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(critic.parameters(), target.parameters(), strict=True):
                q.lerp_(p, 0.1)
    return critic, target


@loop
def momentum_encoder(job: Job):
    """MoCo: an encoder that follows by momentum before each forward, and a queue of its outputs"""
    query, key = net(), net()
    key.requires_grad_(False)
    query, opt, loader = job.start(query)
    for x, _ in loader:
        with torch.no_grad():
            for p, q in zip(query.parameters(), key.parameters(), strict=True):
                q.data = q.data * 0.9 + p.data * 0.1
            goal = key(x + 0.01)
        (query(x) - goal - 0.1).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return query, key


@loop
def diffusion(job: Job):
    """diffusion: noise and time are drawn for the whole batch by a generator, and sliced"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS + 1, 8), nn.SiLU(), nn.Linear(8, INPUTS))
    model, opt = job.prepare(model, job.optimizer(model.parameters()))
    g = torch.Generator().manual_seed(3)
    for x, _ in batches(STEPS):
        noise, t = torch.randn(x.shape, generator=g), torch.rand(len(x), 1, generator=g)
        x, noise, t = job.mine(x), job.mine(noise), job.mine(t)
        nn.functional.mse_loss(model(torch.cat([(1 - t) * x + t * noise, t], dim=1)), noise).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def reversed_gradient(job: Job):
    """DANN: a gradient reversal layer between two heads"""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    model = nn.ModuleList([net()[:2], nn.Linear(8, CLASSES), nn.Linear(8, 2)])
    model, opt, loader = job.start(model)
    for x, y in loader:
        hidden = model[0](x)
        (loss_of(model[1](hidden), y) + 0.1 * loss_of(model[2](Reverse.apply(hidden)), y % 2)).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def dictionary_of_losses(job: Job):
    """detectron2: the model gives a dictionary of losses, some of them only in some steps"""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.box, self.mask = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)

        def forward(self, x, y, with_mask):
            hidden = torch.tanh(self.body(x))
            losses = {"box": loss_of(self.box(hidden), y)}
            if with_mask:
                losses["mask"] = self.mask(hidden).square().mean()
            return losses

    model, opt, loader = job.start(Detector())
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        sum(model(x, y, step % 3 == 0).values()).backward()
        opt.step()
    return model


@loop
def two_phases(job: Job):
    """pre-training of the body by one optimizer, then fine-tuning of all by a second one over the same model"""
    model, opt, loader = job.start()
    for x, _ in loader:
        model[:4](x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    model, opt = job.prepare(model, job.optimizer(model.parameters(), lr=0.05))
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model
