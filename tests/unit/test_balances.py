"""Shares: laws of every balance, the best there are under `measured`, and which batches they hold for."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from laws_table import WORLDS
from paceline import registry
from paceline.balances.even import Even
from paceline.balances.measured import Measured
from paceline.checkpoint.extra import plain
from paceline.core.parts import Speed
from paceline.data.balancing import check, read_ahead
from paceline.data.schedule import Schedule, checked
from paceline.errors import DataError, MethodError, UsageError
from paceline.method import method

speed = st.builds(
    Speed,
    st.floats(1e-4, 1.0),
    st.one_of(st.just(0.0), st.floats(0.0, 5.0)),
    st.one_of(st.just(sys.maxsize), st.integers(3, 12)),
)


def slowest(speeds, shares):
    return max(s.seconds(b) for s, b in zip(speeds, shares, strict=True))


# ------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("name", registry.parts("balance"))
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_batch_is_shared_out_whole(name, world_size):
    balance = registry.find(name)()
    for batch in (1, 2, 7, 64, 1000):
        equal = balance.shares([Speed()] * world_size, batch)
        assert equal == Even().shares([Speed()] * world_size, batch), "workers that are alike share alike"
        shares = balance.shares([Speed(1.0 + r, r) for r in range(world_size)], batch)
        assert len(shares) == world_size
        assert sum(shares) == batch
        assert min(shares) >= min(1, batch // world_size), "no share is zero unless the batch is too small"


@pytest.mark.parametrize("name", registry.parts("balance"))
def test_who_measures_says_when(name):
    balance = registry.find(name)()
    assert any(balance.due(k) for k in range(100)) == balance.measures_speed()
    assert balance.worth(2.0, 1.0) == balance.measures_speed()
    assert not balance.worth(1.0, 1.0)


# ------------------------------------------------------------------------------------------ measured


def best(speeds, batch, least):
    """The smallest longest time there is, by trying all."""
    ranges = [range(least, min(s.most, batch) + 1) for s in speeds]
    return min((slowest(speeds, b) for b in itertools.product(*ranges) if sum(b) == batch), default=None)


@given(speeds=st.lists(speed, min_size=1, max_size=4), batch=st.integers(1, 12), least=st.integers(1, 2))
@settings(max_examples=150, deadline=None)
def test_the_shares_are_the_best_there_are(speeds, batch, least):
    balance = Measured(least=least)
    least = min(least, batch // len(speeds))
    if sum(min(s.most, batch) for s in speeds) < batch:
        with pytest.raises(DataError, match="does not fit"):
            balance.shares(speeds, batch)
        return
    shares = balance.shares(speeds, batch)
    assert sum(shares) == batch
    assert all(least <= b <= s.most for b, s in zip(shares, speeds, strict=True))
    assert slowest(speeds, shares) == pytest.approx(best(speeds, batch, least), rel=1e-9)


@given(speeds=st.lists(speed, min_size=2, max_size=5, unique=True), batch=st.integers(20, 4096), data=st.data())
@settings(max_examples=60, deadline=None)
def test_who_is_asked_first_does_not_matter(speeds, batch, data):
    speeds = [s._replace(most=sys.maxsize) for s in speeds]
    order = data.draw(st.permutations(range(len(speeds))))
    shares = Measured().shares(speeds, batch)
    moved = Measured().shares([speeds[i] for i in order], batch)
    assert slowest([speeds[i] for i in order], moved) == slowest(speeds, shares)
    assert all(abs(moved[k] - shares[i]) <= 1 for k, i in enumerate(order))


def test_a_worker_of_half_speed():
    assert Measured().shares([Speed(1.0), Speed(2.0)], 30) == [20, 10]
    assert Measured().shares([Speed(1.0), Speed(1.0), Speed(2.0)], 50) == [20, 20, 10]
    assert Measured().shares([Speed(1.0, 10.0), Speed(2.0, 10.0)], 30) == [20, 10]
    assert Measured().shares([Speed(1.0), Speed(1000.0)], 30) == [29, 1]
    assert Measured(least=4).shares([Speed(1.0), Speed(1000.0)], 30) == [26, 4]
    assert Measured(most=20).shares([Speed(1.0), Speed(1000.0)], 30) == [20, 10]
    assert Measured().shares([Speed(1.0), Speed(1.0, 0.0, 8)], 30) == [22, 8]
    assert Measured().shares([Speed(1.0), Speed(1.0), Speed(0.1, 0.0, 2)], 5) == [2, 1, 2], "who is full is passed over"


def test_the_last_samples_go_to_who_is_done_with_them_first():
    """Fewer samples than workers, at the end of an epoch."""
    assert Measured().shares([Speed(100.0), Speed(6.0), Speed(6.0), Speed(6.0)], 2) == [0, 1, 1, 0]


def test_no_room_is_refused_by_name():
    with pytest.raises(DataError, match="worker 1 has room for 0 samples, and must take 1"):
        Measured().shares([Speed(), Speed(most=0)], 8)
    with pytest.raises(DataError, match=r"does not fit: the workers have room for \[3, 4\]"):
        Measured().shares([Speed(most=3), Speed(most=4)], 8)


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(99))


@pytest.mark.parametrize(
    ("sources", "habit", "knobs", "words"),
    [
        ([], "global", {}, "was given no loader"),
        ([[1, 2]], "global", {}, "batches of a list"),
        ([DataLoader(range(9), 4)], "per_worker", {}, "batch='per_worker' do not go together"),
        ([DataLoader(Endless(), 4, num_workers=2)], "global", {}, "a stream that 2 processes"),
        ([DataLoader(range(9), 2)], "global", {}, "a global batch of 2 for 3 workers"),
        ([DataLoader(range(99), 8)], "global", {"least": 3}, "each takes 3 or more"),
        ([DataLoader(range(99), 8)], "global", {"least": 2, "most": 1}, "most=1 is below least=2"),
        ([DataLoader(range(99), 8)], "global", {"most": 2}, "none takes more than 2"),
    ],
)
def test_what_cannot_be_shared_out_anew_is_refused(sources, habit, knobs, words):
    with pytest.raises(UsageError, match=words):
        check(sources, Measured(**knobs), habit, 3)
    check(sources, Measured(**knobs), habit, 1)
    check(sources, Even(), habit, 3)


def test_what_can_be_shared_out():
    own = DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 1, drop_last=False))
    check([DataLoader(range(9), 4, num_workers=2), DataLoader(Endless(), 4), own], Measured(), "global", 3)
    assert read_ahead(DataLoader(range(9), num_workers=2, prefetch_factor=5)) == 10
    assert read_ahead(DataLoader(range(9))) == 0


def test_what_it_goes_together_with():
    assert str(method("measured+powersgd")) == "error_feedback(of=powersgd) + measured"
    for name in ("delayed", "onebit_adam", "zero3", "priority", "topk"):
        assert method(f"measured+{name}").balance.name == "measured"
    for name in ("async_average", "hogwild", "parameter_server", "backup_workers"):
        with pytest.raises(MethodError, match=f"does not go together with {name}"):
            method(f"measured+{name}")
    for name in ("local_sgd", "gossip", "sma"):
        with pytest.raises(MethodError, match="measured needs replicas agree"):
            method(f"measured+{name}")
    with pytest.raises(MethodError, match=r"gain=2\.0 is out of range"):
        method("measured", gain=2.0)


# ------------------------------------------------------------------------------------------ the schedule

FAST, SLOW = (Speed(1.0), Speed(2.0)), (Speed(3.0), Speed(1.0, 0.5, 7))


def test_speeds_hold_from_a_batch_on_over_all_epochs():
    schedule = Schedule()
    schedule.begin(0, 0)
    assert schedule.of(3)[1] == ()
    schedule.change(2, 6, FAST)
    assert schedule.latest == FAST
    assert [schedule.of(k)[1] for k in (5, 6, 2)] == [(), FAST, ()]
    schedule.begin(4, 0)  # the epoch was left after four batches, and what had been dealt out beyond is dropped
    assert [schedule.of(k)[1] for k in (1, 2)] == [(), FAST]
    schedule.begin(5, 3)  # an epoch is taken up at batch 3
    assert [schedule.of(k)[1] for k in (3, 4)] == [(), FAST]
    versions = [schedule.of(k)[0] for k in (3, 4)]
    schedule.change(7, 9, SLOW)
    assert schedule.of(4) == (versions[1], FAST)
    assert schedule.of(7)[1] == SLOW
    assert len({*versions, schedule.of(7)[0]}) == 3


def test_what_has_been_dealt_out_stays():
    schedule = Schedule()
    schedule.of(5)
    with pytest.raises(AssertionError, match="batch 5 has been dealt out"):
        schedule.change(2, 5, FAST)
    schedule.begin(2, 0)  # another loop, for which nothing has been dealt out beyond what was handed out
    schedule.change(2, 3, FAST)


def test_a_schedule_goes_on_where_it_was_saved():
    schedule = Schedule()
    schedule.change(2, 6, FAST)
    schedule.change(4, 9, SLOW)
    saved = json.loads(json.dumps(plain({"loader": schedule.save(5)})))["loader"]
    later = Schedule()
    later.begin(2, 0)
    before = later.of(0)[0]
    later.load(checked(saved)[0], 2)
    assert later.of(0)[0] != before, "what was shared out by the number of the old speeds must not be taken for theirs"
    assert later.save(2) == saved
    assert [later.of(k)[1] for k in range(6)] == [(), FAST, FAST, FAST, SLOW, SLOW]
    assert schedule.save(6) == [[0, [[1.0, 0.0, None], [2.0, 0.0, None]]], [3, [[3.0, 0.0, None], [1.0, 0.5, 7]]]]
    assert Schedule().save(9) == [[0, []]]
    assert checked([[0, []]])[1] == 0
    assert checked(saved)[1] == 2


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        [[1, []]],
        [[0, [[1.0, 0.0]]]],
        [[0, [[0.0, 0.0, 5]]]],
        [[0, [[1.0, -1.0, 5]]]],
        [[0, [[1.0, float("nan"), 5]]]],
        [[0, [[1.0, 0.0, 5.0]]]],
        [[0, [[1.0, 0.0, 5]]], [2, [[1.0, 0.0, 5], [1.0, 0.0, 5]]]],
        [[0, 5]],
        {"a": 1},
        "ab",
    ],
)
def test_a_damaged_schedule_is_refused(saved):
    with pytest.raises(DataError, match="which are no speeds of workers"):
        checked(saved)
