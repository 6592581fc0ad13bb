"""What a method that was replaced had kept back: it is added to the next gradients, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.core.bucket import Bucket
from paceline.core.state import State

_SLOT = "carry"


class Carry:
    """One vector for each bucket, in the true units of its gradients. A step that does not count does not spend it."""

    def __init__(self) -> None:
        self.state = State()
        self._spent: set[int] = set()

    def put(self, b: Bucket, x: Tensor) -> None:
        """Keep x for the next gradients of this bucket."""
        self.state[b.index, _SLOT] = x
        self.state.commit()
        self._spent.discard(b.index)

    def take(self, b: Bucket) -> Tensor | None:
        """What is to be added to this bucket's gradients now; None if there is nothing, or it was added already."""
        if not self.state or b.index in self._spent or (b.index, _SLOT) not in self.state:
            return None
        self._spent.add(b.index)
        x: Tensor = self.state[b.index, _SLOT]
        return x

    def commit(self) -> None:
        """The step counts: what was added is gone."""
        for index in self._spent:
            del self.state[index, _SLOT]
        self._spent.clear()

    def rollback(self) -> None:
        """The step does not count: what was added will be added again."""
        self._spent.clear()

    def save(self, buckets: Sequence[Bucket]) -> dict[Any, Any]:
        """What is kept, by parameter name: it can be loaded into any other cut."""
        return self.state.save(buckets)

    def load(self, saved: dict[Any, Any], buckets: Sequence[Bucket]) -> None:
        """Take up what `save` gave."""
        self._spent.clear()
        self.state.load(saved, buckets)
