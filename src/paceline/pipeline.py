"""The coroutines: each bucket's exchange is one, and this runs them.

[Note: order] A part is written as the paper's box, with `await` where bytes travel. Awaiting hands the handle up to
here, and the coroutine sleeps. It is not asyncio: nothing is resumed because it happens to be done. Coroutines
start when the engine says so (a logical event, the same on every worker) and run to their first await at once, so
bytes leave while backward goes on. `drain` resumes them in the order they were started, round after round: the wait
for bucket 0 comes first, and while its second round is on the wire bucket 1 is decoded. Every worker thus issues
the same operations in the same order, whatever the clock does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """A coroutine that starts here and is awaited later, perhaps steps later: its bytes travel meanwhile. Every worker
    does both at the same points.
    """

    def __init__(self, coroutine: Coroutine[Any, None, T]) -> None:
        self._coroutine = coroutine
        self._live = True
        self._result: T
        self._advance()

    def _advance(self) -> None:
        try:
            self._coroutine.send(None)
        except StopIteration as end:
            self._live, self._result = False, end.value

    def finish(self) -> T:
        """To the end, here and now."""
        while self._live:
            self._advance()
        return self._result

    def __await__(self) -> Generator[None, None, T]:
        while self._live:
            yield
            self._advance()
        return self._result


class Pipeline:
    """Coroutines under way, oldest first."""

    def __init__(self) -> None:
        self._live: deque[Coroutine[Any, None, None]] = deque()

    def start(self, coroutine: Coroutine[Any, None, None]) -> None:
        """Run to the first await, which puts bytes on the wire."""
        if self._advance(coroutine):
            self._live.append(coroutine)

    def drain(self) -> None:
        """Finish everything that is under way."""
        while self._live:
            coroutine = self._live.popleft()
            if self._advance(coroutine):
                self._live.append(coroutine)

    def abandon(self) -> None:
        """Close what is under way after a failure; its buffers are no longer ours."""
        while self._live:
            self._live.popleft().close()

    @staticmethod
    def _advance(coroutine: Coroutine[Any, None, None]) -> bool:
        """To the next await (True) or to the end (False). Waiting happens inside, in the handle just awaited."""
        try:
            coroutine.send(None)
        except StopIteration:
            return False
        return True
