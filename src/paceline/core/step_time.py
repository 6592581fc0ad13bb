"""How long a worker's backward takes, by the number of samples: learned from its last laps.

[Note: step time] A lap over b samples takes t(b) = per_step + per_sample · b seconds (the model of compute in Nie et
al., Cannikin). Both are fitted by least squares to the last laps, of which an older one counts less. As long as all of
them had the same b there is nothing to tell the two apart by, and per_step is taken to be 0: the time is proportional
to the samples. That errs on one side only. A slow worker is thought to become faster by giving samples away than it
does, so it gives away too few, never too many, and shares that are computed again and again on that ground approach
those with equal times without passing them. In between, the spread of b says how much the fitted line counts.

A lap far off the line is set aside: a worker prints, saves, or waits for its disk. Three in a row on the same side of
it are no accident, and everything is learned anew from these three.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

_KEPT = 24  # laps
_AGE = 0.9  # what a lap counts of the one after it
_ENOUGH = 3  # laps to say anything at all, and to believe in a change
_SPREAD = 0.05  # of b, relative, at which the fitted line and the proportional one count the same
_LEAST_SLOPE = 0.05  # of the proportional one: a sample always takes time
_NOISE, _MOST_NOISE = 0.05, 0.3  # relative: what is assumed at first, and the most that one lap adds to the mean
_FAR = 3.0  # times the mean noise


class _Lap(NamedTuple):
    samples: int
    seconds: float


class StepTime:
    """The line through a worker's last laps: [Note: step time]."""

    def __init__(self) -> None:
        self._laps: deque[_Lap] = deque(maxlen=_KEPT)
        self._aside: list[_Lap] = []  # the last ones, far off on one side
        self._noise = _NOISE

    @property
    def known(self) -> bool:
        """Have there been enough laps to say something?"""
        return len(self._laps) >= _ENOUGH

    def add(self, samples: int, seconds: float) -> None:
        """A lap is over."""
        lap = _Lap(samples, seconds)
        if not self.known:
            self._begin([*self._laps, lap])
            return
        off = self._off(lap)
        far = abs(off) > max(_NOISE, self._noise) * _FAR
        self._noise = _AGE * self._noise + (1 - _AGE) * min(abs(off), _MOST_NOISE)
        if not far:
            self._laps.append(lap)
            self._aside.clear()
            return
        if self._aside and (self._off(self._aside[-1]) > 0) != (off > 0):
            self._aside.clear()
        self._aside.append(lap)
        if len(self._aside) == _ENOUGH:
            self._begin(self._aside)
            self._aside = []

    def line(self) -> tuple[float, float]:
        """Seconds a sample and seconds a step."""
        weights = [_AGE**age for age in range(len(self._laps))]
        laps = list(zip(weights, reversed(self._laps), strict=True))
        whole = sum(weights)
        samples = sum(w * lap.samples for w, lap in laps) / whole
        seconds = sum(w * lap.seconds for w, lap in laps) / whole
        spread = sum(w * (lap.samples - samples) ** 2 for w, lap in laps) / whole
        together = sum(w * (lap.samples - samples) * (lap.seconds - seconds) for w, lap in laps) / whole
        proportional, doubt = seconds / samples, (_SPREAD * samples) ** 2
        slope = (together + doubt * proportional) / (spread + doubt)
        slope = min(max(slope, _LEAST_SLOPE * proportional), proportional)
        return slope, seconds - slope * samples

    def _begin(self, laps: list[_Lap]) -> None:
        """Learn anew. Among the first three one may be the lap in which everything was loaded."""
        if len(laps) == _ENOUGH:
            middle = statistics.median(lap.seconds / lap.samples for lap in laps)
            laps = [lap for lap in laps if middle / 2 <= lap.seconds / lap.samples <= middle * 2]
        self._laps = deque(laps, maxlen=_KEPT)

    def _off(self, lap: _Lap) -> float:
        """How far a lap is off the line, relative to it.

        With a number of samples that it has not seen yet the line is a guess: all is well between it and the times
        seen so far, which is where per_step puts a lap that was thought to be proportional.
        """
        slope, rest = self.line()
        line = low = high = rest + slope * lap.samples
        if all(lap.samples != old.samples for old in self._laps):
            seen = statistics.fmean(old.seconds for old in self._laps)
            low, high = min(line, seen), max(line, seen)
        return (lap.seconds - min(max(lap.seconds, low), high)) / line
