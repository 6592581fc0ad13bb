"""The loader: the same global batches at any number of workers, each sample once, resumable anywhere."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import threads
from paceline.balances.even import Even
from paceline.comm.group import Group
from paceline.comm.single import SingleComm
from paceline.data import sampling
from paceline.data.loader import Batch, Loader
from paceline.errors import DataError, MismatchError, PacelineError, UsageError
from paceline.telemetry.recorder import Recorder

Source = Callable[[], Any]


def prepared(source: Any, comm: Any = None, **arguments: Any) -> Loader:
    arguments = {"balance": Even(), "recorder": Recorder(None, 0)} | arguments
    return Loader(source, group=Group.over(comm or SingleComm()), **arguments)


def of_all(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` gives on every worker; `str(error)` where it raises one of ours."""

    def caught(comm: Any) -> Any:
        try:
            return work(comm)
        except PacelineError as error:
            return f"{type(error).__name__}: {error}"

    return threads.run(world_size, caught, timeout_s=5)


def epoch(loader: Loader, most: int | None = None) -> list[tuple[Any, Batch]]:
    """One loop: each batch with what the engine is told of it."""
    return [(data, loader.current) for data in itertools.islice(loader, most)]


def joined(workers: list[list[tuple[Any, Batch]]]) -> list[list[int]]:
    """The global batches the workers saw together, with the laws every batch obeys."""
    assert len({len(batches) for batches in workers}) == 1, "not the same number of steps"
    whole = []
    for pieces in zip(*workers, strict=True):
        for data, batch in pieces:
            assert len(data) >= 1
            assert batch.indices is None or batch.indices == data.tolist()
            assert batch.total == sum(b.weight for _, b in pieces)
        whole.append([i for data, batch in pieces if batch.weight for i in data.tolist()])
    return whole


def plain(n: int, batch_size: int, **options: Any) -> Source:
    return lambda: DataLoader(range(n), batch_size=batch_size, **options)  # type: ignore[arg-type]


def together(world_size: int, source: Source, epochs: int = 1, **arguments: Any) -> list[list[list[int]]]:
    """The global batches of each epoch."""

    def work(comm: Any) -> list[Any]:
        loader = prepared(source(), comm, **arguments)
        return [epoch(loader) for _ in range(epochs)]

    results = threads.run(world_size, work, timeout_s=5)
    return [joined([result[e] for result in results]) for e in range(epochs)]


cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 60),
        "batch_size": st.integers(1, 20),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
)


def allowed(case: dict[str, Any], *worlds: int) -> None:
    assume(min(case["n"], case["batch_size"]) >= max(worlds))
    assume(not (case["drop_last"] and case["n"] < case["batch_size"]))


# ------------------------------------------------------------------------------------------ exactly once


@given(case=cases, world_size=st.integers(1, 5), seed=st.integers(-3, 2**63))
@settings(max_examples=60, deadline=None)
def test_any_number_of_workers_walks_through_the_same_batches(case: dict[str, Any], world_size: int, seed: int) -> None:
    allowed(case, world_size)
    alone, many = (together(w, plain(**case), epochs=2, seed=seed) for w in (1, world_size))
    assert many == alone
    n, size = case["n"], case["batch_size"]
    for batches in many:
        used = n - n % size if case["drop_last"] else n
        assert [len(b) for b in batches] == [min(size, used - at) for at in range(0, used, size)]
        seen = [i for b in batches for i in b]
        assert len(set(seen)) == len(seen) == used
        assert case["drop_last"] or sorted(seen) == list(range(n))
    if not case["shuffle"]:
        assert [i for b in many[0] for i in b] == list(range(used))


@given(case=cases, world_size=st.integers(1, 4), later=st.integers(1, 4), at=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_state_taken_anywhere_goes_on_as_if_nothing_had_happened(
    case: dict[str, Any], world_size: int, later: int, at: int
) -> None:
    allowed(case, world_size, later)
    whole = together(1, plain(**case), epochs=2, seed=5)

    def first(comm: Any) -> Any:
        loader = prepared(plain(**case)(), comm, seed=5)
        seen = epoch(loader, min(at, len(loader)))
        return seen, loader.state_dict()

    begun = threads.run(world_size, first, timeout_s=5)
    states = [json.loads(json.dumps(state)) for _, state in begun]
    assert all(state == states[0] for state in states)

    def second(comm: Any) -> Any:
        loader = prepared(plain(**case)(), comm, seed=77)  # the state knows the seed
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]
        return [epoch(loader), epoch(loader)]

    rest = threads.run(later, second, timeout_s=5)
    before = joined([seen for seen, _ in begun])
    assert before + joined([r[0] for r in rest]) == whole[0]
    assert joined([r[1] for r in rest]) == whole[1]


def test_an_epoch_is_reshuffled_from_seed_and_number_and_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    (first, second), (again, _), (other, _) = (
        together(1, plain(40, 8, shuffle=True), epochs=2, seed=s) for s in (1, 1, 2)
    )
    assert first == again
    assert first != second
    assert first != other
    assert torch.equal(before, torch.get_rng_state())


def test_a_worker_whose_share_is_empty_borrows_a_sample_that_does_not_count() -> None:
    results = threads.run(3, lambda comm: epoch(prepared(plain(7, 6)(), comm)))
    ends = [batches[-1] for batches in results]
    assert [data.tolist() for data, _ in ends] == [[6], [6], [6]]
    assert [b.weight for _, b in ends] == [1.0, 0.0, 0.0]
    assert [b.total for _, b in ends] == [1.0, 1.0, 1.0]
    assert [b.indices for _, b in ends] == [[6], [6], [6]]
    assert [[b.last for _, b in batches] for batches in results] == [[False, True]] * 3


def test_per_worker_keeps_the_habit_of_ddp() -> None:
    results = threads.run(2, lambda comm: epoch(prepared(plain(20, 4)(), comm, batch="per_worker")))
    assert joined(results) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert results[1][0][0].tolist() == [4, 5, 6, 7]


def test_shares_follow_the_balance() -> None:
    class Uneven(Even):
        def shares(self, seconds: Any, batch: int) -> list[int]:
            return [batch - 1, 1]

    results = threads.run(2, lambda comm: epoch(prepared(plain(10, 5)(), comm, balance=Uneven())))
    assert [len(data) for data, _ in results[0]] == [4, 4]
    assert joined(results) == [list(range(5)), list(range(5, 10))]


# ------------------------------------------------------------------------------------------ the ledger


def test_the_digest_is_splitmix64_and_does_not_see_the_order() -> None:
    def reference(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    indices = [0, 1, 2, 17, 2**40, 2**62]
    expected = [len(indices), sum(map(reference, indices)) % 2**63]
    assert sampling.digest(torch.tensor(indices)).tolist() == expected
    assert sampling.digest(torch.tensor(indices[::-1])).tolist() == expected
    ledger = sampling.Ledger()
    for i in range(3 * sampling._FOLD // 2):
        ledger.add(torch.tensor([i]))
    assert torch.equal(ledger.digest(), sampling.digest(torch.arange(3 * sampling._FOLD // 2)))


class Overlapping(Even):
    """Worker 0 and worker 1 do not mean the same split: the second takes what the first has."""

    rank = 0

    def shares(self, seconds: Any, batch: int) -> list[int]:
        return [batch // 2, batch // 2] if self.rank == 0 else [0, batch // 2]


def test_overlapping_shares_are_found_at_the_end_of_the_epoch_on_all_workers() -> None:
    def work(comm: Any) -> Any:
        balance = Overlapping()
        balance.rank = comm.rank
        loader = prepared(plain(8, 4)(), comm, balance=balance)
        assert len(epoch(loader, 2)) == 2  # left before its end: nothing to compare
        return epoch(loader)

    errors = of_all(2, work)
    assert errors[0] == errors[1]
    assert errors[0].startswith("DataError: epoch 1: 8 samples were handed out, not each of the 8 exactly once")


def test_different_data_or_seeds_are_found_before_the_first_batch() -> None:
    errors = of_all(2, lambda comm: prepared(plain(8 + comm.rank, 4)(), comm))
    assert all("samples 9" in e and e.startswith(MismatchError.__name__) for e in errors)
    errors = of_all(2, lambda comm: prepared(plain(8, 4)(), comm, seed=comm.rank))
    assert all("seed 1" in e for e in errors)


def test_seeded_orders_cost_no_bytes_but_the_ledger() -> None:
    def work(comm: Any) -> list[int]:
        loader = prepared(plain(8, 4, shuffle=True)(), comm)
        epoch(loader, 2)
        sent = [comm.sent]
        epoch(loader)
        return [*sent, comm.sent]

    assert threads.run(2, work) == [[0, 16], [0, 16]]


class Mute(SingleComm):
    """A world of one in which every word is one too many."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("communication in a world of one")

    sum = all_gather = broadcast = agree = _refuse  # type: ignore[assignment]


@pytest.mark.parametrize(
    "source",
    [
        plain(8, 4, shuffle=True),
        plain(8, 4, sampler=[3, 1, 4]),
        lambda: DataLoader(Stream(9), batch_size=4),
        lambda: [torch.zeros(3)],
    ],
)
def test_a_world_of_one_does_not_communicate(source: Source) -> None:
    loader = prepared(source(), Mute(), weight=lambda data: 2.0)
    assert epoch(loader)
    loader.load_state_dict(loader.state_dict())


# ------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(20), replacement=True, num_samples=30),
        lambda: RandomSampler(range(20), num_samples=11),
        lambda: WeightedRandomSampler([1.0] * 20, 25),
        lambda: SubsetRandomSampler([3, 5, 7, 11, 13]),
        lambda: SequentialSampler(range(9)),
        lambda: [torch.tensor(4), 2, 9, 9],
    ],
)
def test_a_users_sampler_is_drawn_once_for_all(sampler: Source) -> None:
    def work(comm: Any) -> Any:
        loader = prepared(DataLoader(range(20), batch_size=4, sampler=sampler()), comm)  # type: ignore[arg-type]
        assert len(loader) == -(-len(sampler()) // 4)
        return [epoch(loader), epoch(loader)]

    results = threads.run(3, work)
    for e in range(2):
        batches = joined([r[e] for r in results])
        assert sum(map(len, batches)) == len(sampler())
        assert [len(b) for b in batches[:-1]] == [4] * (len(batches) - 1)


def test_shuffling_is_told_from_other_random_samplers() -> None:
    data = list(range(20))
    assert "shuffled" in prepared(DataLoader(data, 4, sampler=RandomSampler(data))).describe()
    for sampler in (
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=7),
        RandomSampler(range(5)),
    ):
        loader = prepared(DataLoader(data, 4, sampler=sampler))
        assert "drawn by RandomSampler" in loader.describe()
        assert sum(len(d) for d, _ in epoch(loader)) == len(sampler)


def test_a_batch_sampler_cuts_the_global_batches_itself() -> None:
    cut = [[1, 2, 3], [4], [5, 6, 7, 8]]
    source = lambda: DataLoader(range(9), batch_sampler=cut)  # noqa: E731
    assert together(2, source) == [cut]
    assert together(2, source, batch="per_worker") == [[[1, 2, 3, 4], [5, 6, 7, 8]]]
    assert len(prepared(source())) == 3
    assert prepared(source()).describe() == "batches of list, 3 batches an epoch"


def test_the_drawn_order_is_part_of_the_state() -> None:
    for options in (
        {"sampler": WeightedRandomSampler([1.0] * 20, 30), "batch_size": 4},
        {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, False)},
    ):

        def first(comm: Any, options: dict[str, Any] = options) -> Any:
            loader = prepared(DataLoader(range(20), **options), comm)  # type: ignore[arg-type]
            seen = epoch(loader, 2)
            state = loader.state_dict()
            rest = [(data, loader.current) for data in loader]  # the next epoch, drawn anew
            return seen, state, rest

        begun = threads.run(2, first)
        state = begun[0][1]
        assert torch.equal(state["order"], begun[1][1]["order"])

        def second(comm: Any, options: dict[str, Any] = options, state: Any = state) -> Any:
            loader = prepared(DataLoader(range(20), **options), comm)  # type: ignore[arg-type]
            loader.load_state_dict(state)
            return epoch(loader)

        batches = joined([b[0] for b in begun]) + joined(threads.run(3, second))
        assert [i for b in batches for i in b] == state["order"].tolist()
        assert len(batches) == (8 if "sampler" in options else 7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": ["a", "b"], "batch_size": 2}, "list gave 'a', which is not a whole number"),
        ({"sampler": [1, 2.5], "batch_size": 2}, "list gave 2.5, which is not a whole number"),
        ({"sampler": [1, 2**70], "batch_size": 2}, "which is not a whole number"),
        ({"batch_sampler": [[0], 3]}, "list gave 3, which is not a list of whole numbers"),
        ({"batch_sampler": [[0, 1], []]}, "list gave an empty batch"),
        ({"sampler": [], "batch_size": 2}, "list drew no samples"),
        ({"sampler": [3], "batch_size": 2}, "1 samples for 2 workers"),
    ],
)
def test_samplers_that_cannot_be_shared_are_refused_on_all_workers(options: Any, says: str) -> None:
    drawing, told = of_all(2, lambda comm: epoch(prepared(DataLoader(range(5), **options), comm)))  # type: ignore[arg-type]
    assert says in drawing
    assert says in told or "worker 0 could not draw" in told
    assert drawing.startswith("DataError")


def test_an_error_in_the_sampler_is_its_own_on_worker_0() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise KeyError("broken")

    def work(comm: Any) -> str:
        loader = prepared(DataLoader(range(5), 2, sampler=Broken()), comm)  # type: ignore[arg-type]
        with pytest.raises((KeyError, DataError)) as error:
            epoch(loader)
        return str(error.value)

    own, told = threads.run(2, work, timeout_s=5)
    assert own == "'broken'"
    assert "worker 0 could not draw this epoch's order from Broken" in told


_seeds = itertools.count(1)


class Endless(Sampler[int]):
    """Permutations without an end, as samplers for training by steps give them. seed=None: others each time."""

    def __init__(self, n: int, seed: int | None = 0) -> None:
        self.n, self.seed, self.given = n, seed, 0

    def __iter__(self) -> Iterator[int]:
        seed = next(_seeds) if self.seed is None else self.seed
        g = torch.Generator().manual_seed(seed)
        while True:
            for i in torch.randperm(self.n, generator=g).tolist():
                self.given += 1
                yield i


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_endless_sampler_starts_at_once_and_is_drawn_in_stretches(
    world_size: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_STRETCH", 64)
    monkeypatch.setattr(sampling, "READ_AHEAD", 16)
    most = 100

    def work(comm: Any) -> Any:
        sampler = Endless(10)
        loader = prepared(DataLoader(range(10), 4, sampler=sampler, num_workers=processes), comm)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            len(loader)
        seen = epoch(loader, most)
        held = [len(stretch) for _, stretch in loader._from.order._held]  # type: ignore[attr-defined]
        return seen, sampler.given, held

    results = threads.run(world_size, work, timeout_s=20)
    batches = joined([seen for seen, _, _ in results])
    assert [i for batch in batches for i in batch] == list(itertools.islice(Endless(10), 4 * most))
    for rank, (_, drawn, held) in enumerate(results):
        assert held == [16, 16]
        assert drawn <= 4 * (most + 3 * 16) if rank == 0 else drawn == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_very_long_epoch_begins_with_its_first_samples(world_size: int) -> None:
    """minGPT: RandomSampler(dataset, replacement=True, num_samples=int(1e10))."""

    def work(comm: Any) -> Any:
        sampler = RandomSampler(range(1000), replacement=True, num_samples=10**10)
        loader = prepared(DataLoader(range(1000), 64, sampler=sampler), comm)  # type: ignore[arg-type]
        assert len(loader) == 156_250_000
        assert "drawn by RandomSampler" in loader.describe()
        return epoch(loader, 3)

    assert [len(batch) for batch in joined(threads.run(world_size, work))] == [64] * 3


@pytest.mark.parametrize("n", [63, 64, 65, 128, 150, 192])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_long_epoch_without_a_length_ends_where_its_sampler_does(
    n: int, drop_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_STRETCH", 64)
    monkeypatch.setattr(sampling, "READ_AHEAD", 4)

    class Unsized(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(n))

    def source() -> Any:
        return DataLoader(range(n), 8, sampler=Unsized(), drop_last=drop_last)  # type: ignore[arg-type]

    def work(comm: Any) -> Any:
        loader = prepared(source(), comm)
        return [epoch(loader), epoch(loader)]

    results = threads.run(2, work)
    used = n - n % 8 if drop_last else n
    for e in range(2):
        batches = joined([r[e] for r in results])
        assert [i for batch in batches for i in batch] == list(range(used))
        assert [batch.last for _, batch in results[0][e]] == [False] * (len(batches) - 1) + [True]


def test_an_endless_batch_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "READ_AHEAD", 4)
    monkeypatch.setattr(sampling, "_STRETCH", 256 * 8)

    def work(comm: Any, batch: Any) -> Any:
        cut = BatchSampler(Endless(10), 3, False)
        return epoch(prepared(DataLoader(range(10), batch_sampler=cut), comm, batch=batch), 60)  # type: ignore[arg-type]

    whole = list(itertools.islice(Endless(10), 180))
    alike = joined(threads.run(2, lambda comm: work(comm, "global")))
    assert [i for batch in alike for i in batch] == whole
    assert {len(batch) for batch in joined(threads.run(2, lambda comm: work(comm, "per_worker")))} == {6}


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("at", [0, 3, 41])
def test_a_long_epoch_is_resumed(
    seed: int | None, at: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is drawn again up to where it was; a sampler that draws another order is said to."""
    monkeypatch.setattr(sampling, "_STRETCH", 64)
    monkeypatch.setattr(sampling, "READ_AHEAD", 4)
    states: list[Any] = []

    def first(comm: Any) -> Any:
        loader = prepared(DataLoader(range(10), 4, sampler=Endless(10, seed)), comm)  # type: ignore[arg-type]
        seen = epoch(loader, at)
        states.append(json.loads(json.dumps(loader.state_dict())))
        return seen

    def second(comm: Any) -> Any:
        loader = prepared(DataLoader(range(10), 4, sampler=Endless(10, seed)), comm)  # type: ignore[arg-type]
        loader.load_state_dict(states[0])
        return epoch(loader, 60)

    before, after = joined(threads.run(2, first)), joined(threads.run(3, second))
    whole = [i for batch in before + after for i in batch]
    said = "does not draw the same order again" in capfd.readouterr().err
    if seed is None and at:
        assert said
        return
    assert not said
    assert seed is None or whole == list(itertools.islice(Endless(10), 4 * (at + 60)))


def test_what_is_read_too_far_ahead_is_refused() -> None:
    assignment = sampling.Assignment(sampling.Shares(Group.over(SingleComm()), Even()))
    stretches = iter([sampling.Epoch.even(torch.arange(4), 2, False)] * 3)
    assignment.epoch = sampling.LongEpoch(next(stretches), lambda: next(stretches, None))
    assignment.epoch.reach(0)  # this stretch and the next one: four batches
    batches = iter(assignment)
    assert list(itertools.islice(batches, 4)) == [[0, 1], [2, 3]] * 2
    with pytest.raises(UsageError, match="batches ahead"):
        next(batches)


def test_workers_at_their_own_pace_cannot_draw_an_endless_order_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_STRETCH", 64)
    monkeypatch.setattr(sampling, "READ_AHEAD", 4)

    def work(comm: Any) -> Any:
        loader = prepared(DataLoader(range(10), 2, sampler=Endless(10)), comm, meet=lambda: None)  # type: ignore[arg-type]
        return epoch(loader, 2)

    assert all("has no end, or a very distant one" in said for said in of_all(2, work))


# ------------------------------------------------------------------------------------------ torch's loader


class Own(list[int]):
    """A data set that says which process read it."""

    def __getitem__(self, i: Any) -> Any:
        return i, os.getpid(), torch.initial_seed()


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes(persistent: bool) -> None:
    source = DataLoader(Own(range(12)), 4, num_workers=2, persistent_workers=persistent, prefetch_factor=3)
    loader = prepared(source)
    pids = []
    for most in (None, 1, None):
        seen = list(itertools.islice(loader, most))
        assert [i for ids, _, _ in seen for i in ids.tolist()] == list(range(12 if most is None else 4))
        pids.append({p for _, ps, _ in seen for p in ps.tolist()})
        assert os.getpid() not in pids[-1]
    assert (pids[0] == pids[2]) is persistent
    assert loader.state_dict()["epoch"] == 3
    del source, loader
    gc.collect()  # ends persistent processes here: later it might happen in the middle of another test, and takes long


def test_what_is_read_ahead_does_not_count() -> None:
    source = lambda: DataLoader(range(40), 4, shuffle=True, num_workers=2, prefetch_factor=4)  # noqa: E731
    whole = together(1, source)[0]
    loader = prepared(source())
    for _ in itertools.islice(loader, 3):
        pass
    state = loader.state_dict()
    assert state["batches"] == 3
    resumed = prepared(source())
    resumed.load_state_dict(state)
    assert [data.tolist() for data in resumed] == whole[3:]


def test_options_of_the_loader_are_kept() -> None:
    hello, stream = lambda _: None, torch.Generator()
    source = DataLoader(
        range(8),  # type: ignore[arg-type]
        4,
        num_workers=1,
        collate_fn=list,
        timeout=7,
        worker_init_fn=hello,
        multiprocessing_context="fork",
        generator=stream,
        prefetch_factor=5,
        persistent_workers=True,
    )
    inner = prepared(source)._from.inner  # type: ignore[attr-defined]
    for name in (
        *("dataset", "num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("prefetch_factor", "persistent_workers", "pin_memory", "pin_memory_device", "in_order"),
    ):
        assert getattr(inner, name) == getattr(source, name), name
    assert next(iter(prepared(DataLoader(range(8), 4, collate_fn=list)))) == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert prepared(DataLoader(range(8), 4, in_order=False))._from.inner.in_order  # type: ignore[attr-defined,arg-type]


def test_loader_processes_of_different_workers_and_epochs_have_different_random_streams() -> None:
    class Rank(SingleComm):
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 2

    seeds = []
    for rank in range(2):
        loader = prepared(DataLoader(Own(range(8)), 8, num_workers=1), Rank(rank))
        for _ in range(2):
            ((_, _, seed),) = itertools.islice(loader, 1)
            seeds.append(int(seed[0]))
    assert len(set(seeds)) == 4


def test_the_error_of_a_loader_process_comes_through() -> None:
    class Bad(Own):
        def __getitem__(self, i: Any) -> Any:
            if i == 5:
                raise ZeroDivisionError("sample 5")
            if i == 9:
                os._exit(3)
            return i

    loader = prepared(DataLoader(Bad(range(6)), 2, num_workers=1))
    with pytest.raises(ZeroDivisionError, match="sample 5"):
        list(loader)
    assert loader.state_dict()["batches"] == 2
    with pytest.raises(DataError, match="data loader died"):
        list(prepared(DataLoader(Bad(range(12)), 2, sampler=[9, 1], num_workers=1)))


def test_a_data_set_that_ends_before_its_length_is_an_error() -> None:
    class Short(Own):
        def __getitem__(self, i: Any) -> Any:
            if i > 3:
                raise StopIteration
            return i

    with pytest.raises(DataError, match="ended within 4 batches"):
        list(prepared(DataLoader(Short(range(8)), 2)))


# ------------------------------------------------------------------------------------------ streams


class Stream(IterableDataset[int]):
    """0, 1, 2, ..., divided between loader processes the way torch's documentation says."""

    def __init__(self, n: int, parts: int = 1, part: int = 0) -> None:
        self.n, self.parts, self.part = n, parts, part

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.part, self.n, self.parts))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def divide(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.part, info.dataset.parts = info.id, info.num_workers  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [7, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_split_like_everything_else(n: int, drop_last: bool) -> None:
    source = lambda: DataLoader(Stream(n), batch_size=4, drop_last=drop_last)  # noqa: E731
    whole = [b.tolist() for b in source()]
    for world_size in (1, 2, 3, 4):
        assert together(world_size, source, epochs=2) == [whole, whole]
    ends = threads.run(2, lambda comm: epoch(prepared(source(), comm)))
    assert not any(batch.last or batch.indices for worker in ends for _, batch in worker)


def test_a_stream_in_loader_processes_is_divided_by_the_user_as_always() -> None:
    class Rank(SingleComm):
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 2

        def all_gather(self, x: Any) -> Any:
            return super().all_gather(x.repeat(2))  # the other worker says the same

    source = lambda: DataLoader(Stream(16), 4, num_workers=2, worker_init_fn=divide)  # noqa: E731
    whole = [b.tolist() for b in source()]
    assert whole[0] == [0, 2, 4, 6]
    seen = [[data.tolist() for data in prepared(source(), Rank(rank))] for rank in range(2)]
    assert [a + b for a, b in zip(*seen, strict=True)] == whole


def test_a_stream_is_resumed_by_passing_over_what_was_seen() -> None:
    source = lambda: DataLoader(Stream(23), batch_size=4)  # noqa: E731
    whole = together(1, source)[0]
    for at in (0, 1, 3, 6):
        begun = threads.run(2, lambda comm: _part(source(), comm, at))  # noqa: B023
        assert begun[0][1] == {
            "epoch": 0,
            "batches": at,
            "seed": 0,
            "kind": "stream",
            "batch_size": 4,
            "batch": "global",
            "drop_last": False,
        }

        def rest(comm: Any, state: Any = begun[0][1]) -> Any:
            loader = prepared(source(), comm)
            loader.load_state_dict(state)
            return [epoch(loader), epoch(loader)]

        resumed = threads.run(3, rest)
        assert joined([b[0] for b in begun]) + joined([r[0] for r in resumed]) == whole
        assert joined([r[1] for r in resumed]) == whole


def _part(source: Any, comm: Any, most: int) -> Any:
    loader = prepared(source, comm)
    return epoch(loader, most), loader.state_dict()


def test_the_length_of_a_stream() -> None:
    with pytest.raises(TypeError, match="does not say how many"):
        len(prepared(DataLoader(Stream(9), 4)))
    assert len(prepared(DataLoader(SizedStream(9), 4))) == 3
    assert len(prepared(DataLoader(SizedStream(9), 4, drop_last=True))) == 2


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(DataError, match="no data for worker 0 in epoch 0"):
        list(prepared(DataLoader(Stream(0), 4)))


# ------------------------------------------------------------------------------------------ batches already split


def test_batches_split_by_the_user_may_be_uneven() -> None:
    own = [[torch.zeros(2), torch.zeros(3)], [torch.ones(1)]]
    results = threads.run(2, lambda comm: epoch(prepared(own[comm.rank], comm)))
    assert [[b.weight for _, b in worker] for worker in results] == [[2.0, 3.0], [1.0, 0.0]]
    assert [[b.total for _, b in worker] for worker in results] == [[3.0, 3.0], [3.0, 3.0]]
    assert results[1][1][0] is own[1][0]  # the last one again


def test_the_size_of_nested_batches() -> None:
    x = torch.zeros(5, 2)
    nested = [x, (x, 1), {"y": [None, {"x": x}]}, [torch.tensor(3.0), "text", x], {"a": x, "b": x[:2]}]
    assert [b.weight for _, b in epoch(prepared(nested))] == [5.0] * 5
    with pytest.raises(DataError, match="str has no tensor to count samples by"):
        list(prepared(["text"]))
    assert [b.weight for _, b in epoch(prepared(["text"], weight=len))] == [4.0]


def test_a_worker_without_any_batch_is_named_on_all() -> None:
    errors = of_all(2, lambda comm: epoch(prepared([] if comm.rank else [torch.zeros(2)], comm)))
    assert errors[0] == errors[1]
    assert errors[0].startswith("DataError: no data for worker 1 in epoch 0")


def test_a_generator_has_only_one_epoch() -> None:
    loader = prepared(torch.zeros(n) for n in (1, 2))
    assert len(epoch(loader)) == 2
    with pytest.raises(DataError, match=r"epoch 1\n.*can be read only once"):
        list(loader)


def test_resuming_batches_split_by_the_user_needs_the_same_number_of_workers() -> None:
    own = [torch.full((2,), i) for i in range(4)]
    loader = prepared(own)
    epoch(loader, 3)
    state = loader.state_dict()
    again = prepared(own)
    again.load_state_dict(state)
    assert [int(data[0]) for data, _ in epoch(again)] == [3]
    assert [int(data[0]) for data, _ in epoch(again)] == [0, 1, 2, 3]
    errors = of_all(2, lambda comm: prepared(own, comm).load_state_dict(state))
    assert all("workers=1, this run has 2" in e for e in errors)


# ------------------------------------------------------------------------------------------ weights


def test_a_weight_function_counts_and_totals_are_gathered() -> None:
    def tokens(batch: Any) -> float:
        return float(batch.sum())

    results = threads.run(2, lambda comm: epoch(prepared(plain(5, 4)(), comm, weight=tokens)))
    assert [[b.weight for _, b in worker] for worker in results] == [[1.0, 4.0], [5.0, 0.0]]
    assert [[b.total for _, b in worker] for worker in results] == [[6.0, 4.0], [6.0, 4.0]]
    assert [b.last for _, b in results[0]] == [False, True]
    assert prepared(plain(5, 4)(), weight=tokens).describe().endswith(", weighted by tokens")


def test_batches_of_weight_zero_do_not_end_a_stream() -> None:
    source = lambda: DataLoader(Stream(8), 4)  # noqa: E731
    results = threads.run(2, lambda comm: epoch(prepared(source(), comm, weight=lambda data: 0)))
    assert [[b.total for _, b in worker] for worker in results] == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf"), "x"])
def test_a_bad_weight_on_one_worker_is_an_error_on_all(weight: Any) -> None:
    def work(comm: Any) -> Any:
        loader = prepared(plain(8, 4)(), comm, weight=lambda data: weight if comm.rank else 1.0)
        with pytest.raises((DataError, ValueError)) as error:
            epoch(loader)
        return str(error.value)

    told, own = threads.run(2, work, timeout_s=5)
    assert "no batch 0 of epoch 0 from worker 1" in told
    assert "the weight function gave" in own or "could not convert" in own


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (plain(0, 4), "DataError: the data set is empty"),
        (plain(3, 8), "DataError: 3 samples for 4 workers"),
        (plain(30, 3), "DataError: a global batch of 3 for 4 workers"),
        (lambda: DataLoader(Stream(30), 3), "DataError: a global batch of 3 for 4 workers"),
        (plain(6, 8, drop_last=True), "DataError: drop_last leaves no batch of 6 samples"),
        (
            lambda: DataLoader(range(9), 4, sampler=DistributedSampler(range(9), 4, 0)),  # type: ignore[arg-type]
            "UsageError: the loader has a DistributedSampler\n  why: Paceline already splits",
        ),
        (
            lambda: DataLoader(
                range(9),  # type: ignore[arg-type]
                batch_sampler=BatchSampler(DistributedSampler(range(9), 4, 0), 2, False),  # type: ignore[arg-type]
            ),
            "UsageError: the loader has a DistributedSampler",
        ),
        (plain(30, None), "UsageError: the DataLoader has batch_size=None"),  # type: ignore[arg-type]
        (lambda: 3, "UsageError: 3 is not a loader"),
        (lambda: prepared(plain(9, 4)()), "UsageError: the loader is prepared already"),
    ],
)
def test_refused_on_all_workers_before_the_first_step(source: Source, says: str) -> None:
    for error in of_all(4, lambda comm: prepared(source(), comm)):
        assert error.startswith(says)
        assert "\n  do:  " in error


def test_other_refusals() -> None:
    class Mine(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter(())

    class Lengthless:
        def __getitem__(self, i: int) -> int:
            return i

    with pytest.raises(UsageError, match="Mine has an __iter__ of its own"):
        prepared(Mine(range(9), 4))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'global'"):
        prepared(plain(9, 4)(), batch="globl")
    with pytest.raises(DataError, match="Lengthless has no length"):
        prepared(DataLoader(Lengthless(), 4))  # type: ignore[arg-type]
    assert len(epoch(prepared(DataLoader(Lengthless(), 4, sampler=range(9))))) == 3  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ epochs


def indices(loader: Loader, most: int | None = None) -> list[int]:
    return [i for data in itertools.islice(loader, most) for i in data.tolist()]


def test_epochs_count_themselves_and_breaking_out_begins_the_next() -> None:
    orders = [[i for b in e for i in b] for e in together(1, plain(12, 4, shuffle=True), epochs=4)]
    loader = prepared(plain(12, 4, shuffle=True)())
    assert indices(loader) == orders[0]
    assert indices(loader, 1) == orders[1][:4]
    assert indices(loader) == orders[2]
    loader.set_epoch(1)
    assert indices(loader) == orders[1]
    loader.set_epoch(2)  # as it would have been anyway
    assert indices(loader, 2) == orders[2][:8]
    loader.set_epoch(2)  # once more from its beginning
    assert indices(loader) == orders[2]
    assert len(loader) == 3


def test_after_an_early_exit_the_state_is_still_in_the_middle() -> None:
    orders = [[i for b in e for i in b] for e in together(1, plain(12, 4, shuffle=True), epochs=2)]
    loader = prepared(plain(12, 4, shuffle=True)())
    assert indices(loader, 2) == orders[0][:8]
    for set_epoch in (False, True):
        resumed = prepared(plain(12, 4, shuffle=True)())
        resumed.load_state_dict(loader.state_dict())
        if set_epoch:
            resumed.set_epoch(0)  # the habit of calling it before each loop must not lose the place
        assert indices(resumed) == orders[0][8:]
        assert indices(resumed) == orders[1]


def test_a_state_of_the_last_batch_leaves_an_empty_rest() -> None:
    loader = prepared(plain(8, 4)())
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 2)
    assert list(batches) == []
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0)
    loader.load_state_dict(state)
    assert list(loader) == []
    assert len(list(loader)) == 2


def test_only_the_newest_iterator_lives() -> None:
    loader = prepared(plain(12, 4)())
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert next(new).tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no longer the newest"):
        next(old)
    assert len(list(new)) == 2  # undisturbed
    unused = iter(loader)
    loader.set_epoch(9)
    with pytest.raises(UsageError, match="no longer the newest"):
        next(unused)
    assert loader.state_dict()["epoch"] == 9


def test_set_epoch_tells_a_sampler_that_asks() -> None:
    class Asking(list[int]):
        told = -1

        def set_epoch(self, epoch: int) -> None:
            self.told = epoch

    sampler = Asking(range(4))
    prepared(DataLoader(range(9), 4, sampler=sampler)).set_epoch(3)  # type: ignore[arg-type]
    assert sampler.told == 3


# ------------------------------------------------------------------------------------------ the state


def state(**changes: Any) -> dict[str, Any]:
    loader = prepared(plain(12, 4, shuffle=True)())
    epoch(loader, 2)
    return loader.state_dict() | changes


def test_the_state_is_plain() -> None:
    saved = state()
    assert json.loads(json.dumps(saved)) == saved
    assert set(saved) == {
        *("epoch", "batches", "seed", "seen"),
        *("kind", "samples", "batch_size", "batch", "drop_last", "sampling"),
    }


def test_any_whole_number_is_a_seed() -> None:
    for seed in (-1, 2**63 + 5):
        loader = prepared(plain(12, 4, shuffle=True)(), seed=seed)
        first = indices(loader, 2)
        again = prepared(plain(12, 4, shuffle=True)())
        again.load_state_dict(loader.state_dict())
        assert sorted(first + indices(again)) == list(range(12))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 11}, "samples=11, this run has 12"),
        ({"batch_size": 8}, "batch_size=8, this run has 4"),
        ({"drop_last": True}, "drop_last=True, this run has False"),
        ({"sampling": "in order"}, "sampling='in order', this run has 'shuffled'"),
        ({"kind": "stream"}, "kind='stream', this run has 'indexed'"),
        ({"batch": "per_worker"}, "batch='per_worker', this run has 'global'"),
        ({"epoch": -1}, "epoch=-1, not a whole number"),
        ({"epoch": "1"}, "epoch='1', not a whole number"),
        ({"batches": None}, "batches=None, not a whole number"),
        ({"batches": True}, "batches=True, not a whole number"),
        ({"batches": 4}, "batches=4, the epoch has 3"),
        ({"seed": 1.0}, "seed=1.0, not a whole number"),
        ({"seed": 1}, "this run would have"),  # another order than the one that was begun
        ({"epoch": 1}, "this run would have"),
        ({"seen": 5}, "seen=5, this run would have"),
    ],
)
def test_a_wrong_state_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as error:
        prepared(plain(12, 4, shuffle=True)()).load_state_dict(state(**changes))
    assert says in str(error.value)


@pytest.mark.parametrize("key", list(state()))
def test_a_state_with_a_field_missing_is_refused_by_name(key: str) -> None:
    with pytest.raises(DataError, match=f"the loader's state has (no )?{key}"):
        prepared(plain(12, 4, shuffle=True)()).load_state_dict({k: v for k, v in state().items() if k != key})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"order": None}, "order=None, not a row of int64"),
        ({"order": torch.zeros(3)}, "order=tensor"),
        ({"order": torch.tensor([5, 2, 3, 4])}, "this run would have"),
        ({"sizes": torch.tensor([5])}, "sizes that do not make up its order of 4"),
        ({"sizes": torch.tensor([5, -1])}, "sizes that do not make up its order of 4"),
    ],
)
def test_a_damaged_order_is_refused(changes: dict[str, Any], says: str) -> None:
    source = lambda: DataLoader(range(9), batch_sampler=[[1, 2], [3, 4]])  # noqa: E731
    loader = prepared(source())
    epoch(loader, 1)
    with pytest.raises(DataError) as error:
        prepared(source()).load_state_dict(loader.state_dict() | changes)
    assert says in str(error.value)


def test_per_worker_batches_go_on_in_mid_epoch_only_with_as_many_workers() -> None:
    source = plain(16, 4)
    for most, fits in ((1, False), (None, True)):
        loader = prepared(source(), batch="per_worker")
        epoch(loader, most)
        saved = loader.state_dict()
        results = of_all(2, lambda comm: prepared(source(), comm, batch="per_worker").load_state_dict(saved))  # noqa: B023
        assert [r is None for r in results] == [fits, fits]
        assert fits or "workers=1, this run has 2" in results[0]


def test_workers_that_load_different_states_are_told() -> None:
    states = []
    for most in (1, 2):
        loader = prepared(plain(12, 4)())
        epoch(loader, most)
        states.append(loader.state_dict())
    errors = of_all(2, lambda comm: prepared(plain(12, 4)(), comm).load_state_dict(states[comm.rank]))
    assert all("position of the loader" in e and "batch 2" in e for e in errors)


# ------------------------------------------------------------------------------------------ laps, gate, engine


class Noting(Recorder):
    """A recorder that notes what it is told, and by whom else something was said in between."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.notes: list[Any] = []
        self.data_s: list[float] = []

    def start_lap(self, samples: int, data_s: float) -> None:
        super().start_lap(samples, data_s)
        self.notes.append(samples)
        self.data_s.append(data_s)

    def end_lap(self) -> None:
        if self._wall:
            self.notes.append("end")
        super().end_lap()


@pytest.mark.parametrize(
    "source", [plain(6, 4), lambda: DataLoader(Stream(6), 4), lambda: [torch.zeros(4), torch.zeros(2)]]
)
def test_laps_the_gate_and_the_engine_in_their_order(source: Source) -> None:
    recorder = Noting()

    def gate() -> bool:
        recorder.notes.append("gate")
        return True

    def on_batch(batch: Batch) -> None:
        assert loader.current is batch
        recorder.notes.append("on_batch")

    loader = prepared(source(), recorder=recorder, gate=gate, on_batch=on_batch)
    for _ in range(2):
        for _ in loader:
            recorder.notes.append("step")
    first = ["gate", "on_batch", 4, "step", "end"]
    second = ["gate", "on_batch", 2, "step", "end"]
    if loader._from.asks:  # the gate was asked before the end of the stream was seen, and not again after it
        assert recorder.notes == [*first, *second, *first[:1], *first[1:], *second, "gate"]
    else:
        assert recorder.notes == [*first, *second] * 2
    assert recorder.step == 4


def test_a_lap_ends_where_the_loop_is_left() -> None:
    recorder = Noting()
    loader = prepared(plain(12, 4)(), recorder=recorder)
    for _ in loader:
        break
    assert recorder.notes == [4, "end"]
    kept = iter(loader)
    next(kept)
    loader.set_epoch(5)
    assert recorder.notes == [4, "end", 4, "end"]
    assert loader.current is not None  # the batch after the loop still has its weight


def test_a_borrowed_batch_counts_no_samples_in_the_lap() -> None:
    recorders = [Noting(), Noting()]
    threads.run(2, lambda comm: epoch(prepared(plain(5, 4)(), comm, recorder=recorders[comm.rank])))
    assert [r.notes for r in recorders] == [[2, "end", 1, "end"], [2, "end", 0, "end"]]


def test_the_time_of_fetching_is_not_part_of_the_step() -> None:
    class Slow(Own):
        def __getitem__(self, i: Any) -> Any:
            import time

            time.sleep(0.03)
            return i

    recorder = Noting()
    list(prepared(DataLoader(Slow(range(2)), 1), recorder=recorder))
    assert all(s >= 0.03 for s in recorder.data_s)


def test_a_closed_gate_ends_everything() -> None:
    leave = iter([True, True, False])
    loader = prepared(plain(12, 4)(), gate=lambda: next(leave))
    assert len(list(loader)) == 2
    assert list(loader) == []  # and the gate, which has nothing left to say, is not asked
    assert list(loader) == []


# ------------------------------------------------------------------------------------------ what is printed


@pytest.mark.parametrize(
    ("world_size", "source", "says"),
    [
        (
            2,
            plain(60000, 256, shuffle=True),
            "global batch 256 = 128 + 128 samples, 235 batches an epoch (last 96), shuffled",
        ),
        (1, plain(512, 256), "global batch 256 samples, 2 batches an epoch, in order"),
        (3, plain(512, 256), "global batch 256 = 86 + 85 + 85 samples, 2 batches an epoch, in order"),
        (4, plain(512, 256), "global batch 256 = 4 x 64 samples, 2 batches an epoch, in order"),
        (8, plain(512, 258), "global batch 258 = 2 x 33 + 6 x 32 samples, 2 batches an epoch (last 254), in order"),
        (
            2,
            plain(100, 32, drop_last=True),
            "global batch 32 = 16 + 16 samples, 3 batches an epoch (4 samples dropped), in order",
        ),
        (
            2,
            plain(100, 32, sampler=SubsetRandomSampler(range(40))),
            "global batch 32 = 16 + 16 samples, 2 batches an epoch, drawn by SubsetRandomSampler",
        ),
        (2, lambda: DataLoader(Stream(9), 4), "global batch 4 = 2 + 2 samples of a stream, which every worker reads"),
        (2, lambda: [1], "batches of each worker's own list, taken as split by you (batch='per_worker')"),
    ],
)
def test_describe(world_size: int, source: Source, says: str) -> None:
    assert threads.run(world_size, lambda comm: prepared(source(), comm).describe()) == [says] * world_size


def test_describe_many_different_shares() -> None:
    class Steps(Even):
        def shares(self, seconds: Any, batch: int) -> list[int]:
            return list(range(1, len(seconds) + 1))

    class Many(SingleComm):
        world_size = 64

    loader = prepared(plain(5000, 2080)(), Many(), balance=Steps())
    assert "global batch 2080 = 64 workers x 1 to 64 samples" in loader.describe()


def test_what_user_code_looks_at() -> None:
    data = range(9)
    loader = prepared(DataLoader(data, 4), batch="per_worker")  # type: ignore[arg-type]
    assert loader.dataset is data
    assert loader.batch_size == 4


class Migrated(Dataset[int]):
    """A data set that says what its processes draw."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, float(torch.rand(()))


def test_a_prepared_loader_has_a_dataloaders_attributes() -> None:
    generator = torch.Generator().manual_seed(5)
    source = DataLoader(Migrated(), 4, shuffle=True, num_workers=2, drop_last=True, generator=generator)
    loader: Any = prepared(source)
    for name, value in vars(source).items():
        if not name.startswith("_"):
            assert getattr(loader, name) is value, name
    for name in ("sampler", "batch_sampler", "num_workers", "collate_fn", "drop_last", "generator", "timeout"):
        assert getattr(loader, name) is getattr(source, name), name
    assert loader.multiprocessing_context is None
    assert isinstance(loader.sampler, RandomSampler)
    assert not hasattr(loader, "no_such_thing")
    with pytest.raises(AttributeError, match="DataLoader has no attribute 'no_such_thing'"):
        _ = loader.no_such_thing
    with pytest.raises(UsageError, match="num_workers of a prepared loader cannot be changed"):
        loader.num_workers = 0
    loader.note = "the user's own"
    assert loader.note == "the user's own"

    class Odd(list[Any]):
        epoch, weight, group = 7, 8, 9

    assert len(prepared(Odd([torch.ones(2)]))) == 1


def test_set_epoch_of_a_migrated_script_does_no_harm() -> None:
    """DDP's habit: loader.sampler.set_epoch(e) at the beginning of every epoch."""

    def epochs(tell: Callable[[Any, int], None]) -> list[list[int]]:
        loader = prepared(plain(20, 4, shuffle=True)(), seed=3)
        seen = []
        for e in range(3):
            tell(loader, e)
            seen.append([i for data, _ in epoch(loader) for i in data.tolist()])
        return seen

    want = epochs(lambda loader, e: None)
    assert len({str(order) for order in want}) == 3
    for name in ("sampler", "batch_sampler"):
        assert epochs(lambda loader, e, name=name: getattr(loader, name).set_epoch(e)) == want  # type: ignore[misc]
    assert epochs(lambda loader, e: loader.batch_sampler.sampler.set_epoch(e)) == want
    source = plain(20, 4, shuffle=True)()
    for _ in range(2):  # prepared again: the newest loader listens
        loader: Any = prepared(source, seed=3)
        loader.sampler.set_epoch(2)
        assert loader.epoch == 2
        loader.set_epoch(1)
        assert loader.epoch == 1


def test_the_seed_of_a_generator_counts() -> None:
    def order(seed: int, **options: Any) -> Any:
        g = torch.Generator().manual_seed(seed)
        if options.pop("in_sampler", False):
            options["sampler"] = RandomSampler(options.setdefault("data", range(20)), generator=g)
        else:
            options |= {"shuffle": True, "generator": g}
        return together(
            2,
            lambda: DataLoader(options.get("data", range(20)), 4, **{k: v for k, v in options.items() if k != "data"}),
        )

    assert order(1) == order(1) != order(2)
    assert order(1) == order(1, in_sampler=True)

    def seeded_by_rank(comm: Any) -> Any:
        g = torch.Generator().manual_seed(comm.rank)
        return epoch(prepared(DataLoader(range(20), 4, shuffle=True, generator=g), comm))  # type: ignore[arg-type]

    assert joined(threads.run(2, seeded_by_rank)) == order(0)[0], "worker 0's counts"
    one_has_none = lambda comm: DataLoader(range(20), 4, generator=torch.Generator() if comm.rank else None)  # noqa: E731
    assert all("generator" in said for said in of_all(2, lambda comm: prepared(one_has_none(comm), comm)))  # type: ignore[arg-type]


def test_loader_processes_draw_other_numbers_on_each_worker_although_a_generator_is_given() -> None:
    class Rank(SingleComm):
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 2

    drawn = []
    for rank in range(2):
        g = torch.Generator().manual_seed(0)
        loader = prepared(DataLoader(Migrated(), 8, num_workers=1, generator=g), Rank(rank))
        drawn += [x for (_, numbers), _ in epoch(loader, 2) for x in numbers.tolist()]
    assert len(set(drawn)) == len(drawn)


class Shuffling(IterableDataset[tuple[int, float]]):
    """A stream that shuffles itself with the numbers of the process, as WebDataset's and many others do."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for i in torch.randperm(12).tolist():
            yield i, random.random()


def mixed_up(samples: list[tuple[int, float]]) -> tuple[Any, Any, Any]:
    """A collate function that draws a factor, and a number for each sample."""
    indices, numbers = zip(*samples, strict=True)
    return torch.tensor(indices), numbers, torch.rand(1 + len(samples)).tolist()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_that_shuffles_itself_is_read_alike_by_all(processes: int) -> None:
    """Threads share the process's streams, so each worker is run by itself, with its own numbers before it."""

    def run(rank: int, before: int) -> list[Any]:
        class Rank(SingleComm):
            def __init__(self) -> None:
                self.rank, self.world_size = rank, 2

            def all_gather(self, x: Any) -> Any:
                class Done:
                    def wait(self) -> Any:
                        return torch.stack([x, x])

                return Done()

        torch.manual_seed(before)
        random.seed(before)
        loader = prepared(DataLoader(Shuffling(), 5, num_workers=processes, collate_fn=mixed_up), Rank(), seed=4)
        seen = []
        for indices, numbers, factors in itertools.islice(loader, 2):
            torch.rand(before)  # a dropout of the training
            seen.append((indices.tolist(), numbers, factors))
        return seen

    with torch.random.fork_rng(devices=()):
        state = random.getstate()
        zero, one = run(0, 1), run(1, 2)
        random.setstate(state)
    indices = [i for worker in (zero, one) for batch, _, _ in worker for i in batch]
    assert len(set(indices)) == len(indices) == 10, "a sample was read by both workers, or by none"
    factors = [x for worker in (zero, one) for _, _, drawn in worker for x in drawn]
    assert len(set(factors)) == len(factors), "two workers mixed alike"


def test_what_a_process_that_is_not_forked_gets_can_be_sent_to_it() -> None:
    def work(comm: Any) -> Any:
        loader: Any = prepared(DataLoader(Stream(9), 4), comm)
        again = pickle.loads(pickle.dumps(loader._from.inner.collate_fn))
        return again([0, 1, 2, 3])[1].tolist()

    assert threads.run(2, work) == [[0, 1], [2, 3]]
