"""The host's threads: those that step a bucket together, and the queues in which buckets wait for their turn.

The threads that share a bucket do not wait for each other: one that is done with a stretch takes the next one, of this
bucket or of another. So a core that is slow, as those of a shared host are now and then, does less, and does not hold
up the rest. Python's lock is held only between two stretches, so there are few of them: a bucket has as many as there
are threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from queue import SimpleQueue
from typing import Any, TypeVar

from paceline.errors import StoreError

T = TypeVar("T")
Work = Callable[[int, int], None]  # does what is to be done from where to where

PATIENCE_S = 600.0
_GRAIN = 1024  # elements: stretches begin on pages, and short vectors are not worth several threads


class HostThreads:
    """Threads that share the work on a vector."""

    def __init__(self, threads: int) -> None:
        """Start so many threads. 0: three quarters of the cores, because the others launch kernels and load data."""
        count = threads or max(1, len(os.sched_getaffinity(0)) * 3 // 4)
        self._count, self._queue = count, SimpleQueue[Any]()
        for _ in range(count):
            threading.Thread(target=_serve, args=(self._queue,), name="paceline-step", daemon=True).start()
        weakref.finalize(self, _dismiss, self._queue, count)

    def spread(self, n: int, work: Work, then: Callable[[BaseException | None], None]) -> None:
        """Call work(start, stop) for stretches of 0..n in all threads.

        The last of them calls `then`, with the first error if there was one.
        """
        length = -(-n // (self._count * _GRAIN)) * _GRAIN or 1
        starts = range(0, max(n, 1), length)
        share = _Share(work, then, len(starts))
        for start in starts:
            self._queue.put((share, start, min(start + length, n)))

    def start(self, n: int, work: Work) -> Future[None]:
        """Call work(start, stop) for stretches of 0..n in all threads, and give a future of its end."""
        done: Future[None] = Future()
        self.spread(n, work, lambda error: done.set_exception(error) if error else done.set_result(None))
        return done

    def all(self, n: int, work: Work) -> None:
        """Call work(start, stop) for stretches of 0..n in all threads, and wait for its end."""
        result(self.start(n, work), "a step on the host")


class StepQueue:
    """A queue of buckets that wait for the same, the device or a disk too, and are begun in order.

    Buckets of another queue need not wait for them.
    """

    def __init__(self, threads: HostThreads) -> None:
        self.threads = threads
        self._first = ThreadPoolExecutor(1, "paceline-store")
        weakref.finalize(self, self._first.shutdown, wait=False, cancel_futures=True)

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Call job(*args) when those before it have been called."""
        self._first.submit(job, *args)


class _Share:
    """One bucket's work: how much of it is still to be done."""

    def __init__(self, work: Work, then: Callable[[BaseException | None], None], stretches: int) -> None:
        self.work, self.then, self.left = work, then, stretches
        self.error: BaseException | None = None
        self.lock = threading.Lock()

    def do(self, start: int, stop: int) -> None:
        try:
            self.work(start, stop)
        except BaseException as error:
            self.error = self.error or error
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self.then(self.error)


def _serve(queue: SimpleQueue[Any]) -> None:
    while (item := queue.get()) is not None:
        share, start, stop = item
        share.do(start, stop)
        del item, share  # an idle thread keeps no bucket alive


def result(future: Future[T], what: str) -> T:
    """Wait for a future of the host's threads, and not for ever. what: it is named so where it takes too long."""
    try:
        return future.result(PATIENCE_S)
    except TimeoutError:
        if future.done():
            raise
        raise StoreError(
            f"{what} took more than {PATIENCE_S:.0f} s",
            why="the host's memory is swapped out, or a disk does not answer",
            do="look at the machine; keep less of the state there",
        ) from None


def _dismiss(queue: SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        queue.put(None)
