"""Shares that follow the workers' speeds, in the real loader and engine, on clocks that the tests set.

Nothing here sleeps: a worker's clock goes on by what its samples cost, and that is all the balance hears of.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import paceline
import processes
import threads
from paceline import registry
from paceline.balances.measured import Measured
from paceline.core.consensus import consensus_weights
from paceline.core.parts import Speed
from paceline.data.balancing import Balancing
from paceline.data.loader import Loader
from paceline.data.sampling import Shares
from paceline.errors import DataError, MismatchError, UsageError
from paceline.telemetry.events import Rebalance
from paceline.telemetry.recorder import Recorder
from processes import values
from rig import Rig, adamw, close, group_of, mlp, same, sgd, weights

BALANCES = list(registry.parts("balance"))


@dataclass
class Clock:
    """A worker's own time."""

    now: float = 0.0

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin


# ------------------------------------------------------------------------------------------ a cluster on paper


@dataclass
class Told(Recorder):
    """Keeps the decisions."""

    decisions: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__(None, 0)

    def emit(self, event):
        if isinstance(event, Rebalance):
            self.decisions.append(event)


def cluster(world_size, cost, *, steps, batch=64, ahead=0, noise=0.0, seed=0, exposed=0.0, **knobs):
    """The shares of every step, and what was decided. cost(step, rank): (seconds a sample, seconds a step)."""

    def work(comm):
        shares, clock, recorder = Shares(group_of(comm), Measured(**knobs)), Clock(), Told()
        balancing = Balancing(shares, recorder, reads_ahead=ahead + comm.rank, clock=clock)
        draw, dealt, seen = random.Random(1000 * seed + comm.rank), [], []
        balancing.begin(0, 0)
        for step in range(steps):
            balancing.before_batch(step, batch)
            while len(dealt) <= step + ahead + comm.rank:  # as the loader's processes do once a batch is handed out
                dealt.append(shares.all(batch, shares.schedule.of(len(dealt))[1]))
            seen.append(dealt[step])
            recorder.start_lap(dealt[step][comm.rank], 0.0)
            recorder.follow(balancing.pace)
            each, rest = cost(step, comm.rank)
            clock.now += (rest + each * dealt[step][comm.rank]) * (1 + draw.uniform(-noise, noise))
            recorder.backward_ended()
            with recorder.waiting():
                clock.now += exposed
            recorder.end_lap()
        return seen, [event for event in recorder.decisions if event.changed]

    results = threads.run(world_size, work)
    assert all(seen == results[0][0] for seen, _ in results), "the workers do not share alike"
    return results[0]


def test_a_slow_worker_gets_less_within_ten_steps():
    seen, changes = cluster(3, lambda step, rank: (2.0 if rank == 2 and step >= 41 else 1.0, 0.0), steps=80, batch=50)
    assert seen[:41] == [[17, 17, 16]] * 41
    assert all(shares == [20, 20, 10] for shares in seen[41 + 10 :])
    assert len(changes) == 1


@pytest.mark.parametrize("ahead", [0, 6])
@pytest.mark.parametrize("begins", [40, 41, 42, 43])
def test_slow_and_well_again(ahead, begins):
    """Within ten steps beyond what the loaders have read ahead, and not more often than the worker changes."""

    def cost(step, rank):
        return (2.0 if rank == 1 and begins <= step < begins + 40 else 1.0), 0.0

    seen, changes = cluster(2, cost, steps=130, batch=30, ahead=ahead)
    latest = 10 + ahead + 1
    assert seen[:begins] == [[15, 15]] * begins
    assert seen[begins + latest : begins + 40] == [[20, 10]] * (40 - latest)
    assert seen[begins + 40 + latest :] == [[15, 15]] * len(seen[begins + 40 + latest :])
    assert len(changes) == 2


@pytest.mark.parametrize("seed", range(4))
def test_noise_alone_moves_nothing(seed):
    seen, changes = cluster(4, lambda step, rank: (1.0, 3.0), steps=150, noise=0.1, seed=seed)
    assert changes == []
    assert seen == [[16] * 4] * 150


def slowest(cost, shares):
    return max(rest + each * b for (each, rest), b in zip(cost, shares, strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rest", [0.0, 12.0])
def test_unequal_workers_under_noise_come_to_rest(seed, rest):
    cost = [(2.0, rest), (1.0, rest), (1.0, rest), (1.5, rest)]
    seen, changes = cluster(4, lambda step, rank: cost[rank], steps=150, noise=0.1, seed=seed)
    assert len(changes) <= 5
    ideal = Measured().shares([Speed(*c) for c in cost], 64)
    assert slowest(cost, seen[-1]) <= 1.08 * slowest(cost, ideal)


def test_a_cost_of_every_step_is_not_given_away():
    """Worker 1 has no slower samples but more to do in a step. Shares go to those with equal times from one side."""
    seen, changes = cluster(2, lambda step, rank: (1.0, 20.0 * rank), steps=80, batch=60, gain=0.01)
    assert seen[-1] == [40, 20]
    first = [shares[1] for shares in seen]
    assert first == sorted(first, reverse=True), "it went too far, and back"
    assert changes[-1].per_step_ms[1] == pytest.approx(20e3, rel=0.3)


def test_where_the_wire_is_all_of_a_step_shares_stay():
    _, changes = cluster(2, lambda step, rank: (1.0 + 0.5 * rank, 0.0), steps=40, batch=60, exposed=1000.0)
    assert changes == []
    _, changes = cluster(2, lambda step, rank: (1.0 + 0.5 * rank, 0.0), steps=40, batch=60, exposed=10.0)
    assert [event.exposed_ms for event in changes] == [10e3]
    assert changes[0].before_ms == pytest.approx(55e3)
    assert changes[0].after_ms == pytest.approx(46e3)
    assert changes[0].shares == [36, 24]


def test_memory_that_has_become_short_is_kept_to():
    def work(comm):
        shares, clock, recorder = Shares(group_of(comm), Measured()), Clock(), Told()
        balancing = Balancing(shares, recorder, clock=clock)
        balancing.begin(0, 0)
        for step in range(12):
            balancing.most = [40, 4, 40][comm.rank]
            balancing.before_batch(step, 30)
            recorder.start_lap(10, 0.0)
            recorder.follow(balancing.pace)
            clock.now += 10.0
            recorder.backward_ended()
            recorder.end_lap()
        return shares.all(30, shares.schedule.latest)

    assert threads.run(3, work) == [[13, 4, 13]] * 3


# ------------------------------------------------------------------------------------------ loader and engine

X = torch.randn(120, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randint(0, 3, (120,), generator=torch.Generator().manual_seed(4))


class Points(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i], i


class Flow(IterableDataset):
    def __iter__(self):
        return iter([Points()[i] for i in range(120)])


class Ragged(BatchSampler):
    """A user's own batches, of 12 and 9 samples in turn."""

    def __init__(self):
        self.ends = [0]
        while self.ends[-1] < 115:
            self.ends.append(self.ends[-1] + (12 if len(self.ends) % 2 else 9))

    def __len__(self):
        return len(self.ends) - 1

    def __iter__(self):
        return iter([list(range(a, b)) for a, b in zip(self.ends, self.ends[1:], strict=False)])


def drawn(n):
    return RandomSampler(Points(), replacement=True, num_samples=n, generator=torch.Generator().manual_seed(5))


SOURCES = {
    "shuffled": lambda: DataLoader(Points(), 12, shuffle=True),
    "a last batch that is small": lambda: DataLoader(Points(), 17),
    "drop_last": lambda: DataLoader(Points(), 17, shuffle=True, drop_last=True),
    "a sampler": lambda: DataLoader(Points(), 12, sampler=drawn(180)),
    "endless": lambda: DataLoader(Points(), 12, sampler=drawn(10**9)),
    "own batches": lambda: DataLoader(Points(), batch_sampler=Ragged()),
    "a stream": lambda: DataLoader(Flow(), 12),
}


def gentle(model):
    return torch.optim.SGD(model.parameters(), lr=5e-3)  # sums are large


class Job:
    """One worker: loader, engine, and a clock by which worker 1 is `slow` times slower."""

    def __init__(self, comm, source, spec="measured", slow=3.0, optimizer=sgd, **settings):
        self.comm, self.clock = comm, Clock()
        self.each = slow if comm.rank == 1 else 1.0
        self.model = mlp()
        self.opt = optimizer(self.model)
        knobs = {"measured.every": 2} if "measured" in spec else {}
        self.rig = Rig(comm, self.model, self.opt, spec=spec, knobs=knobs, **settings)
        self.loader = Loader(
            source,
            group=self.rig.engine.group,
            balance=self.rig.engine.method.balance,
            recorder=self.rig.recorder,
            seed=1,
            on_batch=self.rig.engine.take_batch,
            on_end=lambda: self.rig.engine.loop_ended(0),
            clock=self.clock,
        )
        self.batches, self.sizes, self.loss = [], [], settings.get("loss", "mean")

    def train(self, most=10**9):
        for k, (x, y, i) in enumerate(self.loader):
            batch = self.loader.current
            self.batches.append(i.tolist() if batch.weight else [])
            self.sizes.append(int(batch.weight))
            self.clock.now += self.each * len(x)
            cross_entropy(self.model(x), y, reduction=self.loss).backward()
            self.opt.step()
            self.opt.zero_grad()
            if k + 1 == most:
                break
        return self


def whole(jobs):
    """The global batches, in the order of the ranks."""
    return [[i for part in parts for i in part] for parts in zip(*(job.batches for job in jobs), strict=True)]


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in SOURCES), ("shuffled", 3)])
def test_the_trajectory_is_that_of_equal_shares(name, world_size):
    """The same global batches and, to rounding, the same weights. Each sample once an epoch: the ledger counts them."""

    def run(balance):
        def work(comm):
            return Job(comm, SOURCES[name](), balance).train(most=14).train(most=14)

        return threads.run(world_size, work)

    even, measured = run("even"), run("measured")
    assert whole(measured) == whole(even)
    close(same([weights(job.model) for job in measured]), weights(even[0].model), tol=1e-5)
    sizes = [job.sizes[-2] for job in measured]
    assert sizes[1] < sizes[0], "shares have not moved"
    assert abs(3 * sizes[1] - sizes[0]) <= 3, sizes


@pytest.mark.parametrize("spec", ["powersgd", "zero1", "zero3", "priority", "delayed", "onebit_adam"])
def test_other_parts_beside_it(spec):
    """Every worker sees fewer samples or more, and what they agree on stays one."""

    def work(comm):
        job = Job(comm, SOURCES["shuffled"](), f"measured+{spec}", optimizer=adamw if spec == "onebit_adam" else sgd)
        job.train().train().rig.engine.settle()
        with consensus_weights(job.rig.engine):
            return job, weights(job.model)

    (job, final), (slow, others) = threads.run(2, work)
    assert torch.equal(final, others)
    assert final.isfinite().all()
    assert job.sizes[-1] >= 2 * slow.sizes[-1]


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"loss": "sum"}])
def test_windows_and_sums(settings):
    def run(spec):
        def work(comm):
            return Job(comm, SOURCES["shuffled"](), spec, optimizer=gentle, **settings).train().train()

        jobs = threads.run(2, work)
        return same([weights(job.model) for job in jobs]), jobs[0].sizes[-1]

    (measured, nine), (even, six) = run("measured"), run("even")
    close(measured, even, tol=1e-5)
    assert (nine, six) == (9, 6)


def test_an_evaluation_stays_even():
    def work(comm):
        job, other = (Job(comm, DataLoader(Points(), 12)) for _ in range(2))
        other.loader.recorder = job.rig.recorder
        for _ in range(2):
            job.train()
            with torch.no_grad():
                for _, (x, _, _) in enumerate(other.loader):
                    other.sizes.append(len(x))
                    job.clock.now += job.each * len(x)
        return job.sizes[-1], other.sizes[-1]

    assert threads.run(2, work) == [(9, 6), (3, 6)]


# ------------------------------------------------------------------------------------------ the state


@pytest.mark.parametrize("name", ["shuffled", "a sampler", "endless", "a stream"])
@pytest.mark.parametrize("later", [2, 3])
def test_a_resumed_epoch_goes_on_with_its_shares(name, later, capfd):
    """With as many workers; among others shares are equal again, which is said once. No sample is lost or repeated."""

    def first(comm):
        job = Job(comm, SOURCES[name]()).train(most=8)
        return job, job.loader.state_dict()

    begun = threads.run(2, first)
    states = [json.loads(json.dumps(state, default=torch.Tensor.tolist)) for _, state in begun]
    assert states[0] == states[1]
    capfd.readouterr()

    def second(comm):
        job = Job(comm, SOURCES[name]())
        job.loader.load_state_dict(begun[0][1])
        assert later != 2 or job.loader.state_dict()["balance"] == begun[0][1]["balance"]
        return job.train(most=4)

    rest = threads.run(later, second)
    if name != "endless":  # which draws another order
        uninterrupted = threads.run(2, lambda comm: Job(comm, SOURCES[name](), "even").train(most=12))
        assert whole([job for job, _ in begun]) + whole(rest) == whole(uninterrupted)[: 8 + len(rest[0].batches)]
    first_sizes = [job.sizes[0] for job in rest]
    assert first_sizes == ([9, 3] if later == 2 else [4, 4, 4])
    said = capfd.readouterr().err
    assert said.count("has the speeds of 2 workers, and there are 3 now") == (later == 3)


def test_a_state_that_is_damaged_or_another_on_each_worker():
    def work(comm):
        loader = Job(comm, SOURCES["shuffled"]()).loader
        state = loader.state_dict()
        with pytest.raises(DataError, match="balance=oops"):
            loader.load_state_dict(state | {"balance": "oops"})
        loader.load_state_dict({key: value for key, value in state.items() if key != "balance"})
        own = [[0, [[1.0 + comm.rank, 0.0, 100], [1.0, 0.0, 100]]]]
        with pytest.raises(MismatchError, match="shares"):
            loader.load_state_dict(state | {"balance": own})

    threads.run(2, work)


def test_even_sends_and_saves_nothing():
    def work(comm):
        job = Job(comm, SOURCES["a stream"](), "even")
        assert "balance" not in job.loader.state_dict()
        return comm.ops, job.train().rig.recorder.pace, comm.ops

    plain = threads.run(2, work)
    assert all(pace is None for _, pace, _ in plain)
    grown = threads.run(2, lambda comm: Job(comm, SOURCES["a stream"](), "measured").train() and comm.ops)
    assert [(ops - after) for ops, (_, _, after) in zip(grown, plain, strict=True)] == [6, 6], "one in two batches"


# ------------------------------------------------------------------------------------------ refused


def test_a_loop_that_is_a_batch_ahead_is_refused():
    def work(comm):
        job = Job(comm, SOURCES["shuffled"]())
        batches = iter(job.loader)
        ahead = next(batches)
        for after in batches:
            x, y, _ = ahead
            cross_entropy(job.model(x), y).backward()
            job.opt.step()
            ahead = after

    with pytest.raises(UsageError, match="takes the next batch before the backward of the one in hand, and measured"):
        threads.run(2, work)


def test_an_evaluation_before_a_backward_is_no_loop_that_is_ahead():
    def work(comm):
        job, other = (Job(comm, DataLoader(Points(), 12)) for _ in range(2))
        other.loader.recorder = job.rig.recorder
        for k, (x, y, _) in enumerate(job.loader):
            if k == 0:
                with torch.no_grad():
                    list(other.loader)
            job.clock.now += job.each * len(x)
            cross_entropy(job.model(x), y).backward()
            job.opt.step()
            job.opt.zero_grad()
        return int(job.loader.current.weight)

    assert threads.run(2, work) == [9, 3]


def test_loaders_side_by_side_are_refused():
    def work(comm):
        job, other = Job(comm, SOURCES["shuffled"]()), Job(comm, SOURCES["shuffled"]())
        other.loader.on_batch = lambda batch: job.rig.engine.take_batch(batch, 1)
        for (x, y, _), (z, _, _) in zip(job.loader, other.loader, strict=True):
            (cross_entropy(job.model(x), y) + job.model(z).sum()).backward()

    with pytest.raises(UsageError, match="loaders 1 and 2 are in hand in one backward"):
        threads.run(2, work)


# ------------------------------------------------------------------------------------------ processes


def read_by_processes(rank):
    """The whole of it: `prepare`, and a loader whose processes read ahead."""
    from paceline.telemetry import pace

    clock = Clock()
    pace.HostClock.mark = lambda self: clock.now
    model = mlp()
    opt = sgd(model)
    source = DataLoader(Points(), 12, num_workers=2, prefetch_factor=2, multiprocessing_context="fork")
    model, opt, loader = paceline.prepare(model, opt, source, method="measured", timeout=30.0)
    sizes, seen = [], []
    for _ in range(2):
        for x, y, i in loader:
            sizes.append(len(x))
            seen += i.tolist()
            clock.now += (3.0 if rank == 1 else 1.0) * len(x)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return sizes, seen, weights(model)


def test_loader_processes_read_ahead_and_shares_still_move():
    (fast, *_, w), (slow, *_) = (results := values(processes.run(2, read_by_processes)))
    assert sorted(results[0][1] + results[1][1]) == sorted([*range(120)] * 2)
    assert [a + b for a, b in zip(fast, slow, strict=True)] == [12] * 20
    assert fast[:9] == [6] * 9, "4 batches are read ahead of the fifth, before which the speeds are told"
    assert fast[9:] == [9] * 11
    even = threads.run(2, lambda comm: Job(comm, DataLoader(Points(), 12), "even").train().train())
    close(w, weights(even[0].model), tol=1e-5)


def test_it_is_refused_before_any_worker_is_met(monkeypatch):
    """The other worker of the two is not even started."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    model = mlp()
    with pytest.raises(UsageError, match="batch='per_worker' do not go together"):
        paceline.prepare(model, sgd(model), DataLoader(Points(), 12), method="measured", batch="per_worker")
