"""Every reducer, as its paper combines it, in the loops users write: accumulation, clipping, loss scaling, bf16
parameters, uneven data.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import Messy
from marks import slow
from paceline import registry
from paceline.core.facts import Fact
from paceline.method import Method, method
from rig import Rig, close, data, loop, mlp, same, weights

KNOBS = {"warmup": {"steps": 2}, "accordion": {"window": 2}}  # or the tests would end before it does
REDUCERS = list(registry.parts("reducer"))
# Where rounding is random, a last bit more or less may tip an element over to the next level; these tests' gradients
# and rates make that at most so much, in weights after a few steps.
TIPPED = 2e-2


def made(name):
    return method(name, **KNOBS.get(name, {}))


def facts(name):
    return {fact for part in made(name).parts() for fact in part.gives}


def random(name):
    return Fact.UNBIASED in registry.find(name).gives and Fact.EXACT_MEAN not in registry.find(name).gives


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum, which dgc does itself


def run(world_size, name, work, make=mlp, **settings):
    """work(model, optimizer, rig) on every worker."""

    def worker(comm):
        model = make()
        opt = sgd(model)
        return work(model, opt, Rig(comm, model, opt, spec=made(name), **settings))

    return threads.run(world_size, worker)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_two_halves_of_a_batch_are_the_batch(name, world_size):
    """What a worker holds when it sends is the same, so what it sends is, and what it keeps."""
    batches = data(5)

    def halves(x):
        """Two micro-batches, of which every worker's shares make up its share of the whole."""
        per_worker = [part.chunk(2) for part in x.chunk(world_size)]
        return [torch.cat([p[i] for p in per_worker]) for i in range(2)]

    small = [pair for x, y in batches for pair in zip(halves(x), halves(y), strict=True)]
    got = same(run(world_size, name, lambda m, o, r: loop(small, m, o, r.take), accumulate=2))
    want = same(run(world_size, name, lambda m, o, r: loop(batches, m, o, r.take)))
    close(got, want, tol=TIPPED if random(name) else 1e-5)
    assert not torch.equal(got, weights(mlp()))


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_clipping_sees_the_agreed_norm(name, world_size):
    batches = data(5)

    def clipped(model, opt, r):
        norms = []
        for x, y in batches:
            x, y = r.take(x, y)
            cross_entropy(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            left = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            assert left <= 0.05 * (1 + 1e-5)
            opt.step()
            opt.zero_grad()
        return torch.stack(norms), weights(model)

    results = run(world_size, name, clipped)
    assert (same([norms for norms, _ in results]) > 0).all()
    moved = same([w for _, w in results]) - weights(mlp())
    assert 0 < moved.norm() <= 5 * 0.1 * 0.05 * (1 + 1e-4), "five clipped steps go no further than that"


@pytest.mark.parametrize("name", [name for name in REDUCERS if Fact.KEEPS_LEFTOVERS in facts(name)])
def test_a_growing_loss_scale_changes_nothing(name):
    """Leftovers are in true units. The scales are powers of two: not a bit may differ."""
    batches = data(8)

    def scaled(growth):
        def worker(comm):
            model = mlp()
            opt = sgd(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth)
            r = Rig(comm, model, opt, spec=made(name), scaler=scaler)
            for x, y in batches:
                x, y = r.take(x, y)
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            return weights(model), scaler.get_scale()

        results = threads.run(2, worker)
        return same([w for w, _ in results]), results[0][1]

    (steady, low), (growing, high) = scaled(1000), scaled(1)
    assert (low, high) == (8.0, 2048.0)
    assert torch.equal(steady, growing)
    assert torch.equal(steady, same(run(2, name, lambda m, o, r: loop(batches, m, o, r.take))))


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_bf16_parameters(name, world_size):
    batches = [(x.bfloat16(), y) for x, y in data(6)]
    got = same(run(world_size, name, lambda m, o, r: loop(batches, m, o, r.take), make=lambda: mlp().bfloat16()))
    assert got.dtype == torch.bfloat16
    assert got.isfinite().all()
    assert not torch.equal(got, weights(mlp().bfloat16()))


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize(("world_size", "size"), [slow(2, 7), (3, 7), (3, 2)])  # 2 samples of 3 workers: one has none
def test_uneven_data(name, world_size, size):
    batches = data(6, size=size)
    got = same(run(world_size, name, lambda m, o, r: loop(batches, m, o, r.take)))
    assert got.isfinite().all()
    assert not torch.equal(got, weights(mlp()))


@pytest.mark.parametrize("name", REDUCERS)
def test_a_worker_without_samples_changes_nothing(name):
    """What it computes on is a stand-in: it counts nothing, whatever it is, and is not kept for later either."""
    batches = data(6, size=2)

    def idle(stand_in):
        def work(model, opt, r):
            for x, y in batches:
                empty = not r.shares(2)[r.comm.rank]
                x, y = r.take(x, y)
                cross_entropy(model(x * stand_in if empty else x), y).backward()
                opt.step()
                opt.zero_grad()
            return weights(model)

        return same(run(3, name, work))

    assert torch.equal(idle(1.0), idle(-30.0))


def test_the_padding_is_zero_when_it_leaves():
    """Or it would count in the next step's norms, scales and leftovers."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return loop(data(4), model, opt, Rig(comm, model, opt, spec=Method(reducer=Messy())).take)

    close(same(threads.run(2, work)), same(run(2, "exact", lambda m, o, r: loop(data(4), m, o, r.take))))
