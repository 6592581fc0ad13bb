"""What holds for every registered sync, on worlds of one to four."""

from __future__ import annotations

import pytest
import torch

import threads
from laws_table import brisk, on_every_world, variants
from marks import slow
from paceline import registry
from paceline.core.consensus import consensus_weights
from paceline.core.facts import Fact
from paceline.core.state import State
from paceline.method import Method
from rig import Rig, adamw, alone, close, data, loop, mlp, same, sgd, train, weights

SYNCS = registry.parts("sync")
OWN_PACE = sorted(name for name, cls in SYNCS.items() if cls.is_async)
IN_STEP = sorted(set(SYNCS) - set(OWN_PACE))


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def optimizer_of(cls):
    return adamw if Fact.ADAM in cls.needs else sgd


def each(names):
    cases = [(name, {**brisk(SYNCS[name]), **knobs}) for name in names for knobs in variants(SYNCS[name])]
    return [pytest.param(name, knobs, id=f"{name}-{knobs}") for name, knobs in cases]


@on_every_world
@pytest.mark.parametrize("name", sorted(n for n, cls in SYNCS.items() if cls.limit is not None))
def test_at_its_limit_it_goes_as_every_step(name, world_size):
    batches = data(12)
    spec = Method(sync=SYNCS[name](**SYNCS[name].limit))
    for result in train(world_size, batches, plain, spec=spec):
        close(result, alone(batches, plain))


@pytest.mark.parametrize("name", IN_STEP)
def test_with_one_worker_it_is_the_optimizer_alone(name):
    batches = data(8)
    make = optimizer_of(SYNCS[name])
    [result] = train(1, batches, make, spec=Method(sync=SYNCS[name](**brisk(SYNCS[name]))))
    assert torch.equal(result, alone(batches, make))


@pytest.mark.parametrize("world_size", [slow(1), slow(2), 3, slow(4)])
@pytest.mark.parametrize(("name", "knobs"), each(IN_STEP))
def test_inside_agreed_all_workers_have_the_same_weights_and_after_it_their_own(name, knobs, world_size):
    cls = SYNCS[name]

    def work(comm):
        model = mlp()
        opt = optimizer_of(cls)(model)
        rig = Rig(comm, model, opt, spec=Method(sync=cls(**knobs)))
        loop(data(7), model, opt, rig.take)
        rig.engine.method.sync.settle(rig.engine.ex)
        before = weights(model)
        with consensus_weights(rig.engine):
            inside = weights(model)
        assert torch.equal(weights(model), before)
        return inside, before

    results = threads.run(world_size, work)
    same([inside for inside, _ in results])
    if Fact.REPLICAS_AGREE in cls.gives:
        same([own for _, own in results])


@pytest.mark.parametrize("world_size", [slow(1), slow(2), 3, slow(4)])
@pytest.mark.parametrize(("name", "knobs"), each(IN_STEP))
def test_a_seeded_rerun_is_bit_equal(name, knobs, world_size):
    cls = SYNCS[name]
    run = lambda: train(world_size, data(9), optimizer_of(cls), spec=Method(sync=cls(**knobs)))  # noqa: E731
    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", IN_STEP)
def test_what_it_remembers_can_be_saved_and_loaded(name):
    """Halfway through, everything moves to new objects; the rest goes as if nothing had been."""
    cls, batches = SYNCS[name], data(14)
    make = optimizer_of(cls)

    def rig(comm):
        model = mlp()
        opt = make(model)
        return Rig(comm, model, opt, spec=Method(sync=cls(**brisk(cls))))

    def settle(one):
        one.engine.method.sync.settle(one.engine.ex)

    def straight(comm):
        one = rig(comm)
        loop(batches[:7], one.model, one.optimizer, one.take)
        settle(one)
        return loop(batches[7:], one.model, one.optimizer, one.take)

    def moved(comm):
        one = rig(comm)
        loop(batches[:7], one.model, one.optimizer, one.take)
        settle(one)
        comm = type(comm)(comm.room, comm.rank, "afterwards")
        two = rig(comm)
        two.model.load_state_dict(one.model.state_dict())
        two.optimizer.load_state_dict(one.optimizer.state_dict())
        two.engine.ex.step = one.engine.ex.step
        two.engine.refresh()
        saved = one.engine.method.sync.state.save(one.engine.buckets)
        two.engine.method.sync.state.load(saved, two.engine.buckets)
        return loop(batches[7:], two.model, two.optimizer, two.take)

    for a, b in zip(threads.run(3, straight), threads.run(3, moved), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", IN_STEP)
def test_a_bad_gradient_of_one_worker_harms_nobody(name):
    """Worker 1 has a NaN in one step: it is left out, and all weights stay finite and in step."""
    cls, batches = SYNCS[name], data(9)
    batches[4][0][:] = torch.where(torch.arange(12)[:, None] // 4 == 1, torch.nan, batches[4][0])

    def work(comm):
        model = mlp()
        opt = optimizer_of(cls)(model)
        rig = Rig(comm, model, opt, spec=Method(sync=cls(**brisk(cls))))
        loop(batches, model, opt, rig.take)
        with consensus_weights(rig.engine):
            return weights(model), rig.engine.ex.step

    with pytest.warns(UserWarning, match="not finite"):
        results = threads.run(3, work)
    assert same([w for w, _ in results]).isfinite().all()
    assert len({step for _, step in results}) == 1


@pytest.mark.parametrize("name", IN_STEP)
def test_what_it_remembers_survives_another_number_of_workers(name):
    cls = SYNCS[name]

    def work(comm, saves=None):
        model = mlp()
        opt = optimizer_of(cls)(model)
        rig = Rig(comm, model, opt, spec=Method(sync=cls(**brisk(cls))))
        if saves is not None:
            rig.engine.method.sync.state.load(State.merge(saves), rig.engine.buckets)
        loop(data(5), model, opt, rig.take)
        rig.engine.method.sync.settle(rig.engine.ex)
        assert weights(model).isfinite().all()
        return rig.engine.method.sync.state.save(rig.engine.buckets)

    three = threads.run(3, work)
    two = threads.run(2, lambda comm: work(comm, three))
    threads.run(3, lambda comm: work(comm, two))


@pytest.mark.parametrize("spec", ["local_sgd", "sma"])
def test_workers_that_have_written_other_weights_before_the_first_step_begin_with_worker_0s(spec):
    """A layer in two optimizers, a climb taken back with another rounding: the centre must be one for all."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec, knobs={"every": 2})
        with torch.no_grad():
            model[2].weight.add_(0.01 * comm.rank)
        loop(data(4), model, opt, one.take)
        with consensus_weights(one.engine):
            return weights(model)

    same(threads.run(3, work))
