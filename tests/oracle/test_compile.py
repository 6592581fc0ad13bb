"""torch.compile around or inside: the compiled model trains as the plain one does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from marks import slow
from processes import run, values


def compiled(rank, before):
    import paceline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if before:
        fast = torch.compile(model, backend="aot_eager")
        fast, optimizer = paceline.prepare(fast, optimizer)
    else:
        model, optimizer = paceline.prepare(model, optimizer)
        fast = torch.compile(model, backend="aot_eager")
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(12, 8, generator=g), torch.randint(0, 3, (12,), generator=g)
        cross_entropy(fast(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("before", [True, slow(False)])
def test_compiled_models(before):
    results = values(run(2, compiled, before))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(12, 8, generator=g), torch.randint(0, 3, (12,), generator=g)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        for a, b in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
