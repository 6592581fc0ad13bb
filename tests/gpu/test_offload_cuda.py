"""State on the host, parameters on a GPU: the same steps as with everything there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDTH = 256


def _train(rank, stage, knobs, clip, bad):
    import paceline

    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8)).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = paceline.prepare(model, optimizer, method=stage, bucket_mb=0.2, **knobs)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(12):
        x = torch.randn(16, WIDTH, generator=generator).cuda().bfloat16()
        loss = nn.functional.cross_entropy(model(x).float(), torch.arange(16, device="cuda") % 8)
        (loss * float("nan") if step == bad else loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"]
    moments = torch.cat([s["exp_avg"].float().cpu().flatten() for s in state.values()])
    weights = torch.cat([p.detach().float().cpu().flatten() for p in model.state_dict().values()])
    return weights, moments, torch.tensor(losses)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("knobs", "clip", "bad"),
    [
        ({}, None, None),
        ({"guess": False}, None, None),
        ({"device_gb": 0.002}, None, None),
        ({}, 0.05, None),
        ({}, None, 5),
    ],
    ids=["guess", "no guess", "part", "clipped", "a bad step"],
)
@pytest.mark.filterwarnings("ignore:paceline")
def test_the_same_steps(stage, knobs, clip, bad):
    [got] = processes.values(processes.run(1, _train, stage, {"store": "cpu", **knobs}, clip, bad))
    [want] = processes.values(processes.run(1, _train, stage, {}, clip, bad))
    for mine, theirs, tol in zip(got, want, (1e-2, 1e-4, 2e-2), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tol, atol=tol)
