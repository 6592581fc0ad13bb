"""Hooks that stay with the user's own module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


class LeftBehind:
    """A hook on the user's module that `torch.save` and `copy.deepcopy` leave behind.

    A function inside a function cannot be saved, and a copy that took it along would call an engine that is not its
    own. So a copy has a hook that does nothing. In a file it is one that every Python knows, whether or not Paceline
    is installed where the file is read: `sys.audit` with a name that means nothing to anyone.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> LeftBehind:
        return LeftBehind(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "a hook that was left behind")


def _nothing(*args: Any) -> None:
    return None
