"""A worker or a server is lost: it is named on every worker that is left, and no process stays behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from processes import run

STEPS, AT = 2000, 3  # far more than it takes to notice


def train(rank, folder, at, **knobs):
    """In step 3 at(rank, pids of the servers) is called. Each worker writes down what it started."""
    import paceline
    from paceline.session.session import current

    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = paceline.prepare(model, optimizer, method="parameter_server", timeout=30.0, **knobs)
    for step in range(STEPS):
        if step == AT:
            mine = [child.pid for child in psutil.Process().children(recursive=True)]
            (folder / f"{rank}.part").write_text(" ".join(map(str, mine)))
            (folder / f"{rank}.part").rename(folder / str(rank))
            paceline.mean(0.0)  # all have written
            current().group.board.timeout_s = 3.0
            at(rank, started(folder))
        current().group.board.step = step
        cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()


def started(folder):
    return [int(pid) for path in folder.iterdir() for pid in path.read_text().split()]


def nothing_left(folder):
    _, alive = psutil.wait_procs([psutil.Process(p) for p in started(folder) if psutil.pid_exists(p)], 5.0)
    return bool(started(folder)) and not alive


def kill_worker(rank, folder, victim, knobs):
    def at(rank, servers):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    train(rank, folder, at, **knobs)


def test_a_killed_worker_is_named(tmp_path):
    """Where nobody waits for anybody: the server tells."""
    outcomes = run(3, kill_worker, tmp_path, 2, {"consistency": "eventual"})
    assert outcomes[2].error == "Died"
    for o in outcomes[:2]:
        assert o.error == "PeerError", o
        # The server tells, or the store: whichever is asked first.
        assert re.search("worker 2 stopped answering (at clock|in step) 3", o.message), o
    assert nothing_left(tmp_path)


@pytest.mark.slow
def test_a_killed_worker_takes_its_server_along_and_is_named(tmp_path):
    """It served the store too: nobody is left to ask for the cause."""
    outcomes = run(2, kill_worker, tmp_path, 0, {})
    assert outcomes[1].error == "PeerError", outcomes[1]
    assert "worker 0 stopped answering at clock 3" in outcomes[1].message
    assert nothing_left(tmp_path)


def harm_server(rank, folder, with_):
    def at(rank, servers):
        if rank == 1:
            os.kill(servers[0], with_)

    train(rank, folder, at)


@pytest.mark.slow
def test_a_killed_server_is_named(tmp_path):
    outcomes = run(2, harm_server, tmp_path, signal.SIGKILL)
    [pid] = started(tmp_path)
    for o in outcomes:
        assert o.error == "PeerError", o
        assert f"server 0 (pid {pid} on " in o.message
        assert "stopped answering in step 3" in o.message
    assert nothing_left(tmp_path)


def test_a_server_that_hangs_is_named_at_the_deadline(tmp_path):
    outcomes = run(2, harm_server, tmp_path, signal.SIGSTOP)
    [pid] = started(tmp_path)
    for o in outcomes:
        assert o.error == "PeerTimeoutError", o
        assert f"from server 0 (pid {pid} on " in o.message
    # A stopped process cannot look after its worker: this test goes on with it, and then it does.
    os.kill(pid, signal.SIGCONT)
    assert nothing_left(tmp_path)


def raises(rank, folder):
    def at(rank, servers):
        if rank == 1:
            raise ValueError("a bug in the script")

    train(rank, folder, at, consistency="bounded")


@pytest.mark.slow
def test_an_exception_in_a_worker_is_the_cause(tmp_path):
    outcomes = run(2, raises, tmp_path)
    assert outcomes[1].error == "ValueError"
    assert outcomes[0].error == "PeerError", outcomes[0]
    assert "worker 1 failed in step 2: ValueError: a bug in the script" in outcomes[0].message
    assert nothing_left(tmp_path)


def no_server(rank, folder):
    sys.executable = "/bin/false"
    train(rank, folder, lambda *_: None)


def test_a_server_that_does_not_start_is_named(tmp_path):
    outcomes = run(2, no_server, tmp_path)
    assert all("server 0 did not start" in o.message for o in outcomes), outcomes
    assert "its process ended with code 1" in outcomes[0].message


@pytest.mark.slow
def test_a_server_without_its_worker_does_not_wait_for_a_store_that_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent, subprocess.Popen(["true"]) as gone:
        gone.wait()
        where = {"PACELINE_STORE": f"tcp:127.0.0.1:{silent.getsockname()[1]}"}
        words = ["servers", "0", "0", "2", "300.0", str(gone.pid)]
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.server", *words], env=os.environ | where
        ) as server:
            assert server.wait(50) == 0
