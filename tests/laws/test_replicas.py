"""Replicas that should agree are looked at, and what pulls them apart is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.core.consensus import consensus_weights
from paceline.errors import MismatchError, UsageError
from paceline.session.objects import Objects
from rig import Rig, close, data, mlp, same, sgd, weights


def trained(spec, meddle=lambda model, rank, step: None, steps=9, **rig):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec, check_replicas=3, **rig)
        for step, (x, y) in enumerate(data(steps)):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            meddle(model, comm.rank, step)
        one.engine.settle()
        return weights(model)

    return threads.run(3, work)


@pytest.mark.parametrize("spec", ["exact", "priority", "zero1", "powersgd", "delayed"])
def test_equal_replicas_are_left_alone(spec):
    same(trained(spec))


@pytest.mark.parametrize(("spec", "who"), [("exact", 0), ("exact", 1), ("priority", 1), ("topk", 1)])
def test_weights_that_one_worker_alone_has_written_are_named(spec, who):
    def meddle(model, rank, step):
        if rank == who and step == 3:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-6

    with pytest.raises(MismatchError, match=rf"the weights of worker {who} are not those of the others: 2\.weight"):
        trained(spec, meddle)


def test_local_methods_are_not_looked_at():
    trained("local_sgd", lambda model, rank, step: None, knobs={"every": 4})


def test_a_learning_rate_of_ones_own_is_named():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt)
        for x, y in data(3):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            opt.param_groups[0]["lr"] = 0.1 if comm.rank else 0.05

    with pytest.raises(
        MismatchError, match=r"worker 0 is at the learning rate 0.05, the others at the learning rate 0.1"
    ):
        threads.run(3, work)


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the closure is called at weights moved uphill."""

    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        up = [p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)) for p in params]
        torch._foreach_add_(params, up)
        for p in params:
            p.grad = None
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, up)
        for p in params:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("spec", ["exact", "priority"])
def test_a_closure_goes_to_an_optimizer_of_the_users_own(spec):
    def loop(model, opt, take):
        for x, y in data(4):
            x, y = take(x, y)

            def closure(x=x, y=y):
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            closure()
            opt.step(closure)
            opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = Sharp(model.parameters(), 0.1)
        return loop(model, opt, Rig(comm, model, opt, spec=spec).take)

    model = mlp()
    close(same(threads.run(2, work)), loop(model, Sharp(model.parameters(), 0.1), lambda *t: t))


def test_what_is_thrown_away_is_not_kept_back():
    """`model.zero_grad()` after a backward without a step: error feedback keeps nothing of those gradients."""

    def run(twice):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            one = Rig(comm, model, opt, spec="topk", knobs={"ratio": 0.1})
            for x, y in data(4):
                x, y = one.take(x, y)
                for _ in range(1 + twice):
                    model.zero_grad()
                    cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            return weights(model)

        return same(threads.run(2, work))

    assert torch.equal(run(True), run(False))


def test_a_wrapped_model_and_a_lazy_one_are_refused():
    wrapped = nn.DataParallel(mlp())
    objects = Objects.sort([wrapped, sgd(wrapped)])
    with pytest.raises(UsageError, match="inside torch's DataParallel already"):
        objects.check()
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="lazy module"):
        Objects.sort([lazy, sgd(lazy)]).check()


class Centred(nn.Module):
    """Takes the running mean of its input off, and writes it in forward."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


@pytest.mark.parametrize("spec", ["exact", "priority", "zero3", "local_sgd"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_each_worker_writes_by_itself_is_named(spec, persistent):
    def work(comm):
        model = nn.Sequential(Centred(persistent), mlp())
        one = Rig(comm, model, opt := sgd(model), spec=spec, check_replicas=3)
        for x, y in data(8):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    if not persistent:
        threads.run(2, work)
        return
    with pytest.raises(MismatchError, match=r"the buffers of worker . are not those of the others: .*mean"):
        threads.run(2, work)


def climb(one, batches):
    """Write into the weights after each backward, without a step."""
    for x, y in batches:
        x, y = one.take(x, y)
        cross_entropy(one.model(x), y).backward()
        with torch.no_grad():
            for p in one.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


@pytest.mark.parametrize("spec", ["local_sgd", "gossip"])
def test_weights_that_change_without_a_step_are_told(spec):
    def work(comm):
        model = mlp()
        climb(Rig(comm, model, sgd(model), spec=spec), data(30))

    with pytest.raises(UsageError, match=r"step\(\) of the prepared optimizer was not called"):
        threads.run(2, work)


def test_they_are_told_where_the_workers_were_to_agree():
    def work(comm):
        model = mlp()
        one = Rig(comm, model, sgd(model), spec="local_sgd")
        climb(one, data(6))
        with consensus_weights(one.engine):
            pass

    with pytest.raises(UsageError, match=r"step\(\) of the prepared optimizer was not called"):
        threads.run(2, work)


def test_climbs_before_a_step_are_not_and_neither_are_loops_that_lose_nothing():
    def work(comm, spec, climbs, steps):
        model = mlp()
        one = Rig(comm, model, sgd(model), spec=spec)
        for _ in range(steps):
            climb(one, data(climbs))
            one.optimizer.step()
            one.optimizer.zero_grad()

    threads.run(2, lambda comm: work(comm, "local_sgd", 8, 4))
    threads.run(2, lambda comm: work(comm, "exact", 30, 1))
