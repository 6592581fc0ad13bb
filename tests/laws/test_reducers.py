"""The laws of every registered reducer, from one table: worlds 1, 2, 3, 4, threads here and processes in
test_processes.
"""

from __future__ import annotations

import pytest
import torch

import threads
from laws_table import BUCKETS, WORLDS, fresh, reduce, reducers, together, vector
from marks import slow
from paceline.core.bucket import Bucket
from paceline.method import method

cases = [(name, knobs, n) if n in (2, 3) else slow(name, knobs, n) for name, knobs in reducers() for n in WORLDS]


@pytest.mark.parametrize(("name", "knobs", "world_size"), cases)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_conservation_and_agreement(name, knobs, world_size, bucket):
    """avg(x) == mean + avg(left), and the mean is bitwise equal on all workers."""

    def work(comm):
        reducer, b = fresh(name, knobs), bucket(comm.world_size)
        x = vector(b, comm.rank)
        mean, left = reduce(comm, reducer, b, x.clone())
        return x, mean, left, reducer.tolerance

    results = threads.run(world_size, work)
    x, mean, left = (torch.stack([r[i] for r in results]).double() for i in range(3))
    assert torch.equal(mean, mean[0].expand_as(mean)), "workers disagree"
    scale = x.abs().max().clamp(min=1e-30)
    error = (x.mean(0) - mean[0] - left.mean(0)).abs().max() / scale
    assert error <= results[0][3], f"lost {error:.2e} of the gradient"


@pytest.mark.parametrize(("name", "knobs", "world_size"), cases)
def test_bytes(name, knobs, world_size):
    """The formula is what Comm counted."""

    def work(comm):
        reducer, b = fresh(name, knobs), BUCKETS[0](comm.world_size)
        reduce(comm, reducer, b, vector(b, comm.rank))
        return comm.sent, reducer.sends(b, comm.world_size)

    for sent, formula in threads.run(world_size, work):
        assert sent == formula


@pytest.mark.parametrize("name", sorted({name for name, _ in reducers()}))
def test_bytes_of_the_recipe_in_bf16(name):
    """Error feedback hands fp32 to the reducer inside, whatever the gradients are: the formula knows."""

    def work(comm):
        reducer = method(name).reducer
        b = Bucket(0, [("p", torch.nn.Parameter(torch.zeros(64, 40, dtype=torch.bfloat16)))], comm.world_size)
        mean, _ = reduce(comm, reducer, b, torch.ones_like(b.flat))
        assert mean.dtype == torch.bfloat16
        return comm.sent, reducer.sends(b, comm.world_size)

    for sent, formula in threads.run(3, work):
        assert sent == formula


@pytest.mark.parametrize(("name", "knobs", "world_size"), cases)
def test_own_randomness(name, knobs, world_size):
    """The global random stream is the user's: a reducer neither reads nor moves it."""

    def work(comm):
        reducer, b = fresh(name, knobs), BUCKETS[0](comm.world_size)
        return reduce(comm, reducer, b, vector(b, comm.rank))[0]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = threads.run(world_size, work)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = threads.run(world_size, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "knobs", "world_size"), cases)
def test_same_program(name, knobs, world_size):
    """What is awaited does not depend on the values: zeros, tiny and huge ones make the same operations."""

    def trace(fill):
        def work(comm):
            reducer, b = fresh(name, knobs), BUCKETS[0](comm.world_size)
            x = vector(b, comm.rank) * (fill if comm.rank == 0 else 1.0)
            mean, _ = reduce(comm, reducer, b, x)
            assert mean.isfinite().all()
            return comm.ops, comm.sent

        return threads.run(world_size, work)

    assert trace(0.0) == trace(1.0) == trace(1e30)


@pytest.mark.parametrize(("name", "knobs", "world_size"), cases)
def test_mine_is_my_slice_of_the_mean(name, knobs, world_size):
    def work(comm):
        b = BUCKETS[0](comm.world_size)
        mean, _ = reduce(comm, fresh(name, knobs), b, vector(b, comm.rank))
        [mine] = together(fresh(name, knobs).mine(b, vector(b, comm.rank), comm))
        return mean, mine.mean

    for rank, (mean, mine) in enumerate(threads.run(world_size, work)):
        torch.testing.assert_close(mine, mean.view(world_size, -1)[rank], rtol=1e-5, atol=1e-6)
