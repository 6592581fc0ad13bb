"""Oracle: torch DDP, on the same gloo, the same model, data and seeds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from marks import slow
from processes import run, values

STEPS = 50


def _data():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(24 * STEPS, 10, generator=g)
    return TensorDataset(x, torch.randint(0, 4, (24 * STEPS,), generator=g))


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def _optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _train(model, optimizer, batches):
    for x, y in batches:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def beside_ddp(rank, name):
    import paceline

    torch.distributed.init_process_group("gloo")  # DDP needs a default group; prepare neither needs nor makes one
    model = _model()
    twin = copy.deepcopy(model)
    loader = DataLoader(_data(), batch_size=24, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, _optimizer(name, model), loader, bucket_mb=0.01)
    batches = [(x.clone(), y.clone()) for x, y in loader]
    ours = _train(model, optimizer, batches)
    assert list(model.state_dict()) == list(twin.state_dict())
    ddp = nn.parallel.DistributedDataParallel(twin)
    theirs = _train(ddp, _optimizer(name, ddp), batches)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)), len(batches)


@pytest.mark.parametrize("name", [slow("sgd"), "adamw"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_to_ddp_after_50_steps(world_size, name):
    for difference, steps in values(run(world_size, beside_ddp, name)):
        assert steps == STEPS
        # Two halves add up the same either way; three thirds are rounded in another order.
        assert difference == 0.0 if world_size == 2 else difference < 1e-5


def one_or_many(rank):
    import paceline

    model = _model()
    loader = DataLoader(_data(), batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = paceline.prepare(model, _optimizer("adamw", model), loader)
    return _train(model, optimizer, loader)


def test_the_same_script_on_one_two_and_four_workers():
    one = values(run(1, one_or_many, env={"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""}))[0]
    for world_size in (2, 4):
        for result in values(run(world_size, one_or_many)):
            for a, b in zip(one, result, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
