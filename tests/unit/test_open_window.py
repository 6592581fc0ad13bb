"""What a round of micro-batches counts, and what of it the other workers hear."""

from __future__ import annotations

import pytest

from paceline.comm.group import Group
from paceline.core.open_window import OpenWindow
from paceline.data.loader import Batch


@pytest.fixture
def window():
    """Rounds of ten seconds, in micro-batches that take three."""
    now = iter(range(0, 1000, 3))
    return OpenWindow(Group.single(), lambda elapsed, usual: elapsed + usual > 10.0, lambda: float(next(now)))


def micro_batch(window, number, samples=4.0):
    window.take(Batch(samples, 4.0, last=False, indices=None, number=number))
    window.count()


def test_the_others_hear_of_the_micro_batches_that_were_computed(window):
    for number in (1, 2):
        micro_batch(window, number, samples=4.0 - number)
        assert not window.ends()
        window.use()
        window.hold()
    micro_batch(window, 3)
    assert window.ends()
    assert window.closing
    assert window.finished() == (3.0 + 2.0 + 4.0, 3, 9.0, 3)


def test_a_micro_batch_whose_backward_raised_does_not_count(window):
    micro_batch(window, 1)
    assert not window.ends()
    window.use()
    window.hold()
    micro_batch(window, 2)
    window.uncount()
    assert window.finished()[:2] == (4.0, 1)


def test_a_step_without_a_batch_since_the_last_one_ends_at_once(window):
    """The loop calls step() again by the same gradients, and so does every other worker's."""
    micro_batch(window, 1)
    window.over()
    assert window.ends()
    assert window.closing
