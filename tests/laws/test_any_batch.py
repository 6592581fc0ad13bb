"""Rounds that end at a deadline, by a logical clock: against their formulas in fp64, on any data, with any part.

A worker's clock moves by its `pace` in every micro-batch and by nothing else, so it is known what each finishes.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import threads
from laws_table import on_every_world
from paceline.comm.group import Group
from paceline.comm.single import SingleComm
from paceline.core.consensus import consensus_weights
from paceline.core.engine import EngineOptions
from paceline.core.facts import Fact
from paceline.core.open_window import Finished
from paceline.data.dealing import Deal
from paceline.data.loader import Loader
from paceline.errors import DataError, MethodError, UsageError
from paceline.method import Method, method
from paceline.syncs import _mirror
from paceline.syncs.any_batch import AnyBatch
from paceline.syncs.any_batch_gossip import AnyBatchGossip
from paceline.syncs.gossip import mixing
from rig import Rig, built, close, data, mlp, same, sgd, weights

LR = 0.1
PACES = [
    1.0,
    0.35,
    2.1,
    0.6,
]  # seconds of a micro-batch, worker by worker; with a deadline of 3 s: 3, 8, 1 and 5 of them
DEADLINE = {"deadline_ms": 3000.0}
DONE = [3, 8, 1, 5]
GRAPHS = ("exponential", "full", "ring", "shift_one")


def samples(n):
    x, y = (torch.cat(part) for part in zip(*data(-(-n // 12)), strict=True))
    return TensorDataset(x[:n].double(), y[:n])


@dataclass
class Worker:
    """One worker of a job: what `prepare` would make, over a thread's lane, with a clock that the test moves."""

    rank: int
    rig: Rig
    loader: Loader
    pace: float
    now: list[float]
    rounds: list[list[int]] = field(default_factory=list)  # the samples it has finished, round by round
    epochs: list[list[int]] = field(default_factory=list)  # those it was handed, epoch by epoch

    def train(self, epochs=1, *, each=lambda model, k: None, steps=None):
        """The plain loop."""
        model, opt = self.rig.model, self.rig.optimizer
        for _ in range(epochs):
            mine, self.epochs = [], [*self.epochs, []]
            for x, y in self.loader:
                batch = self.loader.current
                mine += batch.indices if batch.weight else []
                self.epochs[-1] += batch.indices if batch.weight else []
                self.now[0] += self.pace
                cross_entropy(model(x), y).backward()
                if self.rig.engine.window.closing:
                    self.rounds.append(mine)
                    mine = []
                    each(model, len(self.rounds))
                opt.step()
                opt.zero_grad()
                if steps is not None and self.rig.engine.ex.step >= steps:
                    return self
        return self


def hired(comm, source, sync, *, make=lambda: mlp().double(), lr=LR, momentum=0.0, paces=PACES, optimizer=None, **more):
    """A worker with its loader. source: a DataLoader."""
    now, model = [0.0], make()
    opt = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    options = EngineOptions(clock=lambda: now[0])
    spec = sync if isinstance(sync, Method) else Method(sync=sync)
    rig = Rig(comm, model, opt, spec=spec, options=options, **more)
    engine = rig.engine
    loader = Loader(
        source,
        group=Group(comm.rank, comm.world_size, lambda name: type(comm)(comm.room, comm.rank, f"{name} of the loader"))
        if comm.world_size > 1
        else Group.over(SingleComm()),
        balance=engine.method.balance,
        recorder=rig.recorder,
        on_batch=lambda batch: engine.take_batch(batch, 0),
        on_end=lambda: engine.loop_ended(0),
        rule=engine.method.sync.micro_batch,
    )
    engine.on_round(lambda of, handed: loader.round_ended(handed))
    return Worker(comm.rank, rig, loader, paces[comm.rank], now)


def job(world_size, sync, *, n=120, batch=24, epochs=1, settings=None, shuffle=False, train=None, **more):
    """Every worker, after it has trained."""

    def work(comm):
        source = DataLoader(samples(n), batch_size=batch, shuffle=shuffle, **(settings or {}))
        worker = hired(comm, source, sync, **more)
        worker.train(epochs, **(train or {}))
        worker.rig.engine.settle()
        return worker

    return threads.run(world_size, work)


def trained(workers):
    return [weights(w.rig.model) for w in workers]


def rounds(workers):
    """Round by round, each worker's samples."""
    assert len({len(w.rounds) for w in workers}) == 1
    return list(zip(*(w.rounds for w in workers), strict=True))


# ---------------------------------------------------------------------------------------------------- the oracle


MODEL = mlp().double()
MODEL.requires_grad_(True)


def summed(w, x, y):
    """Σ_s ∇f(w, s); zero where there is no sample."""
    if not len(y):
        return torch.zeros_like(w)
    nn.utils.vector_to_parameters(w.clone(), MODEL.parameters())
    loss = cross_entropy(MODEL(x), y, reduction="sum")
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(MODEL.parameters()))])


def formula(history, n, *, graph=None, r=1, momentum=0.0):
    """The two boxes in one fp64 loop. graph=None: Anytime Minibatch, all workers make one step."""
    dataset, world_size = samples(n), len(history[0])
    w = torch.stack([weights(mlp()).double()] * world_size)
    v = torch.zeros_like(w)
    for t, done in enumerate(history):
        b = sum(map(len, done))
        own = torch.stack([summed(w[i], *dataset[list(mine)]) for i, mine in enumerate(done)])
        g = own.sum(0).expand_as(w) / b if graph is None else own * world_size / b
        v = momentum * v + g
        w = w - LR * v
        for k in range(r if graph else 0):
            w = mixing(graph, t * r + k, world_size) @ w
    return w


@on_every_world
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_any_batch_goes_by_its_formula(world_size, momentum):
    workers = job(world_size, AnyBatch(micro=2, **DEADLINE), n=131, epochs=2, momentum=momentum, shuffle=True)
    history = rounds(workers)
    assert [len(mine) for mine in history[0]] == [2 * done for done in DONE[:world_size]]
    close(same(trained(workers)), formula(history, 131, momentum=momentum)[0], tol=1e-11)


@on_every_world
@pytest.mark.parametrize(("graph", "r"), [*itertools.product(GRAPHS, [1]), ("exponential", 2), ("ring", 3)])
def test_the_gossip_form_goes_by_its_formula(graph, r, world_size):
    sync = AnyBatchGossip(micro=2, graph=graph, rounds=r, **DEADLINE)
    workers = job(world_size, sync, n=71, momentum=0.9)
    history = rounds(workers)
    close(torch.stack(trained(workers)), formula(history, 71, graph=graph, r=r, momentum=0.9), tol=1e-11)


def test_the_averages_of_a_round_go_on_through_the_graph():
    """Three turns of the graph, two averages a round: the second round begins with the third."""
    workers = job(6, AnyBatchGossip(micro=2, rounds=2, **DEADLINE), n=150, batch=48, paces=[*PACES, 1.0, 1.5])
    close(torch.stack(trained(workers)), formula(rounds(workers), 150, graph="exponential", r=2), tol=1e-11)


@pytest.mark.parametrize("graph", GRAPHS)
def test_workers_come_closer_with_every_average(graph):
    """And the mean of all weights does not depend on how often they average, at the first step."""

    def apart(r):
        def work(comm):
            worker = hired(comm, DataLoader(samples(60), batch_size=24), AnyBatchGossip(micro=2, graph=graph, rounds=r))
            worker.train(2)
            own = weights(worker.rig.model)
            with consensus_weights(worker.rig.engine):
                return (own - weights(worker.rig.model)).norm()

        return max(threads.run(4, work))

    first, third = apart(1), apart(3)
    assert third <= first / 2 or third < 1e-12
    assert first < LR


@on_every_world
@pytest.mark.parametrize(("sync", "knobs"), [(AnyBatch, {}), (AnyBatchGossip, {"graph": "full"})])
def test_workers_of_one_speed_go_as_every_step(sync, knobs, world_size):
    """Four micro-batches of two samples each, worker by worker: the batches of every_step, in order."""
    workers = job(world_size, sync(micro=2, deadline_ms=4000.0, **knobs), n=96, batch=48, paces=[1.0] * 4)
    dataset, each = samples(96), 4 * 2 * world_size
    model = mlp().double()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    for at in range(0, 96, each):
        cross_entropy(model(dataset[at : at + each][0]), dataset[at : at + each][1]).backward()
        opt.step()
        opt.zero_grad()
    for w in trained(workers):
        close(w, weights(model), tol=1e-11)


def test_a_world_of_one_accumulates_until_its_deadline():
    """It has no board, no other worker, and rounds like any other."""

    worker = hired(SingleComm(), DataLoader(samples(40), batch_size=20), AnyBatch(micro=2, **DEADLINE))
    worker.train()
    assert [len(mine) for mine in worker.rounds] == [6] * 6 + [4]
    close(weights(worker.rig.model), formula([(mine,) for mine in worker.rounds], 40)[0], tol=1e-11)


# ---------------------------------------------------------------------------------------------------- data


@on_every_world
@pytest.mark.parametrize("n", [131, 26])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_once_an_epoch_and_the_fast_take_more(n, drop_last, world_size):
    settings = {"drop_last": drop_last}
    workers = job(world_size, AnyBatch(micro=3, **DEADLINE), n=n, epochs=3, shuffle=True, settings=settings)
    for k in range(3):
        seen = sorted(i for w in workers for i in w.epochs[k])
        assert len(seen) == len(set(seen)) == (n - n % 3 if drop_last else n)
    assert workers[0].epochs[0] != workers[0].epochs[1]
    if world_size > 2 and n > 100:
        assert len(workers[1].epochs[1]) > 3 * len(workers[2].epochs[1])
    assert len({w.rig.engine.ex.step for w in workers}) == 1


def test_what_is_dealt_is_the_same_every_time():
    one, two = (job(3, AnyBatch(micro=2), epochs=2, shuffle=True) for _ in range(2))
    assert [w.rounds for w in one] == [w.rounds for w in two]
    assert torch.equal(torch.stack(trained(one)), torch.stack(trained(two)))


def test_loader_processes_read_ahead():
    settings = {"num_workers": 1, "prefetch_factor": 3}
    workers = job(2, AnyBatch(micro=2, **DEADLINE), n=90, epochs=2, settings=settings)
    for k in range(2):
        assert sorted(i for w in workers for i in w.epochs[k]) == list(range(90))
    close(same(trained(workers)), formula(rounds(workers), 90)[0], tol=1e-11)


def test_workers_that_have_no_more_take_part_without_weight():
    """Worker 1 reads ahead so far that nothing of it can move: the others wait for the end of its list."""
    settings = {"num_workers": 1, "prefetch_factor": 8}
    workers = job(2, AnyBatch(micro=2, **DEADLINE), n=40, settings=settings, paces=[0.1, 3.0])
    history = rounds(workers)
    assert [len(mine) for mine in history[-1]] == [0, 2]
    close(same(trained(workers)), formula(history, 40)[0], tol=1e-11)


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("paces", [[1, 1, 1], [7, 2, 1], [20, 5, 1]])
def test_a_deal_ends_together(paces, ahead):
    """In as many rounds as all paces together need, and what is read ahead, by the slowest."""
    deal, count = Deal(range(500), 3, ahead), 0
    while any(map(deal.rest, range(3))):
        taken = [t + min(pace, deal.rest(r)) for r, (t, pace) in enumerate(zip(deal.taken, paces, strict=True))]
        reading = [mine[: t + ahead] for mine, t in zip(deal.lists, taken, strict=True)]
        deal.advance(taken)
        assert [mine[: len(those)] for mine, those in zip(deal.lists, reading, strict=True)] == reading
        count += 1
    assert sorted(itertools.chain(*deal.lists)) == list(range(500))
    assert count <= 500 / sum(paces) + 2 + ahead


def test_a_pace_is_that_of_several_rounds():
    deal = Deal(range(40), 2, 0)
    deal.advance([6, 2])
    deal.advance([8, 8])
    assert [deal.rest(rank) for rank in (0, 1)] == [12, 12]


def test_what_is_being_read_does_not_move():
    deal = Deal(range(40), 2, 5)
    deal.advance([1, 15])
    assert deal.lists[0][1:6] == [2, 4, 6, 8, 10]
    assert deal.rest(1) > 15


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_resumed_epoch_hands_out_the_rest(before, after, drawn):
    """On as many workers, more or fewer; the state is one for all workers and can be written as JSON."""

    def source():
        sampler = RandomSampler(samples(80), num_samples=60, generator=torch.Generator().manual_seed(3))
        options = {"sampler": sampler} if drawn else {"shuffle": True}
        return DataLoader(samples(80), batch_size=24, **options)

    def first(comm):
        worker = hired(comm, source(), AnyBatch(micro=2, **DEADLINE)).train(steps=2)
        return worker.epochs[0], worker.loader.state_dict()

    def second(comm, state):
        worker = hired(comm, source(), AnyBatch(micro=2, **DEADLINE))
        worker.loader.load_state_dict(state)
        assert worker.loader.state_dict()["left"] == state["left"]
        worker.train(2)
        return worker.epochs

    halves = threads.run(before, first)
    states = [state for _, state in halves]
    plain = [json.dumps({k: v for k, v in state.items() if k != "order"}) for state in states]
    assert len(set(plain)) == 1
    rest = threads.run(after, lambda comm: second(comm, states[0]))
    seen = sorted(i for mine, _ in halves for i in mine) + sorted(i for epochs in rest for i in epochs[0])
    again = sorted(i for epochs in rest for i in epochs[1])
    assert len(seen) == (60 if drawn else 80)
    if not drawn:
        assert sorted(seen) == again == list(range(80))


@pytest.mark.parametrize("damage", [{"left": [3, 1]}, {"left": [0, 500]}, {"left": None}, {"seen": 1}, {"micro": 3}])
def test_a_damaged_state_is_refused(damage):
    def work(comm):
        source = DataLoader(samples(40), batch_size=24)
        worker = hired(comm, source, AnyBatch(micro=2, **DEADLINE)).train(steps=1)
        worker.loader.load_state_dict(worker.loader.state_dict() | damage)

    with pytest.raises(DataError, match=next(iter(damage))):
        threads.run(2, work)


def test_an_evaluation_reads_each_sample_once():
    def work(comm):
        worker = hired(comm, DataLoader(samples(50), batch_size=24), AnyBatch(micro=4))
        with torch.no_grad():
            return [i for _ in worker.loader for i in worker.loader.current.indices]

    assert sorted(itertools.chain(*threads.run(3, work))) == list(range(50))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(torch.zeros(2))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: DataLoader(Endless(), batch_size=8), "stream"),
        (lambda: [(torch.zeros(4, 6), torch.zeros(4).long())], "split"),
        (lambda: DataLoader(samples(20), batch_sampler=[[0, 1], [2, 3]]), "batch sampler"),
        (lambda: DataLoader(samples(40), batch_size=8), "micro=6"),
        (lambda: DataLoader(samples(5), batch_size=24), "smaller micro"),
    ],
)
def test_data_that_cannot_be_dealt_out_are_refused(source, said):
    def work(comm):
        hired(comm, source(), AnyBatch(micro=6)).train()

    with pytest.raises((UsageError, DataError), match=said):
        threads.run(2, work)


# ---------------------------------------------------------------------------------------------------- the deadline


def test_a_tuned_deadline_finds_the_batch_size():
    workers = job(3, AnyBatch(micro=2), n=2400, batch=96)
    per_round = [sum(map(len, done)) for done in rounds(workers)]
    assert per_round[0] == 6, "nothing is known yet"
    settled = per_round[4:-2]
    assert 0.8 * 96 < sum(settled) / len(settled) < 1.1 * 96
    assert len({w.rig.engine.method.sync.state["deadline"] for w in workers}) == 1


def test_a_tuned_deadline_goes_half_the_way_and_at_most_doubles():
    model = mlp()
    engine = Rig(SingleComm(), model, sgd(model), spec=Method(sync=AnyBatch())).engine
    sync, seen = engine.method.sync, []
    for asked_for in (40.0, 40.0, 400.0, 20.0):  # of a worker that takes four samples a second
        sync.learn([Finished(8.0, 2, 2.0, 2)], asked_for, engine.ex)
        seen.append(sync.deadline)
    assert seen == [0.0, 10.0, (10 + 20) / 2, (15 + 5) / 2]


def test_a_tuned_deadline_follows_a_worker_that_becomes_slow():
    def work(comm):
        worker = hired(comm, DataLoader(samples(2400), batch_size=96), AnyBatch(micro=2), paces=[1.0, 1.0])

        def slower(model, k):
            worker.pace = 4.0 if k >= 10 and comm.rank == 1 else 1.0

        worker.train(each=slower)
        return worker

    workers = threads.run(2, work)
    done = [[len(mine) for mine in one] for one in rounds(workers)]
    assert done[8][0] == done[8][1]
    assert all(3 * b <= a for a, b in done[18:22])
    assert all(0.75 * 96 < a + b < 1.1 * 96 for a, b in done[18:22])


def test_a_deadline_shorter_than_a_micro_batch_is_said_once(capsys):
    workers = job(3, AnyBatch(micro=1, deadline_ms=900.0), n=60)
    said = capsys.readouterr().err
    assert said.count("deadline_ms=900 is shorter than one micro-batch of worker 2 (2.1e+03 ms)") == 1
    assert all(len(done[2]) == 1 for done in rounds(workers)[:-2])
    close(same(trained(workers)), formula(rounds(workers), 60)[0], tol=1e-11)


def test_a_worker_whose_last_micro_batch_took_longer_is_not_said_to_be_late(capsys):
    everyone = [Finished(8.0, 2, 1.5, 2), Finished(8.0, 2, 0.9, 2)]
    model = mlp()
    engine = Rig(SingleComm(), model, sgd(model), spec=Method(sync=AnyBatch(deadline_ms=1000.0))).engine
    engine.method.sync.learn(everyone, 16.0, engine.ex)
    assert "late" not in capsys.readouterr().err


def test_a_deadline_below_zero_is_refused():
    with pytest.raises(MethodError, match="deadline_ms=-1"):
        AnyBatch(deadline_ms=-1.0)
    with pytest.raises(MethodError, match="not a choice"):
        AnyBatchGossip(graph="line")


# ---------------------------------------------------------------------------------------------------- mirror maps


class Mixture(nn.Module):
    """Linear layers beside a distribution over their outputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 5)
        self.p = nn.Parameter(torch.full((3, 5), 0.2))

    def forward(self, x):
        return self.net(x).tanh() @ self.p.T


mixture = built(lambda: Mixture().double())


def mirrored(model):
    groups = [{"params": model.net.parameters()}, {"params": [model.p], "lr": 0.7, "mirror": "entropic"}]
    return torch.optim.SGD(groups, lr=LR)


def descend(history, n, graph=None, r=1):
    """The formulas again, for both maps side by side."""
    dataset, world_size, models = samples(n), len(history[0]), [mixture() for _ in history[0]]
    for t, done in enumerate(history):
        b = sum(map(len, done))
        grads = []
        for model, mine in zip(models, done, strict=True):
            x, y = dataset[list(mine)]
            grads.append(torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), list(model.parameters())))
        for i, model in enumerate(models):
            for k, (name, q) in enumerate(model.named_parameters()):
                g = sum(one[k] for one in grads) / b if graph is None else grads[i][k] * world_size / b
                with torch.no_grad():
                    y = q * torch.exp(-0.7 * g) if name == "p" else q - LR * g
                    q.copy_(y / y.sum(-1, keepdim=True) if name == "p" else y)
        for k in range(r if graph else 0):
            w = mixing(graph, t * r + k, world_size) @ torch.stack([weights(m) for m in models])
            for model, mine in zip(models, w, strict=True):
                nn.utils.vector_to_parameters(mine, model.parameters())
    return torch.stack([weights(m) for m in models]), models[0].p


@on_every_world
@pytest.mark.parametrize(
    ("sync", "knobs"), [(AnyBatch, {}), (AnyBatchGossip, {"graph": "ring"}), (AnyBatchGossip, {"rounds": 2})]
)
def test_the_entropic_map_is_the_exponentiated_gradient(sync, knobs, world_size):
    workers = job(world_size, sync(micro=2, **DEADLINE, **knobs), n=70, make=mixture, optimizer=mirrored)
    graph = knobs.get("graph", "exponential") if sync is AnyBatchGossip else None
    expected, p = descend(rounds(workers), 70, graph, knobs.get("rounds", 1))
    close(torch.stack(trained(workers)), expected, tol=1e-10)
    assert (p - 0.2).abs().max() > 0.01
    for worker in workers:
        torch.testing.assert_close(worker.rig.model.p.sum(-1), torch.ones(3).double())


def test_a_step_that_is_left_out_leaves_the_simplex_alone():
    model = mixture()
    opt = mirrored(model)
    model(torch.ones(2, 6).double()).square().sum().backward()
    before = model.p.detach().clone()
    _mirror.apply(lambda: None, opt)
    assert torch.equal(model.p, before)
    _mirror.apply(opt.step, opt)
    assert not torch.equal(model.p, before)


def test_what_underflows_stays_above_zero():
    """A weight of zero would be refused when the model is prepared again."""
    p = _mirror._exponentiated(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 500.0]), 1.0)
    assert (p > 0).all()


def test_a_distribution_in_shards_is_refused():
    def work(comm):
        model = mixture()
        opt = mirrored(model)
        rig = Rig(comm, model, opt, spec=Method(sync=AnyBatch(**DEADLINE), layout=method("zero1").layout))
        for x, y in data(3):
            x, y = rig.take(x.double(), y, last=True)
            cross_entropy(model(x), y).backward()
            opt.step()

    with pytest.raises(MethodError, match="is entropic, and its parameters are sharded"):
        threads.run(2, work)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.p.data[0].copy_(torch.tensor([0.4, 0.6, -0.2, 0.1, 0.1])), "a weight of -0.2"),
        (lambda m: m.p.data.mul_(2), "not to one"),
    ],
)
def test_weights_off_the_simplex_are_refused(change, said):
    model = mixture()
    change(model)
    with pytest.raises(MethodError, match=said):
        _mirror.check(mirrored(model), "any_batch")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: torch.optim.SGD([{"params": [m.p], "mirror": "entropic"}], lr=0.1, momentum=0.9), "momentum=0.9"),
        (lambda m: torch.optim.Adam([{"params": [m.p], "mirror": "entropic"}]), "Adam"),
        (lambda m: torch.optim.SGD([{"params": [m.p], "mirror": "entropy"}], lr=0.1), "did you mean 'entropic'"),
    ],
)
def test_optimizers_that_the_entropic_map_does_not_fit_are_refused(make, said):
    with pytest.raises(MethodError, match=said):
        _mirror.check(make(mixture()), "any_batch")


# ---------------------------------------------------------------------------------------------------- with other parts


@pytest.mark.parametrize("spec", ["zero1", "zero2", "priority", "topk", "powersgd"])
def test_any_reducer_layout_and_order_carries_the_sum(spec):
    """Against plain sums where the parts are exact; those that estimate keep their replicas equal, and learn."""
    part = method(spec)
    spec_ = Method(**{**part.axes(), "sync": AnyBatch(micro=2, **DEADLINE)})
    workers = job(3, spec_, n=131, momentum=0.9)
    expected = formula(rounds(workers), 131, momentum=0.9)[0]
    if Fact.EXACT_MEAN in {fact for p in spec_.parts() for fact in p.gives}:
        for worker, w in zip(workers, trained(workers), strict=True):
            close(w, expected, tol=1e-10)
            assert worker.rig.engine.ex.step == len(worker.rounds)
    else:
        assert (same(trained(workers)).double() - expected).abs().max() < 0.5


def test_parameters_that_are_gathered_in_forward_are_refused():
    with pytest.raises(MethodError, match="use zero2"):
        method("any_batch+zero3")


def test_neighbours_need_whole_weights():
    for other in ("topk", "half"):
        with pytest.raises(MethodError):
            Method(**{**method(other).axes(), "sync": AnyBatchGossip()})
    with pytest.raises(MethodError):
        Method(**{**method("zero1").axes(), "sync": AnyBatchGossip()})


def test_a_nan_of_one_worker_skips_the_round_on_all():
    def work(comm):
        worker = hired(comm, DataLoader(samples(96), batch_size=24), AnyBatch(micro=2, **DEADLINE))
        before = weights(worker.rig.model)
        skipped = []

        def poison(model, k):
            skipped.append(weights(model))

        x = worker.loader.source.dataset.tensors[0]
        if comm.rank == 1:
            x[2] = torch.nan  # the first micro-batch of worker 1 has samples 2 and 3
        worker.train(each=poison)
        return before, skipped, weights(worker.rig.model)

    with pytest.warns(UserWarning, match="worker 1 is not finite"):
        results = threads.run(3, work)
    for before, seen, last in results:
        assert torch.equal(before, seen[1]), "the first round did not count"
        assert last.isfinite().all()
    same([last for *_, last in results])


def test_clipping_sees_the_mean_of_the_round():
    def work(comm):
        worker = hired(comm, DataLoader(samples(96), batch_size=24), AnyBatch(micro=2, **DEADLINE))
        norms = []
        worker.train(each=lambda model, k: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        moved = weights(worker.rig.model) - weights(mlp()).double()
        return torch.stack(norms), moved

    results = threads.run(3, work)
    assert (same([norms for norms, _ in results]) > 0.05).any()
    assert all(moved.norm() <= 0.05 * LR * len(norms) * (1 + 1e-6) for norms, moved in results)


@pytest.mark.parametrize("sync", [AnyBatch, AnyBatchGossip])
def test_a_grad_scaler_changes_nothing(sync):
    """Scales are powers of two."""

    plain = trained(job(3, sync(micro=2, **DEADLINE), n=96))

    def scaled(comm):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        worker = hired(comm, DataLoader(samples(96), batch_size=24), sync(micro=2, **DEADLINE), scaler=scaler)
        model, opt = worker.rig.model, worker.rig.optimizer
        for x, y in worker.loader:
            worker.now[0] += worker.pace
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return weights(model), scaler.get_scale()

    for (w, scale), expected in zip(threads.run(3, scaled), plain, strict=True):
        close(w, expected, tol=1e-12)
        assert scale > 8


# ---------------------------------------------------------------------------------------------------- processes


REALLY_SLOW = """
import json, sys, time
from pathlib import Path
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import paceline

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(720, 6, generator=g), torch.randint(0, 3, (720,), generator=g)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=96, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader, timeout=60)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
folder, rank, steps = Path(sys.argv[1]), paceline.rank(), 0


def epoch(save_at=None):
    global steps
    mine, saved = [], None
    for x, y in loader:
        time.sleep([0.004, 0.02][rank])
        mine += loader.current.indices if loader.current.weight else []
        cross_entropy(model(x), y).backward()
        last = paceline.will_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if last:
            steps += 1
            scheduler.step()
        if last and steps == save_at:
            saved = list(mine)
            paceline.save(folder / "checkpoints", model, optimizer, extra={"loader": loader.state_dict()})
    return mine, saved


first, before = epoch(save_at=5)
second, _ = epoch()
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
rate, made = optimizer.param_groups[0]["lr"], steps
loader.load_state_dict(paceline.load(folder / "checkpoints", model, optimizer)["loader"])
after, _ = epoch()
said = [first, second, before, after, weights, rate, made]
(folder / f"{rank}.json").write_text(json.dumps(said))
"""


def test_a_really_slow_worker_takes_less_and_an_epoch_can_be_resumed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(REALLY_SLOW)
    command = ["run", "--workers", "2", "--method", "any_batch", "--set", "micro=4", str(script), str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "paceline.tools.cli.main", *command], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    fast, slow = results
    for epoch in range(2):
        assert sorted(fast[epoch] + slow[epoch]) == list(range(720))
    assert len(fast[1]) > 1.3 * len(slow[1])
    assert sorted(one for first, second, before, after, *_ in results for one in before + after) == list(range(720))
    assert fast[4:] == slow[4:]
    assert fast[5] < 0.1


def refused(rank, **how):
    import paceline

    model = mlp()
    many = how.pop("optimizers", 1)
    opts = [torch.optim.SGD(list(model.parameters())[i::many], lr=LR) for i in range(many)]
    paceline.prepare(model, *opts, DataLoader(samples(40), batch_size=24), method="any_batch", **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"accumulate": 2}, "accumulate=2"),
        ({"optimizers": 2}, "2 optimizers"),
        ({"weight": len}, "weight="),
        ({"tuned": "x"}, "tuned="),
    ],
)
def test_what_rounds_cannot_have_is_refused_before_anyone_is_met(how, said):
    with pytest.raises(UsageError, match=said):
        refused(0, **how)
    from paceline.session.session import current

    assert current() is None
