"""The coroutines: each bucket's exchange is one, and this runs them.

[Note: order] A part is written as the paper's box, with `await` where bytes travel. Awaiting hands the handle up to
here, and the coroutine sleeps. It is not asyncio: nothing is resumed because it happens to be done. Coroutines start
when the engine says so (a logical event, the same on every worker) and run to their first await at once, so bytes leave
while backward goes on. `drain` resumes them in the order they were started, or rearranged, round after round: the wait
for bucket 0 comes first, and while its second round is on the wire bucket 1 is decoded. Every worker thus issues the
same operations in the same order, whatever the clock does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from paceline.comm.protocol import Handle

T = TypeVar("T")


class Task(Generic[T]):
    """A coroutine that starts here and is awaited later, perhaps steps later: its bytes travel meanwhile.

    Every worker must start it and await it at the same points.
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
        """Run it to its end, here and now."""
        while self._live:
            self._advance()
        return self._result

    def __await__(self) -> Generator[None, None, T]:
        while self._live:
            yield
            self._advance()
        return self._result


class Flight(NamedTuple):
    """One coroutine under way."""

    coroutine: Coroutine[Any, None, None]
    subject: object  # what it is about, to ask for it later
    size: int  # bytes of that
    handle: Handle | None  # what it waits for; None: a Task, which keeps its handle to itself


class Pipeline:
    """The coroutines under way, oldest first.

    on_resume: told what the coroutine that is about to run is about, and None after it has run. For a trace.
    """

    def __init__(self, on_resume: Callable[[object], None] | None = None) -> None:
        self._flights: deque[Flight] = deque()
        self._on_resume = on_resume

    def start(self, coroutine: Coroutine[Any, None, None], subject: object = None, size: int = 0) -> None:
        """Run a coroutine to its next await, which puts bytes on the wire, or to its end."""
        if self._on_resume is not None:
            self._on_resume(subject)
        try:
            handle = coroutine.send(None)
        except StopIteration:
            return
        finally:
            if self._on_resume is not None:
                self._on_resume(None)
        self._flights.append(Flight(coroutine, subject, size, handle))

    def _resume_oldest(self) -> None:
        flight = self._flights.popleft()
        self.start(flight.coroutine, flight.subject, flight.size)

    def drain(self, left: int = 0) -> None:
        """Resume coroutines, oldest first, until at most so many are under way."""
        while len(self._flights) > left:
            self._resume_oldest()

    def drain_until(self, subject: object) -> None:
        """Resume coroutines, oldest first, until all about this subject have ended."""
        while any(flight.subject is subject for flight in self._flights):
            self._resume_oldest()

    def rearrange(self, urgency: Callable[[Any], int]) -> None:
        """Make the most urgent the oldest; what has no size comes before all others. A logical event."""
        self._flights = deque(
            sorted(self._flights, key=lambda flight: (flight.size > 0, urgency(flight.subject) if flight.size else 0))
        )

    def backlog(self) -> int:
        """The size of all that waits for bytes which have not landed. That depends on the clock."""
        return sum(flight.size for flight in self._flights if flight.handle and not flight.handle.done())

    def abandon(self) -> None:
        """Close what is under way after a failure; its buffers are no longer ours."""
        while self._flights:
            self._flights.popleft().coroutine.close()
