"""Running out of a GPU's memory for real: under a cap, the batch is dealt again until it fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import processes
from paceline.errors import DataError, UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 1 << 16


def job(rank, method, cap_gb, batch, knobs):
    """Activations of 32 samples of 256 x 65536 floats are 2 GB each, and there are three."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, WIDTH), nn.GELU(), nn.Tanh(), nn.Linear(WIDTH, 4)).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(2 * batch, 128, 16), torch.randn(2 * batch, 128, 4))
    cap = {"memory_gb": cap_gb} if cap_gb else {}
    model, opt, loader = paceline.prepare(
        model, opt, DataLoader(data, batch), method=method, backend="gloo", micro_batch="auto", **cap, **knobs
    )
    sizes = []
    for x, y in loader:
        with paceline.retry():
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            sizes.append(len(x))
            opt.step()
            opt.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]) if method != "zero3" else None
    with torch.no_grad():
        out = model(torch.ones(1, 128, 16).cuda()).cpu()
    return out, sizes, None if weights is None else float(weights.double().abs().sum())


@pytest.mark.parametrize(("method", "knobs"), [("exact", {}), ("zero3", {}), ("zero3", {"store": "cpu"})])
def test_two_workers_find_what_fits(method, knobs):
    found = processes.values(processes.run(2, job, method, 3.0, 64, knobs, wait_s=120))
    whole = processes.values(processes.run(2, job, method, None, 64, knobs, wait_s=120))
    for (out, sizes, _), (expected, _, _) in zip(found, whole, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        assert max(sizes) < 32
        assert sum(sizes) >= 64, "what fitted before a part did not is computed again"


def test_alone():
    (found,) = processes.values(processes.run(1, job, "exact", 3.0, 64, {}, wait_s=120))
    (whole,) = processes.values(processes.run(1, job, "exact", None, 64, {}, wait_s=120))
    torch.testing.assert_close(found[0], whole[0], rtol=1e-3, atol=1e-4)
    assert max(found[1]) < 64
    assert max(whole[1]) == 64


def test_one_sample_that_does_not_fit_says_how_much_is_missing():
    (found,) = processes.run(1, job, "exact", 0.08, 2, {}, wait_s=120)
    assert found.error == DataError.__name__, found
    assert "Tried to allocate" in found.message


def test_a_cap_below_what_is_used_is_refused():
    (found,) = processes.run(1, job, "exact", 0.001, 2, {}, wait_s=120)
    assert found.error == UsageError.__name__, found
