"""Asynchronous averaging: against its formula in fp64 by a logical clock, and with the real one, where nothing may
hang.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from marks import slow
from paceline.core.consensus import consensus_weights, latest_weights
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.sharding.replicated import Replicated
from paceline.syncs.async_average import AsyncAverage
from processes import run, values
from rig import Rig, alone, close, data, mlp, same, weights

LR = 0.1
EVERY, AGE = 2, 4


@dataclass(kw_only=True)
class Clocked(AsyncAverage):
    """A round counts as arrived after so many own steps, whatever the clock says."""

    name: ClassVar[str] = "clocked"
    delay: int = 1

    def arrived(self, averages, age):
        return age >= self.delay


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def go_on(rig, batches):
    for x, y in batches:
        x, y = rig.take(x, y)
        cross_entropy(rig.model(x.to(next(rig.model.parameters()).dtype)), y).backward()
        rig.optimizer.step()
        rig.optimizer.zero_grad()


def rig_of(comm, sync, make=mlp):
    model = make()
    return Rig(comm, model, plain(model), spec=Method(sync=sync))


# ---------------------------------------------------------------------------------------------------- the oracle


def steps_of(rank):
    return 5 + 3 * rank  # they come to the end at different own steps


def delay_of(rank):
    return 1 + 2 * rank  # 1, 3, 5, 7: the last two reach the age first


MODEL = mlp().double()


def gradient(w, x, y):
    nn.utils.vector_to_parameters(w, MODEL.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(MODEL(x), y), list(MODEL.parameters()))])


def rider(rank, world_size, batches):
    """One worker by the formula. Where it needs a round's mean it yields its snapshot and whether it wants to stop."""
    w, snapshot, since = weights(mlp()).double(), None, 0
    for x, y in batches[: steps_of(rank)]:
        w = w - LR * gradient(w, x.double().chunk(world_size)[rank], y.chunk(world_size)[rank])
        since += 1
        if snapshot is not None and since >= min(AGE, delay_of(rank)):
            mean, _ = yield snapshot, False
            w, snapshot = w + mean - snapshot, None
        if snapshot is None and since >= EVERY:
            snapshot, since = w, 0
    if snapshot is not None:
        mean, _ = yield snapshot, False
        w = w + mean - snapshot
    stopped = False
    while not stopped:
        w, stopped = yield w, True
    return w


def simulate(world_size, batches):
    """Round by round: the mean of what all workers sent in it goes to all of them."""
    riders = [rider(r, world_size, batches) for r in range(world_size)]
    sent, rounds = [next(one) for one in riders], 0
    while True:
        rounds += 1
        answer = torch.stack([snapshot for snapshot, _ in sent]).mean(0), all(stop for _, stop in sent)
        try:
            sent = [one.send(answer) for one in riders]
        except StopIteration as end:
            return end.value, rounds


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_it_goes_by_its_formula_and_a_rerun_is_bit_equal(world_size):
    batches = data(16)

    def work(comm):
        sync = Clocked(every=EVERY, age=AGE, delay=delay_of(comm.rank))
        rig = rig_of(comm, sync, lambda: mlp().double())
        go_on(rig, batches[: steps_of(comm.rank)])
        rig.engine.method.sync.settle(rig.engine.ex)
        return weights(rig.model), rig.engine.ex.background.ops // len(rig.engine.buckets)

    first, second = threads.run(world_size, work), threads.run(world_size, work)
    want, rounds = simulate(world_size, batches)
    got = same([w for w, _ in first])
    close(got, want, tol=1e-11)
    assert rounds > 3
    assert {n for _, n in first} == {rounds}
    assert torch.equal(got, same([w for w, _ in second]))


def test_with_one_worker_it_is_the_optimizer_alone():
    def work(comm):
        rig = rig_of(comm, AsyncAverage(every=1))
        go_on(rig, data(6))
        rig.engine.method.sync.settle(rig.engine.ex)
        return weights(rig.model)

    [got] = threads.run(1, work)
    assert torch.equal(got, alone(data(6), plain))


def test_without_steps_in_between_the_mean_is_taken_as_it_is():
    """Between steps of nobody the weights are their own snapshot."""

    def work(comm):
        rig = rig_of(comm, AsyncAverage())
        with torch.no_grad():
            for p in rig.model.parameters():
                p += comm.rank
        for _ in range(2):  # and once more: to stop is no end
            rig.engine.method.sync.settle(rig.engine.ex)
        return weights(rig.model)

    close(same(threads.run(3, work)), weights(mlp()) + 1.0)


def test_a_worker_waits_when_its_snapshot_has_its_age():
    """Nobody else begins a round before this one has waited for it: its own steps are counted."""
    log = []

    def work(comm):
        rig = rig_of(comm, Clocked(every=1, age=3, delay=1000))
        rig.recorder.log = lambda metrics: log.append((comm.rank, rig.engine.ex.step, metrics["average_age"]))
        go_on(rig, data(9))
        rig.engine.method.sync.settle(rig.engine.ex)

    threads.run(2, work)
    assert sorted(log) == [(rank, step, 3) for rank in (0, 1) for step in (3, 6)]


# ---------------------------------------------------------------------------------------------------- around it


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_warm_up_goes_as_every_step(world_size):
    """... and the first step after it does not."""

    def work(comm, steps):
        rig = rig_of(comm, AsyncAverage(warmup=5))
        go_on(rig, data(6)[:steps])
        return weights(rig.model)

    close(same(threads.run(world_size, lambda comm: work(comm, 5))), alone(data(6)[:5], plain))
    after = threads.run(world_size, lambda comm: work(comm, 6))
    assert not torch.equal(after[0], after[1])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_with_the_real_clock_all_stop_together_and_can_go_on(world_size):
    def work(comm):
        dice = random.Random(comm.rank)
        rig = rig_of(comm, AsyncAverage(every=1 + comm.rank % 2, age=3))
        found = []
        for part in (data(8), data(5), data(0), data(3)):
            for batch in part[: len(part) - comm.rank]:
                time.sleep(dice.random() * 0.003)
                go_on(rig, [batch])
            with consensus_weights(rig.engine):
                found.append(weights(rig.model))
            assert torch.equal(weights(rig.model), found[-1]), "settled weights are everybody's"
        return torch.stack(found)

    found = same(threads.run(world_size, work))
    assert found.isfinite().all()
    assert not torch.equal(found[0], found[1])
    close(found[1], found[2])


def test_who_looks_without_waiting_sees_the_average_of_the_last_round():
    """... its own weights before the first, and the settled ones after the last."""

    def seen(rig):
        own = weights(rig.model)
        with latest_weights(rig.engine):
            looked_at = weights(rig.model)
        assert torch.equal(weights(rig.model), own)
        return own, looked_at

    def work(comm):
        rig, batches, found = rig_of(comm, Clocked(every=2)), data(3), []
        for batch in batches:  # a snapshot after the second step, its average after the third
            go_on(rig, [batch])
            found.append(seen(rig))
        rig.engine.method.sync.settle(rig.engine.ex)
        return [*found, seen(rig)]

    results = threads.run(3, work)
    snapshots = torch.stack([worker[1][0] for worker in results])
    for first, second, third, settled in results:
        assert all(torch.equal(own, looked_at) for own, looked_at in (first, second, settled))
        close(third[1], snapshots.mean(0))
        assert not torch.equal(*third)


def test_a_bad_gradient_of_one_worker_harms_nobody():
    def work(comm):
        rig = rig_of(comm, Clocked(every=2))
        batches = data(6)
        if comm.rank == 1:
            batches[3][0][:] = torch.nan
        go_on(rig, batches)
        rig.engine.method.sync.settle(rig.engine.ex)
        return weights(rig.model)

    with pytest.warns(UserWarning, match="worker 1 is not finite"):
        assert same(threads.run(3, work)).isfinite().all()


def test_what_it_sends_is_told():
    def work(comm):
        rig = rig_of(comm, Clocked(every=2))
        go_on(rig, data(8))
        rounds = rig.engine.ex.background.ops // len(rig.engine.buckets)
        size = sum(b.flat.numel() * 4 for b in rig.engine.buckets)
        assert rounds == 4
        assert rig.recorder.sent == rig.engine.ex.background.sent == rounds * 2 * size * 2 // 3
        rig.engine.method.sync.settle(rig.engine.ex)

    threads.run(3, work)


def test_bf16_parameters():
    def work(comm):
        rig = rig_of(comm, Clocked(every=1), lambda: mlp().bfloat16())
        go_on(rig, data(5))
        rig.engine.method.sync.settle(rig.engine.ex)
        return weights(rig.model)

    assert same(threads.run(3, work)).isfinite().all()


# ---------------------------------------------------------------------------------------------------- real processes


def hurried(rank, seed):
    """Random speeds, random numbers of steps, an agreement in the middle, and out of the door while rounds run."""
    import paceline

    dice = random.Random(1000 * seed + rank)
    model = mlp()
    optimizer = plain(model)
    knobs = {"every": 1 + seed % 3, "age": 3} if seed % 2 else {"every": 1, "age": 1}
    model, optimizer = paceline.prepare(model, optimizer, method="async_average", timeout=15.0, **knobs)
    found = []
    for part in range(2):
        for x, y in data(dice.randrange(12), seed=seed):
            time.sleep(dice.random() * 0.004 * (rank + 1))
            x, y = (t.chunk(paceline.world_size())[rank] for t in (x, y))
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if part == 0:
            with paceline.consensus():
                found.append(weights(model))
    return found


def no_hang(seed):
    outcomes = run((2, 3, 2, 3, 4)[seed % 5], hurried, seed, wait_s=40)
    results = [found for [found] in values(outcomes)]
    assert same(results).isfinite().all()
    assert [o.exitcode for o in outcomes] == [0] * len(outcomes), "a worker hung or failed on its way out"


def five(first):
    """Side by side: they mostly wait, and more so when others compute."""
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(no_hang, range(first, first + 5)))


@pytest.mark.parametrize("first", [0, *(slow(n) for n in range(5, 20, 5))])
def test_processes_of_different_speeds_end_together(first):
    five(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 120, 5))
def test_processes_of_different_speeds_end_together_again_and_again(first):
    five(first)


def lost(rank):
    import paceline

    model = mlp()
    optimizer = plain(model)
    model, optimizer = paceline.prepare(model, optimizer, method="async_average", every=1, timeout=15.0)
    for step, (x, y) in enumerate(data(4)):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 2:
            raise ValueError("out of luck")
    with paceline.consensus():
        pass


def test_the_others_are_told_of_a_worker_that_fails():
    outcomes = run(3, lost, wait_s=30)
    assert outcomes[1].error == "ValueError"
    assert {outcomes[0].error, outcomes[2].error} == {"PeerError"}
    assert "out of luck" in outcomes[0].message


# ---------------------------------------------------------------------------------------------------- what is refused


@dataclass(kw_only=True)
class Sharded(Replicated):
    name: ClassVar[str] = "sharded"
    gives: ClassVar[frozenset[str]] = frozenset()


def test_a_layout_that_shares_out_parameters_is_refused():
    with pytest.raises(MethodError, match="needs whole parameters"):
        Method(sync=AsyncAverage(), layout=Sharded())


@pytest.mark.parametrize("reducer", ["half", "int8", "topk", "powersgd", "dgc"])
def test_lossy_reducers_are_refused(reducer):
    with pytest.raises(MethodError, match=r"(?s)async_average.*use the reducer exact"):
        method(f"async_average+{reducer}")


@pytest.mark.parametrize("knobs", [{"every": 0}, {"age": 0}, {"warmup": -1}, {"every": 1.0}, {"age": True}])
def test_bad_knobs_are_refused(knobs):
    with pytest.raises(MethodError):
        AsyncAverage(**knobs)
