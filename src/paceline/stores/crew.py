"""Threads that step the state on the host: one that takes buckets in their order, several that share each bucket."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, TypeVar

from paceline.errors import StoreError

T = TypeVar("T")

PATIENCE_S = 600.0


class Crew:
    """Jobs run one after the other, and each may share its work out."""

    def __init__(self, threads: int) -> None:
        self.threads = threads or max(1, (os.cpu_count() or 2) - 1)  # one launches what the device computes
        self._first = ThreadPoolExecutor(1, "paceline-store")
        self._others = ThreadPoolExecutor(self.threads, "paceline-step")
        weakref.finalize(self, _close, self._first, self._others)

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        return self._first.submit(job, *args)

    def each(self, work: Callable[..., None], shares: Sequence[tuple[Any, ...]]) -> None:
        """`work` with the arguments of every share, all at once; the first error comes out."""
        for one in [self._others.submit(work, *share) for share in shares]:
            one.result(PATIENCE_S)


def result(future: Future[T], what: str) -> T:
    try:
        return future.result(PATIENCE_S)
    except TimeoutError:
        if future.done():
            raise
        raise StoreError(
            f"{what} took more than {PATIENCE_S:.0f} s",
            why="the host's memory is swapped out, or a disk does not answer",
            do="look at the machine; give a smaller host_gb",
        ) from None


def _close(*pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
