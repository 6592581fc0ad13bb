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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import paceline
from paceline import launch as launcher
from paceline.environment import Environment
from paceline.errors import PeerError, UsageError
from paceline.lab import namespaces
from paceline.lab.namespaces import Lab
from paceline.launch import CAUSE, Cause, Crew, Output, Site, launch, worker_env

SRC = Path(next(iter(paceline.__path__))).parent
NO_LAB = namespaces.available()
lab = pytest.mark.lab
needs_lab = pytest.mark.skipif(NO_LAB is not None, reason=f"no network lab: {NO_LAB}")

Start = Callable[..., Crew]


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
    crews: list[Crew] = []

    def begin(argv: list[str], workers: int = 2, **options: object) -> Crew:
        options.setdefault("output", Output.kept(tmp_path))
        crews.append(launch(argv, workers=workers, **options))  # type: ignore[arg-type]
        return crews[-1]

    yield begin
    for crew in crews:
        crew.close()
        assert not any(psutil.pid_exists(worker.pid) for worker in crew.workers)


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


def test_a_worker_knows_its_place(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    argv = script("import json; print(json.dumps(dict(os.environ)))")
    assert start(argv, 2, env={"PACELINE_METHOD": "half"}).wait(20) == 0
    told = [json.loads(said(tmp_path, rank)) for rank in range(2)]
    for rank, env in enumerate(told):
        place = Environment.read(env)
        assert (place.rank, place.world, place.local_rank, place.local_world) == (rank, 2, rank, 2)
        assert (place.address, place.served, place.method) == ("127.0.0.1", True, "half")
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["OMP_NUM_THREADS"] == str(max(1, launcher.cores() // 2))
        assert env["PYTHONUNBUFFERED"] == "1"
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] != "0"


def test_what_the_user_set_stays() -> None:
    env = worker_env(Site(), 2, 0, 1, {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "99"})
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"], env["RANK"]) == ("7", "eth9", "0")


def test_ranks_go_on_from_host_to_host() -> None:
    site = Site(address="10.0.0.1", own="10.0.0.2", index=1, hosts=3, port=29511)
    env = worker_env(site, 4, 2, 29511, {})
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
        launch(["true"], workers=workers)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start /no/such"):
        launch(["/no/such"], workers=2, output=Output.kept(tmp_path))


# ------------------------------------------------------------------------------------------------ the first cause


def test_a_killed_worker_is_the_cause_and_the_others_end(start: Start, script: Callable[[str], list[str]]) -> None:
    crew = start(script("time.sleep(60)"), 3, grace=1.0)
    store = crew.store()
    time.monotonic()
    os.kill(crew.workers[1].pid, signal.SIGKILL)
    wait_until(lambda: store.check([CAUSE]))
    cause = json.loads(store.get(CAUSE))
    assert cause["worker"] == 1
    assert cause["what"] == "worker 1 was killed by SIGKILL (out of memory?)"
    assert cause["step"] is None
    assert crew.wait(10) == 4
    assert crew.cause == Cause(**cause)
    assert [worker.code for worker in crew.workers] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (77, 77)])
def test_the_exit_code_is_that_of_the_first_cause(
    start: Start, script: Callable[[str], list[str]], code: int, expected: int
) -> None:
    crew = start(script(f"sys.exit({code} if rank else time.sleep(60))"), 2, grace=0.1)
    assert crew.wait(20) == expected
    assert crew.cause is not None
    assert (crew.cause.worker, crew.cause.what) == (1, f"worker 1 ended with exit code {code}")


def test_the_last_word_of_a_worker_is_the_reason(start: Start, script: Callable[[str], list[str]]) -> None:
    crew = start(script("raise ValueError('no such column') if rank else time.sleep(60)"), 2, grace=0.1)
    assert crew.wait(20) == 1
    assert crew.cause is not None
    assert crew.cause.why == "ValueError: no such column"


def test_what_a_worker_wrote_itself_comes_first(start: Start, script: Callable[[str], list[str]]) -> None:
    crew = start(script("time.sleep(60)"), 2, grace=0.5)
    own = {"worker": 1, "what": "worker 1: the data is gone", "why": "disk", "step": 7, "kind": "DataError"}
    crew.store().compare_set(CAUSE, "", json.dumps(own))
    os.kill(crew.workers[0].pid, signal.SIGKILL)
    assert crew.wait(20) == 4  # worker 1, whom it names, was only stopped by us
    assert crew.cause == Cause(1, "worker 1: the data is gone", "disk", 7)


@pytest.mark.parametrize("text", ["", "x", "[1]", "null", '{"worker": "1", "what": 3}', "[" * 100_000])
def test_any_text_is_some_cause(text: str) -> None:
    cause = Cause.decode(text)
    assert cause.worker is None
    assert cause.what


def test_of_two_that_end_together_the_killed_one_is_the_cause(start: Start, script: Callable[[str], list[str]]) -> None:
    code = "sys.exit(4) if rank == 0 else os.kill(os.getpid(), signal.SIGSEGV)"
    crew = start(["sh", "-c", 'sleep 0.3; exec "$@"', "sh", *script(code)], 2)
    # Held up until both are dead: the order in which they are noticed is then the launcher's choice.
    for worker in crew.workers:
        worker._lock.acquire()
    psutil.wait_procs([psutil.Process(worker.pid) for worker in crew.workers], timeout=0.1)
    wait_until(lambda: not any(running(worker.pid) for worker in crew.workers))
    for worker in crew.workers:
        worker._lock.release()
    assert crew.wait(20) == 4
    assert crew.cause is not None
    assert crew.cause.what == "worker 1 was killed by SIGSEGV"


def test_a_worker_that_ends_early_and_well_is_no_failure(start: Start, script: Callable[[str], list[str]]) -> None:
    crew = start(script("time.sleep(0.5 * rank)"), 2)
    assert crew.wait(20) == 0
    assert crew.cause is None


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
    code = "import sys; from paceline.launch import *; launch(sys.argv[1:], workers=2).wait()"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        pids = [int(process.stdout.readline().removeprefix(b"[1] ")) for _ in range(2)]
        assert all(running(pid) for pid in pids)
        process.kill()
    wait_until(lambda: not any(running(pid) for pid in pids), 2)


def test_signals_are_handed_on_once(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    code = """
        signal.signal(signal.SIGTERM, lambda *_: (print("asked"), time.sleep(0.2), sys.exit(0)))
        print("ready")
        time.sleep(60)
    """
    crew = start(script(code))
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    with launcher.forwarding() as forward:
        forward(crew)
        os.kill(os.getpid(), signal.SIGTERM)
        assert crew.wait(10) == 0  # they ended by themselves, and well
    assert [said(tmp_path, rank).count("asked") for rank in range(2)] == [1, 1]
    assert crew.asked == signal.SIGTERM


def test_a_signal_that_comes_before_the_crew_is_known_waits_for_it(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    with launcher.forwarding() as forward:
        os.kill(os.getpid(), signal.SIGTERM)
        crew = start(script("print('ready'); time.sleep(60)"))
        wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
        forward(crew)
        assert crew.wait(10) == 128 + signal.SIGTERM


def test_who_does_not_listen_is_killed_after_the_grace(
    start: Start, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    crew = start(script("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"), grace=0.5)
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    began = time.monotonic()
    crew.stop(signal.SIGTERM)
    assert crew.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began > 0.4, "no grace"
    assert {worker.code for worker in crew.workers} == {-signal.SIGKILL}


def test_asked_twice_kills_at_once(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    crew = start(script("signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); time.sleep(60)"), grace=30)
    wait_until(lambda: all("ready" in said(tmp_path, rank) for rank in range(2)))
    crew.stop(signal.SIGINT)
    crew.stop(signal.SIGINT)
    assert crew.wait(5) == 130


def test_a_launcher_that_fails_does_not_look_like_success(
    start: Start, script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.launch.crew._suspicion", lambda worker: 1 / 0)
    crew = start(script("time.sleep(60 * rank)"))
    assert crew.wait(20) == 4
    assert crew.cause is not None
    assert "ZeroDivisionError" in crew.cause.why


# ------------------------------------------------------------------------------------------------ output


def test_worker_0_passes_as_it_is_and_the_others_get_their_rank(
    script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    argv = script("print('out', rank); print('half', end=''); print('err', rank, file=sys.stderr)")
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        with launch(argv, workers=2, output=Output(log_dir=tmp_path, out=out, err=err)) as crew:
            assert crew.wait(20) == 0
    shown = (tmp_path / "out").read_text()
    assert "[1] out 1\n" in shown
    assert "[1] half\n" in shown
    assert "out 0\n" in shown
    assert "[0]" not in shown
    assert sorted((tmp_path / "err").read_text().splitlines()) == ["[1] err 1", "err 0"]
    assert sorted(said(tmp_path, 1).split("\n")) == ["err 1", "half", "out 1"] or "halferr 1" in said(tmp_path, 1)


def test_lines_of_two_workers_do_not_run_into_each_other(tmp_path: Path) -> None:
    from paceline.launch.output import _Stream

    with (tmp_path / "out").open("w+b") as out:
        output = Output(out=out, err=out)
        first, second = (_Stream(rank, out, out, None) for rank in range(2))
        output._show(first, first.feed(b"loading 10%"))
        output._show(second, second.feed(b"a\nb\r"))
        output._show(second, second.feed(b"c\r\nd"))
        output._show(second, second.feed(b""))
        output._release(math.inf)
    assert (tmp_path / "out").read_bytes() == b"loading 10%\n[1] a\n[1] b\r[1] c\r\n[1] d\n"


def test_a_line_in_two_pieces_is_not_torn(tmp_path: Path) -> None:
    """An unbuffered print writes its text and its end of line apart."""
    from paceline.launch.output import _Stream

    with (tmp_path / "out").open("w+b") as out:
        output = Output(out=out, err=out)
        first, second = (_Stream(rank, out, out, None) for rank in range(2))
        output._show(first, first.feed(b"ready"))
        output._show(second, second.feed(b"ready\n"))
        output._show(first, first.feed(b"\n"))
    assert (tmp_path / "out").read_bytes() == b"ready\n[1] ready\n"


def test_a_reader_that_goes_away_does_not_end_the_job(script: Callable[[str], list[str]], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as gone:
        with launch(script("print('x' * 10000)"), workers=2, output=Output(out=gone, err=gone)) as crew:
            assert crew.wait(20) == 0


# ------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "a;rm", "", "$(x)", "user@host", "x" * 300, "a\nb"])
def test_host_names_are_names(host: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        Site.among(["127.0.0.1", host])


def test_a_host_that_is_not_listed_is_told_its_addresses() -> None:
    with pytest.raises(UsageError) as raised:
        Site.among(["192.0.2.77", "192.0.2.78"])
    assert "this host is none of 192.0.2.77, 192.0.2.78" in raised.value.what
    assert "127.0.0.1" in raised.value.why


def test_a_host_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.site.own_addresses", lambda: {"127.0.0.1": "lo", "192.0.2.78": "eth5"})
    site = Site.among(["192.0.2.77", "192.0.2.78"], 1234)
    assert (site.index, site.hosts, site.address, site.port) == (1, 2, "192.0.2.77", 1234)
    assert site.interface == "eth5"
    assert worker_env(site, 1, 0, 1234, {})["GLOO_SOCKET_IFNAME"] == "eth5"


def test_loopback_is_no_meeting_place_for_several_hosts() -> None:
    with pytest.raises(UsageError, match="cannot reach"):
        Site.among(["127.0.0.1", "192.0.2.77"])


def test_a_host_listed_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        Site.among(["192.0.2.77", "192.0.2.77"])


def test_one_host_is_simply_this_one() -> None:
    assert Site.among(["127.0.0.1"]) == Site()


def test_a_first_host_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.site.own_addresses", lambda: {"192.0.2.78": "eth5"})
    monkeypatch.setattr("paceline.launch.site._resolve", lambda host: [] if host == "nowhere" else [host])
    with pytest.raises(PeerError, match="cannot resolve 'nowhere'"):
        Site.among(["nowhere", "192.0.2.78"])


def test_a_taken_port_is_named_with_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}") as raised:
            Site(port=port).listen()
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
    crew = start(script(TORCH))
    store = crew.store()
    own = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == store.port and c.status == "LISTEN"]
    assert [c.laddr.ip for c in own] == ["127.0.0.1"]
    assert crew.wait(60) == 0
    assert [json.loads(said(tmp_path, rank)) for rank in range(2)] == [[[3.0] * 3, ["127.0.0.1"]]] * 2


@lab
@needs_lab
def test_a_crew_in_the_lab(start: Start, script: Callable[[str], list[str]], tmp_path: Path) -> None:
    with Lab(2) as hosts:
        crew = start(script(TORCH), site=Site.in_lab(hosts))
        assert crew.wait(60) == 0
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
    command = [sys.executable, "-m", "paceline.cli.main", "run", "--hosts", "10.77.0.1,10.77.0.2", *words]
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
