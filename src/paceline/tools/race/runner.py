"""The race itself: every contender's workers are started once, then take turns, so noise hits all alike.

Only one contender computes at any moment. A round gives each of them a turn of a few steps; every other round
goes backwards, so that no contender always runs after the same one. A contender that fails is out, with its
reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.environment import TRACE, TRACE_STEPS
from paceline.tools.race import score
from paceline.tools.race.contenders import Contender
from paceline.tools.race.network import RaceNetwork, single_placement
from paceline.tools.race.score import SINGLE, Target
from paceline.tools.race.workers import ContenderError, ContenderWorkers

START_S = 300.0  # a dozen processes import torch at once on two cores
STOP_S = 60.0
_FIRST_TURN_S = 600.0
_LEAST_TURN_S = 60.0
_SLOWEST_TIMES = 10

Watch = Callable[[Contender], None]  # called whenever something about a contender has changed


@dataclass(frozen=True, kw_only=True)
class RaceRules:
    """How a race is run: the same for every contender."""

    steps: int = 30  # that count, for each contender
    warmup: int = 3
    turn: int = 5  # steps at a time
    seconds: float = math.inf  # a contender has finished after the turn in which its counted steps exceed this
    target: Target | None = None
    threads: int = 1
    trace_steps: int = 0  # the last steps, of which a timeline is kept; 0: none
    timeout_s: float | None = None  # for a turn; None: ten times the slowest so far


def run(
    contenders: Sequence[Contender],
    rules: RaceRules,
    network: RaceNetwork,
    directory: Path,
    watch: Watch = lambda _: None,
) -> bool:
    """Run the race; what came of it is in the contenders. False: it was interrupted and is not complete."""
    race = _Race(contenders, rules, network, directory, watch)
    try:
        race.start()
        race.take_turns()
        return True
    except KeyboardInterrupt:
        for contender in contenders:
            if contender.state not in ("finished", "out"):
                contender.error = "interrupted"
        return False
    finally:
        race.end()


@dataclass
class _Race:
    contenders: Sequence[Contender]
    rules: RaceRules
    network: RaceNetwork
    directory: Path
    watch: Watch

    def start(self) -> None:
        """Start all workers at once: most of a start is importing, and nothing is measured yet."""
        for number, contender in enumerate(self.contenders):
            with self._out_if_it_fails(contender):
                self._start_workers(contender, number)
            self.watch(contender)
        for contender in self.contenders:
            if contender.workers is None:
                continue
            with self._out_if_it_fails(contender):
                if not contender.workers.wait(START_S):
                    raise ContenderError(
                        "the script ended before its first step: does its loop run over paceline's loader?"
                    )
                contender.state = "waiting"
                self.watch(contender)

    def take_turns(self) -> None:
        """Give every contender its turns, round after round, until none is left in the race."""
        for number in itertools.count():
            racing = [contender for contender in self.contenders if contender.is_racing]
            if not racing:
                return
            for contender in racing if number % 2 == 0 else reversed(racing):
                self._take_turn(contender)

    def end(self) -> None:
        """End all workers. A contender that has not finished is out."""
        for contender in self.contenders:
            if contender.workers is not None:
                contender.workers.kill()
            if contender.state not in ("finished", "out"):
                contender.state = "out"
                self.watch(contender)

    def _start_workers(self, contender: Contender, number: int) -> None:
        folder = self.directory / (contender.alias or contender.method).replace(":", "-").replace("/", "-")
        env = {
            "PACELINE_METHOD": "exact" if contender.method == SINGLE else contender.method,
            "PACELINE_EVENTS": str(folder),
            "OMP_NUM_THREADS": str(self.rules.threads),
            "PYTHONUNBUFFERED": "1",
        }
        if self.rules.trace_steps:
            env |= {TRACE: str(folder), TRACE_STEPS: str(self.rules.trace_steps)}
        if contender.knobs:
            env["PACELINE_SET"] = json.dumps(contender.knobs)
        placements = [single_placement()] if contender.method == SINGLE else self.network.placements(number)
        contender.workers = ContenderWorkers(folder, contender.command, placements, env)

    def _take_turn(self, contender: Contender) -> None:
        workers = contender.workers
        assert workers is not None
        with self._out_if_it_fails(contender):
            contender.state = "running"
            self.watch(contender)
            steps, counted = next_turn(contender.done, contender.counted, self.rules)
            began = time.monotonic()
            workers.go(steps)
            goes_on = workers.wait(self._turn_timeout_s(contender, steps))
            contender.step_s = (time.monotonic() - began) / steps
            workers.read()
            contender.done += steps
            contender.counted += counted
            contender.state = "waiting"
            if not goes_on:
                contender.state = "finished"  # the script had fewer steps in it than the race
                contender.counted = len(score.measured_steps(workers.events, self.rules.warmup))
            elif self._has_finished(contender, workers):
                workers.stop(STOP_S)
                contender.state = "finished"
            self.watch(contender)

    def _turn_timeout_s(self, contender: Contender, steps: int) -> float:
        if self.rules.timeout_s is not None:
            return self.rules.timeout_s
        if contender.step_s == 0:
            return _FIRST_TURN_S  # a slow link is no failure, and it is not known yet how slow it is
        slowest_s = max(other.step_s for other in self.contenders)
        return max(_LEAST_TURN_S, _SLOWEST_TIMES * slowest_s * steps)

    def _has_finished(self, contender: Contender, workers: ContenderWorkers) -> bool:
        rules = self.rules
        if contender.counted >= rules.steps:
            return True
        if rules.target is not None and score.reached_s(workers.events, rules.target) is not None:
            return True
        if rules.seconds == math.inf:
            return False  # so in most races: do not go through all events after every turn
        return sum(step.ms for step in score.measured_steps(workers.events, rules.warmup)) >= 1e3 * rules.seconds

    @contextlib.contextmanager
    def _out_if_it_fails(self, contender: Contender) -> Iterator[None]:
        try:
            yield
        except ContenderError as error:
            contender.error, contender.state = str(error), "out"
            if contender.workers is not None:
                contender.workers.kill()
            self.watch(contender)


def next_turn(done: int, counted: int, rules: RaceRules) -> tuple[int, int]:
    """(steps of the next turn, how many of them count): its first one never does, nor does the warm-up."""
    lost = max(1, rules.warmup - done)
    steps = min(max(rules.turn, lost + 1), lost + rules.steps - counted)
    return steps, steps - lost
