"""`paceline race` as it is typed: a small race to its end, and everything it refuses before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.cli import main as command_line
from paceline.tools.lab import namespaces

PACELINE = [sys.executable, "-m", "paceline.tools.cli.main"]
RESULT_KEYS = [
    "schema", "paceline", "torch", "machine", "date", "command", "commit", "task", "workers", "link", "link_kind",
    "threads", "rows",
]  # fmt: skip
ROW_KEYS = [
    "method", "workers", "link", "steps", "step_ms_median", "samples_per_s", "speedup", "efficiency",
    "sent_bytes_per_step", "wire_bytes_per_step", "exposed_comm_ms", "cpu_ms_per_step", "break_even_mbit",
    "barrier_ms_p50", "barrier_ms_p99", "loss", "accuracy", "target_s", "peak_rss_mb", "error",
]  # fmt: skip

# A script of one's own, reduced to what the race sees of it: its gate and its events. Without torch it starts at once;
# that a training script under `prepare` races too is what the built-in tasks show.
SCRIPT = """
import os, time
from pathlib import Path
from paceline.session.gate import Gate
from paceline.telemetry.recorder import Recorder

recorder = Recorder(Path(os.environ["PACELINE_EVENTS"]), int(os.environ.get("RANK", "0")))
gate = Gate.from_env(recorder, lambda: None)
step = 0
while gate():
    recorder.start_lap(8, 0.0)
    time.sleep(0.002)
    recorder.log({"loss": 1 / (1 + step)})
    recorder.end_lap()
    step += 1
    if os.environ["PACELINE_METHOD"] == "torch:ddp" and step == 8:
        raise ValueError("this script does not go together with DDP")
recorder.close()
"""


def race(*words: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run([*PACELINE, "race", *words], capture_output=True, text=True, timeout=timeout, env=env)


def no_constants(word: str) -> Any:
    pytest.fail(f"{word} in JSON")


def test_a_small_race_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out, page, keep = tmp_path / "race.json", tmp_path / "race.html", tmp_path / "kept"
    trace = tmp_path / "trace.json"
    done = race(
        "digits", "--methods", "floor,exact", "--link", "unlimited", "--steps", "8", "--warmup", "2", "--turn", "4",
        "--json", str(out), "--html", str(page), "--keep", str(keep), "--trace", str(trace), "--trace-steps", "5",
        "--", "--eval-every", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(), parse_constant=no_constants)
    assert list(found) == RESULT_KEYS
    assert (found["schema"], found["task"], found["workers"]) == (1, "digits", 2)
    assert (found["link"], found["link_kind"], found["threads"]) == ("unlimited", "none", 1)
    assert set(found["machine"]) == {"cores", "cpu", "memory_gb"}
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["single", "floor", "exact"]
    for row in rows.values():
        assert list(row) == ROW_KEYS
        assert row["error"] is None
        assert row["steps"] == 8
        for key in (
            "step_ms_median", "samples_per_s", "speedup", "efficiency", "cpu_ms_per_step", "loss", "peak_rss_mb"
        ):  # fmt: skip
            assert row[key] > 0
        assert 0 <= row["accuracy"] <= 1
    assert rows["single"]["workers"] == 1
    assert rows["single"]["speedup"] == 1
    assert rows["exact"]["sent_bytes_per_step"] > 4 * 9610 * 0.9  # the gradient, and little else
    # The gradients pass through shared memory: the kernel's counters miss them, so the table shows the payload.
    assert rows["exact"]["wire_bytes_per_step"] < 0.5 * rows["exact"]["sent_bytes_per_step"]
    assert "MB/step: a worker's payload" in done.stdout
    assert rows["floor"]["sent_bytes_per_step"] is None
    assert rows["exact"]["barrier_ms_p99"] >= rows["exact"]["barrier_ms_p50"] > 0
    # The same seed, the same global batch: one worker and two follow the same trajectory.
    assert rows["exact"]["loss"] == pytest.approx(rows["single"]["loss"], rel=1e-3)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("exact") for line in lines)
    assert "<svg" in page.read_text()
    assert "One step of each" in page.read_text()
    drawn = json.loads(trace.read_text(), parse_constant=no_constants)["traceEvents"]
    workers = {e["pid"]: e["args"]["name"].partition(" ")[0] for e in drawn if e["name"] == "process_name"}
    assert list(workers.values()) == ["single", "floor", "floor", "exact", "exact"]
    for pid, name in workers.items():
        mine = [e["name"] for e in drawn if e["ph"] == "X" and e["pid"] == pid]
        assert sum(word.startswith("step ") for word in mine) == 5
        assert ("bucket 0" in mine) == (name == "exact")
    assert (keep / "exact" / "worker-1.jsonl").is_file()
    assert (keep / "exact" / "worker-1.log").is_file()


def test_a_script_of_ones_own_with_a_contender_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = race(
        str(script), "--methods", "torch:ddp,exact", "--link", "unlimited", "--steps", "12", "--json", "-",
        "--keep", str(tmp_path / "kept"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout, parse_constant=no_constants)["rows"]}
    assert rows["exact"]["error"] is None
    assert rows["exact"]["steps"] == 12
    assert "ValueError: this script does not go together with DDP" in rows["torch:ddp"]["error"]
    assert rows["torch:ddp"]["steps"] > 0, "what was measured before it failed counts"
    assert "torch:ddp is out: ValueError" in done.stderr


def test_ctrl_c_prints_what_is_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    keep = tmp_path / "kept"
    command = [
        *PACELINE, "race", str(script), "--methods", "exact", "--link", "unlimited", "--steps", "100000",
        "--keep", str(keep),
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        events, end = keep / "exact" / "worker-0.jsonl", time.monotonic() + 80
        while not (events.is_file() and events.read_text().count('"event":"step"') > 20):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "exact is out: interrupted" in out
    assert "speedup" in out


@pytest.mark.slow
@pytest.mark.lab
def test_a_race_over_a_slow_link_in_the_lab(tmp_path: Path) -> None:
    if why := namespaces.available():
        pytest.skip(why)
    done = race("digits", "--methods", "floor,exact", "--link", "1mbit", "--steps", "4", "--warmup", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["method"]: row for row in found["rows"]}
    assert (found["link"], found["link_kind"]) == ("1mbit", "lab")
    assert rows["exact"]["error"] is None
    # 38 kB of gradients each way at 1 Mbit/s take 0.3 s.
    assert rows["exact"]["step_ms_median"] > 200 > rows["floor"]["step_ms_median"]
    assert rows["exact"]["exposed_comm_ms"] > 150
    assert not [name for name in namespaces.leftovers() if f"pl{os.getpid()}" in name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["txt"], "did you mean 'text'"),
        (["digits", "--methods", "exakt"], "did you mean 'exact'"),
        (["digits", "--methods", "torch:dpd"], "did you mean 'torch:ddp'"),
        (["digits", "--methods", ""], "names no contender"),
        (["digits", "--link", "fast"], "fast"),
        (["digits", "--target", "speed=3"], "is not a target"),
        (["digits", "--set", "rank=4"], "METHOD.KNOB=VALUE"),
        (["digits", "--hosts", "2", "--link", "unlimited"], "--hosts needs a link"),
        (["digits", "--turn", "1"], "--turn"),
        (["digits", "--json", "/nonexistent/race.json"], "cannot be written"),
        (["digits", "--trace", "/nonexistent/trace.json"], "cannot be written"),
        (["digits", "--json", "/tmp/" + "a" * 300], "File name too long"),
        (["digits", "--json", "/dev/null"], "it is a device or a pipe"),
        (["digits", "--json", "/tmp/race.out", "--trace", "/tmp/../tmp/race.out"], "are the same file"),
        (["digits", "--keep", "/etc"], "not an empty folder"),
        (["digits", "--keep", "/tmp/" + "a" * 300], "File name too long"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "race", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        command_line.main()
    out, err = capfd.readouterr()
    assert left.value.code == 2, err
    assert said in err
    assert "Traceback" not in err
    assert out == ""
