"""Optimizers, what is wrapped around them, schedulers, closures, several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from loops.job import STEPS, Job, batches, loop, loss_of, net


def _with(make: Callable[..., torch.optim.Optimizer], job: Job, **options: Any) -> nn.Module:
    model = net()
    model, opt, loader = job.prepare(model, make(model.parameters(), **options), batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def sgd_momentum(job: Job):
    """SGD with Nesterov momentum and weight decay"""
    return _with(torch.optim.SGD, job, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


@loop(nonlinear=True)
def adam(job: Job):
    """Adam"""
    return _with(torch.optim.Adam, job, lr=0.01)


@loop(nonlinear=True)
def adamw(job: Job):
    """AdamW with weight decay, capturable off, foreach"""
    return _with(torch.optim.AdamW, job, lr=0.01, weight_decay=0.1, foreach=True)


@loop(nonlinear=True)
def adamw_fused(job: Job):
    """AdamW(fused=True)"""
    return _with(torch.optim.AdamW, job, lr=0.01, fused=True)


@loop(nonlinear=True)
def amsgrad(job: Job):
    """Adam(amsgrad=True)"""
    return _with(torch.optim.Adam, job, lr=0.01, amsgrad=True)


@loop(nonlinear=True)
def rmsprop(job: Job):
    """RMSprop"""
    return _with(torch.optim.RMSprop, job, lr=0.001)


@loop(nonlinear=True)
def adagrad(job: Job):
    """Adagrad"""
    return _with(torch.optim.Adagrad, job, lr=0.05)


@loop(nonlinear=True)
def adafactor(job: Job):
    """Adafactor, which looks at whole matrices"""
    return _with(torch.optim.Adafactor, job, lr=0.05)


@loop
def lbfgs(job: Job):
    """LBFGS"""
    model = net()
    model, opt, loader = job.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3), batches())
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    return model


class Orthogonal(torch.optim.Optimizer):
    """A small Muon: a matrix steps by its momentum, normalised as a whole."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                p.add_(m / (m.norm() + 1e-8) if p.dim() == 2 else m, alpha=-group["lr"])


@loop(nonlinear=True)
def muon(job: Job):
    """an optimizer of one's own that needs whole matrices"""
    return _with(Orthogonal, job)


class Scaled(torch.optim.SGD):
    """An optimizer of one's own that passes step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


@loop
def own_optimizer(job: Job):
    """a subclass of SGD that changes its rate in step"""
    return _with(Scaled, job, lr=0.1)


@loop
def groups(job: Job):
    """parameter groups of different rates"""
    model = net()
    opt = job.optimizer([{"params": model[:2].parameters(), "lr": 0.05}, {"params": model[2:].parameters()}])
    model, opt, loader = job.prepare(model, opt, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def group_added(job: Job):
    """add_param_group in mid-run: a layer thaws"""
    model = net()
    model[0].requires_grad_(False)
    model, opt, loader = job.prepare(model, job.optimizer(model[2:].parameters()), batches())
    for step, (x, y) in enumerate(loader):
        if step == 3:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": list(model[0].parameters())})
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def layer_appended(job: Job):
    """a layer is appended to the model in mid-run, with add_param_group"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            torch.manual_seed(5)
            model.append(nn.Linear(3, 3))
            opt.add_param_group({"params": list(model[5].parameters())})
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


def _scheduled(
    job: Job, make: Callable[[Any], Any], *, after_prepare: bool = True, each: Callable[[Any, int], None] | None = None
) -> Any:
    model = net()
    opt = job.optimizer(model.parameters())
    scheduler = None if after_prepare else make(opt)
    model, opt, loader = job.prepare(model, opt, batches())
    scheduler = scheduler or make(opt)
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        each(scheduler, i) if each else scheduler.step()
    return model, [group["lr"] for group in opt.param_groups]


@loop
def scheduler_before_prepare(job: Job):
    """StepLR made before prepare"""
    return _scheduled(job, lambda opt: schedulers.StepLR(opt, 2, 0.5), after_prepare=False)


@loop
def scheduler_cosine(job: Job):
    """CosineAnnealingLR"""
    return _scheduled(job, lambda opt: schedulers.CosineAnnealingLR(opt, STEPS))


@loop
def scheduler_one_cycle(job: Job):
    """OneCycleLR"""
    return _scheduled(
        job, lambda opt: schedulers.OneCycleLR(opt, 0.02, total_steps=STEPS, cycle_momentum=False), after_prepare=False
    )


@loop
def scheduler_lambda_chained(job: Job):
    """a linear warm-up, then an exponential fall: SequentialLR"""
    return _scheduled(
        job,
        lambda opt: schedulers.SequentialLR(
            opt, [schedulers.LinearLR(opt, 0.1, 1.0, 3), schedulers.ExponentialLR(opt, 0.5)], milestones=[3]
        ),
    )


@loop
def scheduler_warm_restarts(job: Job):
    """CosineAnnealingWarmRestarts with fractions of epochs"""
    return _scheduled(
        job,
        lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, 1),
        each=lambda scheduler, i: scheduler.step(i / 3),
    )


@loop
def scheduler_stepped_first(job: Job):
    """scheduler.step() between backward and optimizer.step()"""
    model, opt, loader = job.start()
    scheduler = schedulers.ExponentialLR(opt, 0.5)
    for x, y in loader:
        loss_of(model(x), y).backward()
        scheduler.step()
        opt.step()
        opt.zero_grad()
    return model


@loop
def rate_by_hand(job: Job):
    """nanoGPT: group["lr"] is set before every step"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        for group in opt.param_groups:
            group["lr"] = 0.02 * (step + 1) / STEPS
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def plateau_on_mean(job: Job):
    """ReduceLROnPlateau on the loss of all workers"""
    model, opt, loader = job.start()
    scheduler = schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for x, y in loader:
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step(round(job.mean(loss.detach()), 4))
    return model


@loop(apart=True)
def plateau_on_own(job: Job):
    """ReduceLROnPlateau on the loss of this worker's share"""
    model, opt, loader = job.start()
    scheduler = schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for x, y in loader:
        loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step(float(loss))
    return model


@loop(apart=True)
def rate_differs(job: Job):
    """one worker's script sets another learning rate"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 2 and job.rank == 1:
            opt.param_groups[0]["lr"] *= 0.5
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def two_optimizers(job: Job):
    """two optimizers over one model, one loss"""
    model = net()
    one, two = job.optimizer(model[:2].parameters()), job.optimizer(model[2:].parameters(), lr=0.05)
    model, one, two, loader = job.prepare(model, one, two, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
    return model


@loop
def two_optimizers_by_turns(job: Job):
    """two optimizers over one model, stepped by turns"""
    model = net()
    one, two = job.optimizer(model[:2].parameters()), job.optimizer(model[2:].parameters())
    model, one, two, loader = job.prepare(model, one, two, batches())
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        (one, two)[i % 2].step()
        one.zero_grad()
        two.zero_grad()
    return model


@loop
def two_prepares(job: Job):
    """two models, prepared by two calls, trained by turns"""
    a, b = net(), net(seed=1)
    a, opt_a = job.prepare(a, job.optimizer(a.parameters()))
    b, opt_b, loader = job.prepare(b, job.optimizer(b.parameters()), batches())
    for x, y in loader:
        loss_of(a(x), y).backward()
        opt_a.step()
        opt_a.zero_grad()
        loss_of(b(x), y).backward()
        opt_b.step()
        opt_b.zero_grad()
    return a, b


@loop
def two_models_one_optimizer(job: Job):
    """encoder and decoder, one optimizer over both"""
    a, b = net()[:2], net(seed=1)[2:]
    opt = job.optimizer([*a.parameters(), *b.parameters()])
    a, b, opt, loader = job.prepare(a, b, opt, batches())
    for x, y in loader:
        loss_of(b(a(x)), y).backward()
        opt.step()
        opt.zero_grad()
    return a, b


@loop
def loss_over_two_prepares(job: Job):
    """one loss over two models that were prepared by two calls"""
    a, b = net()[:2], net(seed=1)[2:]
    a, opt_a = job.prepare(a, job.optimizer(a.parameters()))
    b, opt_b, loader = job.prepare(b, job.optimizer(b.parameters()), batches())
    for x, y in loader:
        loss_of(b(a(x)), y).backward()
        opt_a.step()
        opt_b.step()
        opt_a.zero_grad()
        opt_b.zero_grad()
    return a, b


@loop
def closure(job: Job):
    """optimizer.step(closure)"""
    model, opt, loader = job.start()
    for x, y in loader:

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        opt.step(again)
    return model


class Sharpness(torch.optim.Optimizer):
    """SAM as its usual repository has it: first_step climbs, second_step steps from where it began."""

    def __init__(self, params: Any, base: Callable[[Any], torch.optim.Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@loop(nonlinear=True)
def sam(job: Job):
    """SAM: first_step, a second backward, second_step; step is never called"""
    model = net()
    opt = Sharpness(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
    model, opt, loader = job.prepare(model, opt, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.first_step()
        loss_of(model(x), y).backward()
        opt.second_step()
    return model


@loop(nonlinear=True)
def sam_closure(job: Job):
    """SAM by a closure: step calls it between its halves"""
    model = net()
    opt = Sharpness(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
    model, opt, loader = job.prepare(model, opt, batches())
    for x, y in loader:

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        loss_of(model(x), y).backward()
        opt.step(again)
    return model


@loop(nonlinear=True)
def sam_by_hand(job: Job):
    """SAM written out in the loop over a plain optimizer"""
    model, opt, loader = job.start()
    for x, y in loader:
        loss_of(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            climbs = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, e in zip(model.parameters(), climbs, strict=True):
                p.add_(e)
        opt.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), climbs, strict=True):
                p.sub_(e)
        opt.step()
        opt.zero_grad()
    return model


class Lookahead:
    """A wrapper around a prepared optimizer that is no Optimizer itself."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.count = base, 0
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]

    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for p, slow in zip((p for g in self.base.param_groups for p in g["params"]), self.slow, strict=True):
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)

    def zero_grad(self) -> None:
        self.base.zero_grad()


@loop
def lookahead_around(job: Job):
    """Lookahead around the prepared optimizer"""
    model, opt, loader = job.start()
    opt = Lookahead(opt)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


class Wrapped(torch.optim.Optimizer):
    """An optimizer that holds another and is the one given to prepare, while the inner one is stepped."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, dict(base.defaults))
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


@loop
def optimizer_inside(job: Job):
    """a wrapper that is an Optimizer is prepared; its step calls the inner one's"""
    model = net()
    opt = Wrapped(job.optimizer(model.parameters()))
    model, opt, loader = job.prepare(model, opt, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def inner_prepared_wrapper_kept(job: Job):
    """the plain optimizer object is prepared, and a copy of its step kept from before is called"""
    model = net()
    opt = job.optimizer(model.parameters())
    step = opt.step
    model, opt, loader = job.prepare(model, opt, batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        step()
        opt.zero_grad()
    return model


@loop
def optimizer_hooks(job: Job):
    """register_step_pre_hook scales gradients, register_step_post_hook writes weights"""
    model, opt, loader = job.start()

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        for group in opt.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in opt.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    opt.register_step_pre_hook(before)
    opt.register_step_post_hook(after)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def optimizer_reset(job: Job):
    """the optimizer's state is forgotten in mid-run"""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, opt, loader = job.prepare(model, opt, batches())
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if step == 2:
            opt.state.clear()
    return model


@loop
def optimizer_state_loaded(job: Job):
    """optimizer.load_state_dict(deepcopy(optimizer.state_dict())) in mid-run"""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, opt, loader = job.prepare(model, opt, batches())
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if step == 1:
            kept = copy.deepcopy(opt.state_dict())
        if step == 3:
            opt.load_state_dict(kept)
    return model


@loop
def optimizer_made_anew(job: Job):
    """a new optimizer for the same model is prepared in mid-run"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 3:
            opt = job.prepare(model, job.optimizer(model.parameters(), lr=0.05))[1]
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def optimizer_read(job: Job):
    """momentum buffers are read for logging after the step"""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, opt, loader = job.prepare(model, opt, batches())
    seen = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        seen.append(sum(float(s["momentum_buffer"].square().sum()) for s in opt.state_dict()["state"].values()) >= 0)
    return model, len(seen)
