"""A timeline is valid for those who draw it, says what happened when it happened, and is not there unless asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import processes
from paceline.comm.shared_memory import SharedMemoryComm
from paceline.comm.single import SingleComm
from paceline.core.cutting import cut
from paceline.core.pipeline import Pipeline
from paceline.session.session import current
from paceline.telemetry import chrome, tape
from paceline.telemetry.events import Hello, Step
from paceline.telemetry.events import read as read_events
from paceline.telemetry.exchanges import exchanges, in_rows
from paceline.telemetry.recorder import Recorder
from paceline.telemetry.tape import COMPUTE, WAITS, Span, Tape, Trace
from paceline.telemetry.traced_comm import TracedComm
from paceline.telemetry.traced_recorder import TracedRecorder
from paceline.tools.race import timeline

LANES = ("gradients 0", "gradients 0 (background)")


def hello(rank: int = 0, **other: Any) -> Hello:
    told = {
        "t": 100.0,
        "unix": 1e9,
        "world_size": 2,
        "method": "exact",
        "host": "h",
        "pid": 1,
        "torch": "2",
        "threads": 1,
    }
    return Hello(rank=rank, parameters=1, **(told | other))


def trace(*spans: Span, rank: int = 0, clock: str = "a", **other: Any) -> Trace:
    return Trace(hello(rank, **other), clock, 200.0, list(spans))


def op(
    begin: float, end: float, bucket: int | None = 0, *, step: int = 0, sent: int = 10, lane: str = LANES[0]
) -> Span:
    name = "" if bucket is None else f"w{bucket}"
    return Span(lane, "mean", step, begin, end, sent, bucket, name, name)


def slices(text: str) -> list[dict[str, Any]]:
    """The format, as its description has it; and what lies on one thread lies within each other or apart."""
    document = json.loads(text)
    assert document["displayTimeUnit"] == "ms"
    names: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    found = []
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in ("M", "X")
        if event["ph"] == "M":
            names.setdefault(event["name"], set()).add((event["pid"], event["tid"]))
            continue
        assert type(event["ts"]) is type(event["dur"]) is int
        assert event["dur"] >= 0
        found.append(event)
    assert {event["pid"] for event in found} == {pid for pid, _ in names["process_name"]}
    threads = {(event["pid"], event["tid"]) for event in found}
    assert threads <= names["thread_name"]
    for thread in threads:
        open_: list[int] = []
        for event in (e for e in found if (e["pid"], e["tid"]) == thread):
            end = event["ts"] + event["dur"]
            while open_ and open_[-1] <= event["ts"]:
                open_.pop()
            assert not open_ or end <= open_[-1], event
            open_.append(end)
    return found


# ------------------------------------------------------------------------------------------------ the tape


def test_only_the_last_steps_are_kept(tmp_path: Path) -> None:
    recorder = TracedRecorder(None, 0, tape=Tape(steps=3), traces=tmp_path)
    recorder.emit(hello())
    recorder.tape.add(op(1.0, 2.0))  # before the first batch: setting up
    for _ in range(10):
        recorder.start_lap(1, 0.001)
        recorder.wait_s += 0.001
        recorder.end_lap()
    recorder.close()
    (found,) = tape.read(tmp_path)
    assert [s.name for s in found.spans if s.name.startswith("step")] == ["step 7", "step 8", "step 9"]
    assert {s.step for s in found.spans} == {7, 8, 9}
    assert [s.name for s in found.spans if s.step == 7] == ["data", "wait", "step 7"]


def test_a_wait_ends_when_it_is_told_of_and_is_as_long(tmp_path: Path) -> None:
    recorder = TracedRecorder(tmp_path, 0, tape=Tape(9), traces=tmp_path)
    recorder.start_lap(1, 0.0)
    before = time.monotonic()
    recorder.wait_s += 0.25
    after = time.monotonic()
    recorder.wait_s += 0.5
    with recorder.untimed():
        pass
    recorder.end_lap()
    recorder.flush()
    first, second, untimed, step = recorder.tape.spans()
    assert (first.track, second.track) == (WAITS, WAITS)
    assert before <= first.end <= after
    assert [s.end - s.begin for s in (first, second)] == pytest.approx([0.25, 0.5])
    assert (untimed.name, step.name) == ("untimed", "step 0")
    (event,) = (e for e in read_events(tmp_path / "worker-0.jsonl") if isinstance(e, Step))
    assert event.wait_ms == pytest.approx(750)
    assert recorder.wait_s == 0.0  # of the next step


def test_a_worker_that_never_said_who_it_is_leaves_nothing(tmp_path: Path) -> None:
    TracedRecorder(None, 0, tape=Tape(9), traces=tmp_path).close()
    assert tape.read(tmp_path) == []


def test_whose_bytes_they_are() -> None:
    """An operation is about the bucket whose coroutine started it; outside of the pipeline about none."""
    buckets = list(cut([("w", nn.Parameter(torch.ones(4))), ("v", nn.Parameter(torch.ones(400)))], 2, cap_bytes=64))
    tape = Tape(9)
    tape.running = True
    comm, pipeline = TracedComm(SingleComm(), tape), Pipeline(tape.about)

    async def mean() -> None:
        await comm.mean(torch.ones(3))

    for b in buckets:
        pipeline.start(mean(), b)
    pipeline.drain()
    comm.sum(torch.ones(1)).wait()
    assert [(s.name, s.bucket, s.first) for s in tape.spans()] == [
        ("mean", 0, "v"),
        ("mean", 1, "w"),
        ("sum", None, ""),
    ]
    assert all(s.end for s in tape.spans())


# ------------------------------------------------------------------------------------------------ the drawing


def test_operations_of_a_bucket_in_a_step_are_one_exchange() -> None:
    rounds, late = [op(1, 2, sent=5), op(3, 4, sent=7)], op(5, 0, step=1)
    found = exchanges(trace(*rounds, op(1, 6, 1), op(2, 3, None), late))
    assert [(x.name, x.begin, x.end, x.sent) for x in found] == [
        ("bucket 0", 1, 4, 12),
        ("bucket 1", 1, 6, 10),
        ("mean", 2, 3, 10),
        ("bucket 0", 5, 200.0, 10),  # it had not landed when the trace was written
    ]
    assert [x.landed for x in found] == [True, True, True, False]
    assert [x.rounds for x in found] == [rounds, [], [], []]
    assert [row for row, _ in in_rows(found)] == [0, 1, 2, 0]


def test_rounds_that_overlap_are_not_drawn() -> None:
    (found,) = exchanges(trace(op(1, 3), op(2, 4)))
    assert found.rounds == []
    assert (found.begin, found.end) == (1, 4)


def test_the_document_is_valid_and_names_its_tracks() -> None:
    spans = [
        Span(COMPUTE, "step 0", 0, 100.0, 101.0),
        Span(COMPUTE, "forward", 0, 100.0, 100.5),
        Span(WAITS, "wait", 0, 100.6, 100.9),
        op(100.2, 100.7, 0),
        op(100.3, 100.8, 1),
        op(100.3, 100.4, 2, lane=LANES[1]),
    ]
    text = chrome.document({"exact": [trace(*spans)], "half": [trace(*spans, rank=r) for r in (0, 1)]})
    found = slices(text)
    assert len(found) == 3 * len(spans)
    about = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "M"]
    processes_ = [e["args"]["name"] for e in about if e["name"] == "process_name"]
    assert processes_ == ["exact · worker 0 of 2", "half · worker 0 of 2", "half · worker 1 of 2"]
    threads = [e["args"]["name"] for e in about if e["name"] == "thread_name"]
    assert threads[:5] == [COMPUTE, WAITS, LANES[0], f"{LANES[0]} (2)", LANES[1]]
    (args,) = (e["args"] for e in found[: len(spans)] if e["name"] == "bucket 1")
    assert args == {"step": 0, "bytes": 10, "bucket": 1, "parameters": "w1", "operations": ["mean"]}


def test_one_clock_has_one_offset_and_two_are_aligned_by_the_time_of_day() -> None:
    span = Span(COMPUTE, "step 0", 0, 101.0, 102.0)
    same = slices(chrome.document({"": [trace(span), trace(span, rank=1, unix=1e9 + 5)]}))
    assert same[0]["ts"] == same[1]["ts"] == 1_000_000_001 * 10**6
    other = trace(Span(COMPUTE, "step 0", 0, 7.0, 8.0), rank=1, clock="b", t=6.0, unix=1e9 + 0.5)
    apart = slices(chrome.document({"": [trace(span), other]}))
    assert apart[1]["ts"] - apart[0]["ts"] == 500_000


def test_the_picture_shows_a_step_in_which_something_travels() -> None:
    steps = [Span(COMPUTE, f"step {i}", i, 100.0 + i, 100.9 + i) for i in range(4)]
    work = [Span(COMPUTE, "backward", i, 100.1 + i, 100.5 + i) for i in range(4)]
    aside = op(100.0, 104.0, None, lane="control")
    told = trace(*steps, *work, aside, op(101.4, 102.6, step=1))  # in steps 1 and 2, about as long in both
    assert timeline.typical(told) in steps[1:3]
    backward, exchange = timeline.bars(told)
    assert (backward.what, backward.line, exchange.what, exchange.line) == ("backward", 0, "exchange", 1)
    assert backward.begin == pytest.approx(100)
    assert backward.length == pytest.approx(400)
    assert 0 <= exchange.begin < exchange.begin + exchange.length <= 900 + 1e-6
    assert list(timeline.bars(trace())) == []


def test_the_picture_is_drawn_where_there_is_something_to_draw() -> None:
    pytest.importorskip("matplotlib")
    assert timeline.draw({}) is None
    assert timeline.draw({"exact": [], "single": [trace(Span(COMPUTE, "step 0", 0, 1, 2))]}) is None
    step = [Span(COMPUTE, "step 0", 0, 1, 2), Span(COMPUTE, "forward", 0, 1, 1.5)]
    assert "<svg" in (timeline.draw({"exact": [trace(*step)]}) or "")


# ------------------------------------------------------------------------------------------------ real workers


def _train(rank: int, method: str, knobs: dict[str, Any], steps: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(16 * steps, 8), torch.randint(0, 2, (16 * steps,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, method=method, bucket_mb=0.01, **knobs)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = current()
    assert session is not None
    kinds = [type(session.recorder).__name__, *(type(lane).__name__ for lane in session.group.lanes.values())]
    spans = list(session.tape.spans()) if session.tape else []
    on_tape = {
        lane.name: sum(s.sent or 0 for s in spans if s.track == lane.name) for lane in session.group.lanes.values()
    }
    return [kinds, [(lane.sent, on_tape[lane.name]) for lane in session.group.lanes.values() if lane.name in LANES]]


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("exact", {}),
    ("powersgd", {"rank": 1}),
    ("local_sgd", {"every": 4, "delay": 2}),
    ("async_average", {"every": 2}),
]


def _within(span: Span, steps: Iterator[Span] | list[Span]) -> bool:
    return any(step.begin <= span.begin and span.end <= step.end for step in steps)


@pytest.mark.parametrize(("method", "knobs"), METHODS)
def test_a_real_run(method: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    steps = 12
    env = {"PACELINE_TRACE": str(tmp_path), "PACELINE_EVENTS": str(tmp_path)}
    for kinds, sent in processes.values(processes.run(2, _train, method, knobs, steps, env=env)):
        assert set(kinds) == {"TracedRecorder", "TracedComm"}
        assert all(counted == seen for counted, seen in sent)
        assert any(counted for counted, _ in sent)
    traces = tape.read(tmp_path)
    assert [t.worker.rank for t in traces] == [0, 1]
    assert traces[0].clock == traces[1].clock
    slices(chrome.document({"": traces}))
    for told in traces:
        laps = [s for s in told.spans if s.name == f"step {s.step}"]
        assert [s.step for s in laps] == list(range(steps))
        for name in ("forward", "backward", "optimizer"):
            assert sum(s.name == name for s in told.spans) == steps
        inner = [s for s in told.spans if s.name in ("forward", "backward", "optimizer", "wait") and s.step < steps]
        assert all(_within(s, laps) for s in inner)
        waited = [sum(s.end - s.begin for s in inner if s.track == WAITS and s.step == i) for i in range(steps)]
        events = [e for e in read_events(tmp_path / f"worker-{told.worker.rank}.jsonl") if isinstance(e, Step)]
        assert waited == pytest.approx([e.wait_ms / 1e3 for e in events], abs=1e-6)
        travelled = [x for x in exchanges(told) if x.operations[0].bucket is not None]
        assert len({x.name for x in travelled}) > 1
        assert all(x.landed and x.end >= x.begin for x in travelled)
        assert {x.lane for x in travelled} == {LANES[method == "async_average"]}
        if method == "exact":  # nothing is waited for longer than until the last has landed
            for wait in (s for s in inner if s.track == WAITS):
                assert all(x.end <= wait.end for x in travelled if x.operations[0].step == wait.step)


@pytest.mark.slow
def test_pushes_to_a_server_and_pulls_from_it_are_traced(tmp_path: Path) -> None:
    steps = 4
    env = {"PACELINE_TRACE": str(tmp_path), "PACELINE_EVENTS": str(tmp_path)}
    processes.values(processes.run(2, _train, "parameter_server", {}, steps, env=env))
    for told in tape.read(tmp_path):
        spans = [s for s in told.spans if s.track.startswith("servers of ") and s.step < steps]
        assert all(s.end >= s.begin > 0 for s in spans)
        pushes = [s for s in spans if s.name == "push" and s.step > 0]  # in step 0 worker 0 also sends its weights
        pulls = [s for s in spans if s.name == "pull"]
        assert [s.step for s in pushes] == list(range(1, steps))
        assert len({s.sent for s in pushes}) == 1
        events = [e for e in read_events(tmp_path / f"worker-{told.worker.rank}.jsonl") if isinstance(e, Step)]
        assert all((s.sent or 0) <= events[s.step].sent for s in pushes)
        assert (pushes[0].sent or 0) > 4 * 64 * 64
        assert {s.step for s in pulls} >= set(range(steps))
        assert all(s.sent == 0 for s in pulls)


def test_nothing_is_different_where_nobody_asked(tmp_path: Path) -> None:
    env = {"PACELINE_EVENTS": str(tmp_path)}
    for kinds, _ in processes.values(processes.run(2, _train, "exact", {}, 2, env=env)):
        assert set(kinds) == {Recorder.__name__, SharedMemoryComm.__name__}
    assert tape.read(tmp_path) == []
    assert not list(tmp_path.glob("trace*"))


def _lands(rank: int) -> list[float]:
    """Both workers start an operation; nobody asks for it."""
    _train(rank, "exact", {}, 1)
    session = current()
    assert session is not None
    assert session.tape is not None
    lane = session.group.lane("user")
    assert isinstance(lane, TracedComm)
    x = torch.ones(1000)
    handle, end = lane.mean(x), time.monotonic() + 30
    span = next(s for s in session.tape.spans() if s.track == "user")
    while not span.end and time.monotonic() < end:
        time.sleep(0.001)
    asked = time.monotonic()
    handle.wait()
    scattered = lane.reduce_scatter_mean(x)  # gloo tells nobody of its end
    scattered.wait()
    last = [s for s in session.tape.spans() if s.track == "user"][-1]
    return [span.begin, span.end, asked, asked, last.end, time.monotonic()]


def test_the_end_is_when_it_landed_and_not_when_somebody_asked(tmp_path: Path) -> None:
    for begin, end, asked, *scattered in processes.values(
        processes.run(2, _lands, env={"PACELINE_TRACE": str(tmp_path)})
    ):
        assert begin <= end < asked
        assert scattered == sorted(scattered)
