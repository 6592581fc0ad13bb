"""A backward that raises, and is caught: it leaves nothing behind, on whichever worker it happened."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import threads
from paceline.core.parts import Reduced, Reducer
from paceline.errors import MismatchError
from paceline.method import Method
from rig import Rig, close, data, mlp, same, sgd, weights

AT = 2  # the step in which it happens


class Trap:
    """Raises in the middle of a backward, once it is armed."""

    def __init__(self, model):
        self.armed = False
        model[2].weight.register_hook(self)  # the last layer's gradients are there by then, the first's are not

    def __call__(self, grad):
        if self.armed:
            raise MemoryError("out of memory, say")


def trained(world_size, spec="exact", *, who=(0, 1, 2), knobs=None, retry=False, again=False, steps=False, **rig):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        trap = Trap(model)
        one = Rig(comm, model, opt, spec=spec, knobs=knobs, **rig)
        for step, (x, y) in enumerate(data(6)):
            x, y = one.take(x, y)
            trap.armed = step == AT and comm.rank in who
            loss = cross_entropy(model(x), y)
            try:
                loss.backward(retain_graph=again)
            except MemoryError:
                trap.armed = False
                if again:  # the same graph once more: no forward comes before
                    loss.backward()
                elif retry:  # in two halves, as one does when memory is short
                    for half, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                        (cross_entropy(model(half), labels) / 2).backward()
                elif not steps:
                    continue
            opt.step()
            opt.zero_grad()
        one.engine.settle()
        return weights(model)

    with warnings.catch_warnings(action="ignore"):
        return threads.run(world_size, work)


def plain(leave_out=True):
    model = mlp()
    opt = sgd(model)
    for step, (x, y) in enumerate(data(6)):
        if step == AT and leave_out:
            continue
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


EXACT = [
    ("exact", {}),
    ("priority", {}),
    ("zero1", {}),
    ("zero2", {}),
    ("topk", {"ratio": 1.0}),
    ("delayed", {"staleness": 0}),
    ("local_sgd", {"every": 1}),
]


@pytest.mark.parametrize(("spec", "knobs"), EXACT, ids=[spec for spec, _ in EXACT])
def test_on_all_workers(spec, knobs):
    close(same(trained(3, spec, knobs=knobs)), plain())


@pytest.mark.parametrize("spec", ["exact", "priority", "zero2", "topk"])
@pytest.mark.parametrize("who", [0, 2])
def test_on_one_worker_no_worker_makes_the_step(spec, who):
    knobs = {"ratio": 1.0} if spec == "topk" else {}
    close(same(trained(3, spec, who=(who,), knobs=knobs)), plain())


@pytest.mark.parametrize("spec", ["exact", "priority", "zero2", "topk", "local_sgd"])
def test_a_step_behind_it_does_not_count_either(spec):
    """The error is caught on one worker, and the loop goes on to `step` as if nothing had happened."""
    knobs = {"topk": {"ratio": 1.0}, "local_sgd": {"every": 1}}.get(spec, {})
    result = same(trained(3, spec, who=(1,), knobs=knobs, steps=True))
    if spec != "local_sgd":  # there the other workers make their own steps
        close(result, plain())


@pytest.mark.parametrize("steps", [False, True])
def test_loss_scales_stay_equal(steps):
    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
        trap = Trap(model)
        one = Rig(comm, model, opt, scaler=scaler)
        scales = []
        for step, (x, y) in enumerate(data(6)):
            x, y = one.take(x, y)
            trap.armed = step == AT and comm.rank == 1
            try:
                scaler.scale(cross_entropy(model(x), y)).backward()
            except MemoryError:
                if not steps:
                    continue
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
        return torch.tensor([scales[-1], *weights(model)])

    with warnings.catch_warnings(action="ignore"):
        same(threads.run(2, work))


@pytest.mark.parametrize("spec", ["exact", "priority", "zero1"])
def test_the_batch_once_more_in_halves(spec):
    close(same(trained(2, spec, retry=True)), plain(leave_out=False))


@pytest.mark.parametrize("spec", ["exact", "priority"])
def test_the_same_graph_once_more(spec):
    close(same(trained(2, spec, again=True)), plain(leave_out=False))


def test_one_worker_that_runs_the_batch_once_more_is_named():
    with pytest.raises(MismatchError, match=r"worker \d is at (step|batch) \d"):
        trained(3, who=(1,), retry=True)


@pytest.mark.parametrize("at", [2, 3])
def test_in_a_window_of_micro_batches(at):
    """Of four the third raises: the step is the mean over the samples of the other three. Or the last, whose bytes the
    others wait for: the window is of no step, and the next one begins with the next batch.
    """

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, accumulate=4)
        trap = Trap(model)
        for step, (x, y) in enumerate(data(8)):
            x, y = one.take(x, y)
            trap.armed = step == at
            try:
                cross_entropy(model(x), y).backward()
            except MemoryError:
                trap.armed = False
                if at == 3:
                    continue
            opt.step()
            opt.zero_grad()
        return weights(model)

    model = mlp()
    opt = sgd(model)
    batches = data(8)
    for window in (batches[:2] + batches[3:4], batches[4:]) if at == 2 else (batches[4:],):
        for x, y in window:
            (cross_entropy(model(x), y) / len(window)).backward()
        opt.step()
        opt.zero_grad()
    with warnings.catch_warnings(action="ignore"):
        close(same(threads.run(2, work)), weights(model))


@dataclass(kw_only=True)
class Seen(Reducer):
    """Notes what is sent."""

    name: ClassVar[str] = "seen"
    sent: ClassVar[dict[int, list[Tensor]]] = {}

    async def mean(self, b, x, comm):
        self.sent.setdefault(comm.rank, []).append(x[: b.n].clone())
        return Reduced(await comm.mean(x))


def test_the_others_are_sent_zeros():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        trap = Trap(model)
        one = Rig(comm, model, opt, spec=Method(reducer=Seen()))
        for step, (x, y) in enumerate(data(AT + 2)):
            x, y = one.take(x, y)
            trap.armed = step == AT and comm.rank == 1
            try:
                cross_entropy(model(x), y).backward()
            except MemoryError:
                continue
            opt.step()
            opt.zero_grad()
        return len(one.engine.buckets)

    with warnings.catch_warnings(action="ignore"):
        [count, _] = threads.run(2, work)
    first, *_, last = Seen.sent[1][-2 * count : -count]
    assert first.any(), "nothing had left before it raised"
    assert not last.any()


@pytest.mark.parametrize("then", ["another backward", "a step"])
def test_it_is_said(then):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        trap = Trap(model)
        one = Rig(comm, model, opt)
        x, y = one.take(*data(1)[0])
        trap.armed = True
        with pytest.raises(MemoryError):
            cross_entropy(model(x), y).backward()
        trap.armed = False
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if then == "another backward":
                cross_entropy(model(x), y).backward()
            opt.step()
        return [str(w.message) for w in said]

    assert any("a backward raised an error and was given up" in text for text in threads.run(2, work)[0])


def test_alone_it_is_left_as_it_is():
    """In a world of one the gradients are the user's own, as in plain PyTorch."""
    model = mlp()
    opt = sgd(model)
    trap = Trap(model)
    for step, (x, y) in enumerate(data(6)):
        trap.armed = step == AT
        try:
            cross_entropy(model(x), y).backward()
        except MemoryError:
            continue
        opt.step()
        opt.zero_grad()
    close(trained(1)[0], weights(model))
