"""The race's own parts: scoring on hand-made events, the gate over pipes, peers, contenders that fail."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from rich.console import Console

from marks import slow
from paceline.comm.carried import carried
from paceline.comm.interface import Counters
from paceline.errors import MethodError, PeerTimeoutError, UsageError
from paceline.integrations.peers import PEERS, prepare_peer
from paceline.session.gate import Gate
from paceline.telemetry import files
from paceline.telemetry.events import AnyEvent, Barrier, Bye, Metric, Step, Wire, read
from paceline.telemetry.recorder import Recorder
from paceline.tools.lab import namespaces
from paceline.tools.race import report, result, runner, score, table
from paceline.tools.race.contenders import Contender, parse_contenders, task_command
from paceline.tools.race.event_tail import EventTail
from paceline.tools.race.network import RaceNetwork, open_network
from paceline.tools.race.progress import RaceProgress
from paceline.tools.race.report import RaceReport
from paceline.tools.race.result import RaceResult, RaceSetting
from paceline.tools.race.runner import RaceRules
from paceline.tools.race.score import ContenderRecord, RaceRow, Target
from paceline.tools.race.workers import last_exception

ROW_KEYS = [
    "method", "workers", "link", "steps", "step_ms_median", "samples_per_s", "speedup", "efficiency",
    "sent_bytes_per_step", "wire_bytes_per_step", "exposed_comm_ms", "cpu_ms_per_step", "break_even_mbit",
    "barrier_ms_p50", "barrier_ms_p99", "loss", "accuracy", "target_s", "peak_rss_mb", "error",
]  # fmt: skip
RESULT_KEYS = [
    "schema", "paceline", "torch", "machine", "date", "command", "commit", "task", "workers", "link", "link_kind",
    "threads", "rows",
]  # fmt: skip


def step(number: int, wall: float = 10.0, cpu: float | None = None, data: float = 0.0, sent: int = 0) -> Step:
    cpu = wall if cpu is None else cpu
    return Step(t=0, step=number, wall_ms=wall, cpu_ms=cpu, data_ms=data, wait_ms=0, sent=sent, samples=8)


def metric(number: int, busy: float, value: float, name: str = "loss") -> Metric:
    return Metric(t=0, step=number, busy_s=busy, name=name, value=value)


def barrier(ms: float = 1.0) -> Barrier:
    return Barrier(t=0, ms=ms)


def wire(steps: int, sent: int) -> Wire:
    return Wire(t=0, steps=steps, sent=sent, received=sent, interface="lo")


# ------------------------------------------------------------------------------------------------ score


def test_a_step_takes_as_long_as_its_slowest_worker() -> None:
    fast = [step(0, wall=10, data=1), step(1, wall=20)]
    slow = [step(0, wall=12, data=2), step(1, wall=5)]
    assert [lap.ms for lap in score.measured_steps([fast, slow], warmup=0)] == [14, 20]
    assert [lap.samples for lap in score.measured_steps([fast, slow], warmup=0)] == [16, 16]


def test_warm_up_and_the_first_step_of_every_turn_do_not_count() -> None:
    turn = [barrier(), barrier()]
    events = [
        [
            *turn,
            step(0),
            step(1),
            step(2),
            wire(3, 30),
            *turn,
            step(3),
            step(4),
            wire(2, 20),
            step(5),
            step(6),
        ]
    ]
    assert [lap.step for lap in score.measured_steps(events, warmup=1)] == [1, 2, 4, 6]
    assert [lap.step for lap in score.measured_steps(events, warmup=3)] == [4, 6]


def test_a_step_that_one_worker_has_not_finished_does_not_count() -> None:
    assert [lap.step for lap in score.measured_steps([[step(0), step(1)], [step(0)]], warmup=0)] == [0]


def test_throughput_counts_rare_communication_which_the_median_hides() -> None:
    events: list[AnyEvent] = [step(i, wall=90 if i % 8 == 0 else 10) for i in range(32)]
    row = score.rows([ContenderRecord("torch:local_sgd", 1, [events])], link="none", warmup=0)[0]
    assert row.step_ms_median == 10
    assert row.samples_per_s == pytest.approx(8 / 0.020)


def test_one_stall_is_cut_off() -> None:
    steady = [10.0] * 40
    assert score.typical([*steady, 5000.0]) < 10.5
    assert score.typical(steady) == pytest.approx(10)


def test_speedup_efficiency_and_exposed_communication() -> None:
    single = [[step(i, wall=20) for i in range(4)]]
    floor = [[step(i, wall=12, cpu=10) for i in range(4)] for _ in range(2)]
    ours = [[step(i, wall=16, cpu=10, sent=1000) for i in range(4)] for _ in range(2)]
    entries = [
        ContenderRecord("single", 1, single),
        ContenderRecord("floor", 2, floor, counts_payload=False),
        ContenderRecord("exact", 2, ours),
    ]
    alone, bare, exact = score.rows(entries, link="100mbit", warmup=0)
    assert (alone.speedup, alone.efficiency, alone.exposed_comm_ms, alone.link) == (1, 1, None, "none")
    assert (bare.exposed_comm_ms, bare.sent_bytes_per_step) == (0, None)
    assert exact.exposed_comm_ms == 4
    assert exact.sent_bytes_per_step == 1000
    assert exact.speedup == pytest.approx((16 / 0.016) / (8 / 0.020))
    assert exact.efficiency == pytest.approx((exact.speedup or 0) / 2)


def test_less_blocked_than_the_floor_is_not_negative() -> None:
    floor = [[step(0, wall=12, cpu=2)]]
    ours = [[step(0, wall=12, cpu=12)], [step(0, wall=12, cpu=12)]]
    scored = score.rows([ContenderRecord("floor", 1, floor), ContenderRecord("exact", 2, ours)], link="none", warmup=0)
    assert scored[1].exposed_comm_ms == 0


def test_without_the_floor_exposed_communication_is_not_known() -> None:
    row = score.rows([ContenderRecord("exact", 2, [[step(0)], [step(0)]])], link="none", warmup=0)[0]
    assert row.exposed_comm_ms is None
    assert row.speedup is None


def raced(method: str, cpu: float, sent: int, wall: float = 50.0, *, counts_payload: bool = True) -> ContenderRecord:
    """Two workers that differ in processor time, so that their mean is what counts."""
    workers = [[step(i, wall=wall, cpu=cpu + d, sent=sent) for i in range(4)] for d in (-1.0, 1.0)]
    return ContenderRecord(method, 2, workers, counts_payload=counts_payload)


def test_processor_time_is_the_mean_over_the_workers_and_cuts_single_stalls() -> None:
    assert score.rows([raced("exact", 10, 1000)], link="none", warmup=0)[0].cpu_ms_per_step == 10
    stalled: list[AnyEvent] = [step(i, wall=9000, cpu=5000 if i == 7 else 10) for i in range(40)]
    cut = score.rows([ContenderRecord("exact", 1, [stalled])], link="none", warmup=0)[0].cpu_ms_per_step
    assert cut == pytest.approx(10, abs=0.5)


def test_break_even_is_where_the_bytes_saved_take_as_long_as_the_processor_time_they_cost() -> None:
    # 1 MB less for 8 ms more: 8 Mbit in 8 ms are 1000 Mbit/s.
    entries = [raced("exact", 10, 2_000_000), raced("topk", 18, 1_000_000)]
    _, topk = score.rows(entries, link="none", warmup=0)
    assert topk.break_even_mbit == pytest.approx(1000)

    def seconds(row: RaceRow, mbit: float) -> float:
        return (row.cpu_ms_per_step or 0) * 1e-3 + 8e-6 * (row.sent_bytes_per_step or 0) / mbit

    exact, topk = score.rows(entries, link="none", warmup=0)
    assert seconds(topk, 999) < seconds(exact, 999)
    assert seconds(topk, 1001) > seconds(exact, 1001)


@pytest.mark.parametrize(
    ("cpu", "sent", "expected", "shown"),
    [
        (9, 500, "any", "any"),
        (10, 500, "any", "any"),
        (11, 1000, 0.0, "never"),
        (11, 1500, 0.0, "never"),
        (11, 995, 0.0, "never"),  # half a percent is the counter's jitter
        (9, 1000, None, "–"),  # not for its bytes
        (9, 1500, None, "–"),
    ],
)
def test_break_even_at_its_ends(cpu: float, sent: int, expected: Any, shown: str) -> None:
    rows = score.rows([raced("exact", 10, 1000), raced("x", cpu, sent)], link="none", warmup=0)
    assert rows[0].break_even_mbit is None
    assert rows[1].break_even_mbit == expected
    heading = table.headings(None).index("pays below")
    assert table.cells(rows[1], "sent_bytes_per_step", None)[heading] == shown
    json.loads(msgspec.json.encode(rows[1]), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def test_the_baseline_is_exact_if_it_ran_else_ddp_and_nobody_else() -> None:
    exact, ddp = raced("exact", 10, 2_000_000), raced("torch:ddp", 14, 2_000_000)
    topk = raced("topk", 18, 1_000_000)
    aside = [raced("floor", 9, 0), ContenderRecord("single", 1, [[step(0, cpu=9)]])]

    def found(*entries: ContenderRecord) -> list[Any]:
        return [row.break_even_mbit for row in score.rows(entries, link="none", warmup=0)]

    assert found(*aside, ddp, exact, topk) == [None, None, 0.0, None, pytest.approx(1000)]
    assert found(*aside, ddp, topk) == [None, None, None, pytest.approx(2000)]
    assert found(*aside, ContenderRecord("exact", 2, [], error="it broke"), ddp, topk)[-1] == pytest.approx(2000)
    assert found(*aside, topk) == [None, None, None]
    # What a peer sends is not known from its payload.
    assert found(raced("torch:ddp", 14, 0, counts_payload=False), topk) == [None, None]


@pytest.mark.parametrize(
    ("mbit", "shown"),
    [(0.01, "never"), (3.14, "3.1 Mbit"), (994.0, "994 Mbit"), (996.0, "1.0 Gbit"), (2143.0, "2.1 Gbit"),
     (99_600.0, "100 Gbit"), (1e9, "any"), (None, "–")],
)  # fmt: skip
def test_a_break_even_speed_is_short(mbit: float | None, shown: str) -> None:
    row = RaceRow(method="topk", workers=2, link="none", steps=1, break_even_mbit=mbit)
    assert table.cells(row, "sent_bytes_per_step", None)[table.headings(None).index("pays below")] == shown


def test_bytes_saved_without_time_saved_are_named() -> None:
    entries = [
        ContenderRecord("single", 1, [[step(0, wall=90)]]),
        raced("exact", 10, 1000, wall=50),
        raced("slow", 10, 500, wall=50),
        raced("fast", 10, 500, wall=40),
        raced("same", 10, 1000, wall=60),
        raced("torch:fp16", 10, 500, wall=60, counts_payload=False),
    ]
    rows = score.rows(entries, link="100mbit", warmup=0)
    said = [line for line in table.notes(rows, RaceNetwork("none", "unlimited", 2, 1), None) if "saves bytes" in line]
    assert said == ["slow saves bytes but no time on this link"]


def test_wire_bytes_leave_out_the_turns_of_the_warm_up() -> None:
    events = [[wire(5, 5000), wire(5, 50), wire(5, 100)]]
    assert score.rows([ContenderRecord("exact", 1, events)], link="none", warmup=3)[0].wire_bytes_per_step == 15
    only = [[wire(5, 5000)]]
    assert score.rows([ContenderRecord("exact", 1, only)], link="none", warmup=3)[0].wire_bytes_per_step == 1000


def test_loss_is_the_mean_of_the_last_five_and_of_the_workers() -> None:
    one = [metric(i, i, v) for i, v in enumerate([9, 9, 1, 1, 1, 1, 1])]
    two = [metric(i, i, v) for i, v in enumerate([9, 9, 3, 3, 3, 3, 3])]
    accuracy = [metric(2, 2, 0.5, "accuracy"), metric(6, 6, 0.75, "accuracy")]
    row = score.rows([ContenderRecord("exact", 2, [[*one, *accuracy], two])], link="none", warmup=0)[0]
    assert (row.loss, row.accuracy) == (2, 0.75)


def test_target_seconds_are_the_slowest_workers_when_it_was_first_met() -> None:
    one = [metric(i, 1.0 * i, v, "accuracy") for i, v in enumerate([0.1, 0.8, 0.9, 0.7])]
    two = [metric(i, 1.5 * i, v, "accuracy") for i, v in enumerate([0.1, 0.8, 0.9, 0.7])]
    assert score.reached_s([one, two], Target.parse("accuracy=0.85")) == 3.0
    assert score.reached_s([one, two], Target.parse("accuracy=0.95")) is None
    falling = [[metric(i, i, v) for i, v in enumerate([5, 4, 3, 2, 1, 0])]]
    assert score.reached_s(falling, Target.parse("loss=3")) == 4  # (5+4+3+2+1)/5: one lucky batch is not enough


@pytest.mark.parametrize("text", ["", "loss", "loss=", "loss=low", "speed=3", "loss=nan", "=2"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a target"):
        Target.parse(text)


def test_barriers_and_memory() -> None:
    bye = [Bye(t=0, steps=1, peak_rss_mb=mb) for mb in (100.0, 200.0)]
    events = [[barrier(1), barrier(2), bye[0]], [barrier(3), bye[1]]]
    row = score.rows([ContenderRecord("exact", 2, events)], link="none", warmup=0)[0]
    assert (row.barrier_ms_p50, row.peak_rss_mb) == (2, 200)
    assert row.barrier_ms_p99 == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("events", [[], [[]], [[], []], [[metric(0, 0, float("nan"))]], [[step(0)], []]])
def test_nothing_measured_gives_a_row_of_unknowns(events: list[list[AnyEvent]]) -> None:
    row = score.rows([ContenderRecord("exact", 2, events, error="it broke")], link="none", warmup=3)[0]
    assert (row.step_ms_median, row.loss, row.error, row.steps) == (None, None, "it broke", 0)
    assert list(msgspec.to_builtins(row)) == ROW_KEYS


def test_no_nan_reaches_the_json() -> None:
    broken = [[step(i, wall=float("nan")) for i in range(3)]]
    row = score.rows([ContenderRecord("exact", 1, broken)], link="none", warmup=0)[0]
    json.loads(msgspec.json.encode(row), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert row.step_ms_median is None


def test_bytes_by_step_add_up() -> None:
    own = [[step(0, sent=10), step(1, sent=20)], [step(0, sent=30), step(1, sent=40)]]
    assert score.bytes_by_step(own, wire=False) == [(0, 0), (1, 20), (2, 50)]
    assert score.bytes_by_step([[wire(5, 50), wire(5, 70)]], wire=True) == [(0, 0), (5, 50), (10, 120)]
    assert score.bytes_by_step(own, wire=True) == []


def test_tail_gives_every_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    tail = EventTail(path)
    assert tail.new() == []
    line = msgspec.json.encode(step(0))
    path.write_bytes(line + b"\nnot json\n" + line[:20])
    assert tail.new() == [step(0)]
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    assert tail.new() == [step(0)]
    assert tail.new() == []


# ------------------------------------------------------------------------------------------------ gate


class Race:
    """The other ends of a gate's pipes, and the gate's environment."""

    def __init__(self, directory: Path, **env: str) -> None:
        self.their_in, self.go_fd = os.pipe()
        self.done_fd, self.their_out = os.pipe()
        self.recorder = Recorder(directory, 0)
        self.barriers = 0
        env = {"PACELINE_GATE": f"{self.their_in},{self.their_out}", "PACELINE_GATE_TIMEOUT": "20", **env}
        self.gate = Gate(self.recorder, self._barrier, env)

    def _barrier(self) -> None:
        self.barriers += 1

    def say(self, text: str) -> None:
        os.write(self.go_fd, text.encode())

    def heard(self) -> str:
        return os.read(self.done_fd, 100).decode()

    def close(self) -> None:
        for fd in (self.their_in, self.their_out, self.go_fd, self.done_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    it = Race(tmp_path)
    yield it
    it.close()


def test_gate_counts_a_turn_down_and_reports_it(race: Race) -> None:
    race.say("go 2\ngo 1\nstop\n")
    assert race.gate()
    assert race.heard() == "done 0\n"  # ready
    assert race.gate()
    assert race.gate()  # the first step of the second turn
    assert race.heard() == "done 2\n"
    assert not race.gate()
    assert race.heard() == "done 1\n"
    assert not race.gate(), "stays stopped, without another word"
    os.close(race.their_out)
    assert race.heard() == ""


def test_gate_blocks_until_its_turn(race: Race) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(race.gate()))
    thread.start()
    assert race.heard() == "done 0\n"
    thread.join(0.2)
    assert thread.is_alive()
    race.say("go 1")
    thread.join(0.2)
    assert thread.is_alive(), "half a line is no permission"
    race.say("\n")
    thread.join(10)
    assert answers == [True]


def test_gate_ends_when_the_race_is_gone(race: Race) -> None:
    os.close(race.go_fd)
    assert not race.gate()


def test_gate_ends_when_nobody_listens(race: Race) -> None:
    os.close(race.done_fd)
    assert not race.gate()


@pytest.mark.parametrize("word", ["go", "go x", "go -1", "hello 3", "go 0", ""])
def test_gate_takes_nonsense_for_stop(race: Race, word: str) -> None:
    race.say(f"{word}\n")
    assert not race.gate()


def test_gate_gives_up_at_its_timeout(tmp_path: Path) -> None:
    race = Race(tmp_path, PACELINE_GATE_TIMEOUT="0.05")
    with pytest.raises(PeerTimeoutError, match="no turn"):
        race.gate()
    race.close()


def test_gate_measures_barriers_and_wire_in_every_turn(tmp_path: Path) -> None:
    race = Race(tmp_path, PACELINE_WIRE="lo", WORLD_SIZE="2")
    race.say("go 3\ngo 1\nstop\n")
    while race.gate():
        pass
    assert race.barriers == 6
    race.recorder.close()
    events = list(read(tmp_path / "worker-0.jsonl"))
    assert [type(e).__name__ for e in events] == [
        "Barrier",
        "Barrier",
        "Wire",
        "Barrier",
        "Barrier",
        "Wire",
        "Bye",
    ]
    assert [e.steps for e in events if isinstance(e, Wire)] == [3, 1]
    race.close()


def test_gate_splits_a_shared_interface_among_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, PACELINE_WIRE="eth0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    counts = iter([(100, 10), (500, 30)])
    monkeypatch.setattr(race.gate, "_counters", lambda: next(counts))
    race.say("go 1\nstop\n")
    while race.gate():
        pass
    wires = [e for e in read(tmp_path / "worker-0.jsonl") if isinstance(e, Wire)]
    assert [(w.sent, w.received) for w in wires] == [(200, 10)]
    race.close()


def test_own_connections_are_counted_and_nobody_elses() -> None:
    before = carried()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            one.sendall(bytes(100_000))
            assert len(other.recv(100_000, socket.MSG_WAITALL)) == 100_000
            other.sendall(b"x" * 10)
            assert len(one.recv(10, socket.MSG_WAITALL)) == 10
            now = carried()
    assert now.received - before.received == 100_010
    assert now.sent - before.sent == pytest.approx(100_010, abs=20)


def test_gate_counts_its_own_connections_undivided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(tmp_path, PACELINE_WIRE="tcp", WORLD_SIZE="2")
    counts = iter([Counters(100, 10), Counters(500, 5)])
    monkeypatch.setattr("paceline.session.gate.carried", lambda: next(counts))
    race.say("go 1\nstop\n")
    while race.gate():
        pass
    wires = [e for e in read(tmp_path / "worker-0.jsonl") if isinstance(e, Wire)]
    assert [(w.sent, w.received, w.interface) for w in wires] == [(400, 0, "tcp")]
    race.close()


def test_gate_refuses_an_interface_that_does_not_exist(tmp_path: Path) -> None:
    race = Race(tmp_path, PACELINE_WIRE="nosuch0")
    race.say("go 1\n")
    with pytest.raises(UsageError, match="nosuch0"):
        race.gate()
    race.close()


@pytest.mark.parametrize("text", ["3", "a,b", "1000,1001", ""])
def test_gate_refuses_pipes_that_are_not_there(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="two open pipes"):
        Gate(Recorder(None, 0), lambda: None, {"PACELINE_GATE": text})


def test_there_is_no_gate_outside_of_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_GATE", raising=False)
    assert Gate.from_env(Recorder(None, 0), lambda: None) is None


# ------------------------------------------------------------------------------------------------ contenders

# A job without torch: the gate, the telemetry and what can go wrong, in milliseconds.
FAKE = """
import os, signal, sys, time
from pathlib import Path
from paceline.session.gate import Gate
from paceline.telemetry.recorder import Recorder

method, rank = os.environ["PACELINE_METHOD"], int(os.environ.get("RANK", "0"))
if method == "never":
    sys.exit(0)
if method == "refuses":
    print("  File x\\nValueError: no such option\\n", file=sys.stderr)
    sys.exit(1)
recorder = Recorder(Path(os.environ["PACELINE_EVENTS"]), rank)
gate = Gate.from_env(recorder, lambda: None)
step = 0
while gate():
    recorder.start_lap(8, 0.0)
    time.sleep(0.002)
    if method == "crashes" and step == 6:
        raise ValueError("boom") if rank == 1 else ConnectionResetError("Connection closed by peer")
    if method == "hangs" and step == 6 and rank == 1:
        time.sleep(100)
    if method == "killed" and step == 6 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if method == "short" and step == 6:
        break
    recorder.log({"loss": 5.0 - 0.1 * step})
    recorder.end_lap()
    step += 1
recorder.end_lap()
recorder.close()
if method == "fails at the end":
    raise RuntimeError("cannot save")
"""
RULES = RaceRules(steps=8, warmup=2, turn=4, timeout_s=20)


def hold_race(folder: Path, methods: list[str], rules: RaceRules = RULES, watch: Any = None) -> dict[str, Contender]:
    script = folder / "fake.py"
    script.write_text(FAKE)
    contenders = [Contender(name, [sys.executable, str(script)]) for name in methods]
    network = RaceNetwork("none", "unlimited", workers=2, hosts=1)
    complete = runner.run(contenders, rules, network, folder / "race", watch or (lambda _: None))
    assert complete or watch
    for contender in contenders:
        for worker in contender.workers.workers if contender.workers else []:
            assert worker.process.process.poll() is not None, "no worker is left behind"
    return {contender.method: contender for contender in contenders}


def test_everybody_gets_the_same_steps_in_turns(tmp_path: Path) -> None:
    held = hold_race(tmp_path, ["single", "a", "b"])
    entries = [contender.record(2) for contender in held.values()]
    rows = score.rows(entries, link="unlimited", warmup=RULES.warmup)
    assert [(row.method, row.workers, row.steps, row.error) for row in rows] == [
        ("single", 1, 8, None), ("a", 2, 8, None), ("b", 2, 8, None)
    ]  # fmt: skip
    assert {contender.state for contender in held.values()} == {"finished"}
    # Steps in the order they ended: a contender's turn is never mixed with another's, and rounds go to and fro.
    ended = sorted(
        (event.t, contender.method)
        for contender in held.values()
        for event in (contender.workers.events[0] if contender.workers else [])
        if isinstance(event, Step)
    )
    turns = [method for method, _ in itertools.groupby(method for _, method in ended)]
    assert turns == ["single", "a", "b", "a", "single", "a", "b"]
    assert all(row.wire_bytes_per_step is not None for row in rows[1:])


def test_a_contender_has_finished_when_its_seconds_are_over(tmp_path: Path) -> None:
    held = hold_race(tmp_path, ["a"], RaceRules(steps=10**6, warmup=2, turn=4, seconds=0.05, timeout_s=20))
    assert held["a"].state == "finished"
    # Steps of 2 ms, and a little: the warm-up and the first of every turn are not among those that count.
    assert 4 <= held["a"].counted <= 28


def test_one_method_races_twice_under_different_names(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    command = [sys.executable, str(script)]
    both = [Contender("a", command, alias=alias) for alias in ("a slow", "a fast")]
    assert runner.run(both, RULES, RaceNetwork("none", "unlimited", workers=2, hosts=1), tmp_path / "race")
    for contender in both:
        rows = score.rows([contender.record(2)], link="unlimited", warmup=RULES.warmup)
        assert rows[0].steps == RULES.steps, "neither reads the other's events"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("crashes", "ValueError: boom"),
        ("killed", "SIGKILL"),
        slow("refuses", "ValueError: no such option"),
        slow("never", "ended before its first step"),
        ("fails at the end", "RuntimeError: cannot save"),
    ],
)
def test_a_contender_that_fails_is_out_and_the_race_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, reason: str
) -> None:
    if method == "killed":  # the other worker never notices: there is no use in waiting for its reason
        monkeypatch.setattr("paceline.tools.race.workers._GRACE_S", 0.2)
    held = hold_race(tmp_path, ["a", method])
    assert (held["a"].state, held["a"].counted, held["a"].error) == ("finished", 8, None)
    assert held[method].state == "out"
    assert reason in (held[method].error or "")
    if method != "never":
        log = Path((held[method].error or "").partition("(log: ")[2].rstrip(")"))
        assert log.is_file()


def test_a_contender_that_hangs_is_ended_at_its_timeout(tmp_path: Path) -> None:
    rules = RaceRules(steps=8, warmup=2, turn=4, timeout_s=3)
    held = hold_race(tmp_path, ["hangs", "a"], rules)
    assert "worker 1 did not finish its turn in 3 s" in (held["hangs"].error or "")
    assert held["a"].state == "finished"
    row = score.rows([held["hangs"].record(2)], link="none", warmup=2)[0]
    assert row.steps > 0, "what was measured before counts"


def test_a_script_with_fewer_steps_is_no_failure(tmp_path: Path) -> None:
    held = hold_race(tmp_path, ["short", "a"])
    assert (held["short"].state, held["short"].error) == ("finished", None)
    assert held["short"].counted < 8


def test_a_race_ends_at_its_target(tmp_path: Path) -> None:
    rules = RaceRules(steps=200, warmup=2, turn=4, timeout_s=20, target=Target.parse("loss=4.0"))
    held = hold_race(tmp_path, ["a"], rules)
    assert held["a"].counted < 20
    row = score.rows([held["a"].record(2)], link="none", warmup=2, target=rules.target)[0]
    assert row.target_s is not None


def test_ctrl_c_ends_everybody_and_keeps_what_is_known(tmp_path: Path) -> None:
    def watch(contender: Contender) -> None:
        if contender.done >= 8 and contender.state == "running":
            raise KeyboardInterrupt

    held = hold_race(tmp_path, ["a", "b"], RaceRules(steps=100, warmup=2, turn=4), watch)
    assert [contender.error for contender in held.values()] == ["interrupted", "interrupted"]
    rows = score.rows([contender.record(2) for contender in held.values()], link="none", warmup=2)
    assert all(row.step_ms_median for row in rows)


def test_workers_do_not_outlive_a_killed_race(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "race.py").write_text(
        f"""
import sys, time
from pathlib import Path
from paceline.tools.race.network import RaceNetwork
from paceline.tools.race.workers import ContenderWorkers
placements = RaceNetwork("none", "unlimited", 2, 1).placements(0)
env = {{"PACELINE_METHOD": "hangs", "PACELINE_EVENTS": {str(tmp_path)!r}}}
group = ContenderWorkers(Path({str(tmp_path)!r}), [sys.executable, {str(tmp_path / "fake.py")!r}], placements, env)
group.wait(60)
group.go(20)
time.sleep(0.5)  # now worker 1 is in the middle of a step, where it does not look at its pipe
print(*(w.process.pid for w in group.workers), flush=True)
time.sleep(60)
"""
    )
    with subprocess.Popen([sys.executable, tmp_path / "race.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    end = time.monotonic() + 20
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"{alive} still run"
        time.sleep(0.05)


@pytest.mark.parametrize(("turn", "warmup"), [(2, 0), (5, 3), (5, 12), (4, 1)])
def test_every_contender_gets_exactly_its_counted_steps(turn: int, warmup: int) -> None:
    rules = RaceRules(steps=10, warmup=warmup, turn=turn)
    done = counted = 0
    for _ in range(100):
        if counted == rules.steps:
            break
        steps, more = runner.next_turn(done, counted, rules)
        assert more >= 1
        done, counted = done + steps, counted + more
    assert counted == rules.steps


def test_the_reason_is_the_last_exception_with_its_advice(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(
        "paceline: 2 workers\n[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n"
        "[rank1]: paceline.errors.DataError: nothing there\n[rank1]:   why: it is empty\n"
        "[rank1]:   do:  fill it\n[W1115] a warning of C++\n"
    )
    assert last_exception(log) == "nothing there; why: it is empty; do:  fill it"
    log.write_text("paceline: nothing there\n  at:  x.py:3: f()\n  do:  fill it\nbye\n")  # without --debug
    assert last_exception(log) == "nothing there; do:  fill it"
    log.write_text("terminate called\n\n  what(): enforce fail\n\n")
    assert last_exception(log) == "enforce fail"
    log.write_text("")
    assert last_exception(log) == ""
    assert last_exception(tmp_path / "none") == ""


# ------------------------------------------------------------------------------------------------ who and where


def test_methods_and_knobs_are_checked_before_anything_starts() -> None:
    chosen = parse_contenders("floor, exact,half", ["half.dtype=bf16"], ["x"])
    assert [contender.method for contender in chosen] == ["single", "floor", "exact", "half"]
    assert chosen[-1].knobs == {"dtype": "bf16"}
    for methods, knobs, word in [
        ("exakt", [], "exact"),
        ("torch:dpd", [], "torch:ddp"),
        ("exact,exact", [], "twice"),
        (" ,", [], "no contender"),
        ("half", ["half.dtype=fp64"], "fp16"),
        ("half", ["dtype=bf16"], "METHOD.KNOB"),
        ("half", ["exact.dtype=bf16"], "METHOD.KNOB"),
        ("half", ["half.speed=3"], "no knob"),
        ("floor", ["floor.speed=3"], "no knobs"),
    ]:
        with pytest.raises(UsageError, match=re.escape(word)):
            parse_contenders(methods, knobs, ["x"])


def test_what_is_run(tmp_path: Path) -> None:
    assert task_command("text", ["--batch", "8"], seed=7)[1:] == [
        "-m", "paceline.tools.tasks.text", "--steps", "1000000000", "--seed", "7", "--batch", "8"
    ]  # fmt: skip
    script = tmp_path / "train.py"
    script.touch()
    assert task_command(str(script), ["-x"], seed=7)[1:] == [str(script), "-x"]
    assert task_command("json.tool", ["-x"], module=True)[1:] == ["-m", "json.tool", "-x"]
    with pytest.raises(UsageError, match="no module 'no_such"):
        task_command("no_such.module", [], module=True)
    with pytest.raises(UsageError, match="neither a task nor a script"):
        task_command("txt", [])


def test_an_unlimited_link_is_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    monkeypatch.setenv("PACELINE_DATA", "here")
    with open_network("unlimited", 2, None) as links:
        placements = links.placements(0)
    assert (links.kind, links.label) == ("none", "unlimited")
    assert [placement.env["RANK"] for placement in placements] == ["0", "1"]
    assert placements[0].env["MASTER_PORT"] == placements[1].env["MASTER_PORT"]
    for placement in placements:
        assert placement.prefix == []
        assert (placement.env["GLOO_SOCKET_IFNAME"], placement.env["PACELINE_WIRE"]) == ("lo", "tcp")
        assert placement.env["PACELINE_DATA"] == "here"
        assert "TORCHELASTIC_RUN_ID" not in placement.env
        assert "PACELINE_PACE" not in placement.env


def test_without_the_lab_a_link_is_emulated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.lab.namespaces.available", lambda: "root is needed")
    with open_network("100mbit", 2, None) as links:
        assert (links.kind, links.label, links.why_emulated) == ("emulated", "100mbit (emulated)", "root is needed")
        assert float(links.placements(0)[1].env["PACELINE_PACE"]) == 12.5e6
    with pytest.raises(UsageError, match="root is needed"), open_network("100mbit", 2, 2):
        pass


@pytest.mark.parametrize(("link", "hosts"), [("unlimited", 2), ("100mbit", 3), ("100mbit", 0), ("fast", None)])
def test_links_that_cannot_be_are_refused(link: str, hosts: int | None) -> None:
    with pytest.raises(UsageError), open_network(link, 2, hosts):
        pass


@pytest.mark.lab
def test_the_lab_spreads_workers_over_its_hosts() -> None:
    if why := namespaces.available():
        pytest.skip(why)
    with open_network("100mbit", 4, 2) as links:
        placements = links.placements(3)
    assert links.kind == "lab"
    assert [placement.env["LOCAL_RANK"] for placement in placements] == ["0", "1", "0", "1"]
    assert {placement.env["LOCAL_WORLD_SIZE"] for placement in placements} == {"2"}
    assert {placement.env["MASTER_ADDR"] for placement in placements} == {"10.77.0.1"}
    assert placements[0].prefix == placements[1].prefix != placements[2].prefix == placements[3].prefix


# ------------------------------------------------------------------------------------------------ what is shown


SETTING = RaceSetting(task="<text>", workers=2, link="100mbit", link_kind="lab", threads=1)


def some_result(rows: list[RaceRow]) -> RaceResult:
    return result.describe(rows, SETTING, ["race", "text"])


def wide_row(method: str, **values: Any) -> RaceRow:
    known = {
        "step_ms_median": 12345.6, "samples_per_s": 123456.0, "speedup": 12.34, "efficiency": 0.5,
        "wire_bytes_per_step": 123456789.0, "exposed_comm_ms": 12345.6, "loss": 12.345, "accuracy": 1.0,
        "target_s": 1234.5, "cpu_ms_per_step": 10.0, "break_even_mbit": 123456.0,
    }  # fmt: skip
    return RaceRow(method=method, workers=2, link="100mbit", steps=8, **(known | values))


def test_the_table_fits_eighty_columns_and_the_fastest_is_first() -> None:
    rows = [wide_row("torch:local_sgd"), wide_row("floor", step_ms_median=1.0), wide_row("out", step_ms_median=None)]
    for target in (None, Target.parse("accuracy=0.9")):
        console = Console(width=80, file=io.StringIO(), force_terminal=False)
        console.print(table.table(rows, target))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines[-3:]] == ["floor", "torch:local_sgd", "out"]
        assert "…" not in "".join(lines)


def test_notes_fit_too_and_name_who_is_out() -> None:
    rows = [wide_row("single"), wide_row("floor"), wide_row("torch:ddp"), wide_row("exact", error="it broke\nmore")]
    for kind in ("lab", "none"):
        notes = table.notes(rows, RaceNetwork(kind, "100mbit", 2, 2), Target.parse("loss=2"))
        assert max(map(len, notes)) <= 80
        assert notes[-1] == "exact is out: it broke"
    assert "emulated" in table.notes(rows, RaceNetwork("emulated", "100mbit (emulated)", 2, 1), None)[0]


def test_bytes_have_one_meaning_in_the_whole_column() -> None:
    assert score.bytes_column([wide_row("a"), wide_row("b")]) == "wire_bytes_per_step"
    assert score.bytes_column([wide_row("a"), wide_row("b", wire_bytes_per_step=None)]) == "sent_bytes_per_step"


def test_what_goes_through_shared_memory_counts_as_sent() -> None:
    shared = wide_row("a", sent_bytes_per_step=1e6, wire_bytes_per_step=120.0)
    assert score.bytes_column([shared, wide_row("torch:ddp", sent_bytes_per_step=None)]) == "sent_bytes_per_step"


def test_without_a_terminal_progress_is_plain_lines(tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    contender = Contender("exact", ["x"])
    with RaceProgress(console, [contender], RULES) as watch:
        watch(contender)
        contender.state, contender.error = "out", "[bold]it broke[/]\nand more"
        watch(contender)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["starting exact", "exact  0/8 steps  out: [bold]it broke[/]"]


def test_the_json_has_these_keys_and_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text("old")
    files.write(path, result.encode(some_result([wide_row("exact", loss=None)])))
    found = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert list(found) == RESULT_KEYS
    assert list(found["rows"][0]) == ROW_KEYS
    assert found["command"] == "paceline race text"
    assert [p.name for p in tmp_path.iterdir()] == ["race.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "race.json"
    path.write_text("old")

    def full(*words: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["race.json"]


def test_a_result_that_could_not_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "race.json"):
        with pytest.raises(UsageError, match="cannot be written"):
            files.check_writable(path)


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows() -> None:
    pytest.importorskip("matplotlib")
    turn = [barrier(), *(step(i, wall=10 + i, cpu=9) for i in range(6))]
    told = [metric(i, i, 5 - 0.1 * i) for i in range(6)] + [metric(5, 5, 0.5, "accuracy")]
    events = [[*turn, *told, wire(6, 6000)] for _ in range(2)]
    names = ["floor", "<b>bold</b>", "exact"]
    entries = [ContenderRecord(name, 2, events) for name in names] + [
        ContenderRecord("out", 2, [], error="<i>it</i> broke")
    ]
    rows = score.rows(entries, link="100mbit", warmup=1)
    page = report.page(
        RaceReport(
            result=some_result(rows), records=entries, notes=["a <note>"], warmup=1, target=Target.parse("loss=4.6")
        )
    )
    assert page.count("<figure>") == 4
    for raw in ("<b>", "<i>it", "<note>", "<text>:"):
        assert raw not in page
    for word in ("&lt;b&gt;bold", "&lt;i&gt;it", "&lt;text&gt;", "loss &lt;= 4.6"):
        assert word in page
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)[^"')\s]+""", page)
    assert outside == []
    assert "<script" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_of_a_race_in_which_all_are_out_is_still_a_page() -> None:
    pytest.importorskip("matplotlib")
    entries = [ContenderRecord("exact", 2, [], error="it broke")]
    rows = score.rows(entries, link="100mbit", warmup=1)
    page = report.page(RaceReport(result=some_result(rows), records=entries, notes=[], warmup=1))
    assert "it broke" in page
    assert "<figure>" not in page


def test_without_matplotlib_the_page_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"paceline\[report\]"):
        report.check_plots()


# ------------------------------------------------------------------------------------------------ peers

# One pair of processes runs all peers in turn: starting torch twice for each would take most of the time.
PEER_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from paceline.integrations.peers import PEERS, prepare_peer

rank, world, store = int(sys.argv[1]), 2, sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # 2.6 MB: DDP would cut it into two buckets, which its PowerSGD hook does not survive on gloo.
        self.blocks = nn.ModuleList([nn.Linear(16, 8192), nn.Linear(8192, 64)])
        self.head = nn.Linear(64, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)

def full(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p

for name in [*PEERS, "reference"]:
    torch.manual_seed(0)
    x, y = torch.randn(16, 16), torch.randint(4, (16,))
    model = Net()
    groups = [{"params": model.blocks.parameters(), "lr": 1e-3}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)
    if name == "reference":
        x_own, y_own = x, y
    else:
        x_own, y_own = x[rank::world], y[rank::world]
        model, optimizer = prepare_peer(name, model, optimizer)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(x_own), y_own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([full(p).detach().flatten() for p in model.parameters()])
    shown = {
        "name": name, "losses": losses, "sum": weights.double().sum().item(), "norm": weights.norm().item(),
        "some": weights[::50000].tolist(), "lr": [g["lr"] for g in optimizer.param_groups],
        "weight_decay": [g["weight_decay"] for g in optimizer.param_groups],
        "kinds": [type(model).__name__, type(optimizer).__name__],
    }
    print(json.dumps(shown), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each of two workers says of each peer."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "script.py").write_text(PEER_SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(rank), str(folder / "store")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=100)
            assert worker.returncode == 0, err
            said.append({line["name"]: line for line in map(json.loads, out.splitlines())})
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    return said


@pytest.mark.parametrize("name", sorted(PEERS))
def test_every_peer_trains(peers: list[dict[str, dict[str, Any]]], name: str) -> None:
    for worker in peers:
        losses = worker[name]["losses"]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["torch:ddp", "torch:fp16", "torch:powersgd", "torch:fsdp2", "torch:zero1"])
def test_replicas_of_a_synchronous_peer_agree(peers: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert peers[0][name]["sum"] == peers[1][name]["sum"]
    assert peers[0][name]["some"] == peers[1][name]["some"]


@pytest.mark.parametrize("name", ["torch:ddp", "torch:fsdp2", "torch:zero1"])
def test_exact_peers_follow_one_worker_with_the_whole_batch(peers: list[dict[str, dict[str, Any]]], name: str) -> None:
    reference = peers[0]["reference"]
    assert peers[0][name]["norm"] == pytest.approx(reference["norm"], rel=1e-4)
    assert peers[0][name]["some"] == pytest.approx(reference["some"], abs=1e-4)


def test_the_floor_and_local_sgd_do_not_agree_between_means(peers: list[dict[str, dict[str, Any]]]) -> None:
    for name in ("floor", "torch:local_sgd"):
        assert peers[0][name]["sum"] != peers[1][name]["sum"]


def test_compressing_peers_do_compress(peers: list[dict[str, dict[str, Any]]]) -> None:
    """With its default settings PowerSGD would be plain DDP for a thousand steps."""
    exact = peers[0]["torch:ddp"]["sum"]
    assert peers[0]["torch:powersgd"]["sum"] != exact
    assert peers[0]["torch:fp16"]["sum"] != exact


def test_recreated_optimizers_keep_their_groups(peers: list[dict[str, dict[str, Any]]]) -> None:
    for name in PEERS:
        assert peers[0][name]["lr"] == [1e-3, 2e-3]
        assert peers[0][name]["weight_decay"] == [0.1, 0.1]


def test_an_unknown_peer_names_the_nearest() -> None:
    with pytest.raises(MethodError, match="torch:ddp"):
        prepare_peer("torch:dpd", torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1), None)


def test_a_peer_without_a_group_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="paceline run"):
        prepare_peer("torch:ddp", model, torch.optim.SGD(model.parameters(), lr=1), None)


# ------------------------------------------------------------------------------------------------ time to accuracy


@pytest.fixture(scope="module")
def bench() -> Any:
    path = Path(__file__).parents[2] / "bench" / "time_to_accuracy.py"
    made = importlib.util.spec_from_file_location("time_to_accuracy", path)
    assert made is not None
    assert made.loader is not None
    module = sys.modules["time_to_accuracy"] = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


@pytest.fixture
def book(bench: Any, tmp_path: Path) -> Any:
    """Two seeds of exact, and one each of a method that is good, one with a schedule, one that fails, one refused."""
    it = bench.Book(tmp_path / "cells.json")

    def steps(method: str, seed: int, taken: int | None, sent: int = 1_000_000, error: str | None = None) -> None:
        key = {"task": "text", "method": method, "workers": 2, "seed": seed}
        curve = [(50, 3.5), (100, 3.0), (120, 2.7)]
        cell = {"steps": taken, "best": 2.7, "sent_bytes_per_step": sent, "curve": curve, "error": error}
        it.add("steps", key, cell)

    def timed(method: str, link: str, ms: float, error: str | None = None) -> None:
        key = {"task": "text", "method": method, "workers": 2, "link": link}
        it.add("time", key, {"step_ms": ms, "sent_bytes_per_step": 1e6, "cpu_ms_per_step": 40.0, "error": error})

    steps("exact", 0, 100)
    steps("exact", 1, 120)
    steps("half", 0, 110)
    steps("onebit_adam", 0, 200, sent=3_000_000)
    steps("sign", 0, 200, sent=10_000)
    steps("topk", 0, None)
    steps("randomk", 0, None, error="refused: no")
    for method in ("exact", "half", "onebit_adam", "sign", "topk", "randomk", "torch:ddp"):
        timed(method, "unlimited", 50)
        timed(method, "100mbit", 500 if method in ("exact", "torch:ddp") else 60)
    return it


def test_seconds_to_the_target_are_steps_times_step_time(bench: Any, book: Any) -> None:
    found = {(c["method"], c["link"]): c for c in bench.estimates(book)}
    assert found["exact", "unlimited"]["seconds"] == pytest.approx(110 * 0.05)
    assert found["exact", "unlimited"]["spread"] == [100, 120]
    assert found["torch:ddp", "100mbit"]["seconds"] == pytest.approx(110 * 0.5), "as many steps as exact"
    assert "1 of 1" in found["topk", "100mbit"]["why"]
    assert found["topk", "100mbit"]["seconds"] is None
    assert found["randomk", "100mbit"]["why"] == "refused: no"
    # 2 MB more in a step than when it was timed: 0.16 s at 100 Mbit/s, and nothing without a limit.
    assert found["onebit_adam", "100mbit"]["seconds"] == pytest.approx(200 * (0.06 + 0.16))
    assert found["onebit_adam", "unlimited"]["seconds"] == pytest.approx(200 * 0.05)
    assert "schedule" in found["onebit_adam", "100mbit"]["how"]
    assert found["sign", "100mbit"]["seconds"] == pytest.approx(200 * 0.04), "never less than it computes"


def test_a_run_that_would_take_too_long_is_told_by_its_steps(
    bench: Any, book: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at the slow link does for all seeds; a seed without a whole run on the faster one has no cell."""
    looks: list[str] = []
    monkeypatch.setattr(bench, "train_a_few", lambda task, name, workers: looks.append(name) or 5.0)
    key = {"task": "text", "method": "sma", "workers": 2}
    for seed, steps in enumerate((100, 120)):
        ran = {
            "steps": steps,
            "seconds": 60.0,
            "best": 2.8,
            "sent_bytes_per_step": 7,
            "link_kind": "lab",
            "error": None,
        }
        book.add("syncs", {**key, "condition": "100mbit", "seed": seed}, {**ran, "curve": [(steps, 60.0, 2.9)]})
    bench.fill_syncs(book, "text", 2, ["10mbit"], [0, 1, 2], ["sma"], 0)
    cells = book.find("syncs", **key, condition="10mbit")
    assert [(c["seed"], c["seconds"], c["how"]) for c in cells] == [
        (seed, seconds, "steps on 100mbit × a mean step here") for seed, seconds in ((0, 500.0), (1, 600.0))
    ]
    assert looks == ["sma"]
    [row] = [r for r in bench.syncs_summary(book) if r["condition"] == "10mbit"]
    assert (row["by_steps"], row["seconds"]) == (True, 550.0)
    assert any("~550.0" in line for line in bench.syncs_table(book))


def test_the_summary_compares_the_best_of_ours_with_exact_without_a_limit(bench: Any, book: Any) -> None:
    key = {"task": "text", "workers": 2}
    whole = [("exact", "unlimited", seed, took) for seed, took in enumerate((5.0, 6.0, 7.0, 90.0))]  # the last alone
    whole += [("local_sgd", "100mbit", seed, 7.5) for seed in range(3)] + [("sma", "100mbit", 2, 1.0)]  # by luck
    for method, condition, seed, took in whole:
        ran = {**key, "method": method, "condition": condition, "seed": seed}
        book.add("syncs", ran, {"seconds": took, "curve": [(100, took, 2.9)], "error": None})
    found = {c["link"]: c for c in bench.summary(book)}
    slow = found["100mbit"]
    assert (slow["best"], slow["goal"]) == ("half", 1.15)
    assert slow["over_exact_unlimited"] == pytest.approx(110 * 0.06 / (110 * 0.05))
    assert (slow["best_whole"], slow["whole_over_exact_unlimited"]) == ("local_sgd", 1.25)
    assert (slow["value_at_exacts_steps"], slow["exacts_value"]) == (3.0, pytest.approx((3.0 + 2.7) / 2))
    lines = [*bench.table(book, "text", 2), *bench.conclusion(book)]
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["text", "2", "100mbit", "half", "1.20", "local_sgd", "1.25", "1.15"]


def test_what_we_would_use_stands_beside_both_goals(bench: Any, book: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "OURS", {("text", 2, "100mbit"): "powersgd rank=8", ("text", 4, "10mbit"): "sma"})
    key = {"task": "text", "workers": 2}
    for method, condition, took, last in (("exact", "unlimited", 8.0, 0.5), ("powersgd rank=8", "100mbit", 9.0, 0.496)):
        book.add(
            "syncs", {**key, "method": method, "condition": condition, "seed": 0}, {"seconds": took, "error": None}
        )
        book.add("final", {**key, "method": method, "seed": 0}, {"last": last, "error": None})
    known, unknown = bench.goals(book)
    assert (known["over_exact_unlimited"], known["goal"]) == (1.125, 1.15)
    assert (known["points_over_exact_at_the_end"], known["goal_points"]) == (-0.4, -0.5)
    assert (unknown["over_exact_unlimited"], unknown["points_over_exact_at_the_end"]) == (None, None)
    lines = list(bench.goals_table(book))
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[-6:] == ["1.12", "(goal", "1.15)", "-0.40", "(goal", "-0.5)"]


def test_what_is_known_is_not_measured_again_and_what_failed_is(bench: Any, book: Any, monkeypatch: Any) -> None:
    again = bench.Book(book.path)
    assert again.cells == json.loads(json.dumps(book.cells))
    ran = []

    def train(task: str, name: str, workers: int, seed: int, limit: int) -> dict[str, Any]:
        ran.append((name, seed, limit))
        return {"steps": 100, "error": None}

    monkeypatch.setattr(bench, "train", train)
    bench.fill_steps(again, "text", 2, [0, 1], ["exact", "half", "topk", "randomk", "torch:ddp"], 3.0)
    # randomk was refused; topk had its chance with the first seed; three times exact's steps at most.
    assert ran == [("randomk", 0, 300), ("half", 1, 360), ("randomk", 1, 360)]
