"""Short messages between workers, beside the data: which worker failed first and why, which left, which wait for what.

The board is the job's store (store.py). Messages are JSON, so that reading one can never run code. Nothing here is on
the fast path of a step.

[Note: news] Every worker has one request under way that the store answers when a cause is posted, or when the
connection of a worker ends that has not left ([Note: wills] in store_server.py). So all hear of a death within
milliseconds of it, whatever they wait for and whichever host it was on, and need not ask.

[Note: patience] How long is too long for a wait? A worker that is waited for may evaluate, save or compile for minutes,
and from outside that looks as if it hangs. As long as its process computes, reads or writes, only `timeout=` ends the
wait. One that is dead, or whose host is cut off, is known from the store's connections, in milliseconds or some 8 s.
One that is stopped (SIGSTOP), or that does nothing at all, is found in /proc by the workers of its host. It is given
eight times the longest wait or step that this worker has seen, and 10 s at least, or 60 s where it is not stopped: it
may sleep, or wait for a download.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from paceline.comm.cause import CAUSE, SAID, Cause
from paceline.comm.frames import split
from paceline.comm.liveness import Idleness, is_stopped
from paceline.comm.store import Answer, Store, StoreLostError
from paceline.comm.waiting import SLICE_S, EndedError
from paceline.errors import MismatchError, PeerError, PeerTimeoutError, differ, plain, users_line

DEAD = "dead"  # the key of the rank whose connection has ended first
_GRACE_S = 2.0  # how long workers wait for each other's messages before they report a worker as silent
_LAUNCHER_S = 1.0  # how long the launcher is given to say how a worker died
_LOOK_S = 0.5  # how often a worker that waits looks what the others wait for
_PATIENT_S = 5.0  # after this a wait is told of
_STOPPED_S, _IDLE_S, _TIMES = 10.0, 60.0, 8  # [Note: patience]
_NEWS_S = 86400.0  # after which the request for news is made anew
_SPARE_S = 60.0
_LONG = 256  # characters of a text that is compared by its hash first
_LONGEST = 4 << 20  # characters of all workers' texts together


class StoreBoard:
    """One worker's view of the board."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self.where = ""  # the samples of the current batch, for error messages only
        self.counts: Callable[[], dict[str, int]] = dict  # how many operations this worker has begun on each lane
        self.processes: Mapping[int, int] = {}  # the process numbers of the workers on this host, by rank
        self.begun: dict[str, int] = {}  # the same of what travels on no lane of the group: pushes to servers
        self._agreed: dict[str, int] = {}
        self._news: Answer | None = None
        self._step: int | None = None
        self._step_began, self._looked = time.monotonic(), -_LOOK_S
        self._longest = 0.0  # seconds of a step, or of a wait that has ended well
        self._waiting_since: float | None = None
        self._told: set[str] = set()
        self._idleness = Idleness()

    @property
    def step(self) -> int | None:
        """The step that is under way, for error messages, and to know how long steps take."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        now = time.monotonic()
        if step is not None and self._step is not None and step > self._step:
            self._longest = max(self._longest, (now - self._step_began) / (step - self._step))
        self._step, self._step_began = step, now

    # ------------------------------------------------------------------------------------------------ plain messages

    def read(self, key: str) -> Any:
        return _read(self.store.get(key))

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def others(self, key: str) -> dict[int, Any]:
        """What the other workers have written under key/<rank> so far, by rank."""
        found = self.store.collected(key, self.world_size)
        return {r: value for r, text in found.items() if r != self.rank and (value := _read(text)) is not None}

    # ------------------------------------------------------------------------------------------------ arrivals

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter that all workers share, and return its new value."""
        return self.store.add(key, more)

    def first(self, key: str, text: str) -> None:
        """Write a text unless a worker has written one under this key already."""
        self.store.compare_set(key, "", text)

    def seen(self, key: str, seconds: float) -> str | None:
        """The text that a worker wrote under this key with `first`; None if there is none within so many seconds."""
        found = self.store.get(key, seconds)
        return None if found is None else found.decode()

    def forget(self, *keys: str) -> None:
        """Delete keys that no worker will read again."""
        self.store.delete(*keys)

    # ------------------------------------------------------------------------------------------------ causes

    def post_cause(self, error: BaseException) -> None:
        """Post the cause of a failure, unless one is posted already: later ones are consequences of the first."""
        cause = Cause.of(error, rank=self.rank, step=self.step, batch=self.where)
        self.store.compare_set(CAUSE, "", cause.encode())
        if isinstance(error, PeerError):
            error.posted = True

    def cause(self) -> PeerError | None:
        """The first cause that any worker posted, or that a worker is gone; None if all is well."""
        news = self.news()
        if not news.has_come:
            return None
        found = news.fields()
        if found is None:  # nothing for a whole day
            self._news = None
            return None
        key, value = found
        if not key.endswith(DEAD.encode()):
            return Cause.decode(value.decode(errors="replace")).error()
        return self._death(int(value) if value.isdigit() else None)

    def posted_cause(self, seconds: float) -> PeerError | None:
        """The cause that somebody posts within so many seconds, or has posted."""
        found = self.store.get(CAUSE, seconds)
        return None if found is None else Cause.decode(found.decode(errors="replace")).error()

    def news(self) -> Answer:
        """Comes when there is a cause: [Note: news]."""
        if self._news is None:
            self._news = self.store.connection.alarm = self.store.when_any([CAUSE, DEAD], _NEWS_S)
            self.store.check(CAUSE)  # the answers come in order: after this one, news that were there have come
        return self._news

    def _death(self, worker: int | None) -> PeerError:
        """The error for a worker whose process is gone. The launcher, if there is one, soon knows how that came."""
        launched = self.store.connection.told.get("served_by") == "launcher"
        if (posted := self.posted_cause(_LAUNCHER_S if launched else 0.0)) is not None:
            return posted
        gone = RuntimeError("its process ended without a word, or its host is cut off")
        return self._gave_up(_silence([] if worker is None else [worker], self.in_step, _place("an operation"), gone))

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
        full = f"{what}\n{text}"
        label = f"{what} ({text})" if "\n" not in text else what
        short = full if len(full) <= _LONG else hashlib.sha256(full.encode()).hexdigest()
        texts = self._exchange(f"agree/{key}", label, short)
        if short is not full and len(set(texts)) > 1:
            texts = self._exchange(f"agree/{key}", label, full[: _LONGEST // self.world_size])
        differ(what, texts)

    def _exchange(self, key: str, what: str, text: str) -> list[str]:
        """Every worker's text, by rank."""
        number = self._agreed[key] = self._agreed.get(key, -1) + 1
        self.write(f"{key}/{number}/{self.rank}", text)
        texts = self.wait_for_all(f"{key}/{number}", what)
        if number:  # all have written the next one, so all have read this one
            self.store.delete(f"{key}/{number - 1}/{self.rank}")
        return [text if r == self.rank else str(texts[r]) for r in range(self.world_size)]

    def wait_for_all(self, key: str, what: str) -> dict[int, Any]:
        """What the other workers wrote under key/<rank>, once all have, this one included; raises if that cannot
        happen any more.
        """
        began = time.monotonic()
        answer = self.store.collect(key, self.world_size, self.timeout_s + _SPARE_S)
        while not answer.has_come:
            self.store.connection.wait_for(answer, seconds=SLICE_S)
            if not answer.has_come:
                self.pulse(key, 0, what, time.monotonic() - began)
        self.clear()
        found = answer.fields()
        if found is None:
            raise StoreLostError(f"not all workers have written {what}", why=f"within {self.timeout_s + _SPARE_S:g} s")
        return {r: _read(text) for r, text in enumerate(split(found[0])) if r != self.rank}

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        """Called by a blocked worker at intervals: raise if what it waits for can no longer happen."""
        if waited_s < _LOOK_S:  # another worker's failure is no reason to give up what is about to end well
            return
        self.raise_cause()
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        self._waiting_since = self._waiting_since or self._looked - waited_s
        for r, left in self.others("left").items():
            if left["ops"].get(lane, 0) <= op and lane in left["ops"]:
                raise self._gave_up(_left_early(r, left, _place(label)))
        place = _place(label)
        wait = {"label": label, "place": place, "lane": lane, "op": op, "ops": {**self.counts(), **self.begun}}
        self.write(f"waits/{self.rank}", wait)
        waits = self._waits()
        places = {r: plain(str(w["place"])) for r, w in sorted(waits.items())}
        if len(set(places.values())) == 1:  # one line of the program, which does different things
            places = {r: f"in {plain(str(w['label']))}" for r, w in sorted(waits.items())}
        if waited_s > _GRACE_S and stuck(waits, self.world_size):
            time.sleep(_LOOK_S)  # a worker may just have continued, so check twice
            self.raise_cause()
            if self._waits() == waits:
                raise self._gave_up(_deadlock(places))
        silent = [r for r in range(self.world_size) if r not in places]
        stopped = [r for r in silent if r in self.processes and is_stopped(self.processes[r])]
        if waited_s > _PATIENT_S and silent:
            self._tell_once(place, silent, stopped)
        self._raise_for_idle(silent, stopped, place)
        if waited_s > (self._patience(_STOPPED_S) if stopped else self.timeout_s):
            raise self._gave_up(self._too_long(waited_s, place, places, silent, stopped))

    def _patience(self, least_s: float) -> float:
        return min(self.timeout_s, max(least_s, _TIMES * self._longest))

    def _raise_for_idle(self, silent: list[int], stopped: list[int], place: str) -> None:
        """Give up a worker that is waited for and does nothing: [Note: patience]."""
        for r in silent:
            pid = self.processes.get(r)
            if pid is None or r in stopped or (idle_s := self._idleness.seconds(pid)) < self._patience(_IDLE_S):
                continue
            raise self._gave_up(
                PeerError(
                    f"worker {r} does nothing{self.in_step}; it is waited for {place}",
                    why=f"its process ({pid}) is there, and has neither computed nor read or written anything for "
                    f"{idle_s:.0f} s",
                    do=f"see where it hangs: py-spy dump --pid {pid} (a lock, a file system that does not answer, a "
                    "request without a timeout)",
                    worker=r,
                )
            )

    def _too_long(
        self, waited_s: float, place: str, places: Mapping[int, str], silent: list[int], stopped: list[int]
    ) -> PeerError:
        """The error for a wait that has taken too long: [Note: patience]."""
        if stopped:
            return PeerError(
                f"worker {stopped[0]} is stopped{self.in_step}; it is waited for {place}",
                why=f"its process ({self.processes[stopped[0]]}) was sent SIGSTOP or SIGTSTP, and has not gone on for "
                f"{waited_s:.0f} s",
                do="do not stop single workers; SIGCONT lets one go on, but this job has given it up",
                worker=stopped[0],
            )
        others = [f"worker {r} is {text}" for r, text in places.items() if r != self.rank]
        quiet = [f"workers {silent} are not waiting: they compute, are stopped or gone"] if silent else []
        return PeerTimeoutError(
            f"worker {self.rank} waited {waited_s:.0f} s {place}",
            why="; ".join(others + quiet),
            do="look at the worker named, or raise timeout= if a step may really take that long",
            worker=silent[0] if silent else None,
        )

    def _tell_once(self, place: str, silent: list[int], stopped: list[int]) -> None:
        """Say who is waited for, once for each line of the program: one worker says it for all."""
        who = "worker" if len(silent) == 1 else "workers"
        text = f"worker {self.rank} waits {place} for {who} {', '.join(map(str, silent))}"
        text += f" ({'stopped: SIGSTOP' if stopped else 'alive, and not in an operation'}; timeout={self.timeout_s:g})"
        if place in self._told:
            return
        self._told.add(place)
        if self.store.compare_set(f"{SAID}/{place[:200]}", "", str(self.rank)) != str(self.rank).encode():
            return
        if self.store.connection.told.get("served_by") == "launcher":
            self.store.root.set(SAID, text)
        else:
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    def _waits(self) -> dict[int, Any]:
        found = self.store.collected("waits", self.world_size)
        return {r: wait for r, text in found.items() if (wait := _read(text)) is not None}

    def clear(self) -> None:
        """Withdraw the message that this worker waits, so that it is not taken for a new one.

        A wait that nobody was told of costs nothing.
        """
        if self._waiting_since is not None:
            self._longest = max(self._longest, time.monotonic() - self._waiting_since)
            self._waiting_since = None
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
            if len(self.others("lost")) == self.world_size - 1:
                break
            self.store.connection.wait_for(self.news(), seconds=0.05)
        quiet = set(range(self.world_size)) - set(self.others("lost")) - {self.rank}
        silent = known or sorted(quiet - set(self._waits()) or quiet)  # a worker that waits for something is alive
        return self._gave_up(_silence(silent, self.in_step, _place(label), error))

    def _gave_up(self, error: PeerError) -> PeerError:
        self.post_cause(error)
        return error


def _read(text: bytes | None) -> Any:
    return None if text is None else json.loads(text)


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
