"""Gossip, whole and in eight bits, against its formulas in fp64; who meets whom, and how far workers drift apart."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import on_every_world
from marks import slow
from paceline.core.consensus import consensus_weights
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.reducers.dgc import DGC
from paceline.reducers.exact import Exact
from paceline.reducers.half import Half
from paceline.reducers.per_bucket import PerBucket
from paceline.sharding.replicated import Replicated
from paceline.syncs.gossip import Gossip, mixing
from paceline.syncs.gossip_lowbit import GossipLowbit
from processes import run, values
from rig import Rig, close, data, mlp, weights

GRAPHS = ("exponential", "full", "ring", "shift_one")
LR, MU = 0.1, 0.9
ONE_BUCKET = 1.0  # megabytes: the whole model


# ---------------------------------------------------------------------------------------------------- who meets whom


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_mixing_is_doubly_stochastic_and_leads_to_the_mean(graph, world_size):
    product = torch.eye(world_size, dtype=torch.float64)
    for turn in range(100):
        M = mixing(graph, turn, world_size)
        assert (M >= 0).all()
        torch.testing.assert_close(M.sum(0), torch.ones(world_size).double())
        torch.testing.assert_close(M.sum(1), torch.ones(world_size).double())
        product = M @ product
        if turn == 2 * world_size:
            assert (product > 0).all(), "somebody has not heard of somebody"
    torch.testing.assert_close(
        product, torch.full((world_size, world_size), 1 / world_size).double(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_exponential_has_the_mean_itself_after_log2_turns(world_size):
    product = torch.eye(world_size, dtype=torch.float64)
    for turn in range(world_size.bit_length() - 1):
        product = mixing("exponential", turn, world_size) @ product
    assert torch.equal(product, torch.full((world_size, world_size), 1 / world_size).double())


@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("graph", ["exponential", "shift_one"])
def test_nobody_rests(graph, world_size):
    for turn in range(2 * world_size):
        assert (mixing(graph, turn, world_size).diagonal() == 0.5).all()


@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
def test_shift_one_pairs_as_bagua_does(world_size):
    half = world_size // 2
    for turn in range(2 * world_size):
        M = mixing("shift_one", turn, world_size)
        assert torch.equal(M, M.T)
        for r in range(half):
            assert M[r, half + (turn + r) % half] == M[r, r] == 0.5


@pytest.mark.parametrize("world_size", [3, 5, 7])
def test_shift_one_of_an_odd_number_lets_all_meet(world_size):
    assert (sum(mixing("shift_one", turn, world_size) for turn in range(world_size - 1)) > 0).all()


def test_a_ring_of_two_is_the_mean():
    assert torch.equal(mixing("ring", 0, 2), torch.full((2, 2), 0.5).double())


# ---------------------------------------------------------------------------------------------------- the oracle


MODEL = mlp().double()


def gradient(w, x, y):
    nn.utils.vector_to_parameters(w, MODEL.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(MODEL(x), y), list(MODEL.parameters()))])


class Riders:
    """All workers in one fp64 loop: momentum SGD, each on its own share of the batch."""

    def __init__(self, world_size):
        self.world_size, self.w = world_size, torch.stack([weights(mlp()).double()] * world_size)
        self.v = torch.zeros_like(self.w)

    def gradients(self, x, y):
        shares = zip(x.double().chunk(self.world_size), y.chunk(self.world_size), strict=True)
        return torch.stack([gradient(w, *share) for w, share in zip(self.w, shares, strict=True)])

    def step(self, g):
        self.v = MU * self.v + g
        self.w = self.w - LR * self.v


def nudge(step, rank):
    """Somebody else changes the weights between two steps: a user who clips them, say."""
    return 0.05 * (rank + 1) if step == 3 else 0.0


def simulate(world_size, batches, *, graph="exponential", every=1, overlap=True, nudged=False):
    riders, flying = Riders(world_size), None
    for t, (x, y) in enumerate(batches):
        g = riders.gradients(x, y)
        if flying is not None:
            riders.w, flying = riders.w + flying, None
        riders.step(g)
        if (t + 1) % every == 0:
            average = mixing(graph, t // every, world_size) @ riders.w
            if overlap:
                flying = average - riders.w
            else:
                riders.w = average
        if nudged:
            riders.w = riders.w + torch.tensor([[nudge(t, r)] for r in range(world_size)], dtype=torch.float64)
    return riders.w if flying is None else riders.w + flying


def quantised(z):
    """256 levels from the smallest to the largest, in fp32 as it travels; the padding of the bucket is zero."""
    low, high = min(z.min(), 0 * z[0]).float(), max(z.max(), 0 * z[0]).float()
    width = high * (1 / 255) - low * (1 / 255)
    level = ((z.float() - low) * (1 / width)).round().clamp(0, 255)
    return torch.addcmul(low, level, width).double()


def simulate_lowbit(world_size, batches, *, rule="bagua", gamma=0.5, every=1):
    """The two boxes as their papers have them, with the copies all in one place."""
    riders = Riders(world_size)
    hat, m = riders.w.clone(), 1 / min(world_size, 3)
    near = [sorted({(r - 1) % world_size, (r + 1) % world_size} - {r}) for r in range(world_size)]
    for t, (x, y) in enumerate(batches):
        riders.step(riders.gradients(x, y))
        if (t + 1) % every or world_size == 1:
            continue
        if rule == "bagua":
            mixed = torch.stack([m * hat[r] + sum(m * hat[j] for j in near[r]) for r in range(world_size)])
            z = (riders.w - hat) + mixed - hat  # DCD-PSGD: from x(t) to W·x̂(t) − η·g
            hat = hat + torch.stack([quantised(one) for one in z])
            riders.w = hat
        else:
            hat = hat + torch.stack([quantised(one) for one in riders.w - hat])
            pull = torch.stack([sum(m * (hat[j] - hat[r]) for j in near[r]) for r in range(world_size)])
            riders.w = riders.w + gamma * pull
    return riders.w


def ride(world_size, batches, sync, *, make=lambda: mlp().double(), nudged=False, settle=True, look=None, mb=0.0005):
    """The plain loop on thread-workers; each one's weights, or what `look(rig)` sees at the end."""

    def work(comm):
        model = make()
        kind = next(model.parameters()).dtype
        opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MU)
        rig = Rig(comm, model, opt, spec=Method(sync=sync()), bucket_mb=mb)
        for t, (x, y) in enumerate(batches):
            x, y = rig.take(x, y)
            cross_entropy(model(x.to(kind)), y).backward()
            opt.step()
            opt.zero_grad()
            if nudged:
                with torch.no_grad():
                    for p in model.parameters():
                        p += nudge(t, comm.rank)
        if settle:
            rig.engine.method.sync.settle(rig.engine.ex)
        return look(rig) if look else weights(model)

    return threads.run(world_size, work)


@on_every_world
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("every", "overlap"), [(1, True), (1, False), (2, True)])
def test_gossip_goes_by_its_formula(graph, every, overlap, world_size):
    knobs, batches = {"graph": graph, "every": every, "overlap": overlap}, data(5)
    got = ride(world_size, batches, lambda: Gossip(**knobs))
    close(torch.stack(got), simulate(world_size, batches, **knobs), tol=1e-11)


def test_the_oracles_differ_where_the_methods_do():
    """Or the tests here would not see whether anything was averaged, with whom, and when."""
    kinds = [{}, {"overlap": False}, {"every": 2}, {"every": 100}, {"graph": "ring"}, {"graph": "full"}]
    found = [simulate(4, data(5), **knobs) for knobs in [*kinds, {"graph": "shift_one"}]]
    found += [
        simulate_lowbit(4, data(5), **knobs) for knobs in ({}, {"rule": "choco"}, {"rule": "choco", "gamma": 1.0})
    ]
    for a, b in itertools.combinations(found, 2):
        assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_changes_the_weights_while_they_travel_is_kept(world_size):
    batches = data(6)
    got = ride(world_size, batches, Gossip, nudged=True)
    close(torch.stack(got), simulate(world_size, batches, nudged=True), tol=1e-11)


@on_every_world
@pytest.mark.parametrize(
    "knobs", [{}, {"every": 2}, {"rule": "choco"}, {"rule": "choco", "gamma": 1.0, "every": 2}], ids=str
)
def test_lowbit_goes_by_its_papers_boxes(knobs, world_size):
    batches = data(6)
    got = ride(world_size, batches, lambda: GossipLowbit(**knobs), mb=ONE_BUCKET)
    close(torch.stack(got), simulate_lowbit(world_size, batches, **knobs), tol=1e-6)


def test_lowbit_sends_what_bagua_says():
    """On three or more workers: x + L/3 + R/3 − 5/3·w."""
    x, left, right, w = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = x - w + (left + right) / 3 - w * (2 / 3)
    torch.testing.assert_close(ours, x + left / 3 + right / 3 - 5 / 3 * w)


@pytest.mark.parametrize("knobs", [{"overlap": False}, {"every": 2, "graph": "ring"}], ids=str)
def test_a_seeded_rerun_is_bit_equal(knobs):
    first, second = (ride(3, data(6), lambda: Gossip(**knobs)) for _ in range(2))
    assert torch.equal(torch.stack(first), torch.stack(second))


# ---------------------------------------------------------------------------------------------------- copies


def _copies(rig):
    state = rig.engine.method.sync.state
    for (index, _), copy in [(key, x) for key, x in state.items() if key != "world_size"]:
        assert not copy[rig.engine.buckets[index].n :].any(), "what is behind the weights is not saved"
    return [[state.get((b.index, who)) for who in ("own", "left", "right")] for b in rig.engine.buckets]


def _agree(copies):
    world_size = len(copies)
    for rank, buckets in enumerate(copies):
        for index, (_, left, right) in enumerate(buckets):
            assert torch.equal(left, copies[rank - 1][index][0])
            if world_size > 2:
                assert torch.equal(right, copies[(rank + 1) % world_size][index][0])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rule", ["bagua", "choco"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_neighbour_believes_of_a_worker_is_what_it_believes_of_itself(rule, world_size, dtype):
    """Bitwise, after any number of steps: otherwise they would drift apart for ever."""
    copies = ride(world_size, data(9), lambda: GossipLowbit(rule=rule), make=lambda: mlp().to(dtype), look=_copies)
    _agree(copies)
    assert not torch.equal(copies[0][0][0], copies[1][0][0])


def test_workers_that_start_apart_know_it():
    """Copies are of what is there, not of what should be: weights may have been loaded."""

    def work(comm):
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * comm.rank
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        rig = Rig(comm, model, opt, spec=Method(sync=GossipLowbit()))
        for x, y in data(3):
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return _copies(rig)

    _agree(threads.run(3, work))


def test_a_ring_of_another_size_takes_new_copies():
    def work(comm, saves=None):
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        rig = Rig(comm, model, opt, spec=Method(sync=GossipLowbit()))
        if saves is not None:
            rig.engine.method.sync.state.load(saves[comm.rank], rig.engine.buckets)
        for x, y in data(3):
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return rig.engine.method.sync.state.save(rig.engine.buckets), _copies(rig)

    saves = [save for save, _ in threads.run(4, work)]
    _agree([copies for _, copies in threads.run(3, lambda comm: work(comm, saves))])


# ---------------------------------------------------------------------------------------------------- bytes, distance


@on_every_world
@pytest.mark.parametrize("graph", GRAPHS)
def test_gossip_sends_what_its_formula_says(graph, world_size):
    def look(rig):
        return rig.comm.sent, sum(4 * b.flat.numel() for b in rig.engine.buckets)

    for sent, size in ride(world_size, data(6), lambda: Gossip(graph=graph, every=2), make=mlp, look=look):
        messages = {"full": 2 * (world_size - 1) / world_size, "ring": min(2, world_size - 1)}.get(graph, 1)
        assert sent == 3 * messages * size * (world_size > 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lowbit_sends_what_its_formula_says(world_size):
    def look(rig):
        return rig.comm.sent, [b.flat.numel() for b in rig.engine.buckets]

    for sent, sizes in ride(world_size, data(6), lambda: GossipLowbit(every=2), make=mlp, look=look):
        neighbours = min(2, world_size - 1)
        assert sent == sum(neighbours * (4 * n + 3 * (n + 8)) for n in sizes)


SYNCS = {
    "exponential": Gossip,
    "ring": lambda: Gossip(graph="ring"),
    "adapt, then combine": lambda: Gossip(graph="ring", overlap=False),
    "bagua": GossipLowbit,
    "choco": lambda: GossipLowbit(rule="choco"),
}


@pytest.mark.parametrize("name", SYNCS)
def test_workers_stay_near_each_other_and_meet_when_the_learning_rate_falls(name):
    def work(comm):
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        rig = Rig(comm, model, opt, spec=Method(sync=SYNCS[name]()))
        distances = []
        rig.recorder.log = lambda metrics: distances.append(metrics["consensus_distance"])
        for t, (x, y) in enumerate(data(12) * 4):
            opt.param_groups[0]["lr"] = LR if t < 24 else LR * 0.5 ** (t - 23)
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if t % 4 == 3:
                with consensus_weights(rig.engine):
                    pass
        return distances

    for distances in threads.run(4, work):
        early, late = max(distances[:3]), max(distances[3:6])
        assert 1e-3 < early < 0.2
        assert late < 2 * early, "the distance grows with time"
        assert distances[-1] < 1e-4 * early, "they do not meet"


# ---------------------------------------------------------------------------------------------------- real processes


CASES = [
    *({"graph": graph} for graph in GRAPHS),
    {"graph": "shift_one", "overlap": False},
    {"rule": "bagua"},
    {"rule": "choco"},
]


def everything(rank):
    import paceline
    from paceline.session.session import current

    found = []
    for knobs in CASES:
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=MU)
        name = "gossip_lowbit" if "rule" in knobs else "gossip"
        model, opt = paceline.prepare(model, opt, method=name, timeout=20.0, bucket_mb=ONE_BUCKET, **knobs)
        for x, y in data(5):
            x, y = (t.chunk(paceline.world_size())[rank] for t in (x, y))
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        engine = current().by_optimizer[id(opt)]
        engine.method.sync.settle(engine.ex)
        own = weights(model)
        with paceline.consensus():
            found.append((own, weights(model)))
    state = engine.method.sync.state
    return found, [state[0, who] for who in ("own", "left", "right") if (0, who) in state]


@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
def test_processes_go_as_threads_do(world_size):
    results = values(run(world_size, everything))
    for i, knobs in enumerate(CASES):
        own, centre = (torch.stack([found[i][j] for found, _ in results]) for j in (0, 1))
        lowbit = "rule" in knobs
        want = simulate_lowbit(world_size, data(5), **knobs) if lowbit else simulate(world_size, data(5), **knobs)
        # In fp32 an element may tip over to the next of 256 levels, each a few 1e-5 wide.
        close(own.double(), want, tol=5e-4 if lowbit else 1e-5)
        assert torch.equal(centre, centre[0].expand_as(centre))
    _agree([[[*copies, None][:3]] for _, copies in results])


# ---------------------------------------------------------------------------------------------------- what is refused


@dataclass(kw_only=True)
class Sharded(Replicated):
    name: ClassVar[str] = "sharded"
    gives: ClassVar[frozenset[str]] = frozenset()


@pytest.mark.parametrize("name", ["gossip", "gossip_lowbit"])
@pytest.mark.parametrize("reducer", ["half", "int8", "qsgd", "topk", "powersgd", "dgc", "randomk"])
def test_lossy_reducers_are_refused(name, reducer):
    with pytest.raises(MethodError, match=r"(?s)gossip.*copies"):
        method(f"{name}+{reducer}")


@pytest.mark.parametrize("sync", [Gossip, GossipLowbit])
@pytest.mark.parametrize("lossy", [Half, DGC])
def test_a_reducer_that_is_exact_in_part_is_refused(sync, lossy):
    with pytest.raises(MethodError, match=f"{sync.name} does not go together"):
        Method(sync=sync(), reducer=PerBucket(of=lossy(), other=Exact()))


@pytest.mark.parametrize("sync", [Gossip, GossipLowbit])
def test_a_layout_that_shares_out_parameters_is_refused(sync):
    with pytest.raises(MethodError, match="needs whole parameters"):
        Method(sync=sync(), layout=Sharded())


@pytest.mark.parametrize(
    ("sync", "knobs"),
    [
        *itertools.product([Gossip], [{"graph": "star"}, {"every": 0}, {"overlap": 1}, {"every": 1.5}]),
        *itertools.product([GossipLowbit], [{"rule": "dcd"}, {"gamma": 0.0}, {"gamma": 1.1}, {"gamma": float("nan")}]),
    ],
)
def test_bad_knobs_are_refused(sync, knobs):
    with pytest.raises(MethodError):
        sync(**knobs)
