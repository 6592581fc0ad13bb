"""What a worker knows of its own speed: the laps, without waits, and the line through them."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.core.step_time import StepTime
from paceline.telemetry.pace import ComputedBatch, HostClock, Pace, clock_of
from paceline.telemetry.recorder import Recorder


class Hands:
    """A clock that is set by hand. blind: how many marks it is behind."""

    def __init__(self, blind: int = 0) -> None:
        self.now, self.blind, self.made = 0.0, blind, 0

    def mark(self) -> tuple[int, float]:
        self.made += 1
        return self.made, self.now

    def seconds(self, begin: tuple[int, float], end: tuple[int, float]) -> float | None:
        return None if end[0] + self.blind > self.made else end[1] - begin[1]


def lap(recorder: Recorder, clock: Hands, pace: Pace, *, backward: bool = True) -> None:
    """8 samples: 1 s forward, 2 s for others, 1 s backward, 5 s evaluation and printing, 3 s for others, 1 s step."""
    recorder.start_lap(8, data_s=9.0)
    recorder.follow(pace)
    clock.now += 1.0
    with recorder.waiting():
        clock.now += 2.0
        with recorder.waiting():
            clock.now += 0.5
    clock.now += 1.0
    if backward:
        recorder.backward_ended()
    with recorder.untimed():
        clock.now += 4.0
        recorder.backward_ended()  # of something else
        with recorder.waiting():
            clock.now += 1.0
    with recorder.waiting():
        clock.now += 3.0
    clock.now += 1.0


def test_a_lap_is_computing_alone():
    clock = Hands()
    recorder, pace = Recorder(None, 0), Pace(clock)
    lap(recorder, clock, pace)
    recorder.end_lap()
    assert pace.take() == [ComputedBatch(8, 2.0, 5.5)]
    assert pace.take() == []


def test_what_is_untimed_before_the_backward_is_taken_out():
    clock = Hands()
    recorder, pace = Recorder(None, 0), Pace(clock)
    recorder.start_lap(0, 0.0)
    recorder.follow(pace)
    with recorder.untimed():
        clock.now += 7.0
    clock.now += 1.0
    recorder.backward_ended()
    clock.now += 1.0
    recorder.backward_ended()  # a second one: of a GAN, say
    recorder.start_lap(4, 0.0)  # of a loader that does not want to know
    recorder.backward_ended()
    recorder.end_lap()
    assert pace.take() == [ComputedBatch(1, 2.0, 0.0)], "who has no sample computes on a borrowed one"


def test_an_evaluation_is_no_lap():
    clock = Hands()
    recorder, pace = Recorder(None, 0), Pace(clock)
    lap(recorder, clock, pace, backward=False)
    recorder.end_lap()
    assert pace.take() == []
    assert recorder.backwards == 1, "the one inside untimed"


def test_a_device_is_never_waited_for():
    """Its times come a lap later, in order."""
    clock = Hands(blind=3)
    recorder, pace = Recorder(None, 0), Pace(clock)
    lap(recorder, clock, pace)
    recorder.end_lap()
    assert pace.take() == []
    lap(recorder, clock, pace)
    recorder.end_lap()
    assert pace.take() == [ComputedBatch(8, 2.0, 5.5)]


def test_an_untimed_wait_is_in_no_step():
    recorder = Recorder(None, 0)
    recorder.start_lap(1, 0.0)
    with recorder.untimed():
        recorder.wait_s += 5.0
    assert recorder.wait_s == 0.0
    with recorder.untimed(), recorder.timed():
        recorder.wait_s += 5.0
    assert recorder.wait_s == 5.0


def test_the_clock_of_a_worker():
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    clock = HostClock()
    assert clock.seconds(clock.mark(), clock.mark()) >= 0.0


# ------------------------------------------------------------------------------------------ the line


def fed(laps: list[tuple[int, float]]) -> StepTime:
    time = StepTime()
    for samples, seconds in laps:
        time.add(samples, seconds)
    return time


def at(time: StepTime, samples: int) -> float:
    slope, rest = time.line()
    return rest + slope * samples


def test_nothing_is_said_before_three_laps():
    assert not fed([(8, 1.0)] * 2).known
    assert fed([(8, 1.0)] * 3).known


def test_equal_shares_are_proportional():
    assert fed([(8, 2.0)] * 10).line() == (0.25, 0.0)


def test_what_a_step_costs_shows_once_shares_have_varied():
    slope, rest = fed([(b, 4.0 + 0.5 * b) for b in (8, 8, 8, 12, 12, 6, 6, 12, 8)]).line()
    assert slope == pytest.approx(0.5, rel=0.1)
    assert rest == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize("true", [(0.5, 0.0), (0.5, -4.0), (0.0, 5.0), (-0.1, 9.0)])
def test_the_line_keeps_its_bounds(true):
    """A step never takes less than nothing, and a sample always takes time."""
    slope, rest = fed([(b, true[1] + true[0] * b) for b in (10, 20, 12, 18, 14, 16)]).line()
    assert slope > 0
    assert rest >= 0


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_and_changes_nothing(seed):
    draw = random.Random(seed)
    time = fed([(16, 1.0 + draw.uniform(-0.1, 0.1)) for _ in range(60)])
    assert at(time, 16) == pytest.approx(1.0, rel=0.06)
    assert len(time._laps) > 20, "noise was taken for a change"


def test_the_first_lap_may_be_one_in_which_everything_is_loaded():
    time = fed([(16, 30.0), (16, 1.0), (16, 1.0), (16, 1.0)])
    assert time.known
    assert time.line() == (1 / 16, 0.0)


@pytest.mark.parametrize("odd", [(9.0, 1.0, 9.0, 9.0, 1.0), (9.0, 0.1, 9.0), (0.1, 0.1, 9.0, 9.0, 0.1, 0.1)])
def test_single_laps_far_off_are_passed_over(odd):
    time = fed([(16, 1.0)] * 5)
    for seconds in odd:
        time.add(16, seconds)
        assert time.line() == (1 / 16, 0.0)


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.5])
def test_three_in_a_row_are_a_change(factor):
    time = fed([(16, 1.0)] * 30)
    for k in range(3):
        assert at(time, 16) == 1.0, k
        time.add(16, factor)
    assert at(time, 16) == pytest.approx(factor)


def test_a_slow_drift_is_followed():
    assert at(fed([(16, 1.0 + 0.01 * k) for k in range(100)]), 16) == pytest.approx(1.99, rel=0.1)


def test_another_share_is_no_change_of_speed():
    """What was thought to be proportional had a part that is not: the line learns it, and keeps what it knew."""
    time = fed([(16, 8.0 + 0.5 * 16)] * 20 + [(8, 8.0 + 0.5 * 8)] * 4)
    assert at(time, 8) == pytest.approx(12.0, rel=0.05)
    assert time.line()[1] == pytest.approx(8.0, rel=0.2)
