"""Syncs between real processes over gloo, through `prepare`, at worlds 2, 3 and 4: as between threads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from laws_table import brisk
from marks import slow
from paceline import registry
from paceline.core.facts import Fact
from paceline.method import Method
from processes import run, values
from rig import adamw, close, data, mlp, sgd, train, weights

IN_STEP = sorted(name for name, cls in registry.parts("sync").items() if not cls.is_async)
STEPS = 7


def optimizer_of(name):
    return adamw if Fact.ADAM in registry.find(name).needs else sgd


def spec(name):
    cls = registry.find(name)
    return Method(sync=cls(**brisk(cls)))


def every_sync(rank, names):
    """A job for each, one after the other in the same processes, as a script with several optimizers has them."""
    import paceline

    results = []
    for name in names:
        model = mlp()
        opt = optimizer_of(name)(model)
        model, opt = paceline.prepare(model, opt, method=spec(name), bucket_mb=0.0005)
        for x, y in data(STEPS):
            share = slice(rank * len(x) // paceline.world_size(), (rank + 1) * len(x) // paceline.world_size())
            cross_entropy(model(x[share]), y[share]).backward()
            opt.step()
            opt.zero_grad()
        own = weights(model)
        with paceline.consensus():
            results.append((own, weights(model)))
    return results


@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
def test_every_sync_goes_as_between_threads(world_size):
    outcomes = values(run(world_size, every_sync, IN_STEP, wait_s=120))
    for i, name in enumerate(IN_STEP):
        agreed = [worker[i][1] for worker in outcomes]
        assert all(torch.equal(z, agreed[0]) for z in agreed), f"{name}: workers do not agree"
        on_threads = train(world_size, data(STEPS), optimizer_of(name), spec=spec(name))
        for worker, expected in zip(outcomes, on_threads, strict=True):
            close(worker[i][0], expected, 1e-5)
