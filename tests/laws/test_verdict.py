"""A verdict that stays on the device: the optimizer skips by a tensor, and the host hears of it one step later."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import threads
from laws_table import WORLDS
from paceline.core.engine import EngineOptions
from paceline.errors import NonFiniteError
from rig import Rig, built, close, data, mlp, same, weights

ON_DEVICE = EngineOptions(device_verdict=True)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value: on a GPU each would wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def train(comm, batches, options, bad=(), spec="exact", guard="skip", **knobs):
    """A loop in which worker 1's gradients are NaN in the steps `bad`; the weights, and the count of steps."""
    model = mlp()
    optimizer = fused(model)
    rig = Rig(comm, model, optimizer, options=options, guard=guard, spec=spec, knobs=knobs)
    for t, (x, y) in enumerate(batches):
        x, y = rig.take(x, y)
        loss = nn.functional.cross_entropy(model(x), y)
        if t in bad and comm.rank == comm.world_size - 1:
            loss = loss * torch.nan
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rig.engine.settle()
    return weights(model), rig.engine.ex.step


@pytest.mark.parametrize("world_size", WORLDS[1:])
@pytest.mark.parametrize("bad", [(), (2,), (0, 3, 4)])
def test_a_step_skipped_on_the_device_leaves_no_trace(world_size, bad):
    batches = data(8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = threads.run(world_size, lambda comm: train(comm, batches, ON_DEVICE, bad))
    assert [steps for _, steps in got] == [8 - len(bad)] * world_size
    told = [str(w.message) for w in said if "is skipped on all workers" in str(w.message)]
    assert bool(told) == bool(bad)
    assert all(f"worker {world_size - 1}" in text for text in told)
    good = [batch for t, batch in enumerate(batches) if t not in bad]
    [(alone, _)] = threads.run(1, lambda comm: train(comm, good, EngineOptions()))
    close(same([w for w, _ in got]), alone)


def test_it_goes_as_the_verdict_on_the_host_bit_for_bit():
    batches = data(8)
    on_host = EngineOptions(device_verdict=False)
    with pytest.warns(UserWarning, match="is skipped"):
        device = threads.run(3, lambda comm: train(comm, batches, ON_DEVICE, (1, 5)))
    with pytest.warns(UserWarning, match="is skipped"):
        host = threads.run(3, lambda comm: train(comm, batches, on_host, (1, 5)))
    assert all(torch.equal(a, b) and s == t for (a, s), (b, t) in zip(device, host, strict=True))


def test_the_averages_of_a_step_skipped_on_the_device_go_back():
    build = built(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))

    def run(options):
        def work(comm):
            model = build()
            optimizer = fused(model)
            rig = Rig(comm, model, optimizer, options=options)
            for t, (x, y) in enumerate(data(4)):
                x, y = rig.take(x, y)
                x = x * torch.nan if t == 2 and comm.rank else x
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            rig.engine.settle()
            return torch.cat([model[1].running_mean, model[1].running_var])

        with pytest.warns(UserWarning, match="is skipped"):
            return same(threads.run(2, work))

    close(run(ON_DEVICE), run(EngineOptions(device_verdict=False)))


def test_a_worker_that_trains_alone_sits_out():
    batches = data(8)
    on_host = EngineOptions(device_verdict=False)
    with pytest.warns(UserWarning, match="is skipped on this worker"):
        device = threads.run(2, lambda comm: train(comm, batches, ON_DEVICE, (1, 5), "local_sgd", every=2))
    with pytest.warns(UserWarning, match="is skipped on this worker"):
        host = threads.run(2, lambda comm: train(comm, batches, on_host, (1, 5), "local_sgd", every=2))
    assert all(torch.equal(a, b) and s == t for (a, s), (b, t) in zip(device, host, strict=True))


@pytest.mark.filterwarnings("ignore:paceline")
def test_patience_ends_and_raise_raises():
    with pytest.raises(NonFiniteError, match="20 in a row"):
        threads.run(2, lambda comm: train(comm, data(30), ON_DEVICE, range(30)))
    with pytest.raises(NonFiniteError, match="step 2 does not count"):
        threads.run(2, lambda comm: train(comm, data(4), ON_DEVICE, (2,), guard="raise"))


@pytest.mark.parametrize("guard", ["skip", "off"])
@pytest.mark.parametrize(("spec", "knobs"), [("exact", {}), ("local_sgd", {"every": 2})])
def test_the_host_reads_nothing_in_a_step(guard, spec, knobs):
    """From the first backward to the end of `step`: but for last step's verdict, which has long arrived."""
    model = mlp()
    optimizer = fused(model)

    def work(comm):
        rig = Rig(comm, model, optimizer, options=ON_DEVICE, guard=guard, spec=spec, knobs=knobs, accumulate=2)
        for t, (x, y) in enumerate(data(6)):
            x, y = rig.take(x, y)
            loss = nn.functional.cross_entropy(model(x), y)
            with Reads() as reads:
                loss.backward()
                optimizer.step()
            assert t < 2 or reads.count == 0, f"step {t} read {reads.count} values"
            optimizer.zero_grad()

    threads.run(1, work)
