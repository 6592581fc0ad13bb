"""The launcher: what workers are told, who is blamed when one dies, and that none is left behind."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.comm.environment import Environment
from paceline.errors import PeerError, UsageError
from paceline.tools import launch as launcher
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab
from paceline.tools.launch import (
    CAUSE,
    Cause,
    JobSpec,
    LaunchSite,
    LocalJob,
    Supervisor,
    WorkerCommand,
    WorkerOutput,
    launch,
    worker_env,
)
from paceline.tools.launch.last_words import last_words

SRC = Path(next(iter(paceline.__path__))).parent
NO_LAB = namespaces.available()
lab = pytest.mark.lab
needs_lab = pytest.mark.skipif(NO_LAB is not None, reason=f"no network lab: {NO_LAB}")

Start = Callable[..., LocalJob]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command of a worker that runs this code (in vain for torch: a plain Python starts in 20 ms)."""

    def write(code: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(code))
        return [sys.executable, str(path)]

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[LocalJob] = []

    def begin(argv: list[str], workers: int = 2, **options: object) -> LocalJob:
        spec = JobSpec(argv=argv, workers=workers, **options)  # type: ignore[arg-type]
        jobs.append(launch(spec, WorkerOutput.kept(tmp_path)))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
        assert not any(psutil.pid_exists(worker.pid) for worker in job.workers)


def said(directory: Path, rank: int) -> str:
    return (directory / f"worker-{rank}.log").read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Is it, apart from waiting to be buried by a parent that is not ours?"""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------------------------ environment


def test_a_worker_knows_its_place(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    argv = script("import json; print(json.dumps(dict(os.environ)))")
    assert start(argv, 2, env={"PACELINE_METHOD": "half"}).wait(20) == 0
    told = [json.loads(said(tmp_path, rank)) for rank in range(2)]
    for rank, env in enumerate(told):
        place = Environment.read(env)
        assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (rank, 2, rank, 2)
        assert (place.address, place.served, place.method) == ("127.0.0.1", True, "half")
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["OMP_NUM_THREADS"] == str(max(1, launcher.cores() // 2))
        assert env["PYTHONUNBUFFERED"] == "1"
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] != "0"


def test_what_the_user_set_stays() -> None:
    env = worker_env(
        LaunchSite(),
        local_rank=0,
        workers=2,
        port=1,
        base={"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "99"},
    )
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"], env["RANK"]) == ("7", "eth9", "0")


def test_the_gpus_a_worker_sees_are_left_alone() -> None:
    def seen(base: dict[str, str]) -> str | None:
        env = worker_env(LaunchSite(), local_rank=1, workers=2, port=1, base=base)
        assert env["LOCAL_RANK"] == "1"
        return env.get("CUDA_VISIBLE_DEVICES")

    assert seen({}) is None
    assert seen({"CUDA_VISIBLE_DEVICES": "3,5"}) == "3,5"


def test_ranks_go_on_from_host_to_host() -> None:
    rendezvous = LaunchSite(address="10.0.0.1", own_address="10.0.0.2", index=1, hosts=3, port=29511)
    env = worker_env(rendezvous, local_rank=2, workers=4, port=29511, base={})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_ADDR"]) == ("6", "12", "2", "10.0.0.1")


def test_arguments_reach_the_script_as_they_are(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    odd = ["--workers", "a b", "ü→", "", "$(touch x)", "; rm", "*", "--"]
    assert start([*script("print(repr(sys.argv[1:]))"), *odd], 1).wait(20) == 0
    assert said(tmp_path, 0).strip() == repr(odd)


@pytest.mark.parametrize("workers", [0, -1, 10**9])
def test_senseless_numbers_of_workers(workers: int) -> None:
    with pytest.raises(UsageError, match=f"{workers} workers"):
        launch(JobSpec(argv=["true"], workers=workers))


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start /no/such"):
        launch(JobSpec(argv=["/no/such"], workers=2), WorkerOutput.kept(tmp_path))


# ------------------------------------------------------------------------------------------------ the first cause


def test_a_killed_worker_is_the_cause_and_the_others_end(start: Start, script: Callable[[str], list[str]]) -> None:
    job = start(script("time.sleep(60)"), 3, grace_s=1.0)
    store = job.store()
    os.kill(job.workers[1].pid, signal.SIGKILL)
    wait_until(lambda: store.check([CAUSE]))
    cause = json.loads(store.get(CAUSE))
    assert cause["worker"] == 1
    assert cause["what"] == "worker 1 was killed by SIGKILL (out of memory?)"
    assert cause["step"] is None
    assert job.wait(10) == 4
    assert job.cause == Cause(**cause)
    assert [worker.code for worker in job.workers] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (77, 77)])
def test_the_exit_code_is_that_of_the_first_cause(
    start: Start, script: Callable[[str], list[str]], code: int, expected: int
) -> None:
    job = start(script(f"sys.exit({code} if rank else time.sleep(60))"), 2, grace_s=0.1)
    assert job.wait(20) == expected
    assert job.cause is not None
    assert (job.cause.worker, job.cause.what) == (1, f"worker 1 ended with exit code {code}")


def test_the_last_word_of_a_worker_is_the_reason(start: Start, script: Callable[[str], list[str]]) -> None:
    job = start(script("raise ValueError('no such column') if rank else time.sleep(60)"), 2, grace_s=0.1)
    assert job.wait(20) == 1
    assert job.cause is not None
    assert job.cause.why == "ValueError: no such column"


def test_what_a_worker_wrote_itself_comes_first(start: Start, script: Callable[[str], list[str]]) -> None:
    job = start(script("time.sleep(60)"), 2, grace_s=0.5)
    own = {"worker": 1, "what": "worker 1: the data is gone", "why": "disk", "step": 7, "kind": "DataError"}
    job.store().compare_set(CAUSE, "", json.dumps(own))
    os.kill(job.workers[0].pid, signal.SIGKILL)
    assert job.wait(20) == 3  # as a DataError has it: worker 1, whom it names, was only stopped by us
    assert job.cause == Cause(1, "worker 1: the data is gone", "disk", step=7, kind="DataError")


@pytest.mark.parametrize("text", ["", "x", "[1]", "null", '{"worker": "1", "what": 3}', "[" * 100_000])
def test_any_text_is_some_cause(text: str) -> None:
    cause = Cause.decode(text)
    assert cause.worker is None
    assert cause.what


def test_of_two_that_end_together_the_killed_one_is_the_cause(start: Start, script: Callable[[str], list[str]]) -> None:
    code = "sys.exit(4) if rank == 0 else os.kill(os.getpid(), signal.SIGSEGV)"
    job = start(["sh", "-c", 'sleep 0.3; exec "$@"', "sh", *script(code)], 2)
    # Held up until both are dead: the order in which they are noticed is then the launcher's choice.
    for worker in job.workers:
        worker._lock.acquire()
    wait_until(lambda: not any(running(worker.pid) for worker in job.workers))
    for worker in job.workers:
        worker._lock.release()
    assert job.wait(20) == 4
    assert job.cause is not None
    assert job.cause.what == "worker 1 was killed by SIGSEGV"


def test_a_worker_that_ends_early_and_well_is_no_failure(start: Start, script: Callable[[str], list[str]]) -> None:
    job = start(script("time.sleep(0.5 * rank)"), 2)
    assert job.wait(20) == 0
    assert job.cause is None


def test_children_of_a_failed_worker_end_with_it(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    code = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert start(script(code), 1).wait(20) == 4
    wait_until(lambda: not running(int(said(tmp_path, 0))), 2)


# ------------------------------------------------------------------------------------------------ the end


def test_workers_die_with_a_killed_launcher(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    argv = script("print(os.getpid()); time.sleep(60)")
    code = "import sys; from paceline.tools.launch import *; launch(JobSpec(argv=sys.argv[1:], workers=2)).wait()"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        pids = [int(process.stdout.readline().removeprefix(b"[1] ")) for _ in range(2)]
        assert all(running(pid) for pid in pids)
        process.kill()
    wait_until(lambda: not any(running(pid) for pid in pids), 2)


def test_nothing_survives_a_killed_launcher(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    """Neither a worker's children nor what it has started in a session of its own."""
    code = """
        import subprocess
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        children = [subprocess.Popen(sleep, start_new_session=own) for own in (False, True)]
        print(os.getpid(), *(child.pid for child in children))
        sys.exit(0) if rank else time.sleep(60)
    """
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "-n", "2", "--output", "all", script(code)[-1]]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        pids = [int(word) for _ in range(2) for word in process.stdout.readline().removeprefix(b"[1] ").split()]
        assert len(pids) == 6
        process.kill()
    wait_until(lambda: not any(running(pid) for pid in pids), 10)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_what_a_script_leaves_behind_on_purpose_outlives_a_launcher_that_ends_well(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    code = """
        import subprocess
        own = [sys.executable, "-c", "import time; time.sleep(60)"]
        print(subprocess.Popen(own, start_new_session=True, stdout=subprocess.DEVNULL).pid)
    """
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", script(code)[-1]]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=30, check=True)
    assert running(int(done.stdout))
    os.kill(int(done.stdout), signal.SIGKILL)


def test_signals_are_handed_on_once(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    code = """
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), time.sleep(0.2), sys.exit(0)))
        print("ready")
        time.sleep(60)
    """
    job = start(script(code))
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    with launcher.forwarding_signals() as forward_to:
        forward_to(job)
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.wait(10) == 0  # they ended by themselves, and well
    assert [said(tmp_path, rank).count("asked") for rank in range(2)] == [1, 1]
    assert job.stopped_by == signal.SIGTERM


def test_a_signal_that_comes_before_the_crew_is_known_waits_for_it(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    with launcher.forwarding_signals() as forward_to:
        os.kill(os.getpid(), signal.SIGTERM)
        job = start(script("print('ready'); time.sleep(60)"))
        wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
        forward_to(job)
        assert job.wait(10) == 128 + signal.SIGTERM


def test_who_does_not_listen_is_killed_after_the_grace(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    job = start(script("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"), grace_s=0.5)
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    began = time.monotonic()
    job.stop(signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began > 0.4, "no grace"
    assert {worker.code for worker in job.workers} == {-signal.SIGKILL}


def test_asked_twice_kills_at_once(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    job = start(script("signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); time.sleep(60)"), grace_s=30)
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    job.stop(signal.SIGINT)
    job.stop(signal.SIGINT)
    assert job.wait(5) == 130


def test_a_launcher_that_fails_does_not_look_like_success(
    start: Start, script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.tools.launch.supervisor._suspicion", lambda worker: 1 / 0)
    job = start(script("time.sleep(60 * rank)"))
    assert job.wait(20) == 4
    assert job.cause is not None
    assert "ZeroDivisionError" in job.cause.why


class Mute:
    """A store whose host is gone without a word: a call of it never returns."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def ask(*_: object) -> None:
            self.asked.set()
            threading.Event().wait()

        return ask


def test_a_store_that_never_answers_keeps_no_signal_from_the_workers(
    start: Start, script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = Mute()

    def opened(job: LocalJob, *_: object) -> None:
        job._store = mute
        job._store_settled.set()

    monkeypatch.setattr(LocalJob, "_open_store", opened)
    job = start(script("time.sleep(60)"), 1, rendezvous=LaunchSite(hosts=2), grace_s=0.2)
    assert mute.asked.wait(10), "it looks for other hosts"
    job.stop(signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM


def test_a_second_signal_ends_a_launcher_that_waits_for_something_else() -> None:
    code = """
        import os, signal, sys, threading
        from paceline.tools.launch import forwarding_signals
        class Deaf:
            def stop(self, signum):
                print("asked", flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
        with forwarding_signals() as forward_to:
            forward_to(Deaf())
            print("ready", flush=True)
            threading.Event().wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for signum, answer in ((0, "ready"), (signal.SIGTERM, "asked"), (signal.SIGINT, "asked")):
            if signum:
                process.send_signal(signum)
            assert process.stdout.readline().strip() == answer
        assert process.wait(20) == 128 + signal.SIGINT


def test_a_worker_that_ends_before_prepare_is_missed_at_once(start: Start, script: Callable[[str], list[str]]) -> None:
    job = start(script("time.sleep(60 * (rank != 1))"), 3, grace_s=0.2)
    wait_until(lambda: job.workers[1].code == 0, 20)
    time.sleep(0.3)
    assert job.cause is None, "no worker waits for it"
    job.store().set(f"{CAUSE.removesuffix('cause')}here/2", "x")  # as a worker does that is in prepare
    assert job.wait(20) == 4
    assert job.cause is not None
    assert (job.cause.worker, job.cause.what) == (
        1,
        "worker 1 ended, with exit code 0, before it called paceline.prepare",
    )
    assert job.cause.do


# ------------------------------------------------------------------------------------------------ the supervisor


def supervised(argv: list[str], count: int = 2, grace_s: float = 30.0) -> Supervisor:
    supervisor = Supervisor(grace_s=grace_s)
    for rank in range(count):
        env = {**os.environ, "RANK": str(rank)}
        supervisor.start(WorkerCommand(rank=rank, argv=argv, env=env, stdout=subprocess.PIPE))
    for worker in supervisor.workers:
        assert worker.process.stdout is not None
        assert worker.process.stdout.readline() == b"ready\n"
    return supervisor


def test_a_supervisor_notices_an_end_at_once_and_says_who_failed(script: Callable[[str], list[str]]) -> None:
    supervisor = supervised(script("print('ready'); sys.exit(time.sleep(60) if rank == 0 else 3)"))
    ended = []
    while not ended:
        ended = supervisor.watch(20)
    assert [(worker.rank, worker.code) for worker in ended] == [(1, 3)]
    assert [worker.rank for worker in supervisor.failed] == [1]
    assert [worker.rank for worker in supervisor.running] == [0]
    supervisor.kill()
    supervisor.kill()
    assert supervisor.running == []
    assert [worker.rank for worker in supervisor.failed] == [1], "the other was asked to end"


def test_a_supervisor_ends_the_others_after_the_grace(script: Callable[[str], list[str]]) -> None:
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else signal.SIG_DFL)
        print("ready")
        time.sleep(60)
    """
    supervisor = supervised(script(code), grace_s=0.3)
    began = time.monotonic()
    supervisor.end_after_grace()
    supervisor.end_after_grace()  # does not put it off
    assert supervisor.wait(20)
    assert [worker.code for worker in supervisor.workers] == [-signal.SIGTERM, -signal.SIGKILL]
    assert time.monotonic() - began > 0.5, "two periods of grace"
    assert supervisor.failed == []


def test_a_supervisor_kills_the_children_of_its_workers_too(script: Callable[[str], list[str]], tmp_path: Path) -> None:
    code = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(sys.argv[1], "w").write(str(child.pid))
        print("ready")
        time.sleep(60)
    """
    supervisor = supervised([*script(code), str(tmp_path / "child")], 1)
    supervisor.kill()
    wait_until(lambda: not running(int((tmp_path / "child").read_text())))


# ------------------------------------------------------------------------------------------------ output


def test_worker_0_passes_as_it_is_and_the_others_get_their_rank(
    script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    argv = script("print('out', rank); print('half', end=''); print('err', rank, file=sys.stderr)")
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        with launch(JobSpec(argv=argv, workers=2), WorkerOutput(log_dir=tmp_path, out=out, err=err)) as job:
            assert job.wait(20) == 0
    shown = (tmp_path / "out").read_text()
    assert "[1] out 1\n" in shown
    assert "[1] half\n" in shown
    assert "out 0\n" in shown
    assert "[0]" not in shown
    assert sorted((tmp_path / "err").read_text().splitlines()) == ["[1] err 1", "err 0"]
    assert sorted(said(tmp_path, 1).split("\n")) == ["err 1", "half", "out 1"] or "halferr 1" in said(tmp_path, 1)


def test_only_worker_0_is_shown_and_whoever_fails(script: Callable[[str], list[str]], tmp_path: Path) -> None:
    code = """
        print("out", rank)
        print("err", rank, file=sys.stderr)
        if rank == 2:
            for i in range(100):
                print("line", i)
            raise ValueError("no such column")
        time.sleep(60)
    """
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        output = WorkerOutput(log_dir=tmp_path, out=out, err=err, shown="main")
        with launch(JobSpec(argv=script(code), workers=3, grace_s=0.1), output) as job:
            assert job.wait(20) == 1
    assert (tmp_path / "out").read_text() == "out 0\n"
    first, *last = (tmp_path / "err").read_text().splitlines()
    assert first == "err 0"
    assert last[-1] == "[2] ValueError: no such column"
    assert "[2] line 99" in last
    assert len(last) == 40, "the last lines, not all of them"
    assert not [line for line in last if not line.startswith("[2] ")], "worker 1 was only stopped"
    assert "line 0\n" in said(tmp_path, 2), "the log has everything"


def test_workers_that_are_stopped_do_not_count_as_failed(script: Callable[[str], list[str]], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as out:
        output = WorkerOutput(log_dir=tmp_path, out=out, err=out, shown="main")
        with launch(JobSpec(argv=script("print('ready'); time.sleep(60)"), workers=2), output) as job:
            wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
            job.stop(signal.SIGINT)
            assert job.wait(20) == 130
    assert "[1]" not in (tmp_path / "out").read_text()


def test_lines_of_two_workers_do_not_run_into_each_other(tmp_path: Path) -> None:
    from paceline.tools.launch.output import _Stream

    with (tmp_path / "out").open("w+b") as out:
        output = WorkerOutput(out=out, err=out)
        first, second = (_Stream(rank, out, out) for rank in range(2))
        output._show(first, first.feed(b"loading 10%"))
        output._show(second, second.feed(b"a\nb\r"))
        output._show(second, second.feed(b"c\r\nd"))
        output._show(second, second.feed(b""))
        output._release(math.inf)
    assert (tmp_path / "out").read_bytes() == b"loading 10%\n[1] a\n[1] b\r[1] c\r\n[1] d\n"


def test_a_line_in_two_pieces_is_not_torn(tmp_path: Path) -> None:
    """An unbuffered print writes its text and its end of line apart."""
    from paceline.tools.launch.output import _Stream

    with (tmp_path / "out").open("w+b") as out:
        output = WorkerOutput(out=out, err=out)
        first, second = (_Stream(rank, out, out) for rank in range(2))
        output._show(first, first.feed(b"ready"))
        output._show(second, second.feed(b"ready\n"))
        output._show(first, first.feed(b"\n"))
    assert (tmp_path / "out").read_bytes() == b"ready\n[1] ready\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\x1b[2J\x1b]0;title\x07a\x1b[3Ab\tc\r\n", b"ab\tc\r\n"),
        (b"\x1b[1;31mred\n", b"\x1b[1;31mred\x1b[0m\n"),
        ("grün \x9b2J".encode() + b"\x00\x08\x7f\xff\n", "grün 2J".encode() + b"\xff\n"),
        (b"\x1b]0;never ends\n", b"0;never ends\n"),
    ],
)
def test_lines_of_other_workers_give_the_terminal_no_orders(line: bytes, shown: bytes, tmp_path: Path) -> None:
    from paceline.tools.launch.output import _Stream

    with (tmp_path / "out").open("w+b") as out:
        assert _Stream(1, out, out).feed(line) == b"[1] " + shown
        assert _Stream(0, out, out).feed(line) == line


ABORT = """terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access
Exception raised from x at y.cpp:3 (most recent call first):
frame #0: c10::Error::Error() + 0x6c (0x7 in libc10.so)
frame #19: _start + 0x2e (0x55 in /usr/bin/python)"""
RAISED = """Traceback (most recent call last):
  File "x.py", line 3, in <module>
    f()
RuntimeError: [enforce fail at x.cpp:2] . boom
frame #19: _start + 0x2e (0x55 in /usr/bin/python)
/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects
  warnings.warn('resource_tracker: There appear to be %d '"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ABORT, ("CUDA error: an illegal memory access", "", "")),
        (RAISED, ("RuntimeError: [enforce fail at x.cpp:2] . boom", "", "")),
        ("frame #19: _start + 0x2e", ("", "", "")),
        ("SyntaxError: invalid syntax", ("SyntaxError: invalid syntax", "", "")),
        (
            "paceline: no data\n  why: it is empty\n  at:  x.py:3: f()\n  do:  give some",
            ("no data", "it is empty", "give some"),
        ),
        ("paceline.errors.DataError: no data\n  why: it is empty", ("no data", "it is empty", "")),
        ("\x1b[31mValueError: \x1b[2Jred\x1b]0;pwn\x07 text\nbye", ("ValueError: red text", "", "")),
        (
            "Fatal Python error: Segmentation fault\n\nThread 0x7 (most recent call first):\n",
            ("Fatal Python error: Segmentation fault", "", ""),
        ),
        ("[rank1]: ValueError: x\n[W1118 12:00 x.cpp:1] Warning: destroy_process_group()", ("ValueError: x", "", "")),
        ("paceline: 2 workers over shared memory\nsegfault", ("segfault", "", "")),
        ("", ("", "", "")),
    ],
)
def test_the_cause_is_found_in_the_last_words(text: str, words: tuple[str, str, str]) -> None:
    assert last_words(text.splitlines()) == words


def test_a_reader_that_goes_away_does_not_end_the_job(script: Callable[[str], list[str]], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as gone:
        with launch(JobSpec(argv=script("print('x' * 10000)"), workers=2), WorkerOutput(out=gone, err=gone)) as job:
            assert job.wait(20) == 0


# ------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "a;rm", "", "$(x)", "user@host", "x" * 300, "a\nb"])
def test_host_names_are_names(host: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        LaunchSite.among(["127.0.0.1", host])


def test_a_host_that_is_not_listed_is_told_its_addresses() -> None:
    with pytest.raises(UsageError) as raised:
        LaunchSite.among(["192.0.2.77", "192.0.2.78"])
    assert "this host is none of 192.0.2.77, 192.0.2.78" in raised.value.what
    assert "127.0.0.1" in raised.value.why


def test_a_host_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.launch.site.own_addresses", lambda: {"127.0.0.1": "lo", "192.0.2.78": "eth5"})
    rendezvous = LaunchSite.among(["192.0.2.77", "192.0.2.78"], 1234)
    assert (rendezvous.index, rendezvous.hosts, rendezvous.address, rendezvous.port) == (1, 2, "192.0.2.77", 1234)
    assert rendezvous.interface == "eth5"
    assert worker_env(rendezvous, local_rank=0, workers=1, port=1234, base={})["GLOO_SOCKET_IFNAME"] == "eth5"


def test_loopback_is_no_meeting_place_for_several_hosts() -> None:
    with pytest.raises(UsageError, match="cannot reach"):
        LaunchSite.among(["127.0.0.1", "192.0.2.77"])


def test_a_host_listed_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        LaunchSite.among(["192.0.2.77", "192.0.2.77"])


def test_one_host_is_simply_this_one() -> None:
    assert LaunchSite.among(["127.0.0.1"]) == LaunchSite()


def test_a_first_host_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.launch.site.own_addresses", lambda: {"192.0.2.78": "eth5"})
    monkeypatch.setattr("paceline.tools.launch.site._resolve", lambda host: [] if host == "nowhere" else [host])
    with pytest.raises(PeerError, match="cannot resolve 'nowhere'"):
        LaunchSite.among(["nowhere", "192.0.2.78"])


def test_a_taken_port_is_named_with_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}") as raised:
            LaunchSite(port=port).listen()
    assert "--port" in raised.value.do


# ------------------------------------------------------------------------------------------------ with torch


TORCH = """
    import json, psutil, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(3) * (rank + 1)
    dist.all_reduce(x)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    print(json.dumps([x.tolist(), sorted(listening)]))
    dist.destroy_process_group()
"""


def test_plain_torch_workers_meet_on_loopback_only(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    job = start(script(TORCH))
    store = job.store()
    own = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == store.port and c.status == "LISTEN"]
    assert [c.laddr.ip for c in own] == ["127.0.0.1"]
    assert job.wait(60) == 0
    assert [json.loads(said(tmp_path, rank)) for rank in range(2)] == [[[3.0] * 3, ["127.0.0.1"]]] * 2


@pytest.mark.slow
@lab
@needs_lab
def test_a_crew_in_the_lab(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    with Lab(2) as hosts:
        job = start(script(TORCH), rendezvous=LaunchSite.in_lab(hosts))
        assert job.wait(60) == 0
        assert hosts.counters(1).sent > 1000
    for rank in range(2):
        summed, listening = json.loads(said(tmp_path, rank).splitlines()[-1])
        assert (summed, listening) == ([3.0] * 3, [f"10.77.0.{rank + 1}"])


@lab
@needs_lab
def test_two_hosts_run_the_same_command(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    script(TORCH)
    with Lab(2) as hosts:
        processes = _paceline_run(hosts, [str(tmp_path / "script.py")])
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert json.loads(outputs[0][0])[0] == [3.0] * 3
    assert json.loads(outputs[1][0].removeprefix("[1] "))[1] == ["10.77.0.2"]


@pytest.mark.slow
@lab
@needs_lab
def test_a_failure_on_one_host_ends_the_other_with_the_same_cause(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    script("raise RuntimeError('bad disk') if rank else time.sleep(60)")
    with Lab(2) as hosts:
        first, second = _paceline_run(hosts, [str(tmp_path / "script.py")])
        (_, errors), (_, others) = first.communicate(timeout=60), second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (4, 1)
    for text in (errors, others):
        assert "worker 1 ended with exit code 1" in text
        assert "RuntimeError: bad disk" in text


def _paceline_run(hosts: Lab, words: list[str]) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "--hosts", "10.77.0.1,10.77.0.2"]
    command += ["--output", "all", *words]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    return [
        subprocess.Popen(
            [*hosts.exec_prefix(i), *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
