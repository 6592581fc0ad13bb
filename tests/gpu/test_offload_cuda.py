"""State on the host or on disk, parameters on a GPU: the same steps as with everything there."""

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
    "guess": ({"store": "cpu"}, None, None),
    "no guess": ({"store": "cpu", "step": "on_step"}, None, None),
    "part": ({"store": "cpu", "device_gb": 0.002}, None, None),
    "clipped": ({"store": "cpu"}, 0.05, None),
    "a bad step": ({"store": "cpu"}, None, 5),
    "gradients pass": ({"store": "cpu", "step": "stream"}, None, None),
    "gradients pass, a bad step": ({"store": "cpu", "step": "stream"}, None, 5),
    "disk": ({"store": "nvme", "path": "FOLDER", "device_gb": 0.001, "host_gb": 0.001}, None, None),
    "disk, clipped": ({"store": "nvme", "path": "FOLDER"}, 0.05, None),
    "disk, gradients pass": ({"store": "nvme", "path": "FOLDER", "step": "stream"}, None, None),
    "chosen": ({"store": "auto"}, None, None),
    "chosen with little room": ({"store": "auto", "path": "FOLDER", "step": "stream"}, None, None),
}
N = 6 * (WIDTH * WIDTH + WIDTH) + 8 * WIDTH + 8


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


def _little(device, folder):
    """As if the GPU and its host were small: most of the state is on disk, some on the GPU."""
    from paceline.offload.memory_model import FreeMemory

    return FreeMemory(device=9 * N, host=11 * N, disk=20 * N if folder else 0, total=20 * N)


def _cases(rank, stage, folder):
    """All cases in one process: torch takes longer to start than they do."""
    from paceline.offload import placement

    warnings.simplefilter("ignore")
    measured, found = placement.measured, {}
    placement.BUCKET = 1 << 16
    for name, (knobs, clip, bad) in CASES.items():
        mine = {key: folder if value == "FOLDER" else value for key, value in knobs.items()}
        placement.measured = _little if name == "chosen with little room" else measured
        found[name] = (_train(stage, mine, clip, bad), _train(stage, {}, clip, bad))
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_same_steps(stage, tmp_path):
    [cases] = processes.values(processes.run(1, _cases, stage, str(tmp_path)))
    for name, (got, want) in cases.items():
        for mine, theirs, tol in zip(got, want, (1e-2, 1e-4, 2e-2), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=tol, atol=tol, err_msg=name)


def _late(rank, stage, folder):
    warnings.simplefilter("ignore")
    disk = {"store": "nvme", "path": folder}
    return [_train(stage, {**store, "step": "late"}, None, None) for store in ({"store": "cpu"}, disk)]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_one_step_late_on_disk_is_that_in_memory(stage, tmp_path):
    [(memory, disk)] = processes.values(processes.run(1, _late, stage, str(tmp_path)))
    for mine, theirs in zip(disk, memory, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-3)


def _memory(rank, knobs):
    """Bytes a parameter on the GPU: between steps, and at the most in one."""
    import paceline
    from paceline.sharding import turns

    turns.AT_ONCE = 1 << 20  # a bucket
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    square = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()
    del square
    before = torch.cuda.memory_allocated()  # the workspace of a product
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(16)))
    n = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = paceline.prepare(model, optimizer, method="zero2", **knobs)
    for step in range(3):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        model(torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before) / n, (torch.cuda.max_memory_allocated() - before) / n


def test_what_is_on_the_device():
    [all_there], [away] = (
        processes.values(processes.run(1, _memory, knobs)) for knobs in ({}, {"store": "cpu", "step": "stream"})
    )
    assert 13.9 < all_there[0] < 14.6  # parameters, masters, moments
    assert all_there[1] < 17.5, "gradients are stepped in fp32 a few at a time"
    assert 1.9 < away[0] < 2.5
    assert away[1] < 6
