"""The command line: every command, every bad input, and what it says about it."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.errors import MethodError
from paceline.tools.cli import doctor as doctor_command
from paceline.tools.cli import main as command_line
from paceline.tools.cli import run as run_command
from paceline.tools.cli.run import parse_knobs
from paceline.tools.launch import JobSpec

SRC = Path(next(iter(paceline.__path__))).parent
ECHO = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process (torch is imported once): its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def echo(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(ECHO)
    return str(path)


def alone(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.tools.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# ------------------------------------------------------------------------------------------------ the program


def test_help_does_not_need_torch() -> None:
    code = """if True:
        import sys
        from paceline.tools.cli.main import main
        try:
            main()
        finally:
            print("torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr)
    """
    environment = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "80"}
    for words in (
        ["--help"],
        ["run", "--help"],
        ["methods", "-h"],
        ["doctor", "-h"],
        ["race", "-h"],
        ["plan", "-h"],
        ["--version"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr.strip()) == (0, "False False"), words
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "Traceback" not in done.stdout


def test_help_lists_the_commands(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    for name in ("run", "methods", "doctor", "race", "plan"):
        assert re.search(rf"^│ {name} ", out, re.MULTILINE), out


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"paceline {paceline.__version__}\n", "")


def test_an_unknown_command_or_option_is_usage(call: Call) -> None:
    for words in (["rum"], ["--nope"], ["run", "--nope", "x.py"], ["methods", "--nope"]):
        code, _, err = call(*words)
        assert code == 2
        assert "Error" in err


def test_errors_say_what_why_do_and_hide_the_traceback(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, err = call("run", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("paceline: ")
    assert "is a directory" in err
    assert "  do:  " in err
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["paceline", "run", str(tmp_path)])
    with pytest.raises(paceline.UsageError):
        command_line.main()


def test_debug_is_an_option_too(tmp_path: Path) -> None:
    done = alone("--debug", "run", str(tmp_path))
    assert "Traceback" in done.stderr
    assert "UsageError" in done.stderr


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def interrupted(workers: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_command, "_checks", interrupted)
    assert call("doctor")[0] == 130


# ------------------------------------------------------------------------------------------------ run


def test_everything_after_the_script_is_its_own(call: Call, echo: str) -> None:
    odd = ["--workers", "9", "--json", "--", "-x", "a b", "ü", "--help"]
    for words in ([echo, *odd], ["--", echo, *odd]):
        code, out, _ = call("run", *words)
        assert code == 0
        assert json.loads(out)[0] == odd


@pytest.mark.parametrize("name", ["with space.py", "ünïcode →.py", "-dash.py", "--workers", "$(touch x);.py"])
def test_scripts_with_odd_names(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(ECHO)
    code, out, err = call("run", "--", name, "a")
    assert (code, json.loads(out)[0]) == (0, ["a"]), err
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_the_method_travels_in_the_environment(call: Call, echo: str, tmp_path: Path) -> None:
    events = tmp_path / "new" / "events"
    code, out, err = call("run", "--method", "half", "--set", "dtype=bf16", "--events", str(events), echo)
    assert code == 0, err
    env = json.loads(out)[1]
    assert (env["PACELINE_METHOD"], json.loads(env["PACELINE_SET"])) == ("half", {"dtype": "bf16"})
    assert env["PACELINE_EVENTS"] == str(events)
    assert list(events.iterdir()) == []  # the probe has gone


def test_knobs_without_a_method_are_the_scripts(call: Call, echo: str) -> None:
    env = json.loads(call("run", "-s", "rank=4", "-s", "dtype=bf16", echo)[1])[1]
    assert json.loads(env["PACELINE_SET"]) == {"rank": 4, "dtype": "bf16"}
    assert "PACELINE_METHOD" not in env


@pytest.mark.parametrize("name", ["torch:ddp", "floor"])
def test_peers_of_the_race_are_let_through(call: Call, echo: str, name: str) -> None:
    assert json.loads(call("run", "--method", name, echo)[1])[1]["PACELINE_METHOD"] == name


def test_two_workers_logs_and_json(call: Call, tmp_path: Path) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text("import os; print('I am', os.environ['RANK'])")
    code, out, err = call("run", "-n", "2", "--output", "all", "--log-dir", str(logs), "--json", str(script))
    assert code == 0
    ended = json.loads(out)
    assert (ended["exit_code"], ended["cause"]) == (0, None)
    assert [worker["exit_code"] for worker in ended["workers"]] == [0, 0]
    assert sorted(err.splitlines()) == ["I am 0", "[1] I am 1"]
    assert [(logs / f"worker-{rank}.log").read_text() for rank in range(2)] == ["I am 0\n", "I am 1\n"]


PACKAGE = """
import os, sys
from package import NAME
print(NAME, os.environ["RANK"], sys.argv[1:])
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("no such column")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in the current directory, whose modules import each other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("NAME = 'I am'")
    (tmp_path / "package" / "train.py").write_text(PACKAGE)
    return "package.train"


def test_a_module_is_run_as_python_does(call: Call, package: str) -> None:
    code, out, err = call("run", "-n", "2", "-m", package, "--lr", "0.1", "-m", "--workers", "9")
    assert (code, err) == (0, "")
    assert out == "I am 0 ['--lr', '0.1', '-m', '--workers', '9']\n", "the other worker is not shown"
    assert "package" not in sys.modules, "the launcher does not run what it starts"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("half", "a method is chosen with --method"),
        ("no_such.train", "there is no module 'no_such.train'"),
        ("train.py", "there is no module 'train.py'"),
        ("./train", "is not the name of a module"),
        ("", "is not the name of a module"),
    ],
)
def test_a_module_that_is_none(call: Call, package: str, name: str, expected: str) -> None:
    code, out, err = call("run", "-m", name)
    assert (code, out) == (2, "")
    assert expected in " ".join(err.split())


def test_output_of_all_workers_on_demand(call: Call, package: str) -> None:
    code, out, _ = call("run", "-n", "2", "--output", "all", "-m", package)
    assert code == 0
    assert sorted(out.splitlines()) == ["I am 0 []", "[1] I am 1 []"]


def test_the_last_lines_of_a_worker_that_failed_are_always_shown(call: Call, package: str) -> None:
    code, out, err = call("run", "-n", "2", "-m", package, "--fail")
    assert code == 1
    assert out == "I am 0 ['--fail']\n"
    lines = err.splitlines()
    assert lines[0] == "[1] I am 1 ['--fail']"
    assert "[1] ValueError: no such column" in lines
    assert lines[-3:] == [
        "paceline: worker 1 ended with exit code 1",
        "  why: ValueError: no such column",
        "  do:  read the output of worker 1 above, or all of it with --output all",
    ]


def test_a_killed_worker_is_named(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    monkeypatch.setattr(run_command, "JobSpec", functools.partial(JobSpec, grace_s=0.2))
    code, _, err = call("run", "-n", "2", str(script))
    assert code == 4
    assert "paceline: worker 1 was killed by SIGKILL" in err


def test_a_single_scripts_own_failure_is_its_own(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert call("run", str(script)) == (3, "", "")


def test_sigterm_reaches_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready')\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "-n", "2", "--output", "all", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[1] ready\n", "ready\n"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["[1] saved", "saved"]
    assert process.returncode == 0, err


def test_under_another_launcher_it_becomes_the_script(echo: str) -> None:
    done = alone("run", "--method", "floor", echo, "x", RANK="1", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    words, env = json.loads(done.stdout)
    assert (done.returncode, words, env["RANK"], env["PACELINE_METHOD"]) == (0, ["x"], "1", "floor")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    done = alone("run", "-n", "2", echo, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unset RANK" in done.stderr


TRAIN = """
import torch
import paceline

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(24, 2), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for x in loader:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_timeline_of_the_last_steps(call: Call, echo: str, tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(TRAIN)
    code, out, err = call("run", "-n", "2", "--trace", str(trace), "--trace-steps", "4", str(script))
    assert (code, out) == (0, "")
    assert f"the timeline is in {trace}" in err
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    for worker in (0, 1):
        names = [e["name"] for e in slices if e["pid"] == worker]
        assert [name for name in names if name.startswith("step")] == [f"step {i}" for i in range(2, 6)]
        assert names.count("bucket 0") == names.count("backward") == 4
    trace.unlink()
    code, _, err = call("run", "--trace", str(trace), echo)  # it has no loop
    assert code == 0
    assert "no timeline" in err
    assert not trace.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--workers", "0"], "--workers 0 is not in 1..256"),
        (["--workers", "-1"], "--workers -1 is not in 1..256"),
        (["--workers", str(10**9)], "is not in 1..256"),
        (["--workers", "two"], "--workers"),
        (["--method", "haf"], "did you mean 'half'"),
        (["--method", ""], "there is no method ''"),
        (["--method", "half+exact"], "two parts for the axis"),
        (["--method", "half", "--set", "dtyp=fp16"], "did you mean 'dtype'"),
        (["--method", "half", "--set", "dtype=fp8"], "is not a choice"),
        (["--method", "half", "--set", "dtype"], "is not KNOB=VALUE"),
        (["--method", "half", "--set", "=x"], "is not KNOB=VALUE"),
        (["--method", "half", "--set", "dtype=fp16", "--set", "dtype=bf16"], "given twice"),
        (["--hosts", "192.0.2.7,192.0.2.8"], "this host is none of"),
        (["--hosts", "127.0.0.1,-oProxy"], "is not a host name"),
        (["--hosts", ""], "is not a host name"),
        (["--port", "1234"], "--port is for several hosts"),
        (["--hosts", "127.0.0.1,192.0.2.8", "--port", "0"], "port 0 is not in"),
        (["--events", "/proc/nope"], "--events /proc/nope cannot be written to"),
        (["--output", "some"], "--output"),
        (["--log-dir", "/dev/null"], "--log-dir /dev/null cannot be written to"),
        (["--log-dir", "/dev/null/x"], "cannot be written to"),
        (["--trace", "/nonexistent/trace.json"], "/nonexistent/trace.json cannot be written"),
        (["--trace", "/tmp"], "it is a folder"),
        (["--trace", "/dev/null"], "it is a device or a pipe"),
        (["--trace", "/tmp/" + "a" * 300], "File name too long"),
        (["--trace", "/dev/full/x"], "cannot be written"),
        (["--events", "/tmp/" + "a" * 300], "File name too long"),
        (["--log-dir", "/tmp/" + "a" * 300], "File name too long"),
        (["--trace", "/tmp/trace.json", "--trace-steps", "0"], "--trace-steps"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    call: Call, echo: str, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("paceline.tools.cli.run.launch", never)
    code, out, err = call("run", *words, echo)
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("option", "name"), [("--log-dir", "worker-1.log"), ("--events", "worker-1.jsonl")])
def test_a_file_of_one_worker_that_cannot_be_written(
    call: Call, echo: str, tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    code, out, err = call("run", "-n", "2", option, str(tmp_path / "out"), echo)
    assert (code, out) == (2, "")
    assert f"{name}: it is a folder" in err


def test_a_failure_that_was_not_foreseen_shows_no_traceback_without_debug(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(doctor_command, "_checks", lambda workers: 1 / 0)
    code, out, err = call("doctor")
    assert (code, out) == (1, "")
    assert err.startswith("paceline: ZeroDivisionError: division by zero\n  why: ")
    assert "--debug" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["missing.py", ".", "missing/x.py", "pipe"])
def test_a_script_that_is_none(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, _, err = call("run", name)
    assert code == 2
    assert repr(name) in err


def test_a_script_that_cannot_be_read(call: Call, echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    code, _, err = call("run", echo)
    assert code == 2
    assert "cannot be read" in err


def test_more_workers_than_cores_is_a_warning(call: Call, echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.cli.run.cores", lambda: 1)
    code, _, err = call("run", "-n", "2", echo)
    assert code == 0
    assert "2 workers share 1 cores" in err


def test_knobs_are_parsed_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from typing import Literal

    from paceline.core.parts import Reducer

    kinds = {
        "rank": int, "ratio": float, "warm": bool, "label": str, "dtype": Literal["a", 8], "sizes": list[int],
        "inner": Reducer,
    }  # fmt: skip
    monkeypatch.setattr("paceline.knobs.kinds", lambda cls: kinds)
    good = {"rank": "4", "ratio": "1e-3", "warm": "Yes", "label": "4", "dtype": "8", "sizes": "[1, 2]"}
    expected = {"rank": 4, "ratio": 0.001, "warm": True, "label": "4", "dtype": 8, "sizes": [1, 2]}
    assert parse_knobs("half", good) == expected
    assert parse_knobs("half+fixed", {"half.rank": "4"}) == {"half.rank": 4}
    bad = {"rank": "4.5", "ratio": "nan", "warm": "maybe", "sizes": "[1,", "inner": "exact"}
    for knob, text in bad.items():
        with pytest.raises(MethodError, match=knob):
            parse_knobs("half", {knob: text})


# ------------------------------------------------------------------------------------------------ methods


def test_methods_lists_every_part_with_its_question(call: Call) -> None:
    from paceline import registry
    from paceline.core.parts import AXES

    code, out, _ = call("methods")
    assert code == 0
    for word in (*AXES, *registry.parts()):
        assert re.search(rf"^ *{word}\b", out, re.MULTILINE), word
    assert max(map(len, out.splitlines())) <= 80
    listed = json.loads(call("methods", "--json")[1])
    assert {part["name"] for part in listed} == set(registry.parts())


def test_every_method_can_be_described(call: Call) -> None:
    from paceline import registry

    for name, cls in registry.parts().items():
        code, out, _ = call("methods", name)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        described = json.loads(call("methods", name, "--json")[1])
        assert (described["name"], described["axis"]) == (name, cls.axis)
        for knob in cls.knobs():
            assert f"{knob.name}=" in out


def test_half_in_full(call: Call) -> None:
    out = call("methods", "half")[1]
    for word in ("reducer", "Micikevicius", "2·n·2·(W−1)/W", 'dtype="fp16"', "fp16 | bf16", "which 16-bit format"):
        assert word in out


def test_an_unknown_method_has_a_neighbour(call: Call) -> None:
    code, out, err = call("methods", "exakt")
    assert (code, out) == (2, "")
    assert "did you mean 'exact'" in err


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor_finds_this_machine_fit(call: Call) -> None:
    code, out, err = call("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0, (out, err)
    for name in ("paceline", "python", "torch", "cores", "memory", "GPUs", "clock", "disk", "loopback", "lab", "link"):
        assert checks[name]["verdict"] in ("ok", "warn"), checks[name]
    assert re.search(r"2 workers over gloo: \d+ Mbit/s, \d+ µs", checks["link"]["found"])


def test_doctor_says_what_is_wrong_and_what_to_do(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.tools.lab import namespaces

    def broken(*_: object, **__: object) -> None:
        raise OSError("no ports for you")

    monkeypatch.setattr(doctor_command, "launch", broken)
    monkeypatch.setattr(namespaces, "available", lambda: "root is needed")
    monkeypatch.setattr(namespaces, "leftovers", lambda: ["pl1.a-0-sw"])
    monkeypatch.setattr(socket, "create_server", broken)
    monkeypatch.setattr(tempfile, "TemporaryFile", broken)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(doctor_command, "_FASHION", Path("/nowhere"))
    code, out, _ = call("doctor")
    assert code == 1
    text = " ".join(out.split())
    for words in (
        "bad loopback no port can be opened on 127.0.0.1: no ports for you → bring up `lo`",
        "warn lab not available: root is needed →",
        "warn leftovers 1 namespaces of labs that were killed",
        "warn disk",
        "warn open files at most 256 → ulimit -n 4096",
        "warn data no Fashion-MNIST",
        "bad link could not be checked: OSError: no ports for you",
    ):
        assert words in text
    assert max(map(len, out.splitlines())) <= 80


def test_doctor_with_one_worker(call: Call) -> None:
    code, _, err = call("doctor", "--workers", "1")
    assert code == 2
    assert "2..256" in err
