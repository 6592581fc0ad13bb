"""When are waiting workers stuck, and when is only the link slow?"""

from __future__ import annotations

import pytest

from paceline.comm.board import StoreBoard, StoreLostError, stuck
from paceline.comm.waiting import EndedError


def waits(label: str, lane: str, op: int, **ops: int) -> dict[str, object]:
    return {"label": label, "lane": lane, "op": op, "ops": ops}


def test_all_in_the_same_operation_is_a_slow_link():
    both = waits("mean #3", "a", 3, a=4)
    assert not stuck({0: both, 1: both}, 2)


def test_one_ahead_on_a_slow_link_is_no_deadlock():
    """Worker 0 has finished operation 2 and wants to agree on the next; worker 1 still receives operation 2."""
    assert not stuck({0: waits("operation 3", "agree/a/1", 0, a=3), 1: waits("mean #2", "a", 2, a=3)}, 2)


def test_different_operations_of_one_number():
    assert stuck({0: waits("mean #3", "a", 3, a=4), 1: waits("broadcast #3", "a", 3, a=4)}, 2)


def test_one_that_never_began_what_the_others_wait_for():
    assert stuck({0: waits("mean #3", "a", 3, a=4, b=0), 1: waits("gather #0", "b", 0, a=3, b=1)}, 2)


def test_who_computes_is_not_stuck():
    assert not stuck({0: waits("mean #3", "a", 3, a=4)}, 2)


def test_a_wait_that_ends_while_another_worker_looks_at_it():
    """What was there when a worker asked is there when it reads: nothing is ever deleted."""

    class Store(dict):
        def check(self, keys):
            found = all(key in self for key in keys)
            if found:
                boards[1].clear()  # at the worst of moments
            return found

        def set(self, key, value):
            self[key] = value

        def get(self, key):  # as TCPStore: a key that has gone is empty bytes
            return super().get(key, b"")

        def delete_key(self, key):
            self.pop(key, None)

    store = Store()
    boards = [StoreBoard(store, rank, 2, 30.0) for rank in range(2)]
    boards[1].write("waits/1", waits("mean #3", "a", 3, a=4))
    assert boards[0].read("waits/1") is None


class Gone:
    """A store whose server has died: every question is a broken pipe."""

    def __getattr__(self, name):
        def broken(*args):
            raise RuntimeError("sendBytes failed: Broken pipe\nframe #0: ...")

        return broken


@pytest.mark.parametrize(
    "ask",
    [
        lambda board: board.agree("a", "operation 0", "mean"),
        lambda board: board.pulse("a", 0, "mean #0", 1.0),
        lambda board: board.clear(),
        lambda board: board.cause(),
        lambda board: board.post_cause(ValueError("x")),
        lambda board: board.count("a"),
        lambda board: board.first("a", "x"),
        lambda board: board.seen("a", 1.0),
        lambda board: board.forget("a"),
    ],
)
def test_a_store_that_is_gone_is_said_to_be(ask):
    with pytest.raises(StoreLostError, match=r"store does not answer(?s:.*)Broken pipe(?s:.*)output of the launcher"):
        ask(StoreBoard(Gone(), 1, 3, 30.0))


def test_with_the_store_gone_a_connection_still_knows_its_worker():
    board = StoreBoard(Gone(), 1, 3, 30.0)
    assert isinstance(board.lost("mean #0", RuntimeError("reset")), StoreLostError)
    error = board.lost("mean #0", EndedError(0))
    assert error.worker == 0
    assert error.what.startswith("worker 0 stopped answering; it is waited for at ")
    assert error.what.endswith('board.lost("mean #0", EndedError(0))'), "the line of this test"
