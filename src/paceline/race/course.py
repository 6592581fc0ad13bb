"""The race itself: every contender's workers are started once, then take turns, so noise hits all alike.

Only one group computes at any moment. A round gives everyone a turn of a few steps; every other round goes
backwards, so that nobody always runs after the same neighbour. A contender that fails is out, with its
reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.environment import TRACE, TRACE_STEPS
from paceline.race import score
from paceline.race.group import ContenderError, Group
from paceline.race.network import Network, alone
from paceline.race.peers import PEERS
from paceline.race.score import SINGLE, Entry, Target
from paceline.trace import tape
from paceline.trace.tape import Trace

START_S = 300.0  # a dozen processes import torch at once on two cores
STOP_S = 60.0
_FIRST_TURN_S = 600.0
_LEAST_TURN_S = 60.0
_SLOWEST_TIMES = 10

State = Literal["starting", "waiting", "running", "finished", "out"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How the race is run: the same for every contender."""

    steps: int = 30  # that count, for each contender
    warmup: int = 3
    turn: int = 5  # steps at a time
    seconds: float = math.inf  # of steps that count; after the turn in which they are over, that is enough
    target: Target | None = None
    threads: int = 1
    trace_steps: int = 0  # the last ones, of which a timeline is kept; 0: none
    deadline_s: float | None = None  # for a turn; None: ten times the slowest so far


@dataclass
class Contender:
    """One method or peer, and how far it has come."""

    method: str
    command: Sequence[str]
    knobs: dict[str, Any] = field(default_factory=dict)
    group: Group | None = None
    state: State = "starting"
    done: int = 0  # steps, all of them
    counted: int = 0  # steps that are measured
    step_s: float = 0.0  # wall seconds for a step of its last turn, evaluation included
    alias: str = ""  # where a method runs more than once, with different knobs
    error: str | None = None

    @property
    def racing(self) -> bool:
        return self.state in ("waiting", "running")

    def entry(self, workers: int) -> Entry:
        return Entry(
            self.method,
            workers=1 if self.method == SINGLE else workers,
            events=self.group.events if self.group else [],
            counted=self.method not in PEERS,
            error=self.error,
        )

    def traces(self) -> list[Trace]:
        """The timelines its workers left behind; of one that was ended there is none."""
        return tape.read(self.group.directory) if self.group else []


Watch = Callable[[Contender], None]


def run(
    contenders: Sequence[Contender],
    rules: Rules,
    network: Network,
    directory: Path,
    watch: Watch = lambda _: None,
) -> bool:
    """Run the race; what came of it is in the contenders. False: it was interrupted and is not complete."""
    with _ended(contenders, watch):
        try:
            _start(contenders, rules, network, directory, watch)
            for number in itertools.count():
                racing = [c for c in contenders if c.racing]
                if not racing:
                    return True
                for contender in racing if number % 2 == 0 else reversed(racing):
                    _take_turn(contender, contenders, rules, watch)
        except KeyboardInterrupt:
            for contender in contenders:
                if contender.state not in ("finished", "out"):
                    contender.error = "interrupted"
            return False
    return True


@contextlib.contextmanager
def _ended(contenders: Sequence[Contender], watch: Watch) -> Iterator[None]:
    try:
        yield
    finally:
        for contender in contenders:
            if contender.group is not None:
                contender.group.end()
            if contender.state not in ("finished", "out"):
                contender.state = "out"
                watch(contender)


def _start(contenders: Sequence[Contender], rules: Rules, network: Network, directory: Path, watch: Watch) -> None:
    """All at once: most of a start is importing, and nothing is measured yet."""
    for number, contender in enumerate(contenders):
        folder = directory / (contender.alias or contender.method).replace(":", "-").replace("/", "-")
        env = {
            "PACELINE_METHOD": "exact" if contender.method == SINGLE else contender.method,
            "PACELINE_EVENTS": str(folder),
            "OMP_NUM_THREADS": str(rules.threads),
            "PYTHONUNBUFFERED": "1",
        }
        if rules.trace_steps:
            env |= {TRACE: str(folder), TRACE_STEPS: str(rules.trace_steps)}
        if contender.knobs:
            env["PACELINE_SET"] = json.dumps(contender.knobs)
        places = alone() if contender.method == SINGLE else network.places(number)
        with _out_if_it_fails(contender, watch):
            contender.group = Group(folder, contender.command, places, env)
        watch(contender)
    for contender in contenders:
        if contender.group is None:
            continue
        with _out_if_it_fails(contender, watch):
            if not contender.group.wait(START_S):
                raise ContenderError(
                    "the script ended before its first step: does its loop run over paceline's loader?"
                )
            contender.state = "waiting"
            watch(contender)


def _take_turn(contender: Contender, contenders: Sequence[Contender], rules: Rules, watch: Watch) -> None:
    group = contender.group
    assert group is not None
    with _out_if_it_fails(contender, watch):
        contender.state = "running"
        watch(contender)
        steps, counted = next_turn(contender.done, contender.counted, rules)
        began = time.monotonic()
        group.go(steps)
        goes_on = group.wait(_deadline(contender, contenders, steps, rules))
        contender.step_s = (time.monotonic() - began) / steps
        group.read()
        contender.done, contender.counted = contender.done + steps, contender.counted + counted
        contender.state = "waiting"
        if not goes_on:
            contender.state = "finished"  # the script had fewer steps in it than the race
            contender.counted = len(score.laps(group.events, rules.warmup))
        elif contender.counted >= rules.steps or _is_long(group, rules) or _reached(group, rules.target):
            group.stop(STOP_S)
            contender.state = "finished"
        watch(contender)


def next_turn(done: int, counted: int, rules: Rules) -> tuple[int, int]:
    """(steps of the next turn, how many of them count): its first one never does, nor does the warm-up."""
    lost = max(1, rules.warmup - done)
    steps = min(max(rules.turn, lost + 1), lost + rules.steps - counted)
    return steps, steps - lost


def _deadline(contender: Contender, contenders: Sequence[Contender], steps: int, rules: Rules) -> float:
    if rules.deadline_s is not None:
        return rules.deadline_s
    if contender.step_s == 0:
        return _FIRST_TURN_S  # a slow link is no failure, and nobody knows yet how slow it is
    return max(_LEAST_TURN_S, _SLOWEST_TIMES * max(c.step_s for c in contenders) * steps)


def _is_long(group: Group, rules: Rules) -> bool:
    if rules.seconds == math.inf:
        return False  # most races: do not go through all events after every turn
    return sum(lap.ms for lap in score.laps(group.events, rules.warmup)) >= 1e3 * rules.seconds


def _reached(group: Group, target: Target | None) -> bool:
    return target is not None and score.reached_s(group.events, target) is not None


@contextlib.contextmanager
def _out_if_it_fails(contender: Contender, watch: Watch) -> Iterator[None]:
    try:
        yield
    except ContenderError as error:
        contender.error, contender.state = str(error), "out"
        if contender.group is not None:
            contender.group.end()
        watch(contender)
