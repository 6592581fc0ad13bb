"""Oracles for shared-out state: torch's ZeroRedundancyOptimizer and FSDP2, the same job on the same gloo."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import registry
from processes import run, values
from rig import data

STAGES = [name for name in registry.parts("layout") if name != "replicated"]


def job(rank, name):
    import paceline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = paceline.prepare(model, optimizer, method=name, bucket_mb=0.002)
    for x, y in data(30, size=12):
        mine = slice(rank * 12 // paceline.world_size(), (rank + 1) * 12 // paceline.world_size())
        cross_entropy(model(x[mine]), y[mine]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in model.state_dict().values()]
    return torch.cat([v.detach().flatten() for v in whole])


def jobs(rank, names):
    """One after the other in the same processes."""
    return [job(rank, name) for name in names]


@pytest.fixture(scope="module")
def trained():
    """By name, the weights of each of two workers."""
    names = [*STAGES, "torch:zero1", "torch:fsdp2"]
    return dict(zip(names, zip(*values(run(2, jobs, names)), strict=True), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_as_torch_shares_it_out(stage, trained):
    for ours in trained[stage]:
        for theirs in ("torch:zero1", "torch:fsdp2"):
            torch.testing.assert_close(ours, trained[theirs][0], rtol=1e-5, atol=1e-6)
