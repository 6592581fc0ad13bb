"""The coroutines: each bucket's exchange is one, and this runs them.

[Note: order] A part is written as the paper's box, with `await` where bytes travel. Awaiting hands the handle up to
here, and the coroutine sleeps. It is not asyncio: nothing is resumed because it happens to be done. Coroutines start
when the engine says so (a logical event, the same on every worker) and run to their first await at once, so bytes leave
while backward goes on. `drain` resumes them in the order they were started, or rearranged, round after round: the wait
for bucket 0 comes first, and while its second round is on the wire bucket 1 is decoded. Every worker thus issues the
same operations in the same order, whatever the clock does.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from paceline.parts import Handle

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


class Flight(NamedTuple):
    coroutine: Coroutine[Any, None, None]  # under way
    of: object
    size: int
    handle: Handle | None  # what it waits for; None: a Task, which keeps that to itself


class Pipeline:
    """Coroutines under way, oldest first."""

    def __init__(self) -> None:
        self._live: deque[Flight] = deque()

    def start(self, coroutine: Coroutine[Any, None, None], of: object = None, size: int = 0) -> None:
        """Run to the next await, which puts bytes on the wire, or to the end; waiting happens inside, in the handle
        awaited last. `of`, `size`: what it is about, to ask for it later."""
        with contextlib.suppress(StopIteration):
            self._live.append(Flight(coroutine, of, size, coroutine.send(None)))

    def drain(self, of: object = None, left: int = 0) -> None:
        """Finish what is under way, in that order: until so many are left, or until all about `of` has ended."""
        while len(self._live) > left if of is None else self.carries(of):
            self.start(*self._live.popleft()[:3])

    def rearrange(self, urgency: Callable[[Any], int]) -> None:
        """The most urgent is the oldest from now on; before all others what has no size. A logical event."""
        self._live = deque(sorted(self._live, key=lambda one: (one.size > 0, urgency(one.of) if one.size else 0)))

    def carries(self, of: object) -> bool:
        return any(flight.of is of for flight in self._live)

    def backlog(self) -> int:
        """The size of all that waits for bytes which have not landed: a matter of the clock."""
        return sum(flight.size for flight in self._live if flight.handle and not flight.handle.done())

    def abandon(self) -> None:
        """Close what is under way after a failure; its buffers are no longer ours."""
        while self._live:
            self._live.popleft().coroutine.close()
