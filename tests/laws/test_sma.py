"""Synchronous model averaging against its formulas in fp64, with any reducer, across evaluations and saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import Messy, on_every_world
from marks import slow
from paceline.core.consensus import consensus_weights
from paceline.errors import MethodError, MismatchError, PeerError, PeerTimeoutError
from paceline.method import Method, method
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.exact import Exact
from paceline.reducers.int8 import Int8
from paceline.reducers.powersgd import PowerSGD
from paceline.reducers.qsgd import QSGD
from paceline.reducers.randomk import RandomK
from paceline.reducers.topk import TopK
from paceline.syncs.sma import SMA
from processes import run, values
from rig import Rig, adamw, alone, close, data, loop, mlp, same, sgd, weights

# ---------------------------------------------------------------------------------------------------- the oracle


def simulate(world_size, batches, make, *, alpha=None, mu=0.9, every=1, rates=None, starts=()):
    """All replicas in one fp64 loop, by the paper's box. The centre, and every replica."""
    models = [mlp().double() for _ in range(world_size)]
    optimizers = [make(model) for model in models]
    z = z_prev = weights(models[0])
    alpha = alpha or 1.0 / world_size
    for t, (x, y) in enumerate(batches):
        before = [weights(model) for model in models]
        for j, model in enumerate(models):
            share = slice(j * len(x) // world_size, (j + 1) * len(x) // world_size)
            if rates:
                optimizers[j].param_groups[0]["lr"] = rates[t]
            cross_entropy(model(x[share].double()), y[share]).backward()
            optimizers[j].step()
            optimizers[j].zero_grad()
        if (t + 1) % every == 0 and world_size > 1:
            c = [alpha * (w - z) for w in before]
            for model, own in zip(models, c, strict=True):
                nn.utils.vector_to_parameters(weights(model) - own, model.parameters())
            z, z_prev = z + sum(c) + mu * (z - z_prev), z
        if t in starts:
            z_prev = z
            for model in models:
                nn.utils.vector_to_parameters(z.clone(), model.parameters())
    return (z if world_size > 1 else weights(models[0])).float(), [weights(model).float() for model in models]


def work_by(make_spec, batches, make=sgd, *, rates=None, look_at=(), **rig):
    """A worker: trains, evaluates after some steps, gives the centre and its own weights."""

    def work(comm):
        model = mlp()
        opt = make(model)
        one = Rig(comm, model, opt, spec=make_spec(), **rig)
        for t, batch in enumerate(batches):
            if rates:
                opt.param_groups[0]["lr"] = rates[t]
            x, y = one.take(*batch)
            cross_entropy(model(x), y).backward()
            opt.step()
            if t in look_at:  # before zero_grad, which forgets what is not committed
                before = weights(model)
                with consensus_weights(one.engine):
                    pass
                assert torch.equal(weights(model), before)
            opt.zero_grad()
        own = weights(model)
        with consensus_weights(one.engine):
            return weights(model), own

    return work


def compare(results, want, tol=1e-5):
    z, replicas = want
    close(same([centre for centre, _ in results]), z, tol)
    for (_, own), replica in zip(results, replicas, strict=True):
        close(own, replica, tol)


@on_every_world
@pytest.mark.parametrize(
    ("make", "knobs"), [(sgd, {}), (adamw, {}), (sgd, {"alpha": 0.3, "mu": 0.0}), (adamw, {"every": 3, "mu": 0.5})]
)
def test_it_is_the_paper_s_box(world_size, make, knobs):
    batches = data(11)
    results = threads.run(world_size, work_by(lambda: Method(sync=SMA(**knobs)), batches, make))
    compare(results, simulate(world_size, batches, make, **knobs), tol=3e-5)


def test_replicas_differ_and_the_centre_is_not_their_mean():
    results = threads.run(3, work_by(lambda: "sma", data(8)))
    owns = torch.stack([own for _, own in results])
    assert not torch.equal(owns[0], owns[1])
    assert (owns.mean(0) - results[0][0]).norm() > 1e-3


def in_processes(rank, knobs):
    import paceline
    from rig import data, mlp, sgd, weights

    model = mlp()
    opt = sgd(model)
    model, opt, loader = paceline.prepare(model, opt, data(9, size=4, seed=50 + rank), method="sma", **knobs)
    for t, (x, y) in enumerate(loader):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if t == 4:
            with paceline.consensus():
                pass
    own = weights(model)
    with paceline.consensus():
        return weights(model), own


@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
def test_between_processes(world_size):
    results = values(run(world_size, in_processes, {"mu": 0.8}))
    shares = [data(9, size=4, seed=50 + rank) for rank in range(world_size)]
    batches = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*shares, strict=True)]
    compare(results, simulate(world_size, batches, sgd, mu=0.8))


# ---------------------------------------------------------------------------------------------------- what carries it


@pytest.mark.parametrize("world_size", [slow(2), 3])
@pytest.mark.parametrize("make_reducer", [Int8, lambda: QSGD(bits=8), lambda: PowerSGD(rank=16)])
def test_any_reducer_may_carry_the_corrections(world_size, make_reducer):
    """Near to exact ones end near the exact trajectory, and the centre is the same everywhere."""
    batches = data(30)
    spec = lambda: Method(sync=SMA(mu=0.5), reducer=make_reducer())  # noqa: E731
    results = threads.run(world_size, work_by(spec, batches))
    z, _ = simulate(world_size, batches, sgd, mu=0.5)
    assert (same([c for c, _ in results]) - z).norm() < 0.03 * (z - weights(mlp())).norm()


@pytest.mark.parametrize("world_size", [2, 3])
def test_error_feedback_owes_the_centre_what_it_kept(world_size):
    """Replicas give the whole of c: with no momentum, z is the start and all that was given, but for what is kept."""
    batches = data(12)

    def work(comm):
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        spec = Method(sync=SMA(mu=0.0), reducer=ErrorFeedback(of=TopK(ratio=0.1)))
        one = Rig(comm, model, opt, spec=spec, bucket_mb=1.0)
        given, [b] = torch.zeros_like(one.engine.buckets[0].flat), one.engine.buckets
        start = b.weights()
        for batch in batches:
            if one.engine.ex.step:
                given += one.engine.method.sync._c[0]
            loop([batch], model, opt, one.take)
        kept = one.engine.method.reducer.state[0, "e"]
        return start, given, kept, one.engine.method.sync.state[0, "z"]

    results = threads.run(world_size, work)
    start, _, _, z = results[0]
    assert any(kept.abs().max() > 1e-4 for _, _, kept, _ in results), "nothing was kept: the test shows nothing"
    close(z, start + sum(given - kept for _, given, kept, _ in results), tol=1e-5)


def test_the_centre_has_no_padding():
    """Or what an estimate leaves there would grow in it, and count in the scales of all later corrections."""
    batches = data(4)
    results = threads.run(3, work_by(lambda: Method(sync=SMA(), reducer=Messy()), batches))
    compare(results, simulate(3, batches, sgd))


@pytest.mark.parametrize("make_reducer", [lambda: RandomK(ratio=0.2), lambda: QSGD(bits=2)])
def test_reducers_draw_anew_in_every_step(make_reducer):
    """The same c, sent again and again, is not rounded the same way: with no update at all, only the dice differ."""

    def work(comm):
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p += comm.rank  # from here on they are drawn together, and nothing else
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        one = Rig(comm, model, opt, spec=Method(sync=SMA(mu=0.0, alpha=1e-9), reducer=make_reducer()), bucket_mb=1.0)
        sync, reducer, seen, steps = one.engine.method.sync, one.engine.method.reducer, [], []
        mean = reducer.mean
        reducer.mean = lambda b, x, comm: steps.append(b.step) or mean(b, x, comm)
        sync.state[0, "z"] = sync.state[0, "z_prev"] = torch.zeros_like(one.engine.buckets[0].flat)
        for batch in data(3):
            loop([batch], model, opt, one.take)
            seen.append(sync._flying[0].finish())
        assert steps == [0, 1, 2, 3]
        return seen

    first, second, third = threads.run(2, work)[0]
    assert (first - second).norm() > 0.1 * first.norm() > 0
    assert (second - third).norm() > 0.1 * first.norm()


def test_the_bytes_are_the_reducer_s_once_in_tau_steps():
    def sent(every):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            one = Rig(comm, model, opt, spec=Method(sync=SMA(every=every)))
            loop(data(8), model, opt, one.take)
            begin = 8 * (comm.world_size - 1) * len(one.engine.buckets)  # do all workers begin with the same weights?
            return comm.sent - begin, sum(Exact().sends(b, comm.world_size) for b in one.engine.buckets)

        return threads.run(3, work)[0]

    total, once = sent(1)
    assert total == 9 * once  # eight steps, and the ninth's are on their way
    total, once = sent(4)
    assert total == 2 * once


# ---------------------------------------------------------------------------------------------------- time and again


@pytest.mark.parametrize(
    ("reducer", "every"),
    [
        (Exact, 1),
        (Exact, 3),
        (lambda: ErrorFeedback(of=TopK(ratio=0.2)), 1),
        (lambda: QSGD(bits=4), 1),
        (lambda: PowerSGD(rank=2), 3),
    ],
)
def test_looking_at_the_centre_changes_nothing(reducer, every):
    """An evaluation lets the corrections arrive early; they count where they belong, and nothing kept is lost."""
    spec = lambda: Method(sync=SMA(every=every), reducer=reducer())  # noqa: E731
    plain = threads.run(3, work_by(spec, data(11)))
    looked = threads.run(3, work_by(spec, data(11), look_at=(0, 1, 4, 5, 9)))
    for (z, own), (z2, own2) in zip(plain, looked, strict=True):
        assert torch.equal(z, z2)
        assert torch.equal(own, own2)


@pytest.mark.parametrize(
    ("reducer", "every", "bucket_mb"),
    [
        (Exact, 1, 0.0005),
        (Exact, 3, 1.0),
        (lambda: ErrorFeedback(of=TopK(ratio=0.2)), 1, 0.0005),
        (lambda: QSGD(bits=4), 1, 0.0005),
        (lambda: PowerSGD(rank=2), 3, 0.0005),
    ],
)
def test_save_and_load_goes_on_bit_equal(reducer, every, bucket_mb):
    batches = data(11)

    def work(comm, split):
        def rig(comm, mb):
            model = mlp()
            return Rig(comm, model, adamw(model), spec=Method(sync=SMA(every=every), reducer=reducer()), bucket_mb=mb)

        one = rig(comm, bucket_mb)
        loop(batches[:5], one.model, one.optimizer, one.take)
        one.engine.method.sync.settle(one.engine.ex)
        if split:
            two = rig(type(comm)(comm.room, comm.rank, "again"), bucket_mb)
            two.model.load_state_dict(one.model.state_dict())
            two.optimizer.load_state_dict(one.optimizer.state_dict())
            two.engine.ex.step = one.engine.ex.step
            for old, new in zip(one.engine.method.parts(), two.engine.method.parts(), strict=True):
                new.state.load(old.state.save(one.engine.buckets), two.engine.buckets)
            one = two
        loop(batches[5:], one.model, one.optimizer, one.take)
        with consensus_weights(one.engine):
            return weights(one.model)

    through = same(threads.run(3, lambda comm: work(comm, False)))
    assert torch.equal(same(threads.run(3, lambda comm: work(comm, True))), through)


@pytest.mark.parametrize("every", [1, 2])
def test_a_new_learning_rate_starts_the_replicas_again_from_the_centre(every):
    rates = [0.1] * 5 + [0.01] * 6
    spec = lambda: Method(sync=SMA(restart="lr", every=every))  # noqa: E731
    results = threads.run(3, work_by(spec, data(11), rates=rates, look_at=(3,)))
    compare(results, simulate(3, data(11), sgd, every=every, rates=rates, starts=(5,)))
    without = simulate(3, data(11), sgd, every=every, rates=rates)
    assert (results[0][0] - without[0]).norm() > 1e-4


def test_a_rate_that_creeps_does_not_hold_the_replicas_at_the_centre():
    rates = [0.1 * 0.8**t for t in range(11)]  # halved after four steps each
    results = threads.run(2, work_by(lambda: Method(sync=SMA(restart="lr")), data(11), rates=rates))
    compare(results, simulate(2, data(11), sgd, rates=rates, starts=(4, 8)))


def test_restarts_can_be_asked_for():
    batches = data(9)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="sma")
        loop(batches[:4], model, opt, one.take)
        one.engine.method.sync.restarts()
        loop(batches[4:], model, opt, one.take)
        own = weights(model)
        with consensus_weights(one.engine):
            return weights(model), own

    compare(threads.run(3, work), simulate(3, batches, sgd, starts=(4,)))


def test_a_restart_of_one_worker_alone_is_an_error():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="sma")
        if comm.rank == 0:
            one.engine.method.sync.restarts()
        loop(data(3), model, opt, one.take)

    with pytest.raises((PeerTimeoutError, MismatchError, PeerError)):
        threads.run(2, work, timeout_s=0.2)


def test_a_window_of_micro_batches_alone_is_the_optimizer():
    """One worker that accumulates goes through the engine, and has nobody to agree with."""
    batches = data(4, size=12)
    halves = [(x[i : i + 6], y[i : i + 6]) for x, y in batches for i in (0, 6)]

    def work(comm):
        model = mlp()
        opt = sgd(model)
        loop(halves, model, opt, Rig(comm, model, opt, spec="sma", accumulate=2).take)
        return weights(model)

    [result] = threads.run(1, work)
    close(result, alone(batches))


# ---------------------------------------------------------------------------------------------------- bad input


def test_too_strong_a_pull_is_refused_when_the_world_is_known():
    with pytest.raises(MethodError, match="alpha=1 is too much for 4 workers"):
        threads.run(4, work_by(lambda: Method(sync=SMA(alpha=1.0)), data(2)))


@pytest.mark.parametrize("alpha", [0.62, 0.66])
def test_the_bound_on_alpha_is_where_it_is(alpha):
    """Without gradients only the formulas remain: below the bound of 0.644 the distance dies out, above it grows."""
    world_size, mu = 4, 0.9
    assert 2 * (1 + mu) / (1 + world_size + mu) == pytest.approx(0.644, abs=1e-3)
    w, z, z_prev = torch.randn(world_size, 1, dtype=torch.float64), torch.zeros(1).double(), torch.zeros(1).double()
    for _ in range(2000):
        c = alpha * (w - z)
        w, z, z_prev = w - c, z + c.sum(0) + mu * (z - z_prev), z
    assert bool((w - z).abs().max() < 1e-3) == (alpha < 0.644)


@pytest.mark.parametrize("knobs", [{"alpha": -0.1}, {"alpha": 1.5}, {"mu": 1.0}, {"every": 0}, {"restart": "always"}])
def test_bad_knobs_are_refused(knobs):
    with pytest.raises(MethodError):
        SMA(**knobs)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(MethodError, match="dgc"):
        method("sma+dgc")
