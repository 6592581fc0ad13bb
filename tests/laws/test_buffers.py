"""Buffers of modules: averaged where they drift apart, and as they were where a step does not count."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.errors import UsageError
from rig import Rig, built, close, data, same, sgd


class Normed(nn.Module):
    """BatchNorm, and a buffer of another kind that every forward in training writes."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.out(self.norm(x))


normed = built(Normed)


def state(model):
    return torch.cat([x.flatten().double() for x in model.state_dict().values()])


def trained(world_size, spec, spoil=lambda step, rank, x: x, knobs=None):
    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec, knobs=knobs)
        for step, (x, y) in enumerate(data(6)):
            x, y = one.take(x, y)
            cross_entropy(model(spoil(step, comm.rank, x)), y).backward()
            opt.step()
            opt.zero_grad()
        one.engine.settle()
        return state(model)

    with warnings.catch_warnings(action="ignore"):
        return threads.run(world_size, work)


@pytest.mark.parametrize("spec", ["exact", "priority", "zero1", "powersgd", "local_sgd"])
def test_a_step_that_does_not_count_leaves_no_trace_in_them(spec):
    """A NaN in one worker's batch: afterwards all is as if that batch had never been."""
    knobs = {"every": 1} if spec == "local_sgd" else {}

    def spoil(step, rank, x):
        return x * float("nan") if step == 2 and rank == 1 else x

    def leave_out(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec, knobs=knobs)
        for step, (x, y) in enumerate(data(6)):
            x, y = one.take(x, y)
            if step == 2:
                continue
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        one.engine.settle()
        return state(model)

    spoiled = trained(3, spec, spoil, knobs)
    assert all(x.isfinite().all() for x in spoiled)
    if spec != "local_sgd":  # there the other two make their step
        close(same(spoiled), same(threads.run(3, leave_out)))


def test_a_backward_that_raises_leaves_no_trace_in_them():
    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt)
        x, y = one.take(*data(1)[0])
        before = [b.clone() for b in model.buffers()]
        handle = model.norm.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cross_entropy(model(x), y).backward()
        handle.remove()
        opt.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))

    with warnings.catch_warnings(action="ignore"):
        threads.run(2, work)


def test_after_an_agreement_a_bad_batch_gives_back_what_was_agreed():
    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="local_sgd", knobs={"every": 2})
        for step, (x, y) in enumerate(data(3)):
            x, y = one.take(x, y)
            agreed = model.norm.running_mean.clone()
            cross_entropy(model(x * float("nan") if step == 2 else x), y).backward()
            opt.step()
            opt.zero_grad()
        assert torch.equal(model.norm.running_mean, agreed)
        return agreed

    with warnings.catch_warnings(action="ignore"):
        same(threads.run(2, work))


@pytest.mark.parametrize("spec", ["exact", "priority", "zero2"])
def test_two_forwards_before_the_first_backward(spec):
    """Autograd has saved the running averages of the second when the first backward agrees on them."""

    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec)
        for x, y in data(4):
            x, y = one.take(x, y)
            losses = [cross_entropy(model(x), y), model(2 * x).square().mean()]
            for loss in losses:
                loss.backward()
            opt.step()
            opt.zero_grad()
        return state(model)

    def plain(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec)
        for x, y in data(4):
            x, y = one.take(x, y)
            (cross_entropy(model(x), y) + model(2 * x).square().mean()).backward()
            opt.step()
            opt.zero_grad()
        return state(model)

    close(same(threads.run(2, work)), same(threads.run(2, plain)))


def test_they_are_followed_when_the_model_is_cast():
    """`.double()` puts other tensors into the modules: these are averaged then."""

    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt)
        model.double()
        for x, y in data(4):
            x, y = one.take(x, y)
            cross_entropy(model(x.double()), y).backward()
            opt.step()
            opt.zero_grad()
        return torch.cat([model.norm.running_mean, model.norm.running_var])

    first, second = threads.run(2, work)
    assert torch.equal(first, second)


def test_a_model_that_is_cast_and_called_by_parts_is_refused():
    def work(comm):
        model = normed()
        opt = sgd(model)
        one = Rig(comm, model, opt)
        model.double()
        x, y = one.take(*data(1)[0])
        cross_entropy(model.out(model.norm(x.double())), y).backward()

    with pytest.raises(UsageError, match=r"became torch.float64 .* in the middle of a step"):
        threads.run(2, work)
