"""When are waiting workers stuck, and when is only the link slow?"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from paceline.comm.board import StoreBoard, stuck
from paceline.comm.credentials import Credentials
from paceline.comm.liveness import Idleness
from paceline.comm.store import Store, StoreConnection, StoreLostError
from paceline.comm.store_address import StoreAddress
from paceline.comm.store_server import StoreServer
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


@pytest.fixture
def served(tmp_path):
    """Connections to a store, as many as are asked for; the store is gone after `server.close()`."""
    address, credentials = StoreAddress(str(tmp_path / "store")), Credentials.new(b"")
    server = StoreServer(address.listen(), credentials, note={"served_by": "launcher"})
    made = []

    def connect(who="worker"):
        made.append(StoreConnection.open(address, credentials, who, 10.0))
        return Store(made[-1])

    connect.server = server
    yield connect
    for connection in made:
        connection.end()
    server.close()


def boards(served, count, timeout_s=30.0):
    return [StoreBoard(served(f"worker {r}"), r, count, timeout_s) for r in range(count)]


def test_a_wait_that_ended_is_withdrawn(served):
    """The key is overwritten, never deleted."""
    first, second = boards(served, 2)
    second.counts = lambda: {"a": 4}
    second.pulse("a", 3, "mean #3", 1.0)
    assert first.others("waits")[1]["label"] == "mean #3"
    second.clear()
    assert first.others("waits") == {}


@pytest.mark.parametrize(
    "ask",
    [
        lambda board: board.agree("a", "operation 0", "mean"),
        lambda board: board.pulse("a", 0, "mean #0", 1.0),
        lambda board: board.cause(),
        lambda board: board.post_cause(ValueError("x")),
        lambda board: board.count("a"),
        lambda board: board.first("a", "x"),
        lambda board: board.seen("a", 1.0),
        lambda board: board.forget("a"),
    ],
)
def test_a_store_that_is_gone_is_said_to_be(served, ask):
    board = StoreBoard(served(), 1, 3, 30.0)
    served.server.close()
    with pytest.raises(
        StoreLostError, match=r"store does not answer(?s:.*)(?:closed|pipe|reset)(?s:.*)output of the launcher"
    ):
        ask(board)


def test_with_the_store_gone_a_connection_still_knows_its_worker(served):
    board = StoreBoard(served(), 1, 3, 30.0)
    served.server.close()
    assert isinstance(board.lost("mean #0", RuntimeError("reset")), StoreLostError)
    error = board.lost("mean #0", EndedError(0))
    assert error.worker == 0
    assert error.what.startswith("worker 0 stopped answering; it is waited for at ")
    assert error.what.endswith('board.lost("mean #0", EndedError(0))'), "the line of this test"


def test_a_process_that_does_nothing_is_told_from_one_that_works() -> None:
    """Whatever it works at: computing, or reading and writing."""
    code = {
        "sleeps": "import time\nprint(1, flush=True)\ntime.sleep(60)",
        "computes": "print(1, flush=True)\nwhile True: pass",
        "writes": "import time\nprint(1, flush=True)\nf = open('/dev/null', 'w')\n"
        "while True: f.write('x'); f.flush(); time.sleep(0.01)",
    }
    running = {
        name: subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for name, text in code.items()
    }
    try:
        for process in running.values():
            assert process.stdout is not None
            process.stdout.readline()
        idleness, began = Idleness(), time.monotonic()
        while time.monotonic() - began < 1.5:
            idle = {name: idleness.seconds(process.pid) for name, process in running.items()}
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert idle["sleeps"] > 1.0
    assert max(idle["computes"], idle["writes"]) < 1.0
    assert idleness.seconds(running["sleeps"].pid) == 0.0, "gone: nothing is known of it"
