"""The team that steps the state on the host: everything is done once, and nobody is held up."""

from __future__ import annotations

import threading

import pytest

from paceline.offload.host_threads import HostThreads

SOON_S = 20.0


def test_who_is_slow_does_less():
    """One thread is stuck in its first stretch until all the others are done: the rest of the team does them."""
    buckets, done, others = 6, threading.Semaphore(0), threading.Semaphore(0)
    crew, stuck = HostThreads(2), threading.Lock()
    late: list[bool] = []

    def work(start, stop):
        if stuck.acquire(blocking=False):  # the very first, and never released
            late.extend(others.acquire(timeout=SOON_S) for _ in range(2 * buckets - 1))
        else:
            others.release()

    for _ in range(buckets):
        crew.spread(4096, work, lambda error: done.release())
    assert all(done.acquire(timeout=2 * SOON_S) for _ in range(buckets))
    assert late == [True] * (2 * buckets - 1)


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 5000, 100_000])
def test_every_element_is_somebodys_once(n):
    seen, lock = [], threading.Lock()

    def work(start, stop):
        with lock:
            seen.extend(range(start, stop))

    HostThreads(3).all(n, work)
    assert sorted(seen) == list(range(n))


def test_the_first_error_is_told():
    def work(start, stop):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        HostThreads(2).all(4096, work)
