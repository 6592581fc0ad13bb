"""Parameters on the host or on its disk, and on the GPU only those that something computes with."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH, LAYERS, STEPS = 2048, 32, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(nn.Sequential(layer, nn.Tanh()), x, use_reentrant=False)
        return x


def _train(rank, knobs):
    """The losses, the weights, and in bytes a parameter: what is on the GPU between two steps, and at most."""
    import paceline

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    nn.Linear(WIDTH, WIDTH).cuda().bfloat16()(x).sum().backward()  # workspaces are there from now on
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = Net().bfloat16()
    n = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = paceline.prepare(model, optimizer, method="zero3", bucket_mb=9.0, **knobs)
    losses, between = [], []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between.append(torch.cuda.memory_allocated() - before)
    peak = torch.cuda.max_memory_allocated() - before
    weights = torch.cat([v.float().cpu().flatten() for v in model.state_dict().values()])
    return np.array(losses), weights.numpy(), max(between) / n, peak / n


@pytest.fixture(scope="module")
def on_the_device():
    [result] = processes.values(processes.run(1, _train, {"store": "cpu"}))
    return result


@pytest.mark.parametrize("store", ["cpu", "nvme"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_few_buckets_are_on_the_device_and_no_more(tmp_path, on_the_device, params, store):
    knobs = {"params": params, "store": store} | ({"path": str(tmp_path)} if "nvme" in (params, store) else {})
    [(losses, weights, between, peak)] = processes.values(processes.run(1, _train, knobs))
    want_losses, want_weights, want_between, want_peak = on_the_device
    np.testing.assert_allclose(losses, want_losses, rtol=1e-3)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-2, atol=1e-2)
    assert want_between > 2
    assert between < 0.5, "the first bucket of the next step, and little else"
    assert peak < want_peak - 1, "half of what the parameters alone take"
