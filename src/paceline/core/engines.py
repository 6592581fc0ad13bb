"""All engines of this worker, in the order they were made.

[Note: forgotten] A worker alone forgets an engine when the user has dropped the model, the optimizer and whatever else
was prepared with it, and what the engine held is free again: memory, threads, state on disk. Among others all must
settle the same ones, and when garbage is collected is chance. So there an engine stays until the next `prepare`: then
each worker collects its garbage, and those that are gone on every worker are forgotten. A new engine takes over the
lanes of one that was.

Torch does not show the garbage collector what a hook that runs after a gradient was written refers to. A parameter
whose hook leads to its engine, and so back to the parameter, would stay for ever: such hooks are made `weakly`.

[Note: raised] Autograd does not call back at the end of a backward that raises: out of memory, an error in the user's
own hook. But it drops what it was given to call. So it is given an object along, and when this is gone without a call,
the backward has raised, and its gradients are dropped at once. At the next forward, backward, `step` or `zero_grad`
every engine that was under way gives up what it had begun: it sends zeros in the place of what the other workers wait
for, and tells them not to count the step.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.bucket import Slot
    from paceline.core.engine import Engine


class _Backward:
    """One backward, which autograd keeps alive."""


class Engines:
    """The engines of one worker. alone: it forgets those that are not used any more, [Note: forgotten]."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self._all: list[weakref.ref[Engine]] = []
        self._kept: list[Engine] = []
        self._backward: weakref.ref[_Backward] | None = None

    def begin_backward(self) -> object:
        """A backward begins. Who gets this object must hand it to autograd, together with what is to be called at the
        end of this backward, and keep it nowhere else: [Note: raised].
        """
        backward = _Backward()
        self._backward = weakref.ref(backward, self._raised)
        return backward

    def end_backward(self) -> None:
        """A backward has ended."""
        self._backward = None

    @property
    def in_backward(self) -> bool:
        """Is a backward under way that has not raised?"""
        return self._backward is not None and self._backward() is not None

    def _raised(self, backward: weakref.ref[_Backward]) -> None:
        """Autograd has dropped a backward that did not end."""
        for engine in self:
            if engine.under_way:
                engine.drop_gradients()

    def give_up_raised(self) -> None:
        """Give up what a backward that raised has left under way: [Note: raised]."""
        if not self.in_backward:
            for engine in self:
                if engine.under_way:
                    engine.give_up()

    def append(self, engine: Engine) -> None:
        """Add an engine."""
        self._all.append(weakref.ref(engine))
        if not self._alone:
            self._kept.append(engine)

    def collect(self) -> list[bool]:
        """Let those go that are not used any more; says of each whether it is still there. Among others only."""
        refs, self._kept = self._all, []
        gc.collect()
        there = [ref() for ref in refs]
        self._kept = [engine for engine in there if engine is not None]
        return [engine is not None for engine in there]

    def keep(self, there: Sequence[bool]) -> None:
        """Forget all but those that are there on every worker."""
        self._all = [ref for ref, stays in zip(self._all, there, strict=True) if stays]
        self._kept = list(self)

    def free_lane(self) -> str:
        """The first lane for gradients that no engine uses."""
        used = {engine.options.lane for engine in self}
        return next(name for i in itertools.count() if (name := f"gradients {i}") not in used)

    def __iter__(self) -> Iterator[Engine]:
        return (engine for ref in self._all if (engine := ref()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def weakly(slot: Slot, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook for torch to hold: what it calls lives as long as the slot, which the garbage collector sees."""
    slot.hooks.append(hook)
    ref = weakref.ref(hook)

    def call(x: Any) -> None:
        if (hook := ref()) is not None:
            hook(x)

    return call
