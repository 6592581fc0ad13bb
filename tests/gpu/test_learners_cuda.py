"""Learners on a CUDA device: in a graph or not, they go as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.learners.learners import Learners
from rig import built

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

cnn = built(
    lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )
)  # fmt: skip
normed = built(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)))
dropped = built(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)))


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def pictures(steps, size=32):
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 1, 8, 8, generator=g), torch.randint(0, 10, (size,), generator=g)) for _ in range(steps)]


def train(make, device, steps=12, **arguments):
    one = Learners(make().to(device), cross_entropy, lr=0.05, momentum=0.9, learners=4, **arguments)
    losses = [one.step(x.to(device), y.to(device)) for x, y in pictures(steps)]
    centre = {name: t.cpu() for name, t in one.centre().items()}
    return centre, torch.stack(losses).cpu()


@pytest.mark.parametrize("make", [cnn, normed])
@pytest.mark.parametrize("conv", ["product", "grouped"])
@pytest.mark.parametrize("graph", [True, False])
def test_as_on_the_cpu(make, conv, graph):
    want, losses = train(make, "cpu")
    got, seen = train(make, "cuda", conv=conv, graph=graph)
    torch.testing.assert_close(seen, losses, rtol=1e-3, atol=1e-3)
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, rtol=1e-3, atol=1e-3, msg=name)


def test_a_graph_does_what_the_steps_do_and_none_of_its_warm_up_counts():
    got, _ = train(cnn, "cuda", graph=True, steps=3)
    want, _ = train(cnn, "cuda", graph=False, steps=3)
    for name, t in want.items():
        torch.testing.assert_close(got[name], t, rtol=1e-4, atol=1e-5, msg=name)


def test_the_rate_changes_inside_a_graph():
    one = Learners(cnn().cuda(), cross_entropy, lr=0.05, learners=2)
    x, y = (t.cuda() for t in pictures(1)[0])
    one.step(x, y)
    one.restart()
    one.lr = 1e-9
    before = one.w.clone()
    one.step(x, y)
    torch.testing.assert_close(one.w, before, rtol=0, atol=1e-6)


def test_a_graph_s_dropout_draws_anew_in_every_step():
    one = Learners(dropped().cuda(), cross_entropy, lr=1e-9, learners=2)
    x, y = (t.cuda() for t in pictures(1)[0])
    assert one.step(x, y) != one.step(x, y)


def test_the_loss_that_was_returned_stays():
    one = Learners(cnn().cuda(), cross_entropy, lr=0.1, learners=2)
    batches = [(x.cuda(), y.cuda()) for x, y in pictures(2)]
    first = one.step(*batches[0])
    kept = first.item()
    one.step(*batches[1])
    assert first.item() == kept


def test_the_tuner_settles():
    one = Learners(cnn().cuda(), cross_entropy, lr=0.01, learners="auto", batch=4, most=8)
    x, y = (t.cuda() for t in pictures(1, size=64)[0])
    for _ in range(40):
        one.step(x, y)
    assert not one._tuning
    assert one.k in (1, 2, 4, 8)
    assert one.z.isfinite().all()
