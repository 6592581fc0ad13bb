"""The reducers' laws and the wire's operations again, between real processes over gloo, at worlds 2 and 3."""

from __future__ import annotations

import pytest
import torch

import processes
from laws_table import BUCKETS, fresh, reducers, vector
from paceline.core.pipeline import Pipeline
from processes import run, values

GLOO = {"PACELINE_COLLECTIVES": "flat"}  # one host would use its shared memory


def _lane(name="laws"):
    return processes.join().group.lane(name)


def every_reducer(rank):
    comm = _lane()
    results = []
    for name, knobs in reducers():
        for bucket in BUCKETS:
            b, reducer = bucket(comm.world_size), fresh(name, knobs)
            x = vector(b, rank)
            before, out = comm.sent, {}

            async def reduce(reducer=reducer, b=b, x=x, out=out):
                reduced = await reducer.mean(b, x.clone(), comm)
                out["left"] = reduced.left()
                out["mean"] = reduced.mean.clone()

            pipeline = Pipeline()
            pipeline.start(reduce())
            pipeline.drain()
            left = out["left"] if out["left"] is not None else torch.zeros_like(x)
            formula = reducer.sends(b, comm.world_size)
            results.append((name, x, out["mean"], left, comm.sent - before, formula, reducer.tolerance))
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_conservation_agreement_and_bytes_over_gloo(world_size):
    for case in zip(*values(run(world_size, every_reducer, env=GLOO)), strict=True):
        name, tolerance = case[0][0], case[0][6]
        x, mean, left = (torch.stack([worker[i] for worker in case]).double() for i in (1, 2, 3))
        assert torch.equal(mean, mean[0].expand_as(mean)), f"{name}: workers disagree"
        error = (x.mean(0) - mean[0] - left.mean(0)).abs().max() / x.abs().max()
        assert error <= tolerance, f"{name} lost {error:.2e} of the gradient"
        assert all(sent == formula for *_, sent, formula, _ in case), name


def every_operation(rank):
    comm = _lane()
    w = comm.world_size
    x = torch.arange(4.0 * w) + 100 * rank
    results = [
        comm.mean(x.clone()).wait(),
        comm.sum(x.clone()).wait(),
        comm.all_gather(x.clone()).wait(),
        comm.all_gather(torch.tensor(float(rank))).wait(),
        comm.reduce_scatter_mean(x.clone()).wait(),
        comm.all_to_all(x.clone().view(w, 4)).wait(),
        comm.broadcast(x.clone(), 1).wait(),
        comm.shift(x.clone(), 1).wait(),
        comm.shift(x.clone(), -1).wait(),
    ]
    if w == 2:
        results.append(comm.swap(x.clone(), 1 - rank).wait())
    return results, comm.sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_as_the_contract_says_and_as_threads_do(world_size):
    import threads

    def on_threads(comm):
        w = comm.world_size
        x = torch.arange(4.0 * w) + 100 * comm.rank
        results = [
            comm.mean(x.clone()).wait(),
            comm.sum(x.clone()).wait(),
            comm.all_gather(x.clone()).wait(),
            comm.all_gather(torch.tensor(float(comm.rank))).wait(),
            comm.reduce_scatter_mean(x.clone()).wait(),
            comm.all_to_all(x.clone().view(w, 4)).wait(),
            comm.broadcast(x.clone(), 1).wait(),
            comm.shift(x.clone(), 1).wait(),
            comm.shift(x.clone(), -1).wait(),
        ]
        if w == 2:
            results.append(comm.swap(x.clone(), 1 - comm.rank).wait())
        return results, comm.sent

    for (gloo, sent), (thread, counted) in zip(
        values(run(world_size, every_operation, env=GLOO)), threads.run(world_size, on_threads), strict=True
    ):
        for a, b in zip(gloo, thread, strict=True):
            torch.testing.assert_close(a, b)
        assert sent == counted, "the two count bytes differently"


def scattered(rank):
    comm, results = _lane(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, 32 * comm.world_size, generator=torch.Generator().manual_seed(0)).to(dtype)
        results.append(comm.reduce_scatter_mean(x[rank].clone()).wait().float())
    return results


def test_a_slice_of_the_mean_is_added_up_in_rank_order_and_rounded_once():
    whole = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    for rank, slices in enumerate(values(run(3, scattered, env=GLOO))):
        for got, dtype in zip(slices, (torch.float32, torch.bfloat16, torch.float16), strict=True):
            a, b, c = whole.to(dtype).float()
            want = ((a + b + c) / 3).to(dtype).float()
            assert torch.equal(got, want[32 * rank : 32 * (rank + 1)])


def late(rank):
    import time

    comm = _lane()
    x = torch.full((5,), float(rank))
    if rank == 1:
        time.sleep(1.2)
    return comm.shift(x, 1).wait(), comm.swap(x, 1 - rank).wait()


def test_a_neighbour_that_is_late_is_waited_for():
    """Longer than one slice of a wait: gloo would close the connection of a plain send or receive."""
    for rank, results in enumerate(values(run(2, late))):
        assert all(torch.equal(x, torch.full((5,), 1.0 - rank)) for x in results)
