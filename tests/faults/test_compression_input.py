"""What a reducer may be handed and does not like: knobs out of range, odd shapes and types, NaN, zeros, the ends of the
number range.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import reduce
from marks import slow
from paceline import registry
from paceline.core.bucket import Bucket
from paceline.core.facts import Fact
from paceline.errors import MethodError
from paceline.method import method
from rig import Complex, Rig, built, data, mlp, same, weights

REDUCERS = list(registry.parts("reducer"))
KNOBS = {"warmup": {"steps": 1}, "accordion": {"window": 1}}  # or the tests would end before it does


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def run(world_size, name, make, work, **settings):
    """work(model, optimizer, rig) on every worker."""

    def worker(comm):
        model = make()
        opt = sgd(model)
        return work(model, opt, Rig(comm, model, opt, spec=method(name, **KNOBS.get(name, {})), **settings))

    return threads.run(world_size, worker)


def descend(model, opt, loss):
    loss.backward()
    opt.step()
    opt.zero_grad()


def finite_state(r):
    tensors = [x for part in r.engine.method.parts() for x in part.state.values() if isinstance(x, torch.Tensor)]
    return all(x.isfinite().all() for x in tensors)


# ---------------------------------------------------------------------------------------------------- knobs


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("powersgd", {"rank": 0}, r"rank=0 is out of range\n.*rank >= 1"),
        ("powersgd", {"rank": -3}, "rank=-3 is out of range"),
        ("powersgd", {"rank": 2.0}, "rank is a int, not a float"),
        ("topk", {"ratio": 0.0}, r"ratio=0.0 is out of range\n.*ratio > 0, <= 1"),
        ("topk", {"ratio": 1.001}, "ratio=1.001 is out of range"),
        ("topk", {"ratio": float("nan")}, "ratio=nan is out of range"),
        ("randomk", {"ratio": 0.0}, "ratio=0.0 is out of range"),
        ("randomk", {"ratio": 2.0}, "ratio=2.0 is out of range"),
        ("dgc", {"ratio": 0.0}, "ratio=0.0 is out of range"),
        ("qsgd", {"bits": 3}, "bits=3 is not a choice"),
        ("nuqsgd", {"bits": 3}, "bits=3 is not a choice"),
        ("qsgd", {"bits": 4.5}, "bits=4.5 is not a choice"),
    ],
)
def test_a_knob_out_of_range_is_named(name, knobs, words):
    with pytest.raises(MethodError, match=words):
        method(name, **knobs)


# ---------------------------------------------------------------------------------------------------- shapes


class Tiny(nn.Module):
    """Tensors of one, two and three elements, one of them a scalar."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(shape)) for shape in ((), (2,), (1, 3)))

    def forward(self, x):
        return x[:, :3] * self.c + self.b.sum() + self.a


class Hollow(nn.Module):
    """Matrices with a zero dimension beside one without."""

    def __init__(self):
        super().__init__()
        self.none, self.wide = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(3, 0))
        self.main = nn.Linear(6, 3)

    def forward(self, x):
        nothing = (x @ self.none.T).sum() + self.wide.sum()
        return self.main(x) + nothing


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x[:, :3] * self.w


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("make", [Tiny, Hollow, Single])
@pytest.mark.parametrize("bucket_mb", [slow(1.0), 1e-6])  # all in one bucket, and one bucket each
def test_odd_shapes(name, make, bucket_mb):
    def work(model, opt, r):
        for x, y in data(8):
            x, y = r.take(x, y)
            descend(model, opt, cross_entropy(model(x), y))
        assert finite_state(r)
        return weights(model)

    build = built(make)
    got = same(run(2, name, build, work, bucket_mb=bucket_mb))
    assert got.isfinite().all()
    assert not torch.equal(got, weights(build()))


@pytest.mark.parametrize(
    "name", [name for name in REDUCERS if "ratio" in {k.name for k in registry.find(name).knobs()}]
)
@pytest.mark.parametrize("ratio", [1e-9, 0.34, 1.0])
def test_k_is_at_least_one_and_at_most_the_tensor(name, ratio):
    def work(comm):
        b = Bucket(0, [(str(n), nn.Parameter(torch.ones(n))) for n in (1, 2, 3, 7)], comm.world_size)
        reducer, x = registry.find(name)(ratio=ratio), torch.zeros_like(b.flat)
        x[: b.n] = torch.arange(1.0, b.n + 1)
        sent = int((reduce(comm, reducer, b, x)[0] != 0).sum())
        return sent, b.n

    for sent, n in threads.run(2, work):
        assert 1 <= sent <= n
        assert sent == n or ratio < 1.0


# ---------------------------------------------------------------------------------------------------- types


class Counting(nn.Module):
    """With a whole-number buffer and a whole-number parameter, which nobody trains."""

    def __init__(self):
        super().__init__()
        self.main, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        return self.norm(self.main(x))


@pytest.mark.parametrize("name", REDUCERS)
def test_whole_numbers_are_left_alone(name):
    def work(model, opt, r):
        model.count += 10 * r.comm.rank  # each worker's own
        for x, y in data(3):
            x, y = r.take(x, y)
            descend(model, opt, cross_entropy(model(x), y))
        assert model.count.tolist() == [10 * r.comm.rank] * 2
        assert model.table.tolist() == [0, 1, 2, 3]
        assert model.norm.num_batches_tracked == 3
        return torch.cat([model.main.weight.detach().flatten(), model.norm.running_mean])

    same(run(2, name, built(Counting), work))


def test_a_whole_number_parameter_cannot_be_trained():
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(torch.arange(4))


@pytest.mark.parametrize("name", REDUCERS)
def test_complex_parameters(name):
    def work(model, opt, r):
        for x, y in data(8):
            x, y = r.take(x, y)
            descend(model, opt, cross_entropy(model(x), y))
        assert finite_state(r)
        return torch.view_as_real(model.w.detach()).clone()

    build = built(Complex)
    got = same(run(2, name, build, work))
    assert got.isfinite().all()
    moved = got - torch.view_as_real(build().w.detach())
    assert moved[..., 0].any() or moved[..., 1].any()


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("bad", [float("nan"), slow(float("inf"))])
def test_nan_on_one_worker_leaves_no_trace(name, bad):
    """Skipped on all, the worker named; then all goes on as if that batch had never been."""
    batches = data(8)

    def spoiled(spoil):
        def work(model, opt, r):
            for step, (x, y) in enumerate(batches):
                if step == 4 and not spoil:
                    continue
                x, y = r.take(x, y)
                descend(model, opt, cross_entropy(model(x), y) * (bad if step == 4 and r.comm.rank == 2 else 1.0))
            assert finite_state(r)
            return weights(model)

        return same(run(3, name, mlp, work))

    with pytest.warns(UserWarning, match="step 4 is skipped on all workers: the gradient of worker 2 is not finite"):
        got = spoiled(True)
    assert torch.equal(got, spoiled(False))


@pytest.mark.parametrize("name", REDUCERS)
def test_a_long_silence(name):
    """Zeros move nothing and break nothing, and what comes after them gets through to every parameter in time."""

    def work(model, opt, r):
        start = weights(model).clone()
        x, y = r.take(*data(1)[0])
        for _ in range(50):
            descend(model, opt, cross_entropy(model(x), y) * 0.0)
        assert torch.equal(weights(model), start), "zero gradients have moved it"
        assert finite_state(r)
        was = [p.detach().clone() for p in model.parameters()]
        for _ in range(10):
            descend(model, opt, cross_entropy(model(x), y))
        moved = [not torch.equal(a, p) for a, p in zip(was, model.parameters(), strict=True)]
        return torch.tensor(moved), weights(model)

    results = run(2, name, mlp, work)
    same([w for _, w in results])
    moved = same([m for m, _ in results])
    assert moved.all() if name != "randomk" else moved.any()  # 1 % by lot does not get round in ten steps


def spread(n, generator):
    """Every size from 1e-38 to 1e38, of either sign, in any order."""
    size = 10.0 ** torch.linspace(-38, 38, n, dtype=torch.float64)
    return (size * torch.randn(n, generator=generator).sign())[torch.randperm(n, generator=generator)]


def huge(n, generator):
    return 1e38 * torch.randn(n, generator=generator).sign().double()


def tiny(n, generator):
    return 1e-38 * torch.randn(n, generator=generator).double()  # some of them too small to be normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("values", [spread, huge, tiny])
@pytest.mark.parametrize("name", REDUCERS)
def test_the_ends_of_the_number_range(name, values, dtype):
    """Finite in, finite out; the workers agree; nothing is lost, where the reducer says what it left."""

    def work(comm):
        shapes = {"w": (24, 16), "b": (24,), "v": (16, 24)}
        b = Bucket(0, [(k, nn.Parameter(torch.zeros(s, dtype=dtype))) for k, s in shapes.items()], comm.world_size)
        x = torch.zeros_like(b.flat)
        x[: b.n] = values(b.n, torch.Generator().manual_seed(comm.rank)).to(dtype)
        reducer = method(name).reducer
        mean, left = reduce(comm, reducer, b, x.clone())
        return x[: b.n], mean[: b.n], left[: b.n], reducer.tolerance

    results = threads.run(2, work)
    assert all(r[1].isfinite().all() for r in results), "the mean is not finite"
    assert all(r[2].isfinite().all() for r in results), "the leftover is not finite"
    mean = same([r[1] for r in results])
    assert mean.dtype == dtype
    if {Fact.LEFTOVER, Fact.EXACT_MEAN, Fact.KEEPS_LEFTOVERS} & {
        fact for part in method(name).parts() for fact in part.gives
    }:
        x, left = (torch.stack([r[i] for r in results]).double() for i in (0, 2))
        lost = (x.mean(0) - mean.double() - left.mean(0)).abs().max()
        rounding = max(2 * results[0][3], 2.0**-7 if dtype == torch.bfloat16 else 1e-6)
        floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # below it there are no numbers
        assert lost <= rounding * x.abs().max() + 2 * floor, f"lost {lost / x.abs().max():.1e}"
