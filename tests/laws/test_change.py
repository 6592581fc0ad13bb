"""Between two steps the group and the method may change, and training goes on as if they had always been so."""

from __future__ import annotations

import threading

import pytest
import torch

import processes
import threads
from laws_table import WORLDS, brisk
from marks import slow
from paceline import registry
from paceline.comm.group import Group
from paceline.comm.threads import Room, ThreadComm
from paceline.core.facts import Fact
from paceline.core.parts import Speed
from paceline.errors import MethodError, UsageError
from paceline.method import method
from rig import Rig, adamw, built, close, data, loop, mlp, same, sgd, weights

SYNCHRONOUS = [
    name for axis in ("reducer", "sync", "layout", "order", "balance") for name, cls in registry.parts(axis).items()
    if not getattr(cls, "is_async", False)
]  # fmt: skip


class Worker:
    """A thread-worker whose group can be made anew: every epoch has a room of its own."""

    def __init__(self, rooms, rank, spec="exact", make=sgd, knobs=None, build=mlp, **settings):
        self.rooms, self.number = rooms, rank
        self.model = build()
        self.optimizer = make(self.model)
        self.comm = ThreadComm(rooms[0], rank)
        self.rig = Rig(
            self.comm, self.model, self.optimizer, spec=spec, knobs=knobs, group=self.group(0, rank), **settings
        )
        self.engine = self.rig.engine

    def group(self, epoch, rank, joined=()):
        room = self.rooms[epoch]
        return Group(rank, room.world_size, lambda name: ThreadComm(room, rank, name), epoch=epoch, joined=joined)

    def train(self, batches):
        rank, world_size = self.engine.group.rank, self.engine.group.world_size

        def take(*tensors):
            sizes = self.engine.method.balance.shares([Speed()] * world_size, len(tensors[0]))
            start = sum(sizes[:rank])
            self.engine.take_batch(_Share(sizes[rank], len(tensors[0])))
            return [t[start : start + sizes[rank]] for t in tensors]

        loop(batches, self.model, self.optimizer, take)


class _Share:
    last, indices, left, number = False, None, 0, 0

    def __init__(self, weight, total):
        self.weight, self.total = weight, total


def run(rooms, work):
    """Three threads; a failure in one ends the others."""
    results, errors = [None] * 3, []

    def one(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            errors.append(error)
            for room in rooms:
                room.fail(error)

    started = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]
    return results


def three_two_three(spec, make=sgd, knobs=None, **settings):
    """A world of 3 made 2 made 3 again; the third worker is away for four steps and gets everything back."""
    rooms = [Room(3), Room(2), Room(3)]
    batches = data(12)

    def work(rank):
        one = Worker(rooms, rank, spec, make, knobs, **settings)
        one.train(batches[:4])
        one.engine.regroup(one.group(1, rank) if rank < 2 else Group.single())
        if rank < 2:
            one.train(batches[4:8])
        one.engine.regroup(one.group(2, rank, joined=(2,)))
        assert one.engine.ex.step == 8
        one.train(batches[8:])
        one.engine.settle()
        return (
            torch.cat([x.flatten() for x in one.model.state_dict().values()]),
            one.engine.ex.step,
            one.engine.group.epoch,
        )

    return run(rooms, work)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_joiner_has_what_the_members_have(steps):
    """Weights, buffers and the optimizer's state, none where they have none; whatever it had done alone."""
    rooms = [Room(3), Room(2), Room(3)]
    build = built(lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)))

    def work(rank):
        one = Worker(rooms, rank, make=adamw, build=build)
        one.engine.regroup(one.group(1, rank) if rank < 2 else Group.single())
        one.train(data(steps if rank < 2 else 2, seed=rank // 2))
        one.engine.regroup(one.group(2, rank, joined=(2,)))
        one.engine.buffers.give_back()  # as after a step that does not count
        known = [one.optimizer.state.get(p, {}) for p in one.model.parameters()]
        moments = [x.flatten() for state in known for x in state.values()]
        return torch.cat([x.flatten() for x in one.model.state_dict().values()] + moments)

    same(run(rooms, work))


def single(make=sgd, batches=None):
    model = mlp()
    return loop(batches or data(12), model, make(model))


@pytest.mark.parametrize("spec", ["exact", "zero1", "zero2", "zero3", "priority"])
@pytest.mark.parametrize("make", [slow(sgd), adamw])
def test_a_world_of_three_made_two_made_three_goes_as_one_worker(spec, make):
    got = three_two_three(spec, make)
    assert [step for _, step, _ in got] == [12] * 3
    assert [epoch for *_, epoch in got] == [2] * 3
    close(same([w for w, *_ in got]), single(make), tol=1e-5)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_synchronous_part_goes_on_with_other_workers(name):
    cls = registry.find(name)
    make = adamw if Fact.ADAM in cls.needs else (lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    got = three_two_three(name, make, brisk(cls))
    assert all(w.isfinite().all() for w, *_ in got)
    if Fact.REPLICAS_AGREE in method(name, **brisk(cls)).sync.facts():
        same([w for w, *_ in got])


def test_what_is_left_over_is_not_lost_when_workers_go():
    """Conservation: plain SGD at rate 1 has gone by the sum of all mean gradients, but for what is still kept."""
    rooms = [Room(3), Room(2)]
    gradients = [torch.randn(3, 500, generator=torch.Generator().manual_seed(t)) for t in range(6)]

    def work(rank):
        p = torch.nn.Parameter(torch.zeros(500))
        model = torch.nn.Module()
        model.p = p
        optimizer = torch.optim.SGD([p], lr=1.0)
        comm = ThreadComm(rooms[0], rank)
        make = [lambda name, room=room: ThreadComm(room, rank, name) for room in rooms]
        engine = Rig(comm, model, optimizer, spec="topk", knobs={"ratio": 0.1}, group=Group(rank, 3, make[0])).engine
        for t in range(6):
            if t == 3:
                engine.regroup(Group(rank, 2, make[1], epoch=1) if rank < 2 else Group.single())
                if rank == 2:
                    return None
            (p * gradients[t][rank]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        [kept] = [x for part in engine.method.parts() if (x := part.flush(engine.buckets[0])) is not None]
        return p.detach().double(), kept[:500].double()

    a, b, _ = run(rooms, work)
    sent = sum(g.double().mean(0) for g in gradients[:3]) + sum(g[:2].double().mean(0) for g in gradients[3:])
    torch.testing.assert_close(-a[0] + (a[1] + b[1]) / 2, sent, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", WORLDS)
def test_methods_change_between_steps(world_size):
    """exact, powersgd, local_sgd, exact: replicas agree in the end, and the first and last stretch are exact's."""

    def work(comm):
        model = mlp()
        optimizer = sgd(model)
        rig = Rig(comm, model, optimizer)
        seen = []
        for i, (spec, knobs) in enumerate(
            [("exact", {}), ("powersgd", {"rank": 2}), ("local_sgd", {"every": 2}), ("exact", {})]
        ):
            if i:
                rig.engine.change(method(spec, **knobs))
            loop(data(3, seed=i), model, optimizer, rig.take)
            seen.append(weights(model).clone())
            assert rig.engine.ex.step == 3 * (i + 1)
        return torch.stack(seen)

    results = threads.run(world_size, work)
    first, last = [r[0] for r in results], [r[-1] for r in results]
    same(last)
    model = mlp()
    close(same(first), loop(data(3, seed=0), model, sgd(model)))


EXACT, LOCAL, TOPK = ("exact", {}), ("local_sgd", {"every": 1}), ("topk", {"ratio": 0.05})


def gone_by(comm, gradients, change_at, by=TOPK, to=(EXACT,), then=lambda engine: None, scale=1.0):
    """Where plain SGD at rate 1 ends: by one method until `change_at`, by others from there. then: what is done after
    the change. scale: of the loss, by a GradScaler.
    """
    model = torch.nn.ParameterList([torch.zeros(100) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    engine = Rig(comm, model, optimizer, spec=method(by[0], **by[1]), scaler=scaler).engine
    for t, g in enumerate(gradients):
        if t == change_at:
            for spec, knobs in to:
                engine.change(method(spec, **knobs))
            then(engine)
        scaler.scale((torch.cat([*model]) * g[comm.rank]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return -weights(model)


GRADIENTS = [torch.randn(2, 300, generator=torch.Generator().manual_seed(t)) for t in range(4)]


CHANGES = {
    "exact": {},
    "local_sgd": {"to": [LOCAL]},
    "twice": {"to": [TOPK, EXACT]},
    "and other buckets": {"then": lambda engine: engine.recut(1 << 20)},
    "under a loss scale": {"scale": 256.0},
    "two means": {"by": ("delayed", {"staleness": 2})},
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_a_method_kept_back_goes_into_the_next_ones_gradients(how):
    """Conservation over a change: in the end everything has been applied."""
    got = same(threads.run(2, lambda comm: gone_by(comm, GRADIENTS, 2, **CHANGES[how])))
    torch.testing.assert_close(got, sum(g.mean(0) for g in GRADIENTS), rtol=0, atol=1e-5)


def test_what_was_kept_back_survives_a_step_that_does_not_count():
    gradients = [*GRADIENTS[:2], torch.full((2, 300), torch.nan), *GRADIENTS[2:]]
    with pytest.warns(UserWarning, match="is skipped"):
        got = same(threads.run(2, lambda comm: gone_by(comm, gradients, 2)))
    torch.testing.assert_close(got, sum(g.mean(0) for g in GRADIENTS), rtol=0, atol=1e-5)


def test_what_cannot_change_is_refused():
    def work(comm):
        model = mlp()
        optimizer = sgd(model)
        rig = Rig(comm, model, optimizer)
        with pytest.raises(MethodError, match="layout cannot change"):
            rig.engine.change(method("zero1"))
        with pytest.raises(MethodError, match="cannot be taken up or left"):
            rig.engine.change(method("async_average"))
        x, y = rig.take(*data(1)[0])
        torch.nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(UsageError, match="in the middle of a step"):
            rig.engine.change(method("half"))

    threads.run(2, work)


def _regrouped(rank: int) -> list[torch.Tensor]:
    """Real processes over gloo: three, then two, then three, in the same processes."""
    session = processes.join()
    rendezvous = session.rendezvous
    model = mlp()
    optimizer = sgd(model)
    from paceline.core.engines import Engines
    from paceline.session.assemble import assemble
    from paceline.session.objects import Objects
    from paceline.session.settings import Settings

    engine = assemble(
        Objects.sort([model, optimizer]),
        optimizer,
        method("exact"),
        session.group,
        recorder=session.recorder,
        settings=Settings(bucket_mb=0.0005),
        engines=Engines(),
    )

    def train(batches):
        me, count = engine.group.rank, engine.group.world_size

        def take(*tensors):
            sizes = engine.method.balance.shares([Speed()] * count, len(tensors[0]))
            start = sum(sizes[:me])
            engine.take_batch(_Share(sizes[me], len(tensors[0])))
            return [t[start : start + sizes[me]] for t in tensors]

        loop(batches, model, optimizer, take)

    batches = data(12)
    train(batches[:4])
    engine.regroup(rendezvous.group(rank, 2, epoch=1) if rank < 2 else Group.single())
    if rank < 2:
        train(batches[4:8])
    engine.regroup(rendezvous.group(rank, 3, epoch=2, joined=(2,)))
    train(batches[8:])
    return weights(model)


@pytest.mark.parametrize("way", ["flat", None])
def test_between_processes(way):
    env = {"PACELINE_COLLECTIVES": way} if way else None
    close(same(processes.values(processes.run(3, _regrouped, env=env))), single(), tol=1e-5)
