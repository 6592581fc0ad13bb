"""On a CUDA device: a world of one takes the same path, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).cuda()


def _train(model, optimizer, autocast, scaler=None):
    g = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(20):
        x, y = torch.randn(32, 64, device="cuda", generator=g), torch.randint(0, 8, (32,), device="cuda", generator=g)
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_a_world_of_one_changes_nothing(autocast):
    model = _model()
    twin = copy.deepcopy(model)
    scalers = [torch.amp.GradScaler("cuda") if autocast == torch.float16 else None for _ in range(2)]
    want = _train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3), autocast, scalers[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    paceline.prepare(*[t for t in (model, optimizer, scalers[1]) if t is not None])
    assert _train(model, optimizer, autocast, scalers[1]) == want


def test_compiled():
    model = _model()
    twin = copy.deepcopy(model)
    want = _train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = paceline.prepare(model, optimizer)
    got = _train(torch.compile(model), optimizer, torch.bfloat16)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=2e-2)
