"""backup_workers: the first K of N gradients make an update. The order of arrivals is written, so runs repeat."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch
from torch import nn

import processes
import threads
from laws_table import on_every_world
from marks import slow
from paceline import registry
from paceline.comm.threads import Room, ThreadComm
from paceline.core.consensus import consensus_weights
from paceline.core.facts import Fact
from paceline.errors import MethodError, PeerTimeoutError
from paceline.method import Method, method
from paceline.session.session import current
from paceline.syncs._rounds import Rounds
from paceline.syncs.backup_workers import BackupWorkers
from rig import Rig, built, close, data, loop, mlp, same, sgd, train, weights

LAM = 0.7


class Play:
    """All workers in one process, in fp64, and the order in which their gradients come: turn by turn, one worker
    arrives. A worker that has made its steps ends.
    """

    def __init__(self, world_size, backups, late, steps, seed=0):
        self.world_size, self.k, self.late = world_size, max(1, world_size - backups), late
        self.model = mlp().double()
        self.params, self.opt = list(self.model.parameters()), sgd(self.model)
        self.left, self.made = list(steps), [0] * world_size
        self.batches = data(max(steps))
        self.version = [0] * world_size
        self.r, self.ended, self.ages, self.dropped = 0, set(), [{} for _ in steps], [0] * world_size
        self.arrived = []  # rank, gradient, weight, age
        self.waiting = set()
        self.turns = []  # (rank, who is ready to come, how many have ended)
        self.gradient = [self.compute(rank) for rank in range(world_size)]
        dice = random.Random(seed)
        while ready := [r for r in range(world_size) if r not in self.ended | self.waiting]:
            rank = dice.choices(ready, [1 if r == 0 else 4 for r in ready])[0]  # worker 0 is slow
            self.turns.append((rank, set(ready), len(self.ended)))
            self.arrive(rank)

    def compute(self, rank):
        x, y = self.batches[self.made[rank]]
        mine = slice(rank * 12 // self.world_size, (rank + 1) * 12 // self.world_size)
        loss = nn.functional.cross_entropy(self.model(x[mine].double()), y[mine])
        g = torch.autograd.grad(loss, self.params)
        return g, [p.detach().clone() for p in self.params], self.r

    def arrive(self, rank):
        g, then, version = self.gradient[rank]
        age = self.r - version
        if age and self.late == "drop":
            self.dropped[rank] += 1
            self.back(rank)
            return
        if age and self.late == "dc":
            g = [x + LAM * x * x * (p.detach() - w) for x, p, w in zip(g, self.params, then, strict=True)]
        self.arrived.append((rank, g, 1 / (1 + age) if self.late == "weigh" else 1.0, age))
        self.waiting.add(rank)
        self.go()

    def go(self):
        while self.arrived and len(self.arrived) >= min(self.k, self.world_size - len(self.ended)):
            total = sum(c for _, _, c, _ in self.arrived)
            for i, p in enumerate(self.params):
                p.grad = sum(g[i] * c for _, g, c, _ in self.arrived) / total
            self.opt.step()
            self.r += 1
            came, self.arrived = self.arrived, []
            for rank, _, _, age in came:
                self.ages[rank][age] = self.ages[rank].get(age, 0) + 1
                self.waiting.discard(rank)
                self.back(rank)

    def back(self, rank):
        """It has the newest weights, and begins its next step or ends."""
        self.made[rank] += 1
        if self.made[rank] == self.left[rank]:
            self.ended.add(rank)
            self.go()
        else:
            self.gradient[rank] = self.compute(rank)


class Stage:
    """Lets thread-workers come in a play's order: the next one comes when all who can be are ready."""

    def __init__(self, play, room):
        self.turns, self.room = play.turns, room
        self.changed, self.ready, self.turn = threading.Condition(), set(), 0

    def _next(self, rank):
        if self.room.error:
            return True
        who, ready, ended = self.turns[self.turn]
        key = "rounds/background of /0/ended"
        return who == rank and self.ready == ready and self.room.counts.get(key, 0) == ended

    def come(self, rank):
        with self.changed:
            self.ready.add(rank)
            self.changed.notify_all()
            while not self.changed.wait_for(lambda: self._next(rank), 0.01):
                pass
            self.ready.discard(rank)
            self.turn += 1


def perform(play, backups, late):
    stages = []

    def work(comm):
        with comm.room.changed:
            if not stages:
                stages.append(Stage(play, comm.room))
        model = mlp().double()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=BackupWorkers(backups=backups, late=late, lam=LAM)))
        sync = rig.engine.method.sync
        sync.ready = lambda ex: stages[0].come(comm.rank)
        loop([(x.double(), y) for x, y in play.batches[: play.left[comm.rank]]], model, opt, rig.take)
        own = weights(model)
        with consensus_weights(rig.engine):
            inside = weights(model)
        assert torch.equal(weights(model), inside), f"after {own}"
        return inside, dict(sync.ages), sync.dropped

    return threads.run(play.world_size, work)


@pytest.mark.parametrize("late", ["drop", "weigh", "dc"])
@pytest.mark.parametrize(("world_size", "backups"), [(2, 1), slow(3, 1), (3, 2), slow(4, 1), slow(4, 2)])
def test_it_goes_as_the_play(world_size, backups, late):
    steps = [4, 9, 8, 7][:world_size]
    play = Play(world_size, backups, late, steps)
    first, second = perform(play, backups, late), perform(play, backups, late)
    result = same([w for w, _, _ in first])
    close(result, weights(play.model), 1e-12)
    assert torch.equal(result, same([w for w, _, _ in second]))
    assert [ages for _, ages, _ in first] == play.ages
    assert [dropped for _, _, dropped in first] == play.dropped
    if late == "drop":
        assert sum(play.dropped) > 0
    else:
        assert any(age for ages in play.ages for age in ages)


@on_every_world
def test_without_backups_it_is_every_step_bit_for_bit(world_size):
    spec = Method(sync=BackupWorkers(backups=0))
    assert torch.equal(same(train(world_size, data(8), spec=spec)), same(train(world_size, data(8))))


@pytest.mark.filterwarnings("ignore:paceline. .* got no gradient")
def test_what_no_worker_used_has_no_gradient():
    """With one of zero its weights would decay."""
    make = built(lambda: nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)}))

    def work(comm):
        model = make()
        before = weights(model["unused"])
        opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        rig = Rig(comm, model, opt, spec=Method(sync=BackupWorkers(backups=1)))
        loop(data(3), model["used"], opt, rig.take)
        with consensus_weights(rig.engine):
            return torch.equal(weights(model["unused"]), before)

    assert threads.run(2, work) == [True, True]


def free(world_size, steps, sync, batches=None, slow=0.0):
    """Nobody writes the order."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=sync))
        if comm.rank == 0 and slow:
            rig.engine.method.sync.ready = lambda ex: time.sleep(slow)
        half = steps // 2
        mine = batches or data(steps)
        loop(mine[:half], model, opt, rig.take)
        with consensus_weights(rig.engine):
            middle = weights(model)
        loop(mine[half:], model, opt, rig.take)
        rig.engine.method.sync.settle(rig.engine.ex)
        own = rig.engine.method.sync
        return middle, weights(model), sum(own.ages.values()) + own.dropped

    results = threads.run(world_size, work)
    for part in (0, 1):
        assert same([r[part] for r in results]).isfinite().all()
    return [r[2] for r in results]


@pytest.mark.parametrize("late", ["drop", "weigh", "dc"])
@on_every_world
def test_at_every_meeting_all_have_the_same_weights_and_no_gradient_is_forgotten(world_size, late):
    counted = free(world_size, 8, BackupWorkers(backups=1, late=late), slow=0.005)
    assert counted == [8 if world_size > 1 else 0] * world_size


def test_an_update_needs_somebody():
    with pytest.raises(MethodError, match="backups=2, but there are only 2 workers"):
        free(2, 6, BackupWorkers(backups=2))


def test_a_gradient_that_is_not_finite_is_not_offered():
    batches = data(8)
    batches[2][0][:4] = torch.nan  # worker 0's
    with pytest.warns(UserWarning, match="worker 0 is not finite"):
        counted = free(3, 8, BackupWorkers(backups=1), batches)
    assert counted == [7, 8, 8]


def test_who_came_after_the_word_is_not_in_the_sum():
    """Worker 1's thread has not heard of the word yet when its gradient comes: counted too late, it stays out."""

    class Slow(Room):
        def __init__(self, world_size):
            super().__init__(world_size)
            self.gate = threading.Event()

        def seen(self, key, seconds):
            if threading.current_thread().name.endswith("of 1"):
                self.gate.wait(20)
            return super().seen(key, seconds)

    room = Slow(2)
    pair = [ThreadComm(room, rank, "lane") for rank in range(2)]
    both = []
    for comm in pair:
        both.append(Rounds(comm, 0, 1, torch.zeros(1)))
        both[-1]._thread.name += f" of {comm.rank}"
    both[0].offer(0, torch.tensor([3.0]))
    both[1].offer(0, torch.tensor([5.0]))
    room.gate.set()
    assert [r.take(0) for r in both] == [(torch.tensor([3.0]), True), (torch.tensor([3.0]), False)]
    for r in both:
        r.end()
    for r in both:
        r.close(1)
    assert not any("arrived" in key or key.endswith("0/0/go") for key in room.counts | room.words if "/0/0/" in key)


def test_too_few_gradients_are_an_error_in_time():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=BackupWorkers(backups=1)))
        if comm.rank == 0:
            loop(data(1), model, opt, rig.take)

    with pytest.raises(PeerTimeoutError, match="update 0 did not come"):
        threads.run(3, work, timeout_s=0.3)


def test_a_worker_that_fails_ends_the_others():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=BackupWorkers(backups=1)))
        loop(data(3), model, opt, rig.take)
        if comm.rank == 2:
            raise RuntimeError("on purpose")
        loop(data(50), model, opt, rig.take)
        rig.engine.method.sync.settle(rig.engine.ex)

    with pytest.raises(RuntimeError, match="on purpose"):
        threads.run(3, work)


@pytest.mark.parametrize("knobs", [{"backups": -1}, {"backups": True}, {"late": "never"}, {"lam": -1.0}])
def test_bad_knobs(knobs):
    with pytest.raises(MethodError):
        registry.find("backup_workers")(**knobs)


def test_a_reducer_that_estimates_is_refused():
    with pytest.raises(MethodError, match=Fact.EXACT_MEAN.value):
        method("backup_workers+int8")


def job(rank, late, dies=None):
    import paceline

    model = mlp()
    opt = sgd(model)
    model, opt = paceline.prepare(model, opt, method="backup_workers", late=late, bucket_mb=0.0005, timeout=20)
    sync = next(iter(current().engines)).method.sync
    for t, (x, y) in enumerate(data(10 if rank else 4)):
        if rank == 0:
            time.sleep(0.02)
        if rank == dies and t == 2:
            os._exit(9)
        nn.functional.cross_entropy(model(x[rank::3]), y[rank::3]).backward()
        opt.step()
        opt.zero_grad()
    with paceline.consensus():
        inside = weights(model)
    return inside, sum(sync.ages.values()) + sync.dropped


@pytest.mark.parametrize(("world_size", "late"), [slow(2, "drop"), (3, "weigh"), slow(4, "dc")])
def test_between_processes(world_size, late):
    results = processes.values(processes.run(world_size, job, late))
    assert same([w for w, _ in results]).isfinite().all()
    assert [n for _, n in results] == [4] + [10] * (world_size - 1)


@pytest.mark.parametrize("dies", [slow(0), 2])
def test_a_process_that_dies_ends_the_others(dies):
    """With worker 0 the store is gone, and nobody can be named."""
    outcomes = processes.run(3, job, "drop", dies)
    assert outcomes.pop(dies).error == "Died"
    assert {o.error for o in outcomes} <= {"PeerError", "StoreLostError"}, [(o.error, o.message) for o in outcomes]
    assert dies == 0 or all("worker 2" in o.message for o in outcomes), [o.message for o in outcomes]


def test_its_bytes_are_in_the_telemetry():
    """They travel outside of the buckets' own exchanges."""

    def work(comm):
        model = mlp()
        one = Rig(comm, model, sgd(model), spec="backup_workers")
        for x, y in data(4):
            x, y = one.take(x, y)
            nn.functional.cross_entropy(model(x), y).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
        return one.engine.recorder.sent

    assert all(sent > 0 for sent in threads.run(2, work))
