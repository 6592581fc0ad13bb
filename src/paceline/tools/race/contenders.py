"""The contenders of a race: methods and peers, and the command they all run. Checked before anything is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import MethodError, UsageError, nearest
from paceline.integrations.peers import PEERS
from paceline.method import method
from paceline.telemetry import tape
from paceline.telemetry.tape import Trace
from paceline.tools.launch.script import module_command, script_command
from paceline.tools.race.score import SINGLE, ContenderRecord
from paceline.tools.race.workers import ContenderWorkers
from paceline.tools.tasks import TASKS

State = Literal["starting", "waiting", "running", "finished", "out"]


@dataclass
class Contender:
    """One method or peer in a race, and how far it has come."""

    method: str
    command: Sequence[str]
    knobs: dict[str, Any] = field(default_factory=dict)
    workers: ContenderWorkers | None = None
    state: State = "starting"
    done: int = 0  # steps, all of them
    counted: int = 0  # steps that are measured
    step_s: float = 0.0  # wall seconds for a step of its last turn, evaluation included
    alias: str = ""  # where a method runs more than once, with different knobs
    error: str | None = None

    @property
    def is_racing(self) -> bool:
        return self.state in ("waiting", "running")

    def record(self, world_size: int) -> ContenderRecord:
        """What has been measured of it so far. `world_size` is that of the contenders with several workers."""
        return ContenderRecord(
            self.method,
            workers=1 if self.method == SINGLE else world_size,
            events=self.workers.events if self.workers else [],
            counts_payload=self.method not in PEERS,
            error=self.error,
        )

    def traces(self) -> list[Trace]:
        """The timelines its workers left behind. Workers that were killed leave none."""
        return tape.read(self.workers.directory) if self.workers else []


def task_command(task: str, arguments: Sequence[str], *, seed: int = 0, module: bool = False) -> list[str]:
    """The command of a built-in task, or of the user's own script or module. The race ends it, not its --steps."""
    if module:
        return [*module_command(task), *arguments]
    if task in TASKS:
        own = ["--steps", str(10**9), "--seed", str(seed)]
        return [sys.executable, "-m", f"paceline.tools.tasks.{task}", *own, *arguments]
    if not Path(task).is_file():
        raise UsageError(
            f"{task!r} is neither a task nor a script",
            do=f"{nearest(task, TASKS)}; or give the path of a .py file, or -m and the name of a module",
        )
    return [*script_command(task), *arguments]


def parse_contenders(methods: str, knobs: Sequence[str], command: Sequence[str]) -> list[Contender]:
    """The contenders that --methods and --set name. One worker alone is always among them: speedup is over it."""
    names = [SINGLE, *(name for word in methods.split(",") if (name := word.strip()) and name != SINGLE)]
    if len(names) == 1:
        raise UsageError("--methods names no contender", do="name some: --methods floor,torch:ddp,exact")
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--methods names {double} twice", do="name every contender once")
    chosen = _knobs(knobs, names)
    for name in names[1:]:
        if name in PEERS:
            if chosen[name]:
                raise MethodError(f"{name} takes no knobs", why=f"--set gives it {sorted(chosen[name])[0]!r}")
        elif name.startswith("torch:"):
            raise MethodError(f"there is no peer {name!r}", do=nearest(name, PEERS))
        else:
            method(name, **chosen[name])  # raises here rather than in every worker
    return [Contender(name, command, chosen[name]) for name in names]


def _knobs(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The knobs of each contender: `powersgd.rank=4` becomes {"powersgd": {"rank": 4}}."""
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        key, equals, text = setting.partition("=")
        name, dot, knob = key.partition(".")
        if not (equals and dot and knob) or name not in chosen:
            raise UsageError(
                f"--set {setting} does not say whose knob it is",
                why=f"contenders are {', '.join(names)}",
                do="write it as METHOD.KNOB=VALUE, with a METHOD that races: --set powersgd.rank=4",
            )
        try:
            chosen[name][knob] = json.loads(text)
        except ValueError:
            chosen[name][knob] = text  # a word: --set half.dtype=bf16
    return chosen
