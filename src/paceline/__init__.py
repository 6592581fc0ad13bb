"""Data-parallel training for PyTorch: every published way to synchronise, behind two lines.

    model, optimizer, loader = paceline.prepare(model, optimizer, loader, method="exact")

The loop around it stays plain PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline._version import __version__
from paceline.errors import show_uncaught as _show_uncaught

if TYPE_CHECKING:
    from paceline.api import (
        advice,
        consensus,
        is_async,
        load,
        log,
        moment,
        no_sync,
        prepare,
        save,
        scheduled_steps,
        untimed,
        will_step,
    )
    from paceline.errors import (
        CheckpointError,
        DataError,
        MethodError,
        MismatchError,
        NonFiniteError,
        PacelineError,
        PeerError,
        PeerTimeoutError,
        UsageError,
    )
    from paceline.learners.learners import Learners
    from paceline.method import Method
    from paceline.registry import register
    from paceline.session.advice import Advice
    from paceline.session.collectives import (
        all_gather,
        barrier,
        broadcast,
        device,
        is_main,
        mean,
        print,
        rank,
        shutdown,
        world_size,
    )
    from paceline.session.retry import retry

__all__ = [
    "Advice",
    "CheckpointError",
    "DataError",
    "Learners",
    "Method",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PacelineError",
    "PeerError",
    "PeerTimeoutError",
    "UsageError",
    "__version__",
    "advice",
    "all_gather",
    "barrier",
    "broadcast",
    "consensus",
    "device",
    "is_async",
    "is_main",
    "load",
    "log",
    "mean",
    "moment",
    "no_sync",
    "prepare",
    "print",
    "rank",
    "register",
    "retry",
    "save",
    "scheduled_steps",
    "shutdown",
    "untimed",
    "will_step",
    "world_size",
]

_COLLECTIVES = (
    "all_gather",
    "barrier",
    "broadcast",
    "device",
    "is_main",
    "mean",
    "print",
    "rank",
    "shutdown",
    "world_size",
)
_HOME = {
    "Advice": "session.advice",
    "Learners": "learners.learners",
    "Method": "method",
    "register": "registry",
    "retry": "session.retry",
} | dict.fromkeys(_COLLECTIVES, "session.collectives")


_show_uncaught()


def __getattr__(name: str) -> Any:
    """Torch is imported when something needs it: `paceline --help` does not."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = _HOME.get(name, "errors" if name.endswith("Error") else "api")
    return getattr(importlib.import_module(f"paceline.{home}"), name)
