"""Short messages between workers, beside the data: who failed first and why, who left, who waits for what.

The board is a c10d store (served by the launcher, by torchrun's agent, or by worker 0). Nothing on it is trusted to
be more than text: messages are JSON. Nothing here is on the fast path of a step.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.errors import DeadlineError, MismatchError, PacelineError, PeerError, differ
from paceline.waiting import SLICE_S, EndedError

_KINDS = {cls.__name__: cls for cls in (DeadlineError, MismatchError)}
_GRACE_S = 2.0  # how long survivors wait for each other's word before they call somebody silent


class StoreLostError(PeerError):
    """Whoever serves the store is gone, and with it everything that workers could say to each other."""


class StoreBoard:
    """One worker's view of the board."""

    def __init__(self, store: Any, rank: int, world: int, deadline_s: float) -> None:
        self.store, self.rank, self.world, self.deadline_s = store, rank, world, deadline_s
        self._store = _Served(store)
        self.step = 0  # kept by the engine, for messages only
        self.where = ""  # the samples in hand, likewise
        self.counts: Callable[[], dict[str, int]] = dict  # how many operations this worker has begun on each lane
        self._agreed: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------ plain messages

    def read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def others(self, key: str) -> dict[int, Any]:
        """What the other workers wrote under key/<rank>, where they did."""
        found = {r: self.read(f"{key}/{r}") for r in range(self.world) if r != self.rank}
        return {r: value for r, value in found.items() if value is not None}

    # ------------------------------------------------------------------------------------------------ arrivals

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter that all workers share; what it says then."""
        return int(self._store.add(key, more))

    def first(self, key: str, text: str) -> None:
        """Written once: who comes later changes nothing."""
        self._store.compare_set(key, "", text)

    def seen(self, key: str, seconds: float) -> str | None:
        """What `first` wrote there, by whomever; None if nobody does within so many seconds."""
        end, pause = time.monotonic() + seconds, 0.0005
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(pause := min(2 * pause, 0.004))
        return str(self._store.get(key).decode())

    def forget(self, *keys: str) -> None:
        """Only what no worker will ask for again."""
        for key in keys:
            self._store.delete_key(key)

    # ------------------------------------------------------------------------------------------------ causes

    def post_cause(self, error: BaseException) -> None:
        """The first cause wins: later ones are consequences."""
        if isinstance(error, PeerError):
            what, why = error.what, error.why
        elif isinstance(error, PacelineError):
            what, why = f"worker {self.rank}: {error.what}", error.why
        else:
            what = f"worker {self.rank} failed in step {self.step}: {type(error).__name__}: {error}"
            frames = traceback.extract_tb(error.__traceback__)
            why = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
            why += f"; its batch was made of {self.where}" if self.where else ""
        worker = error.worker if isinstance(error, PeerError) else self.rank
        cause = {"worker": worker, "what": what, "why": why, "step": self.step, "kind": type(error).__name__}
        self._store.compare_set("cause", "", json.dumps(cause))

    def cause(self) -> PeerError | None:
        """The first one posted, by whomever."""
        if (found := self.read("cause")) is None:
            return None
        kind = _KINDS.get(found.get("kind"), PeerError)
        return kind(found["what"], why=found.get("why") or "", worker=found.get("worker"))

    def raise_cause(self) -> None:
        if cause := self.cause():
            raise cause

    # ------------------------------------------------------------------------------------------------ waiting

    def agree(self, key: str, what: str, text: str) -> None:
        """Post the text, wait for everyone's, and raise the same error everywhere if they differ."""
        number = self._agreed[key] = self._agreed.get(key, -1) + 1
        key = f"agree/{key}/{number}"
        self.write(f"{key}/{self.rank}", f"{what}\n{text}")
        texts = self.wait_for_all(key, f"{what} ({text})" if "\n" not in text else what)
        differ(what, [f"{what}\n{text}" if r == self.rank else texts[r] for r in range(self.world)])

    def wait_for_all(self, key: str, what: str) -> dict[int, Any]:
        began = time.monotonic()
        pause = 0.0005
        slow = False
        while len(posts := self.others(key)) < self.world - 1:
            if (waited := time.monotonic() - began) > SLICE_S:
                slow = True
                self.pulse(key, 0, what, waited)
            time.sleep(pause := min(2 * pause, 0.05))
        if slow:
            self.clear()
        return posts

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        """Called now and then by a blocked worker: is there still something to wait for?"""
        self.raise_cause()
        for r, left in self.others("left").items():
            if left["ops"].get(lane, 0) <= op and lane in left["ops"]:
                raise self._gave_up(_left_early(r, left, label))
        self.write(f"waits/{self.rank}", {"label": label, "lane": lane, "op": op, "ops": self.counts()})
        waits = self._waits()
        labels = {r: w["label"] for r, w in sorted(waits.items())}
        if waited_s > _GRACE_S and stuck(waits, self.world):
            time.sleep(SLICE_S)  # a worker may just have gone on: look twice
            self.raise_cause()
            if self._waits() == waits:
                raise self._gave_up(_deadlock(labels))
        if waited_s > self.deadline_s:
            silent = [r for r in range(self.world) if r not in labels]
            raise self._gave_up(
                DeadlineError(
                    f"worker {self.rank} waited {waited_s:.0f} s in {label}",
                    why="; ".join(f"worker {r} is in {text}" for r, text in labels.items() if r != self.rank)
                    + (
                        f"; workers {silent} are not waiting for anything: still computing, stopped or gone"
                        if silent
                        else ""
                    ),
                    do="look at the worker named, or raise deadline= if a step may really take that long",
                    worker=silent[0] if silent else None,
                )
            )

    def _waits(self) -> dict[int, Any]:
        return {r: w for r in range(self.world) if (w := self.read(f"waits/{r}")) is not None}

    def clear(self) -> None:
        """The wait is over: an old cry must not be taken for a new one.

        It is overwritten, never deleted: another worker may just have seen that the key is there, and is about to read.
        """
        self.write(f"waits/{self.rank}", None)

    def lost(self, label: str, error: Exception) -> PeerError:
        """A connection broke. Find out who is gone: those who live say so within the grace, unless the error knows."""
        known = [error.worker] if isinstance(error, EndedError) else []
        try:
            return self._find_lost(label, error, known)
        except StoreLostError as gone:
            return _silence(known, self.step, label, error) if known else gone

    def _find_lost(self, label: str, error: Exception, known: list[int]) -> PeerError:
        self.write(f"lost/{self.rank}", label)
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            if cause := self.cause():
                return cause
            if gone := self.others("left"):
                r, left = next(iter(gone.items()))
                return self._gave_up(_left_early(r, left, label))
            if known or len(self.others("lost")) == self.world - 1:
                break
            time.sleep(0.05)
        quiet = set(range(self.world)) - set(self.others("lost")) - {self.rank}
        silent = known or sorted(quiet - set(self._waits()) or quiet)  # who still waits for something lives
        return self._gave_up(_silence(silent, self.step, label, error))

    def _gave_up(self, error: PeerError) -> PeerError:
        self.post_cause(error)
        return error


class _Served:
    """The c10d store, whose errors say what it means that it does not answer."""

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


def stuck(waits: dict[int, Any], world: int) -> bool:
    """Can none of the waiting workers go on? One can if everybody has begun the operation it waits for: then it is
    the link that is slow. `waits` says for each blocked worker its lane and operation, and how many it has begun on
    each lane.
    """

    def served(mine: Any) -> bool:
        here = (mine["lane"], mine["op"])
        begun = all(w["ops"].get(mine["lane"], 0) > mine["op"] for w in waits.values())
        return begun and all(w["label"] == mine["label"] for w in waits.values() if (w["lane"], w["op"]) == here)

    return len(waits) == world and not any(served(mine) for mine in waits.values())


def _silence(silent: list[int], step: int, label: str, error: Exception) -> PeerError:
    who = f"worker {silent[0]} stopped answering" if silent else "the connection between workers broke"
    return PeerError(
        f"{who} in step {step} ({label})",
        why=str(error).splitlines()[0],
        do="look at that worker's output: killed (out of memory?), crashed, or its host is gone",
        worker=silent[0] if silent else None,
    )


def _left_early(worker: int, left: Any, label: str) -> PeerError:
    return PeerError(
        f"worker {worker} left after {left['steps']} steps, but the others wait for it in {label}",
        why="it ended (exit, return or an exception it caught) before the others did",
        do="let every worker run the same number of steps",
        worker=worker,
    )


def _deadlock(labels: dict[int, str]) -> MismatchError:
    texts = list(labels.values())
    usual = max(texts, key=texts.count)
    odd = next(r for r, text in labels.items() if text != usual)
    return MismatchError(
        f"worker {odd} is in {labels[odd]}, the others in {usual}",
        why="they wait for each other and none can go on",
        do="make every worker call the same operations in the same order (no branch on the rank around them)",
        worker=odd,
    )
