"""Learners against the paper's formulas in fp64, learner by learner, and against plain SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

import threads
from marks import slow
from paceline.errors import DataError, UsageError
from paceline.learners import learners as module
from paceline.learners.convolution import Products
from paceline.learners.learners import Learners
from processes import run, values
from rig import built, close, data, mlp, weights

cnn = built(
    lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(),
        nn.Linear(4, 3),
    )
)  # fmt: skip
normed = built(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


def pictures(steps, size, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 1, 8, 8, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(steps)]


def make(model=None, **arguments):
    arguments = {"lr": 0.1, "momentum": 0.9, "learners": 4} | arguments
    return Learners(model or mlp(), cross_entropy, **arguments)


def simulate(model, batches, K, *, lr=0.1, momentum=0.9, weight_decay=0.0, alpha=None, mu=0.9):
    """Every learner by torch's SGD in fp64 and the paper's box. The centre, the learners, the mean loss of the last."""
    models = [copy.deepcopy(model).double() for _ in range(K)]
    sgd = [torch.optim.SGD(m.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay) for m in models]
    z = z_prev = weights(models[0])
    for x, y in batches:
        before, losses = [weights(m) for m in models], []
        for m, opt, xj, yj in zip(models, sgd, x.double().chunk(K), y.chunk(K), strict=True):
            losses.append(cross_entropy(m(xj), yj))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
        if K > 1:
            c = [(alpha or 1 / K) * (w - z) for w in before]
            for m, own in zip(models, c, strict=True):
                nn.utils.vector_to_parameters(weights(m) - own, m.parameters())
            z, z_prev = z + sum(c) + mu * (z - z_prev), z
        else:
            z = weights(models[0])
    return z.float(), models, torch.stack(losses).mean().item()


def centre(one):
    one.write()
    return weights(one.model)


# ---------------------------------------------------------------------------------------------------- the oracle


@pytest.mark.parametrize("k", [slow(1), 2, 3, slow(4)])
@pytest.mark.parametrize("extra", [{}, {"weight_decay": 0.01, "mu": 0.5}, {"alpha": 0.15, "momentum": 0.0}])
def test_it_is_the_paper_s_box(k, extra):
    batches = data(9)
    one = make(learners=k, **extra)
    for x, y in batches:
        loss = one.step(x, y)
    z, models, want = simulate(mlp(), batches, k, **extra)
    close(centre(one), z, tol=2e-5)
    assert loss.item() == pytest.approx(want, abs=1e-5)
    for j, m in enumerate(models):
        own = torch.cat([one._view(one.w[j], name).flatten() for name, _ in m.named_parameters()])
        close(own, weights(m).float(), tol=2e-5)


@pytest.mark.parametrize("conv", ["product", "grouped"])
def test_convolutions(conv):
    batches = pictures(6, 12)
    one = make(cnn(), learners=3, conv=conv)
    for x, y in batches:
        one.step(x, y)
    close(centre(one), simulate(cnn(), batches, 3)[0], tol=2e-5)


@pytest.mark.parametrize(("size", "stride", "padding"), [((3, 3), 1, 1), ((2, 3), (2, 1), (0, 2)), ((1, 1), 1, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_convolution(size, stride, padding, bias):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 6, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, *size, generator=g, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, generator=g, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [t for t in (x, w, b) if t is not None]
    want = conv2d(x, w, b, stride, padding)
    with Products():
        got = conv2d(x, w, b, stride, padding)
    torch.testing.assert_close(got, want)
    shape = torch.randn(want.shape, generator=g, dtype=torch.float64)
    for a, c in zip(torch.autograd.grad((got * shape).sum(), inputs),
                    torch.autograd.grad((want * shape).sum(), inputs), strict=True):  # fmt: skip
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("arguments", [{"groups": 3}, {"dilation": 2}, {"padding": "same"}])
def test_convolutions_that_are_no_plain_product_stay_what_they_are(arguments):
    x, w = torch.randn(2, 3, 7, 7), torch.randn(3, 3 // arguments.get("groups", 1), 3, 3)
    with Products():
        got = conv2d(x, w, **arguments)
    assert torch.equal(got, conv2d(x, w, **arguments))


def test_batch_norm_has_averages_for_each_learner():
    batches = data(5)
    one = make(normed(), learners=3)
    for x, y in batches:
        one.step(x, y)
    z, models, _ = simulate(normed(), batches, 3)
    with one.evaluating() as model:
        assert not model.training
        assert not model[1].training
        close(weights(model), z, tol=2e-5)
        for name in ("running_mean", "running_var"):
            close(getattr(model[1], name), torch.stack([getattr(m[1], name) for m in models]).mean(0).float(), 1e-5)
        assert model[1].num_batches_tracked == 5
    assert one.model.training
    assert one.model[1].training


def test_dropout_differs_from_learner_to_learner():
    one = make(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), learners=2)
    x, y = data(1, size=6)[0]
    one.step(torch.cat([x, x]), torch.cat([y, y]))  # the same samples for both
    assert not torch.equal(one.v[0], one.v[1])


def test_frozen_and_tied_parameters():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    model[4].bias.requires_grad_(False)
    frozen, twin, batches = model[4].bias.clone(), copy.deepcopy(model), data(5)
    one = make(model, learners=2)
    for x, y in batches:
        one.step(x, y)
    close(centre(one), simulate(twin, batches, 2)[0], tol=2e-5)
    assert torch.equal(model[4].bias, frozen)
    assert model[2].weight is model[0].weight


# ---------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_learners_of_all_workers_have_one_centre(world_size):
    batches = data(7, size=24)

    def work(comm):
        one = Learners(mlp(), cross_entropy, lr=0.1, momentum=0.9, learners=2, comm=comm)
        for x, y in batches:
            one.step(x.chunk(world_size)[comm.rank], y.chunk(world_size)[comm.rank])
        return centre(one)

    results = threads.run(world_size, work)
    assert all(torch.equal(r, results[0]) for r in results)
    close(results[0], simulate(mlp(), batches, 2 * world_size)[0], tol=2e-5)


def in_processes(rank, world_size, prepared):
    import paceline
    from paceline.learners.learners import Learners
    from rig import data, mlp, sgd, weights

    if prepared:
        other = mlp()
        paceline.prepare(other, sgd(other))
    model = mlp(seed=rank % 2)  # worker 0's counts
    one = Learners(model, cross_entropy, lr=0.1, momentum=0.9, learners=2)
    assert paceline.world_size() == world_size
    for x, y in data(6, size=24):
        one.step(x.chunk(world_size)[rank], y.chunk(world_size)[rank])
    one.write()
    return weights(model)


@pytest.mark.parametrize(("world_size", "prepared"), [(2, True), slow(3, False)])
def test_between_processes(world_size, prepared):
    results = values(run(world_size, in_processes, world_size, prepared))
    assert all(torch.equal(r, results[0]) for r in results)
    close(results[0], simulate(mlp(), data(6, size=24), 2 * world_size)[0], tol=2e-5)


# ---------------------------------------------------------------------------------------------------- time and again


def test_a_seeded_rerun_is_bit_equal():
    def once():
        one = make()
        for x, y in data(5):
            one.step(x, y)
        return centre(one)

    assert torch.equal(once(), once())


def test_samples_wait_until_every_learner_has_a_batch():
    batches = data(4, size=12)
    whole, pieces = make(learners=3), make(learners=3, batch=4)
    for x, y in batches:
        want = whole.step(x, y)
        assert pieces.step(x[:8], y[:8]) is None
        got = pieces.step(x[8:], y[8:])
        assert torch.equal(got, want)
    assert torch.equal(centre(pieces), centre(whole))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    at_once = make(learners=3, batch=4)
    at_once.step(x, y)
    assert torch.equal(centre(at_once), centre(whole))


def test_save_and_load_goes_on_bit_equal():
    batches = data(8)
    one = make(normed(), learners=3)
    for x, y in batches[:4]:
        one.step(x, y)
    other = make(normed(), learners=2, lr=0.7)
    other.load_state_dict(one.state_dict())
    for x, y in batches[4:]:
        one.step(x, y)
        other.step(x, y)
    assert torch.equal(centre(one), centre(other))
    assert other.lr == pytest.approx(0.1)
    with pytest.raises(DataError, match="another model"):
        make(mlp()).load_state_dict(one.state_dict())


def test_the_rate_can_change_and_learners_start_again():
    one = make(learners=2)
    x, y = data(1)[0]
    for _ in range(3):
        one.step(x, y)
    one.lr = 0.01
    assert one.lr == pytest.approx(0.01)
    one.restart()
    assert torch.equal(one.w, one.z.expand(2, -1))
    assert torch.equal(one.z_prev, one.z)
    before = one.z.clone()
    one.step(x, y)
    assert torch.equal(one.z, before)  # corrections are those of the weights before the step


@pytest.mark.parametrize("best", [slow(1), 4, slow(8)])
def test_the_number_of_learners_doubles_while_that_brings_more(best, monkeypatch):
    """By a clock of our own: a step takes as long as one of `best` learners, and longer in proportion beyond."""
    monkeypatch.setattr(module, "_WINDOW", 3)
    one = make(learners="auto", batch=2, most=8)
    clock, seen = [0.0], []
    monkeypatch.setattr(one, "_now", lambda: clock[0])
    inner = one._step

    def counted(x, y):
        seen.append(one.k)
        clock[0] += max(1.0, one.k / best)
        return inner(x, y)

    monkeypatch.setattr(one, "_step", counted)
    for x, y in data(24, size=16):
        one.step(x, y)
    assert one.k == best
    tried = [1, 2, 4, 8][: [1, 2, 4, 8].index(best) + (1 if best == 8 else 2)]
    assert list(dict.fromkeys(seen)) == tried
    assert all(seen.count(k) >= 4 for k in tried)
    assert len(set(seen[-10:])) == 1
    assert one.z.isfinite().all()


def test_new_learners_start_from_the_centre_at_rest():
    one = make(normed(), learners=2)
    for x, y in data(4):
        one.step(x, y)
    old = one.w.clone()
    one._resize(4)
    assert torch.equal(one.w[:2], old)
    assert torch.equal(one.w[2:], one.z.expand(2, -1))
    assert one.v[2:].abs().max() == 0
    mean = one.buffers["1.running_mean"]
    close(mean[2], mean[:2].mean(0))


def test_it_learns():
    x, y = data(1, size=24)[0]
    one, g = make(learners=2, lr=0.1), torch.Generator().manual_seed(0)
    for _ in range(60):
        order = torch.randperm(24, generator=g)  # or each would learn its own samples by heart
        one.step(x[order], y[order])
    with one.evaluating() as model:
        assert cross_entropy(model(x), y) < 0.5 * cross_entropy(mlp()(x), y)


# ---------------------------------------------------------------------------------------------------- bad input


def test_a_learner_whose_loss_is_not_finite_is_left_out():
    one = make(learners=3)
    for t, (x, y) in enumerate(data(6)):
        if t == 3:
            x[4:8] = torch.nan
            before = one.w[1].lerp(one.z, 1 / 3)
        one.step(x, y)
        if t == 3:
            close(one.w[1], before)
    assert one.w.isfinite().all()
    assert one.left_out == 1
    with pytest.warns(UserWarning, match="not finite 1 times"):
        one.write()


@pytest.mark.parametrize(
    "arguments",
    [
        {"learners": 0}, {"learners": "many"}, {"learners": True}, {"learners": "auto"}, {"batch": 0}, {"lr": 0.0},
        {"lr": float("nan")}, {"momentum": 1.0}, {"mu": -0.1}, {"weight_decay": -1.0}, {"alpha": 0.7}, {"alpha": 0.0},
        {"graph": True}, {"conv": "fft"},
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(UsageError):
        make(**arguments)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3).double()), "1.weight"),
        (lambda: nn.Linear(6, 3).requires_grad_(False), "nothing"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)), "GroupNorm"),
    ],
)
def test_models_that_cannot_be_stacked_are_refused(model, named):
    with pytest.raises(UsageError, match=named):
        make(model())


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.mean().item() > 0 else super().forward(-x)


def test_a_model_that_branches_on_values_is_named_as_such():
    x, y = data(1)[0]
    with pytest.raises(UsageError, match="cannot be stacked"):
        make(Branches(6, 3)).step(x, y)


def test_bad_batches():
    one = make(learners=4)
    x, y = data(1, size=12)[0]
    with pytest.raises(DataError, match="labels"):
        one.step(x, y[:-1])
    one.step(x, y)
    with pytest.raises(DataError, match="batches of 3"):
        one.step(x[:7], y[:7])
    with pytest.raises(DataError, match="0 samples"):
        one.step(x[:0], y[:0])
    with pytest.raises(UsageError, match="not a number"):
        Learners(mlp(), lambda out, y: cross_entropy(out, y, reduction="none"), lr=0.1, learners=4).step(x, y)
