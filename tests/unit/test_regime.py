"""When training is critical: by norms over windows, and by the learning rate."""

from __future__ import annotations

import math

import pytest

from paceline.core.regime import Regime

WINDOW = 4


def after(norms, rates=(), *, threshold=0.5, fall=0.0):
    """Whether each step was critical, and what is known in the end. norms: one a window; rates: one a step, or 1."""
    regime, seen = Regime(), []
    for step in range(WINDOW * len(norms)):
        regime = regime.begin(rates[step] if step < len(rates) else 1.0, window=WINDOW, fall=fall)
        seen.append(regime.critical)
        regime = regime.end()
        if regime.steps == WINDOW:
            regime = regime.judge(norms[step // WINDOW], threshold=threshold)
    return seen, regime


def windows(seen):
    """One letter a window, C or -, where all its steps are alike."""
    cut = [seen[i : i + WINDOW] for i in range(0, len(seen), WINDOW)]
    return "".join("C" if all(steps) else "-" if not any(steps) else "?" for steps in cut)


@pytest.mark.parametrize(
    ("norms", "want"),
    [
        ([1, 1, 1, 1], "CC--"),
        ([4, 2, 1, 0.6, 0.5], "CCCC-"),  # 0.5, 0.5, 0.4
        ([1, 1.4, 2.2, 2.2, 2.2], "CC-C-"),  # 0.4, 0.57, 0
        ([1, 1, 0, 0, 1, 1, 1], "CC-CCC-"),  # nothing changes from zero by a share of itself
        ([1, 1, math.inf, 1, 1, 1], "CC-CC-"),
        ([1, 1, math.nan, 1, 1, 1], "CC-CC-"),
    ],
)
def test_a_change_of_the_norm_makes_the_next_window_critical(norms, want):
    assert windows(after(norms)[0]) == want


def test_at_threshold_zero_all_is_critical_and_at_infinity_only_what_must():
    assert windows(after([1] * 4, threshold=0.0)[0]) == "CCCC"
    assert windows(after([1, 50, 1, 90], threshold=math.inf)[0]) == "CC--"


def test_a_fall_of_the_rate_is_critical_at_once_and_for_a_whole_window():
    steady = [1.0] * 6
    for step in range(8, 16):
        seen, _ = after(steady, [1.0] * step + [0.1] * 99)
        begins = -(-(step + WINDOW) // WINDOW) * WINDOW  # the first window's end at which all four steps are over
        assert [i for i, critical in enumerate(seen) if critical] == [*range(8), *range(step, begins)]


def test_a_smooth_schedule_may_fall_by_a_share_before_it_counts():
    cosine = [0.5 + 0.5 * math.cos(math.pi * step / 48) for step in range(48)]
    assert windows(after([1.0] * 12, cosine)[0]) == "C" * 12
    seen, _ = after([1.0] * 12, cosine, fall=0.3)
    first = next(step for step, rate in enumerate(cosine) if rate < 0.7)
    assert next(step for step in range(8, 48) if seen[step]) == first
    assert "-" in windows(seen)


def test_a_rate_that_rises_or_stays_changes_nothing():
    assert windows(after([1.0] * 5, [step / 20 for step in range(20)])[0]) == "CC---"
    _, regime = after([1.0] * 5, [0.0] * 20)
    assert not regime.critical


def test_decisions_are_counted_those_of_the_rate_too_where_it_changes_something():
    assert after([1.0] * 4)[1].decisions == 4
    assert after([1.0] * 4, [1.0] * 3 + [0.5] * 20)[1].decisions == 4  # it was critical already
    assert after([1.0] * 4, [1.0] * 13 + [0.5] * 20)[1].decisions == 5
