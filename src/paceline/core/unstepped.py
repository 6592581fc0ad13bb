"""Weights that change although the prepared optimizer's `step` is never called.

[Note: unstepped] Most methods do something when `optimizer.step()` is called: agree on weights, keep what was not sent.
A wrapper that has kept the optimizer's own `step` from before `prepare`, an optimizer whose users call `first_step` and
`second_step`, a plain `p -= lr * p.grad` go past it, and the workers would drift apart without a word. So where a
method has something to do at a step, each backward looks whether the weights were written since the one before it and
no step was asked for. A few such backwards are a climb before the step (sharpness-aware training, inner loops); more
are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.engine import Engine

_MOST = 20  # climbs to a step
_SOME = 3  # of them, where the weights are to be those of all workers now


class Unstepped:
    """How often one engine's weights have changed without a step: [Note: unstepped]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._versions: list[int] | None = None  # of the weights at the last backward; None: a step was asked for
        self._count = 0

    def backward(self, *, matters: bool) -> None:
        """A backward begins. matters: the method has something to do at the step."""
        if not matters:
            return
        now = [s.param._version for b in self._engine.buckets for s in b.slots]
        if self._versions is not None and now != self._versions:
            self._count += 1
        self._versions = now
        if self._count >= _MOST:
            raise self._error()

    def step(self) -> None:
        """The user calls `step`."""
        self._versions, self._count = None, 0

    def check(self) -> None:
        """The weights are to be those of all workers now: raise if something else has stepped them."""
        if self._count >= _SOME:
            raise self._error()

    def _error(self) -> UsageError:
        return UsageError(
            f"the weights changed over {self._count} backwards, and step() of the prepared optimizer was not called",
            why="the method acts when it is called, and did nothing: the workers have trained by themselves",
            do="hand the optimizer whose step() the loop calls to prepare; call step(closure) of one that has "
            "first_step and second_step",
        )
