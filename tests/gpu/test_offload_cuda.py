"""State on the host, parameters on a GPU: the same steps as with everything there."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH = 256
CASES = {
    "guess": ({}, None, None),
    "no guess": ({"guess": False}, None, None),
    "part": ({"device_gb": 0.002}, None, None),
    "clipped": ({}, 0.05, None),
    "a bad step": ({}, None, 5),
}


def _train(stage, knobs, clip, bad):
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
    return weights.numpy(), moments.numpy(), np.array(losses)


def _both(rank, stage):
    """All cases in one process: torch takes longer to start than they do."""
    warnings.simplefilter("ignore")
    return {
        name: (_train(stage, {"store": "cpu", **knobs}, clip, bad), _train(stage, {}, clip, bad))
        for name, (knobs, clip, bad) in CASES.items()
    }


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_same_steps(stage):
    [cases] = processes.values(processes.run(1, _both, stage))
    for name, (got, want) in cases.items():
        for mine, theirs, tol in zip(got, want, (1e-2, 1e-4, 2e-2), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol, err_msg=name)
