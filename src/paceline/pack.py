"""All engines of this worker, in the order they were made.

[Note: forgotten] A worker alone forgets an engine when the user has dropped the model, the optimizer and whatever else
was prepared with it, and what the engine held is free again: memory, threads, state on disk. Among others an engine
stays to the end, because all must then settle the same ones, and when garbage is collected is chance.

Torch does not show the garbage collector what a hook that runs after a gradient was written refers to. A parameter
whose hook leads to its engine, and so back to the parameter, would stay for ever: such hooks are made `weakly`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from paceline.bucket import Slot
    from paceline.engine import Engine


class Pack:
    """[Note: forgotten]."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._all: list[weakref.ref[Engine]] = []
        self._kept: list[Engine] = []

    def append(self, engine: Engine) -> None:
        self._all.append(weakref.ref(engine))
        if not self._alone:
            self._kept.append(engine)

    def __iter__(self) -> Iterator[Engine]:
        return (engine for ref in self._all if (engine := ref()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def weakly(slot: Slot, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`hook` for torch to hold: it lives as long as the slot, which the collector sees."""
    slot.hooks.append(hook)
    ref = weakref.ref(hook)

    def call(param: Tensor) -> None:
        if (hook := ref()) is not None:
            hook(param)

    return call
