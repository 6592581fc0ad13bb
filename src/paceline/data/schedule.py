"""Which speeds a batch is shared out by.

Other speeds hold from a batch on that no worker has dealt out yet, so all of them are agreed on it before any needs to
know. Batches are counted over all epochs, as this loader hands them out: an epoch that is left early, or begun again,
takes nothing back. Under a balance that measures nothing there is one entry, and it holds for all of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.core.parts import Speed
from paceline.errors import DataError

_JSON = 2**53


class _Entry(NamedTuple):
    start: int  # the first batch it holds for
    speeds: tuple[Speed, ...]  # none: nothing is known, all are alike


class Schedule:
    """The speeds by number of batch. The past is forgotten, but for what the batch in hand is shared by."""

    def __init__(self) -> None:
        self._entries = [_Entry(0, ())]
        self._version = 0  # of the first of them
        self._first = 0  # the number of batch 0 of this epoch, over all epochs
        self._dealt = 0  # batches that have been dealt out

    def begin(self, handed: int, start: int) -> None:
        """An epoch begins with batch `start`, after `handed` batches over all epochs."""
        self._first = handed - start
        self._dealt = handed  # what was dealt out beyond it was dropped with the loader's iterator

    def of(self, k: int) -> tuple[int, Sequence[Speed]]:
        """The speeds for batch k of this epoch, and a number that is another one for other speeds."""
        at = self._first + k
        self._dealt = max(self._dealt, at + 1)
        i = max((i for i, entry in enumerate(self._entries) if entry.start <= at), default=0)
        return self._version + i, self._entries[i].speeds

    @property
    def latest(self) -> Sequence[Speed]:
        """The speeds by which all batches will be shared that are far enough ahead."""
        return self._entries[-1].speeds

    def change(self, handed: int, start: int, speeds: Sequence[Speed]) -> None:
        """After `handed` batches it is agreed that from batch `start` on these speeds hold."""
        assert start >= self._dealt, f"batch {start} has been dealt out, of {self._dealt}"
        self._entries.append(_Entry(start, tuple(speeds)))
        while len(self._entries) > 1 and self._entries[1].start < handed:
            self._entries.pop(0)
            self._version += 1

    def save(self, handed: int) -> list[list[Any]]:
        """What holds for the next batch and after it, in numbers that count from it."""
        past = max(i for i, entry in enumerate(self._entries) if entry.start <= handed)
        return [[max(e.start - handed, 0), [_numbers(speed) for speed in e.speeds]] for e in self._entries[past:]]

    def load(self, saved: Sequence[Any], handed: int) -> None:
        """Take up what `save` gave."""
        self._version += len(self._entries)
        self._entries = [_Entry(handed + start, tuple(map(_speed, speeds))) for start, speeds in saved]

    def forget(self, handed: int) -> None:
        """From the next batch on all workers are alike."""
        self.load([[0, []]], handed)


def checked(saved: Any) -> tuple[list[Any], int]:
    """What `Schedule.save` gave, when it comes from outside; and for how many workers it is, 0 if for any."""
    try:
        worlds = {len(speeds) for _, speeds in saved}
        fine = [type(start) is int and start >= 0 for start, _ in saved]
        fine += [_is_speed(*speed) for _, speeds in saved for speed in speeds]
        fine += [bool(fine) and saved[0][0] == 0, len(worlds - {0}) <= 1]
    except (TypeError, ValueError, IndexError, KeyError):
        fine, worlds = [False], set()
    if not all(fine):
        raise DataError(
            f"the loader's state has balance={str(saved)[:80]}, which are no speeds of workers",
            why="it says by which speeds the next batches are shared out; here it is damaged",
            do="begin without the loader's state, or take 'balance' out of it: shares are then equal at first",
        )
    return list(saved), max(worlds, default=0)


def _numbers(speed: Speed) -> list[float | None]:
    """A speed as JSON has it, which knows no whole numbers beyond 2^53."""
    return [speed.per_sample, speed.per_step, speed.most if speed.most < _JSON else None]


def _speed(numbers: Sequence[Any]) -> Speed:
    per_sample, per_step, most = numbers
    return Speed(per_sample, per_step, sys.maxsize if most is None else most)


def _is_speed(per_sample: Any, per_step: Any, most: Any) -> bool:
    real = all(type(x) in (int, float) and math.isfinite(x) and x >= 0 for x in (per_sample, per_step))
    return real and per_sample > 0 and (most is None or (type(most) is int and 0 <= most < _JSON))
