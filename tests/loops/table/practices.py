"""What people have built around a step: surgery on gradients, climbs, copies, penalties, compression, logging."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loops.job import BATCH, CLASSES, INPUTS, STEPS, Job, batches, loop, loss_of, net, samples


def _step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model(x), y).backward()
    opt.step()
    opt.zero_grad()


# ------------------------------------------------------------------------------------------------ gradients


@loop(nonlinear=True)
def pcgrad(job: Job):
    """PCGrad: a backward for each task, gradients cloned and zeroed, conflicts projected away, p.grad = the sum"""
    model, opt, loader = job.start()
    for x, y in loader:
        tasks = []
        for loss in (loss_of, lambda out, y: out.square().mean()):
            opt.zero_grad()
            loss(model(x), y).backward()
            tasks.append([p.grad.detach().clone() for p in model.parameters()])
        a, b = (torch.cat([g.flatten() for g in task]) for task in tasks)
        dot = a @ b
        if dot < 0:
            a, b = a - dot / b.square().sum() * b, b - dot / a.square().sum() * a
        at = 0
        for p in model.parameters():
            p.grad = (a + b)[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        opt.zero_grad()
    return model


@loop
def per_sample_clipped(job: Job):
    """DP-SGD: the gradient of every sample by vmap, clipped by itself; p.grad = their mean"""
    model, opt, loader = job.start()

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, params, (x[None],)), y[None])

    for x, y in loader:
        params = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (0.5 / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("b,b...->...", factor, each[name]) / len(x)
        opt.step()
        opt.zero_grad()
    return model


@loop
def reptile(job: Job):
    """Reptile: a copy takes one step on the samples, p.grad = p - what it became"""
    model, opt, loader = job.start()
    for x, y in loader:
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.5)
        loss_of(fast(x), y).backward()
        inner.step()
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clipped_by_unit(job: Job):
    """timm: adaptive gradient clipping, each row's gradient against the row's norm"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            if p.ndim > 1:
                limit = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.05
                norm = p.grad.detach().norm(dim=1, keepdim=True)
                clipped = p.grad.detach() * (limit / norm.clamp(min=1e-6))
                p.grad.detach().copy_(torch.where(norm < limit, p.grad.detach(), clipped))
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_norm_infinite(job: Job):
    """clip_grad_norm_ with the largest element as the norm"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def clip_norm_of_some(job: Job):
    """clip_grad_norm_ over the first layer alone, then over all, foreach=False"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def skipped_by_norm(job: Job):
    """a step whose gradient norm is large is left out, as clip_grad_norm_ tells it"""
    model, opt, loader = job.start()
    limit = 0.7
    for x, y in loader:
        loss_of(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm < limit:
            opt.step()
        limit *= 0.95
        opt.zero_grad()
    return model


@loop
def grads_not_a_number_to_zero(job: Job):
    """torch.nan_to_num_ over all gradients, of which none needs it"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0, posinf=1.0, neginf=-1.0)
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def gradient_noise_annealed(job: Job):
    """p.grad += noise of a generator that all workers seed alike"""
    model, opt, loader = job.start()
    g = torch.Generator().manual_seed(3)
    for x, y in loader:
        loss_of(model(x), y).backward()
        for p in model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=g)
        opt.step()
        opt.zero_grad()
    return model


@loop
def momentum_of_gradients(job: Job):
    """Grokfast: an average of gradients is kept and added to each, p.grad = p.grad + 2 * average"""
    model, opt, loader = job.start()
    means: dict[str, Tensor] = {}
    for x, y in loader:
        loss_of(model(x), y).backward()
        for name, p in model.named_parameters():
            means[name] = means.get(name, torch.zeros_like(p)) * 0.9 + p.grad.detach() * 0.1
            p.grad = p.grad + means[name] * 2
        opt.step()
        opt.zero_grad()
    return model


@loop
def backward_of_inputs(job: Job):
    """loss.backward(inputs=[...]) for the last layer, then for the others"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss = loss_of(model(x), y)
        last = list(model[4].parameters())
        loss.backward(inputs=last, retain_graph=True)
        loss.backward(inputs=[p for p in model.parameters() if all(p is not q for q in last)])
        opt.step()
        opt.zero_grad()
    return model


@loop
def hidden_gradients(job: Job):
    """retain_grad and a hook on an activation"""
    model, opt, loader = job.start()
    for x, y in loader:
        hidden = model[:2](x)
        hidden.retain_grad()
        hidden.register_hook(lambda g: g * 0.5)
        loss_of(model[2:](hidden), y).backward()
        assert hidden.grad is not None
        opt.step()
        opt.zero_grad()
    return model


@loop
def curvature_logged(job: Job):
    """the Hessian times a vector by autograd.grad twice, for a log, before the backward of the same loss"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss, params = loss_of(model(x), y), list(model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in grads), params, retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def fisher_penalty(job: Job):
    """EWC: the square of a gradient that was never stepped weighs a pull to the old weights"""
    model, opt, loader = job.start()
    fisher: list[Tensor] = []
    for step, (x, y) in enumerate(loader):
        if step == 2:
            loss_of(model(x), y).backward()
            fisher = [p.grad.detach().clone().square() for p in model.parameters()]
            old = [p.detach().clone() for p in model.parameters()]
            opt.zero_grad()
            continue
        loss = loss_of(model(x), y)
        for p, f, q in zip(model.parameters(), fisher, old if fisher else (), strict=False):
            loss = loss + (f * (p - q).square()).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def r1_lazily(job: Job):
    """StyleGAN2: the penalty on the gradient by the input has a step of its own, every other one"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step % 2:
            opt.zero_grad()
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            grad.square().sum(1).mean().backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def virtual_adversary(job: Job):
    """FGSM training: the input's gradient by backward, zero_grad, then the loss at the moved input"""
    model, opt, loader = job.start()
    for x, y in loader:
        x.requires_grad_()
        loss_of(model(x), y).backward()
        moved = (x + 0.1 * x.grad.sign()).detach()
        opt.zero_grad()
        _step(model, opt, moved, y)
    return model


@loop
def free_adversary(job: Job):
    """free adversarial training: one backward gives the step and the next move of the input"""
    model, opt, loader = job.start()
    for x, y in loader:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            loss_of(model(x + delta), y).backward()
            delta.data = (delta.data + 0.1 * delta.grad.sign()).clamp(-0.2, 0.2)
            delta.grad.zero_()
            opt.step()
            opt.zero_grad()
    return model


# ------------------------------------------------------------------------------------------------ climbs and averages


@loop(nonlinear=True)
def asam(job: Job):
    """ASAM in the loop: an ascent scaled by the weights, zero_grad, a second backward, back, step"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        moved = []
        with torch.no_grad():
            scaled = [(p, p.abs() + 0.01) for p in model.parameters()]
            norm = torch.stack([(t * p.grad).norm() for p, t in scaled]).norm() + 1e-12
            for p, t in scaled:
                e = t.square() * p.grad * (0.05 / norm)
                p.add_(e)
                moved.append((p, e))
        opt.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        opt.step()
        opt.zero_grad()
    return model


@loop
def lookahead_by_hand(job: Job):
    """Lookahead in the loop: slow weights are a list of clones, every other step p.data.copy_"""
    model, opt, loader = job.start()
    slow = [p.data.clone() for p in model.parameters()]
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step % 2:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.add_(0.5 * (p.data - s))
                p.data.copy_(s)
    return model


class _ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: the model holds y while it trains and x while it is evaluated."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _swap(self, weight: float, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = training

    def eval(self) -> None:
        self._swap(1 - 1 / self.param_groups[0]["beta"], False)

    def train(self) -> None:
        self._swap(1 - self.param_groups[0]["beta"], True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            c, beta = 1 / group["k"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (beta * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@loop(nonlinear=True)
def schedule_free(job: Job):
    """a schedule-free optimizer, which swaps weights for evaluation and back"""
    model = net()
    opt: Any
    model, opt, loader = job.start(model, _ScheduleFree(model.parameters()))
    losses = []
    x0, y0 = samples(8, seed=3)
    for x, y in loader:
        opt.train()
        _step(model, opt, x, y)
        opt.eval()
        with torch.no_grad():
            losses.append(job.mean(loss_of(model(x0), y0)))
    return {"losses": losses, **model.state_dict()}


class _NormedSGD(torch.optim.Optimizer):
    """An optimizer of one's own that looks at all gradients together, as Prodigy, LION-with-clipping and LARS do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() if params else 1.0
        for p in params:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


@loop(nonlinear=True)
def normed_over_all(job: Job):
    """an optimizer of one's own divides by the norm over all gradients"""
    model = net()
    model, opt, loader = job.start(model, _NormedSGD(model.parameters()))
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def best_restored(job: Job):
    """the best weights are kept as a deep copy of state_dict and loaded at the end"""
    model, opt, loader = job.start()
    best, least = copy.deepcopy(model.state_dict()), float("inf")
    x0, y0 = samples(8, seed=3)
    for x, y in loader:
        _step(model, opt, x, y)
        model.eval()
        with torch.no_grad():
            loss = job.mean(loss_of(model(x0), y0))
        model.train()
        if loss < least:
            best, least = copy.deepcopy(model.state_dict()), loss
    model.load_state_dict(best)
    _step(model, opt, job.mine(x0), job.mine(y0))
    return model


@loop
def model_soup(job: Job):
    """the mean of three states of the run is loaded, and training goes on"""
    model, opt, loader = job.start()
    kept: list[dict[str, Tensor]] = []
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        if step == 3:
            model.load_state_dict({name: sum(k[name] for k in kept) / len(kept) for name in kept[0]})
    return model


# ------------------------------------------------------------------------------------------------ optimizers


@loop
def optimizer_unprepared(job: Job):
    """an optimizer made after prepare, for the same parameters, is stepped in place of the prepared one"""
    model, _, loader = job.start()
    opt = job.optimizer(model.parameters())
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def stepped_by_hand(job: Job):
    """torch's tutorial: p -= lr * p.grad in no_grad, no optimizer's step at all"""
    model, _, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return model


@loop
def shared_by_two_optimizers(job: Job):
    """one layer is in two optimizers"""
    model = net()
    one = job.optimizer([*model[0].parameters(), *model[2].parameters()])
    two = job.optimizer([*model[2].parameters(), *model[4].parameters()], lr=0.05)
    model, one, two, loader = job.prepare(model, one, two, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
    return model


@loop
def momentum_decayed(job: Job):
    """momentum buffers are scaled in mid-run, and the momentum is changed in the group"""
    model = net()
    model, opt, loader = job.start(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            opt.param_groups[0]["momentum"] = 0.5
            for state in opt.state.values():
                state["momentum_buffer"].mul_(0.5)
    return model


@loop
def rate_in_tensor(job: Job):
    """the learning rate is a tensor"""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), foreach=True)
    model, opt, loader = job.start(model, opt)
    for x, y in loader:
        _step(model, opt, x, y)
        opt.param_groups[0]["lr"].mul_(0.8)
    return model


@loop(nonlinear=True)
def adam_beta_by_hand(job: Job):
    """betas and weight decay are changed in the group while Adam runs"""
    model = net()
    model, opt, loader = job.start(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step, (x, y) in enumerate(loader):
        opt.param_groups[0]["betas"] = (0.9 - 0.05 * step, 0.99)
        opt.param_groups[0]["weight_decay"] = 0.01 * step
        _step(model, opt, x, y)
    return model


@loop(nonlinear=True)
def torch_optimizers(job: Job):
    """NAdam, RAdam and Adamax, each over a layer of one model"""
    model, loader = net(), batches()
    kinds = {0: torch.optim.NAdam, 2: torch.optim.RAdam, 4: torch.optim.Adamax}
    opts = [kind(model[i].parameters(), lr=0.01) for i, kind in kinds.items()]
    model, *opts, loader = job.prepare(model, *opts, loader)
    for x, y in loader:
        loss_of(model(x), y).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return model


@loop
def maximised(job: Job):
    """SGD(maximize=True) on the negative loss, step under a closure that is nested in another"""
    model = net()
    model, opt, loader = job.start(model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))
    for x, y in loader:

        def inner(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            return -loss_of(model(x), y)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = inner(x, y)
            loss.backward()
            return loss

        opt.step(closure)
    return model


@loop
def master_weights(job: Job):
    """the model is in bfloat16 and not in the optimizer, which has float32 copies; gradients are carried by hand"""
    model = net().bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    model, opt, loader = job.start(model, job.optimizer(masters))
    for x, y in loader:
        loss_of(model(x.bfloat16()).float(), y).backward()
        for p, m in zip(model.parameters(), masters, strict=True):
            m.grad, p.grad = p.grad.float(), None
        opt.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters, strict=True):
                p.copy_(m)
        opt.zero_grad()
    return masters


@loop(nonlinear=True)
def sparse_adam(job: Job):
    """an EmbeddingBag with sparse gradients under SparseAdam, the rest under SGD"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 6, sparse=True, mode="sum"), nn.Linear(6, 3))
    one = torch.optim.SparseAdam(list(model[0].parameters()), lr=0.01)
    model, one, two, loader = job.prepare(model, one, torch.optim.SGD(model[1].parameters(), lr=0.1), batches())
    for x, y in loader:
        loss_of(model((x[:, :3].abs() * 4).long().clamp(max=9)), y).backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
    return model


@loop
def thawed_with_new_optimizer(job: Job):
    """the head trains first; then the backbone thaws, and a second optimizer is prepared for it"""
    model = net()
    for p in model[:4].parameters():
        p.requires_grad_(False)
    model, opt, loader = job.start(model, job.optimizer(model[4].parameters()))
    extra: list[Any] = []
    for step, (x, y) in enumerate(loader):
        if step == 3:
            for p in model[:4].parameters():
                p.requires_grad_(True)
            extra.append(job.prepare(model, job.optimizer(model[:4].parameters(), lr=0.05))[1])
        loss_of(model(x), y).backward()
        for one in (opt, *extra):
            one.step()
            one.zero_grad()
    return model


# ------------------------------------------------------------------------------------------------ models


@loop
def wrapped_after(job: Job):
    """the prepared model becomes a part of another module, which is called"""
    model, opt, loader = job.start()

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    task = Task()
    for x, y in loader:
        _step(task, opt, x, y)
    return model


@loop
def pruned_later(job: Job):
    """nn.utils.prune in mid-run: the parameter gets another name and a mask"""
    from torch.nn.utils import prune

    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 2:
            prune.l1_unstructured(model[0], "weight", amount=0.3)
        if step == 4:
            prune.remove(model[0], "weight")
        _step(model, opt, x, y)
    return [model[0].weight, model[2].weight, model[4].weight]


@loop
def fused_for_evaluation(job: Job):
    """a linear layer and its BatchNorm are fused for an evaluation"""
    from torch.nn.utils.fusion import fuse_linear_bn_eval

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    model[1].eval()
    model, opt, loader = job.start(model)
    losses = []
    x0, y0 = samples(8, seed=3)
    for x, y in loader:
        _step(model, opt, x, y)
        model.eval()
        with torch.no_grad():
            fused = fuse_linear_bn_eval(model[0], model[1])
            losses.append(float(loss_of(model[2](fused(x0)), y0)))
        model.train()
        model[1].eval()
    return {"losses": losses, **model.state_dict()}


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(2, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.view(len(x), 3, 2))).mean(1))


@loop
def transformer_evaluated(job: Job):
    """a TransformerEncoderLayer, whose evaluation takes a path of its own that calls no inner module"""
    model = _Tower()
    # Not Adam: the gradient of attention's key bias is rounding and nothing else, which Adam would bring to full size.
    model, opt, loader = job.start(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    x0, y0 = samples(8, seed=3)
    for x, y in loader:
        _step(model, opt, x, y)
        model.eval()
        with torch.no_grad():
            losses.append(float(loss_of(model(x0), y0)))
        model.train()
    return {"losses": losses, **model.state_dict()}


@loop
def lstm(job: Job):
    """an LSTM of two layers, both directions, whose weights torch keeps in a list of its own"""
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x.view(len(x), 3, 2))[0][:, -1])

    model, opt, loader = job.start(Reader())
    for x, y in loader:
        _step(model, opt, x, y)
    return model


@loop
def quantised_weights(job: Job):
    """quantisation-aware training: weights are rounded in forward, gradients pass straight through"""

    class Rounded(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w + (torch.round(w * 16) / 16 - w).detach()

    model = net()
    for k in (0, 2, 4):
        nn.utils.parametrize.register_parametrization(model[k], "weight", Rounded())
    model, opt, loader = job.start(model)
    for x, y in loader:
        with nn.utils.parametrize.cached():
            _step(model, opt, x, y)
    return model


@loop
def saved_tensors_on_cpu(job: Job):
    """torch.autograd.graph.save_on_cpu around the forward, anomaly detection around all"""
    model, opt, loader = job.start()
    with torch.autograd.set_detect_anomaly(True):
        for x, y in loader:
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def self_distilled(job: Job):
    """a frozen copy made after some steps teaches"""
    model, opt, loader = job.start()
    teacher: Any = None
    for step, (x, y) in enumerate(loader):
        if step == 3:
            teacher = copy.deepcopy(model).eval().requires_grad_(False)
        loss = loss_of(model(x), y)
        if teacher is not None:
            with torch.no_grad():
                target = teacher(x).softmax(1)
            loss = loss + nn.functional.cross_entropy(model(x), target)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def dropped_layers(job: Job):
    """stochastic depth: each sample's number decides whether the middle layer runs, so workers differ"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        out = []
        for i in range(len(x)):
            hidden = model[:2](x[i : i + 1])
            if x[i, 0] > 0.3 * (step % 3):
                hidden = hidden + model[2](hidden)
            out.append(model[4](hidden))
        loss_of(torch.cat(out), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def weights_copied_back(job: Job):
    """weights are copied out and, transposed, back in by copy_"""
    model, opt, loader = job.start()
    kept = nn.Linear(8, 8)
    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 2:
            with torch.no_grad():
                kept.weight.copy_(model[2].weight)
                model[2].weight.copy_(kept.weight.t())
                model[2].bias.fill_(0.1)
    return model


@loop
def initialised_in_loop(job: Job):
    """model.apply(init) in mid-run: nn.init with constants"""
    model, opt, loader = job.start()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.constant_(module.bias, 0.01)

    for step, (x, y) in enumerate(loader):
        _step(model, opt, x, y)
        if step == 1:
            model.apply(init)
    return model


# ------------------------------------------------------------------------------------------------ loaders


class _Fails(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = samples(3 * BATCH)
        self.broken = True

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        if self.broken and i >= 2 * BATCH:
            raise OSError("a damaged file")
        return self.x[i], self.y[i]


@loop
def loader_raises(job: Job):
    """the data set raises in the third batch on all workers; it is caught, repaired, and a new epoch begins"""
    data, model = _Fails(), net()
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), DataLoader(data, batch_size=BATCH))
    for _ in range(2):
        try:
            for x, y in loader:
                _step(model, opt, x, y)
        except OSError:
            data.broken = False
    return model


@loop
def lengths_asked(job: Job):
    """len(loader) and len(loader.dataset) make the schedule"""
    model = net()
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), batches(5))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 - k / (2 * len(loader)) + len(loader.dataset) / 1e3)
    for _ in range(2):
        for x, y in loader:
            _step(model, opt, x, y)
            schedule.step()
    return model


@loop
def cached_batches(job: Job):
    """batches are collected in a list first and trained on twice"""
    model, opt, loader = job.start(steps=3)
    kept = list(loader)
    for _ in range(2):
        for x, y in kept:
            _step(model, opt, x, y)
    return model


@loop
def subsets_concatenated(job: Job):
    """ConcatDataset of Subsets, a sampler of fixed order"""
    from torch.utils.data import ConcatDataset, Subset

    data = TensorDataset(*samples(STEPS * BATCH))
    parts = ConcatDataset([Subset(data, range(24, 48)), Subset(data, range(24))])
    order = [*range(0, 48, 2), *range(1, 48, 2)]
    model = net()
    loader = DataLoader(parts, batch_size=BATCH, sampler=order)
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), loader)
    for x, y in loader:
        _step(model, opt, x, y)
    return model
