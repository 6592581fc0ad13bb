"""Who races, and what they run: checked before anything is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import MethodError, UsageError, nearest
from paceline.method import method
from paceline.race.course import Contender
from paceline.race.peers import PEERS
from paceline.race.score import SINGLE
from paceline.tasks import TASKS


def command(task: str, seed: int, extra: Sequence[str]) -> list[str]:
    """How a built-in task, or the user's own script, is started. The race ends it, not its --steps."""
    if task in TASKS:
        own = ["--steps", str(10**9), "--seed", str(seed)]
        return [sys.executable, "-m", f"paceline.tasks.{task}", *own, *extra]
    if not Path(task).is_file():
        raise UsageError(
            f"{task!r} is neither a task nor a script",
            do=f"{nearest(task, TASKS)}; or give the path of a .py file",
        )
    return [sys.executable, task, *extra]


def contenders(methods: str, knobs: Sequence[str], argv: Sequence[str]) -> list[Contender]:
    """Who races, checked before anything is started. One worker alone always does: speedup is over it."""
    names = [SINGLE, *(name for word in methods.split(",") if (name := word.strip()) and name != SINGLE)]
    if len(names) == 1:
        raise UsageError("--methods names nobody", do="name some: --methods floor,torch:ddp,exact")
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
    return [Contender(name, argv, chosen[name]) for name in names]


def _knobs(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`powersgd.rank=4` -> {"powersgd": {"rank": 4}}."""
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
