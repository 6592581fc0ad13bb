"""Workers that keep their own pace, with a loader: nothing in it makes the fast wait for the slow, or both for ever."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from marks import slow
from processes import run, values
from rig import data, mlp, weights

METHODS = [("async_average", {"every": 1, "age": 2}), ("backup_workers", {}), ("hogwild", {})]


def dataset():
    x, y = (torch.cat(part) for part in zip(*data(4), strict=True))
    return TensorDataset(x, y)


def three_epochs(rank, method, knobs, drawn):
    import paceline

    samples = dataset()
    sampler = RandomSampler(samples, replacement=True) if drawn else None
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(samples, batch_size=6, shuffle=not drawn, sampler=sampler)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, method=method, timeout=20, **knobs)
    steps = 0
    for _ in range(3):
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if rank == 1:
                time.sleep(0.02)
    with paceline.consensus():
        return steps, weights(model)


@pytest.mark.parametrize("drawn", [slow(False), True], ids=["shuffled", "drawn by worker 0"])
@pytest.mark.parametrize(("method", "knobs"), METHODS, ids=[name for name, _ in METHODS])
def test_epochs_end_when_a_worker_says_so(method, knobs, drawn):
    results = values(run(2, three_epochs, method, knobs, drawn))
    assert [steps for steps, _ in results] == [24, 24]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].isfinite().all()


def weighted(rank):
    import paceline

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset(), batch_size=6)
    paceline.prepare(model, optimizer, loader, method="async_average", weight=lambda batch: 1.0)


def test_what_asks_everybody_in_every_step_is_refused():
    for outcome in run(2, weighted):
        assert outcome.error == "UsageError"
        assert "lets them keep their own pace" in outcome.message
