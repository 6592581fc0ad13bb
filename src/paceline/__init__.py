"""Data-parallel training for PyTorch: every published way to synchronise, behind two lines.

    model, optimizer, loader = paceline.prepare(model, optimizer, loader, method="exact")

The loop around it stays plain PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.api import (
        agreed,
        hold,
        load,
        log,
        mean,
        moment,
        own_pace,
        prepare,
        rank,
        save,
        stepping,
        untimed,
        world,
    )
    from paceline.errors import (
        CheckpointError,
        DataError,
        DeadlineError,
        MethodError,
        MismatchError,
        NonFiniteError,
        PacelineError,
        PeerError,
        UsageError,
    )
    from paceline.learners import Learners
    from paceline.method import Method
    from paceline.registry import register

__all__ = [
    "CheckpointError",
    "DataError",
    "DeadlineError",
    "Learners",
    "Method",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PacelineError",
    "PeerError",
    "UsageError",
    "agreed",
    "hold",
    "load",
    "log",
    "mean",
    "moment",
    "own_pace",
    "prepare",
    "rank",
    "register",
    "save",
    "stepping",
    "untimed",
    "world",
]

_HOME = {"Learners": "learners", "Method": "method", "register": "registry"}


def __getattr__(name: str) -> Any:
    """Torch is imported when something needs it: `paceline --help` does not."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = _HOME.get(name, "errors" if name.endswith("Error") else "api")
    return getattr(importlib.import_module(f"paceline.{home}"), name)
