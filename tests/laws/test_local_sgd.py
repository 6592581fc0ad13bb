"""Local SGD and its outer optimizers against their formulas in fp64, and in the loops users write around them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from marks import slow
from paceline.core.consensus import consensus_weights
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.topk import TopK
from paceline.syncs.diloco import DiLoCo
from paceline.syncs.local_sgd import LocalSGD
from paceline.syncs.post_local_sgd import PostLocalSGD
from paceline.syncs.slowmo import SlowMo
from rig import Rig, adamw, alone, built, close, data, loop, mlp, same, sgd, train, weights

FAMILY = [LocalSGD(every=3), SlowMo(every=3), DiLoCo(every=3), PostLocalSGD(every=3, start=4)]
LR = 0.1


# ---------------------------------------------------------------------------------------------------- the oracle


class Replica:
    """A worker of the simulation: torch's own optimizer in fp64, weights as one vector."""

    def __init__(self, optimizer):
        self.model = mlp().double()
        self.optimizer = optimizer(self.model)

    @property
    def w(self):
        return weights(self.model)

    @w.setter
    def w(self, vector):
        with torch.no_grad():
            for p, part in zip(
                self.model.parameters(), vector.split([p.numel() for p in self.model.parameters()]), strict=True
            ):
                p.copy_(part.view_as(p))

    def grad(self, x, y):
        self.optimizer.zero_grad()
        cross_entropy(self.model(x.double()), y).backward()

    def step(self, x, y):
        self.grad(x, y)
        self.optimizer.step()


def simulate(world_size, batches, sync, optimizer=sgd, schedule=None):
    """The papers' loops, all workers in one; gives the anchor and everybody's weights."""
    workers = [Replica(optimizer) for _ in range(world_size)]
    x, u, v = workers[0].w, None, None
    for t, (a, b) in enumerate(batches):
        shares = list(zip(a.chunk(world_size), b.chunk(world_size), strict=True))
        for w in workers:
            for group in w.optimizer.param_groups:
                group["lr"] = gamma = schedule(t) if schedule else group["lr"]
        if isinstance(sync, PostLocalSGD) and t < sync.start:
            for w, share in zip(workers, shares, strict=True):
                w.grad(*share)
            for ps in zip(*(w.model.parameters() for w in workers), strict=True):
                mean = sum(p.grad for p in ps) / world_size
                for p in ps:
                    p.grad = mean.clone()
            for w in workers:
                w.optimizer.step()
            x = workers[0].w
            continue
        for w, share in zip(workers, shares, strict=True):
            w.step(*share)
        if (t + 1) % sync.every:
            continue
        delta = sum(x - w.w for w in workers) / world_size
        if isinstance(sync, SlowMo):
            u = delta / gamma + (sync.beta * u if u is not None else 0)
            x = x - sync.alpha * gamma * u
        elif isinstance(sync, DiLoCo):
            v = delta + (sync.outer_momentum * v if v is not None else 0)
            x = x - sync.outer_lr * (delta + sync.outer_momentum * v)
        else:
            x = x - delta
        for w in workers:
            w.w = x
    return x, [w.w for w in workers]


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
@pytest.mark.parametrize("sync", FAMILY, ids=lambda s: s.name)
def test_it_goes_as_its_paper_says(sync, world_size, optimizer):
    batches = data(11)
    _, expected = simulate(world_size, batches, sync, optimizer)
    for got, want in zip(train(world_size, batches, optimizer, spec=Method(sync=sync)), expected, strict=True):
        close(got.double(), want, 3e-5)


def test_slow_momentum_is_in_units_of_gradients():
    """The learning rate changes between agreements: u is divided by the old one and multiplied by the new."""
    sync, lr = SlowMo(every=2), lambda t: LR if t < 4 else LR / 10
    plain = lambda model: torch.optim.SGD(model.parameters(), lr=LR)  # noqa: E731

    def work(comm):
        model = mlp()
        opt = plain(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: lr(t) / LR)
        rig = Rig(comm, model, opt, spec=Method(sync=SlowMo(every=2)))
        for x, y in data(9):
            loop([(x, y)], model, opt, rig.take)
            schedule.step()
        return weights(model)

    _, expected = simulate(2, data(9), sync, plain, lr)
    for got, want in zip(threads.run(2, work), expected, strict=True):
        close(got.double(), want, 1e-5)


# ---------------------------------------------------------------------------------------------------- agreements


@pytest.mark.parametrize("sync", FAMILY, ids=lambda s: s.name)
def test_workers_agree_at_every_agreement_and_differ_in_between(sync):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=sync))
        seen = []
        for batch in data(9):
            loop([batch], model, opt, rig.take)
            seen.append(weights(model))
        return seen

    for t, now in enumerate(zip(*threads.run(3, work), strict=True)):
        together = (t + 1) % 3 == 0 or (isinstance(sync, PostLocalSGD) and t < sync.start)
        assert all(torch.equal(w, now[0]) for w in now) == together


def test_the_anchor_is_what_is_evaluated():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=4)))
        loop(data(4), model, opt, rig.take)
        at_agreement = weights(model)
        loop(data(2, seed=8), model, opt, rig.take)
        with consensus_weights(rig.engine):
            assert torch.equal(weights(model), at_agreement)
        assert not torch.equal(weights(model), at_agreement)

    threads.run(2, work)


def test_what_the_user_writes_after_an_agreement_is_evaluated():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=4)))
        loop(data(4), model, opt, rig.take)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        clamped = weights(model)
        with consensus_weights(rig.engine):
            close(weights(model), clamped)

    threads.run(2, work)


def test_batch_norm_is_agreed_on_with_the_weights():
    make = built(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    def work(comm):
        model = make()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=2)))
        seen = []
        for batch in data(4):
            loop([batch], model, opt, rig.take)
            seen.append(model[1].running_mean.clone())
        return seen

    for t, now in enumerate(zip(*threads.run(2, work), strict=True)):
        assert torch.equal(*now) == (t % 2 == 1)


# ---------------------------------------------------------------------------------------------------- post-local


@pytest.mark.parametrize("every", [100, 7])  # with 7 the step of the drop would end a stretch, had one begun
def test_post_local_starts_at_the_first_drop_of_the_learning_rate(every):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: (t + 1) / 3 if t < 3 else 0.97**t if t < 6 else 0.1)
        rig = Rig(comm, model, opt, spec=Method(sync=PostLocalSGD(every=every)))
        together = []
        for batch in data(10):
            together.append(rig.engine.method.sync.due(rig.engine.ex.step))
            loop([batch], model, opt, rig.take)
            schedule.step()
        return together

    # A rate that rises or decays is no drop; the first step at the low one is still made together.
    assert threads.run(2, work) == [[True] * 7 + [False] * 3] * 2


def test_post_local_averages_its_first_gradients_exactly():
    spec = Method(sync=PostLocalSGD(start=9), reducer=ErrorFeedback(of=TopK(ratio=0.1)))
    close(same(train(2, data(4), spec=spec)), alone(data(4)))


# ---------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("late", ["keep", "mix"])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("fragments", [slow(1), 2, slow(4)])
def test_fragments_take_turns_and_arrive_late(fragments, delay, late):
    """Streaming DiLoCo's loop in fp64, bucket by bucket."""
    H, mix, world_size, steps = 4, 0.25, 3, 13
    batches = data(steps)

    def work(comm):
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        sync = DiLoCo(every=H, fragments=fragments, delay=delay, late=late, mix=mix)
        rig = Rig(comm, model, opt, spec=Method(sync=sync))
        result = loop(batches, model, opt, rig.take)
        return result, [[s.name for s in b.slots] for b in rig.engine.buckets], comm.sent

    results = threads.run(world_size, work)
    buckets = results[0][1]
    assert len(buckets) > 2
    workers = [Replica(lambda m: torch.optim.SGD(m.parameters(), lr=LR)) for _ in range(world_size)]
    params = [dict(w.model.named_parameters()) for w in workers]
    find = lambda r, n: params[r][n]  # noqa: E731
    anchor = {n: find(0, n).detach().clone() for b in buckets for n in b}
    v, flying, sent = {}, {}, {}
    for t, (a, b) in enumerate(batches):
        for w, share in zip(workers, zip(a.chunk(world_size), b.chunk(world_size), strict=True), strict=True):
            w.step(*share)
        with torch.no_grad():
            for i, bucket in enumerate(buckets):
                now = (t + 1 + (i * fragments // len(buckets)) * H // fragments) % H
                for n in bucket:
                    if now == 0:
                        sent[n] = [find(r, n).clone() for r in range(world_size)]
                        flying[n] = sum(anchor[n] - w for w in sent[n]) / world_size
                    if now == delay and n in flying:
                        delta = flying.pop(n)
                        v[n] = delta + 0.9 * v.get(n, torch.zeros_like(delta))
                        anchor[n] = anchor[n] - 0.7 * (delta + 0.9 * v[n])
                        for r in range(world_size):
                            own = find(r, n)
                            mixed = mix * own + (1 - mix) * anchor[n]
                            kept = own + anchor[n] - sent[n][r]
                            own.copy_((kept if late == "keep" else mixed) if delay else anchor[n])
    for (got, _, _), w in zip(results, workers, strict=True):
        close(got.double(), w.w, 1e-5)


def test_settling_lets_what_is_on_its_way_arrive():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=4, delay=3, late="mix", mix=0.0)))
        loop(data(4), model, opt, rig.take)
        with consensus_weights(rig.engine):
            inside = weights(model)
        return inside, weights(model)

    results = threads.run(2, work)
    agreed_on = same([inside for inside, _ in results])
    for _, own in results:
        assert torch.equal(own, agreed_on)


# ---------------------------------------------------------------------------------------------------- its company


@pytest.mark.parametrize("reducer", ["exact", "half", "int8", "qsgd", "topk", "powersgd", "sign", "randomk"])
def test_any_reducer_carries_the_differences(reducer):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=method(f"local_sgd+{reducer}", every=2))
        loop(data(8), model, opt, rig.take)
        return weights(model), comm.sent

    results = threads.run(3, work)
    same([w for w, _ in results])
    exact, start = train(3, data(8), spec="local_sgd", knobs={"every": 2})[0], weights(mlp())
    assert torch.cosine_similarity(results[0][0] - start, exact - start, dim=0) > (
        0.05 if reducer == "randomk" else 0.5
    )


def test_every_agreement_draws_its_own_lot():
    """randomk picks entries by the step: were it told the same one every time, most weights would never move."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        Rig(comm, model, opt, spec=method("local_sgd+randomk", every=1, ratio=0.2))
        moved = []
        for batch in data(6):
            before = weights(model)
            loop([batch], model, opt)
            moved.append((weights(model) != before).nonzero().flatten().tolist())
        return moved

    moved = threads.run(2, work)[0]
    assert len({tuple(places) for places in moved}) == len(moved)


def test_error_feedback_keeps_what_a_difference_left_behind():
    """Top-k of differences: what was not sent is sent later, so the sum of all anchors' ways is the sum of all ways."""
    spec = Method(sync=LocalSGD(every=1), reducer=ErrorFeedback(of=TopK(ratio=0.3)))

    def work(comm):
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        rig = Rig(comm, model, opt, spec=spec)
        loop(data(6), model, opt, rig.take)
        e = rig.engine.method.reducer.state
        return weights(model), torch.cat([e[b.index, "e"][: b.n] for b in rig.engine.buckets])

    results = threads.run(2, work)
    same([w for w, _ in results])
    assert all(left.abs().sum() > 0 for _, left in results)


@pytest.mark.parametrize(
    ("policy", "equal", "zero"), [("local", False, False), ("mean", True, False), ("reset", True, True)]
)
def test_the_optimizers_momentum_at_an_agreement(policy, equal, zero):
    def work(comm):
        model = mlp()
        opt = adamw(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=3, momentum=policy)))
        loop(data(3), model, opt, rig.take)
        return torch.cat([opt.state[p]["exp_avg"].flatten() for p in model.parameters()])

    first, second = threads.run(2, work)
    assert torch.equal(first, second) == equal
    assert bool((first == 0).all()) == zero


# ---------------------------------------------------------------------------------------------------- loops


def test_an_agreement_survives_a_step_that_a_scaler_leaves_out():
    """Worker 1 overflows in the very step after which all agree: it misses its own update and not the agreement."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1000)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=2)), scaler=scaler, guard="off")
        for t, (x, y) in enumerate(data(6)):
            x, y = rig.take(x, y)
            loss = cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if comm.rank == 1 and t == 3 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return weights(model), scaler.get_scale(), rig.engine.ex.step

    results = threads.run(2, work)
    assert same([w for w, _, _ in results]).isfinite().all()
    assert [scale for _, scale, _ in results] == [8.0, 8.0]
    assert [step for _, _, step in results] == [6, 6]


def test_with_accumulation_h_counts_real_steps():
    batches = data(8)
    merged = [
        (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]
    plain = lambda model: torch.optim.SGD(model.parameters(), lr=LR)  # noqa: E731

    def work(comm):
        model = mlp()
        opt = plain(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=2)), accumulate=2)
        return loop(batches, model, opt, rig.take)

    def merged_shares(comm):
        model = mlp()
        opt = plain(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=2)))
        n = 6
        for x, y in merged:
            mine = [
                torch.cat([t[r * 12 + comm.rank * n : r * 12 + (comm.rank + 1) * n] for r in range(2)]) for t in (x, y)
            ]
            rig.take(x, y)
            loop([tuple(mine)], model, opt)
        return weights(model)

    for a, b in zip(threads.run(2, work), threads.run(2, merged_shares), strict=True):
        close(a, b)


def test_bytes_only_at_agreements():
    n = sum(p.numel() for p in mlp().parameters())

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=LocalSGD(every=4)))
        sent = []
        for batch in data(8):
            before = comm.sent
            loop([batch], model, opt, rig.take)
            sent.append(comm.sent - before)
        return sent, len(rig.engine.buckets), sum(b.flat.numel() for b in rig.engine.buckets)

    for sent, buckets, padded in threads.run(2, work):
        first = sent.pop(0)  # eight bytes for each bucket: do all workers begin with the same weights?
        assert first == 8 * buckets
        assert sent == [0, 0, 4 * padded, 0, 0, 0, 4 * padded]
        assert padded >= n


def test_one_worker_alone_is_not_stopped_by_its_warning_twice():
    """A worker whose gradients stay bad gives up by itself, in its own name."""
    from paceline.errors import NonFiniteError

    batches = data(30)
    for x, _ in batches:
        x[6:] = torch.nan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteError, match="worker 1"):
            train(2, batches, spec="local_sgd")


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("local_sgd", {"every": 0}, "every=0 is out of range"),
        ("local_sgd", {"every": -3}, "every=-3 is out of range"),
        ("local_sgd", {"every": 2.5}, "wrong type"),
        ("local_sgd", {"every": 4, "fragments": 5}, "fragments=5 does not fit into every=4"),
        ("local_sgd", {"every": 4, "delay": 4}, "delay=4 does not fit into every=4"),
        ("local_sgd", {"mix": 1.5}, "mix=1.5 is out of range"),
        ("local_sgd", {"momentum": "average"}, "is not a choice"),
        ("slowmo", {"beta": 1.0}, "beta=1.0 is out of range"),
        ("slowmo", {"alpha": 0.0}, "alpha=0.0 is out of range"),
        ("diloco", {"outer_lr": float("nan")}, "outer_lr=nan is out of range"),
        ("diloco", {"outer_momentum": 1.0}, "outer_momentum=1.0 is out of range"),
        ("post_local_sgd", {"start": -1}, "start=-1 is out of range"),
        ("local_sgd+dgc", {}, "dgc does not go together with local_sgd"),
        ("local_sgd+slowmo", {}, "two parts for the axis 'sync'"),
    ],
)
def test_bad_input_is_refused_by_name(name, knobs, said):
    with pytest.raises(MethodError, match=said):
        method(name, **knobs)


def test_in_a_world_of_one_there_is_nobody_to_agree_with():
    assert torch.equal(train(1, data(6), spec="diloco", knobs={"every": 2})[0], alone(data(6)))
