"""Short messages between workers, beside the data: which worker failed first and why, which left, which wait for what.

The board is a c10d store (served by the launcher, by torchrun's agent, or by worker 0). Messages are JSON, so that
reading one can never run code. Nothing here is on the fast path of a step.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.comm.cause import Cause
from paceline.comm.waiting import SLICE_S, EndedError
from paceline.errors import MismatchError, PeerError, PeerTimeoutError, differ, plain, users_line

_GRACE_S = 2.0  # how long workers wait for each other's messages before they report a worker as silent


class StoreLostError(PeerError):
    """The process that serves the store is gone, so workers cannot exchange messages any more."""


class StoreBoard:
    """One worker's view of the board."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self._store = _Served(store)
        self.step: int | None = None  # the step that is under way; for error messages only
        self.where = ""  # the samples of the current batch, for error messages only
        self.counts: Callable[[], dict[str, int]] = dict  # how many operations this worker has begun on each lane
        self._agreed: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------ plain messages

    def read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def others(self, key: str) -> dict[int, Any]:
        """What the other workers have written under key/<rank> so far, by rank."""
        found = {r: self.read(f"{key}/{r}") for r in range(self.world_size) if r != self.rank}
        return {r: value for r, value in found.items() if value is not None}

    # ------------------------------------------------------------------------------------------------ arrivals

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter that all workers share, and return its new value."""
        return int(self._store.add(key, more))

    def first(self, key: str, text: str) -> None:
        """Write a text unless a worker has written one under this key already."""
        self._store.compare_set(key, "", text)

    def seen(self, key: str, seconds: float) -> str | None:
        """The text that a worker wrote under this key with `first`; None if there is none within so many seconds."""
        end, pause = time.monotonic() + seconds, 0.0005
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(pause := min(2 * pause, 0.004))
        return str(self._store.get(key).decode())

    def forget(self, *keys: str) -> None:
        """Delete keys that no worker will read again."""
        for key in keys:
            self._store.delete_key(key)

    # ------------------------------------------------------------------------------------------------ causes

    def post_cause(self, error: BaseException) -> None:
        """Post the cause of a failure, unless one is posted already: later ones are consequences of the first."""
        cause = Cause.of(error, rank=self.rank, step=self.step, batch=self.where)
        self._store.compare_set("cause", "", cause.encode())
        if isinstance(error, PeerError):
            error.posted = True

    def cause(self) -> PeerError | None:
        """The first cause that any worker posted, or None."""
        if not self._store.check(["cause"]):
            return None
        return Cause.decode(self._store.get("cause").decode(errors="replace")).error()

    @property
    def in_step(self) -> str:
        """The step that is under way, as the end of a sentence; empty before the first one."""
        return "" if self.step is None else f" in step {self.step}"

    def raise_cause(self) -> None:
        if cause := self.cause():
            raise cause

    # ------------------------------------------------------------------------------------------------ waiting

    def agree(self, key: str, what: str, text: str) -> None:
        """Post the text, wait for all workers' texts, and raise the same error on every worker if they differ."""
        number = self._agreed[key] = self._agreed.get(key, -1) + 1
        key = f"agree/{key}/{number}"
        self.write(f"{key}/{self.rank}", f"{what}\n{text}")
        texts = self.wait_for_all(key, f"{what} ({text})" if "\n" not in text else what)
        differ(what, [f"{what}\n{text}" if r == self.rank else texts[r] for r in range(self.world_size)])

    def wait_for_all(self, key: str, what: str) -> dict[int, Any]:
        """What the other workers wrote under key/<rank>, once all have; raises if that cannot happen any more."""
        began = time.monotonic()
        pause = 0.0005
        slow = False
        while len(posts := self.others(key)) < self.world_size - 1:
            if (waited := time.monotonic() - began) > SLICE_S:
                slow = True
                self.pulse(key, 0, what, waited)
            time.sleep(pause := min(2 * pause, 0.05))
        if slow:
            self.clear()
        return posts

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        """Called by a blocked worker at intervals: raise if what it waits for can no longer happen."""
        self.raise_cause()
        for r, left in self.others("left").items():
            if left["ops"].get(lane, 0) <= op and lane in left["ops"]:
                raise self._gave_up(_left_early(r, left, _place(label)))
        place = _place(label)
        wait = {"label": label, "place": place, "lane": lane, "op": op, "ops": self.counts()}
        self.write(f"waits/{self.rank}", wait)
        waits = self._waits()
        places = {r: plain(str(w["place"])) for r, w in sorted(waits.items())}
        if len(set(places.values())) == 1:  # one line of the program, which does different things
            places = {r: f"in {plain(str(w['label']))}" for r, w in sorted(waits.items())}
        if waited_s > _GRACE_S and stuck(waits, self.world_size):
            time.sleep(SLICE_S)  # a worker may just have continued, so check twice
            self.raise_cause()
            if self._waits() == waits:
                raise self._gave_up(_deadlock(places))
        if waited_s > self.timeout_s:
            silent = [r for r in range(self.world_size) if r not in places]
            raise self._gave_up(
                PeerTimeoutError(
                    f"worker {self.rank} waited {waited_s:.0f} s {place}",
                    why="; ".join(
                        [f"worker {r} is {text}" for r, text in places.items() if r != self.rank]
                        + ([f"workers {silent} are not waiting: they compute, are stopped or gone"] if silent else [])
                    ),
                    do="look at the worker named, or raise timeout= if a step may really take that long",
                    worker=silent[0] if silent else None,
                )
            )

    def _waits(self) -> dict[int, Any]:
        return {r: w for r in range(self.world_size) if (w := self.read(f"waits/{r}")) is not None}

    def clear(self) -> None:
        """Withdraw the message that this worker waits, so that it is not taken for a new one.

        The key is overwritten, never deleted: another worker may have seen that it exists and be about to read it.
        """
        self.write(f"waits/{self.rank}", None)

    def lost(self, label: str, error: Exception) -> PeerError:
        """The error to raise after a connection broke, naming the worker that is gone.

        Each surviving worker posts a message, so a worker without one after the grace period is gone, unless the
        error itself names it.
        """
        known = [error.worker] if isinstance(error, EndedError) else []
        try:
            return self._find_lost(label, error, known)
        except StoreLostError as gone:
            return _silence(known, self.in_step, _place(label), error) if known else gone

    def _find_lost(self, label: str, error: Exception, known: list[int]) -> PeerError:
        self.write(f"lost/{self.rank}", label)
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            if cause := self.cause():
                return cause
            if gone := self.others("left"):
                r, left = next(iter(gone.items()))
                return self._gave_up(_left_early(r, left, _place(label)))
            if known or len(self.others("lost")) == self.world_size - 1:
                break
            time.sleep(0.05)
        quiet = set(range(self.world_size)) - set(self.others("lost")) - {self.rank}
        silent = known or sorted(quiet - set(self._waits()) or quiet)  # a worker that waits for something is alive
        return self._gave_up(_silence(silent, self.in_step, _place(label), error))

    def _gave_up(self, error: PeerError) -> PeerError:
        self.post_cause(error)
        return error


class _Served:
    """A c10d store whose errors become StoreLostError, which says what to do."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def asked(*args: Any) -> Any:
            try:
                return call(*args)
            except RuntimeError as error:
                raise StoreLostError(
                    "the store does not answer any more",
                    why=str(error).splitlines()[0],
                    do="look at the output of the launcher, or of worker 0 if there is none: one of them serves it",
                ) from None

        return asked


def stuck(waits: dict[int, Any], world_size: int) -> bool:
    """Whether all workers wait and none of them can continue.

    A worker can continue if all workers have begun the operation it waits for: then only the link is slow. `waits` has
    for each blocked worker its lane, its operation and how many operations it has begun on each lane.
    """

    def served(mine: Any) -> bool:
        here = (mine["lane"], mine["op"])
        begun = all(w["ops"].get(mine["lane"], 0) > mine["op"] for w in waits.values())
        return begun and all(w["label"] == mine["label"] for w in waits.values() if (w["lane"], w["op"]) == here)

    return len(waits) == world_size and not any(served(mine) for mine in waits.values())


def _silence(silent: list[int], in_step: str, place: str, error: Exception) -> PeerError:
    who = f"worker {silent[0]} stopped answering" if silent else "the connection between workers broke"
    return PeerError(
        f"{who}{in_step}; it is waited for {place}",
        why=str(error).splitlines()[0],
        do="look at that worker's output: killed (out of memory?), crashed, or its host is gone",
        worker=silent[0] if silent else None,
    )


def _left_early(worker: int, left: Any, place: str) -> PeerError:
    when = "before its first step" if left["steps"] is None else f"after {left['steps']} steps"
    return PeerError(
        f"worker {worker} left {when}, but the others wait for it {place}",
        why="it ended (exit, return or an exception it caught) before the others did",
        do="let every worker run the same number of steps",
        worker=worker,
    )


def _place(label: str) -> str:
    """Where in the user's program this thread waits; where it cannot be seen, in which operation."""
    line = users_line(reversed(list(traceback.walk_stack(sys._getframe()))))
    return f"at {line}" if line else f"in {label}"


def _deadlock(places: dict[int, str]) -> MismatchError:
    texts = list(places.values())
    usual = max(texts, key=texts.count)
    odd = next(r for r, text in places.items() if text != usual)
    return MismatchError(
        f"worker {odd} is {places[odd]}, the others {usual}",
        why="they wait for each other and none can go on",
        do="make every worker call the same operations in the same order (no branch on the rank around them)",
        worker=odd,
    )
