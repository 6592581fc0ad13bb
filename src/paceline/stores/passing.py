"""State that is stepped on the host, with gradients that only pass through.

[Note: passing] Away keeps a bucket's gradient until the step, 2 bytes a parameter of the host's memory, so that a guess
can be undone. Here it comes into one of a few vectors that take turns, the new parameters are written over it, and
they leave from there. What would have to be undone is refused before anything else changes. Two things are not known
when a gradient comes: that a later one is not finite, and that `step` will be called. If it is not, some buckets are a
step ahead of the others, and the optimizer's state is lost.

A gradient that did not come on this worker, so that it is not known yet whether its parameters are stepped, is kept
until the step, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import StoreError, UsageError
from paceline.stores.away import Away, AwayPiece, Wish
from paceline.stores.lanes import Give


class Passing(Away):
    """One bucket: [Note: passing]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._own = self.g  # where a gradient is kept that cannot be stepped at once
        self._give: Give | None = None  # g back to the ring
        self._keeps = False  # g is the last gradient
        self._zeroed: set[AwayPiece] = set()  # the user has made their gradients zero since

    def _memory(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype)

    def hand(self, mean: Tensor, guess: list[Wish] | None) -> None:
        self.ready()
        self._zeroed.clear()
        self._keeps = not guess
        if guess:
            self.g, self._give = self.ring.take(self.vectors.n, self.dtype)
        else:
            if not self._own.numel():
                self._own = super()._memory()
            self.g = self._own
        super().hand(mean, guess)

    def _out(self) -> tuple[Tensor, Give]:
        return self.g, self._gives

    def _let_go(self) -> None:
        self._gives(lambda: None)

    def _gives(self, wait: Any) -> None:
        give, self._give, self.g = self._give, None, self._own
        if give is not None:
            give(wait)

    def ready(self) -> None:
        if self._ahead():
            raise StoreError(
                f"{self.bucket} was stepped, and the step was not made",
                why="it was given up (a gradient is not finite), or never asked for; undo=False cannot take it back",
                do="go on from the last checkpoint: the parameters are whole, the optimizer's state is that of a "
                "half-made step. undo=True survives it",
            )
        super().ready()

    def _ahead(self) -> bool:
        """It was stepped, and nobody has asked for it."""
        return self._job is not None and not self.asked and self._result() is not None

    def take_back(self) -> None:
        if self._ahead():
            raise self._refused(
                "the optimizer's state is looked at, or gradients or parameters are changed, between backward and step"
            )
        if not self.asked:
            self._job = None

    def ask(self, wishes: list[Wish]) -> None:
        if self._keeps:
            super().ask(wishes)
            self._keeps = False  # the new parameters are written over it
            return
        made = self._result() if self._job else None
        if made is None:
            raise StoreError(
                f"a gradient of {self.bucket} is not finite, and the step is to be made all the same",
                why="with undo=False it is gone; others may have been stepped",
                do="go on from the last checkpoint, with guard='skip' or undo=True",
            )
        if made.wishes != wishes:
            raise self._refused("the optimizer's settings, or which gradients there are, changed since backward")
        self.asked = True

    def take_theirs(self, pieces: Sequence[AwayPiece]) -> None:
        if pieces:
            self.check_kept("gradients of the user's own are put in the place of these")
        super().take_theirs(pieces)

    # ------------------------------------------------------------------------------------------------ the gradient

    def check_kept(self, what: str) -> None:
        if not self._keeps:
            raise self._refused(what)

    def grad(self, piece: AwayPiece) -> Tensor:
        if piece in self._zeroed:
            return self.face.new_zeros(1).expand(piece.here.stop - piece.here.start)
        self.check_kept("a gradient is asked for: by a second backward before the step, or a norm not of order 2")
        return super().grad(piece)

    def zero(self, piece: AwayPiece) -> None:
        if self._keeps:
            super().zero(piece)
            return
        self.take_back()
        self._zeroed.add(piece)

    def back(self, part: Tensor) -> Tensor | None:
        if not self._left or self._keeps:
            return super().back(part)
        for piece in self.pieces:
            if piece not in self._zeroed and bool(part[piece.here].any()):
                raise self._refused("a second backward before the step, or a gradient that was not zeroed after it")
        self._left = False
        return None

    def _refused(self, what: str) -> UsageError:
        return UsageError(
            what,
            why=f"with undo=False {self.bucket} was stepped as soon as its gradient came, which is not kept",
            do="use undo=True: it keeps gradients until the step, 2 bytes a parameter of the host's memory",
        )
