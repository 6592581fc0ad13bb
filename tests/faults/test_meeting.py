"""Who is lost while others wait is named soon, whatever they wait for; and so is a link that is cut."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
import processes
from paceline.comm import board
from paceline.errors import PeerError
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab
from processes import run

SRC = Path(next(iter(paceline.__path__))).parent
TIMEOUT_S = 60.0  # nothing here may take that long
VICTIM = 1  # worker 0 serves the store here


def _agrees(rank, ends):
    """The others agree on an operation that the victim never begins."""
    lane = processes.join(TIMEOUT_S).group.lane("test")
    lane.mean(torch.ones(3)).wait()
    if rank == VICTIM:
        if ends == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(PeerError, match="worker 1 stopped answering") as raised:
        lane.mean(torch.ones(4)).wait()
    return time.monotonic() - began, raised.value.worker


@pytest.mark.parametrize("ends", ["kill", "exit"])
def test_a_death_while_others_agree_is_found_at_once(ends):
    for outcome in [o for rank, o in enumerate(run(3, _agrees, ends)) if rank != VICTIM]:
        assert not outcome.error, outcome
        seconds, worker = outcome.value
        assert seconds < TIMEOUT_S / 3, "not by the time-out"
        assert worker == VICTIM


def _hangs(rank):
    """The victim waits for a lock that is never let go."""
    board._IDLE_S = 2.0
    lane = processes.join(TIMEOUT_S).group.lane("test")
    lane.mean(torch.ones(3)).wait()
    if rank == VICTIM:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=8)
    with pytest.raises(PeerError, match="worker 1 does nothing") as raised:
        lane.mean(torch.ones(3)).wait()
    return raised.value.worker


def test_a_worker_that_runs_and_does_nothing_is_named():
    outcomes = run(3, _hangs, wait_s=TIMEOUT_S / 2)
    assert [o.value for rank, o in enumerate(outcomes) if rank != VICTIM] == [VICTIM, VICTIM], outcomes


def _connects(rank):
    """A worker dies while the others make a lane over gloo: their backends wait for its address."""
    os.environ["PACELINE_COLLECTIVES"] = "flat"
    session = processes.join(TIMEOUT_S)
    session.group.lane("first")
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as raised:
        session.group.lane("second").mean(torch.ones(3)).wait()
    return raised.value.worker


@pytest.mark.slow
def test_a_death_while_others_connect_is_found_at_once():
    outcomes = run(3, _connects, env={"PACELINE_COLLECTIVES": "flat"}, wait_s=TIMEOUT_S / 2)
    assert [o.value for rank, o in enumerate(outcomes) if rank != VICTIM] == [VICTIM, VICTIM], outcomes


def _over_gloo(rank):
    session = processes.join(TIMEOUT_S)
    lane = session.group.lane("test")
    lane.mean(torch.ones(1000)).wait()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            lane.mean(torch.ones(1000)).wait()
    except PeerError as error:
        return error.worker


def test_a_death_in_an_operation_over_gloo_is_named():
    outcomes = run(3, _over_gloo, env={"PACELINE_COLLECTIVES": "flat"})
    assert [o.value for rank, o in enumerate(outcomes) if rank != VICTIM] == [VICTIM, VICTIM], outcomes


def _slow(rank):
    """One worker takes ten times as long as ever before, once: nobody gives it up."""
    model = nn.Linear(4, 2)
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=TIMEOUT_S)
    for step in range(8):
        time.sleep(3.0 if rank == VICTIM and step == 6 else 0.3)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return True


@pytest.mark.slow
def test_a_worker_that_is_ten_times_slower_is_waited_for():
    assert processes.values(run(2, _slow)) == [True, True]


# ---------------------------------------------------------------------------------------------------- with a launcher

TRAIN = """
import os, signal, sys, time
import torch
import paceline
torch.set_num_threads(1)
rank, what = int(os.environ["RANK"]), sys.argv[1]
model = torch.nn.Linear(8, 2)
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=200.0)
for step in range(10**9):
    if rank == 1 and step == 5:
        print("now", flush=True)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _started(words, prefix=(), **env):
    command = [*prefix, sys.executable, "-m", "paceline.tools.cli.main", "run", "--output", "all", *words]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONFAULTHANDLER": "", **env}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_the_job_ends(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with _started(["--workers", "2", str(script), "stop"]) as job:
        _, said = job.communicate(timeout=150)
    assert job.returncode == 4
    assert "worker 0 waits at" in said
    assert "(stopped: SIGSTOP" in said
    assert re.search(r"worker 1 is stopped.*train\.py", said)
    assert "waited 200 s" not in said


@pytest.mark.slow
@pytest.mark.lab
def test_a_link_that_is_cut_ends_both_sides_with_a_name(tmp_path):
    """The host without the store as well, whose launcher obeys a signal meanwhile."""
    if why := namespaces.available():
        pytest.skip(f"no network lab: {why}")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Lab(2) as lab:
        words = ["--hosts", f"{lab.address(0)},{lab.address(1)}", str(script), "cut"]
        first, second = (
            _started(words, lab.exec_prefix(i), PACELINE_SECRET="known to both of the hosts") for i in range(2)
        )
        assert second.stdout is not None
        assert second.stdout.readline().strip() == "[1] now"
        lab.cut(1)
        began = time.monotonic()
        (_, here), (_, there) = first.communicate(timeout=120), second.communicate(timeout=120)
        assert time.monotonic() - began < 60
    assert (first.returncode, second.returncode) == (4, 4), (here, there)
    assert "host 1 (10.77.0.2) does not answer any more" in here or "worker 1 stopped answering" in here
    assert "store" in there
    assert "the launcher of the first host" in there


@pytest.mark.slow
@pytest.mark.lab
def test_another_job_at_the_port_is_refused(tmp_path):
    if why := namespaces.available():
        pytest.skip(f"no network lab: {why}")
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text(TRAIN)
    other.write_text(TRAIN)
    with Lab(2) as lab:
        hosts = ["--hosts", f"{lab.address(0)},{lab.address(1)}"]
        with _started([*hosts, str(script), "x"], lab.exec_prefix(0)) as first:
            with _started([*hosts, str(other), "x"], lab.exec_prefix(1)) as second:
                _, said = second.communicate(timeout=60)
            first.send_signal(signal.SIGTERM)
            _, here = first.communicate(timeout=60)
    assert second.returncode == 4
    assert "script: 'other.py' there, 'train.py' here" in said
    assert first.returncode == 128 + signal.SIGTERM
    assert "no secret: whoever reaches 10.77.0.1:29511 may join" in here
    assert "closed a connection from 10.77.0.2" in here
