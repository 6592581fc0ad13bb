"""Events go out and come back as they were; laps measure what they say; a broken line harms nobody."""

from __future__ import annotations

import time
import types

from paceline.telemetry import event_file
from paceline.telemetry import recorder as recording
from paceline.telemetry.events import Bye, Hello, Metric, Note, Skip, Step, read
from paceline.telemetry.recorder import Recorder
from paceline.tools.race.event_tail import EventTail


def test_round_trip(tmp_path):
    recorder = Recorder(tmp_path, 3)
    recorder.start_lap(samples=8, data_s=0.5)
    time.sleep(0.01)
    recorder.wait_s, recorder.sent = 0.002, 77
    recorder.end_lap()
    recorder.log({"loss": 1.5})
    recorder.emit(Skip(t=0.0, step=1, workers=[2], why="NaN"))
    recorder.emit(Note(t=0.0, text="ä <b>"))
    recorder.close(error="")
    step, metric, skip, note, bye = read(tmp_path / "worker-3.jsonl")
    assert isinstance(step, Step)
    assert (step.step, step.samples, step.sent, step.data_ms) == (0, 8, 77, 500.0)
    assert step.wall_ms >= 10
    assert step.cpu_ms < step.wall_ms
    assert isinstance(metric, Metric)
    assert (metric.step, metric.name, metric.value) == (1, "loss", 1.5)
    assert 0.51 <= metric.busy_s < 1.5
    assert isinstance(skip, Skip)
    assert note.text == "ä <b>"
    assert isinstance(bye, Bye)
    assert bye.peak_rss_mb > 1


def test_untimed_time_does_not_count(tmp_path):
    recorder = Recorder(tmp_path, 0)
    recorder.start_lap(1, 0.0)
    with recorder.untimed():
        time.sleep(0.1)
    recorder.end_lap()
    recorder.flush()
    (step,) = read(tmp_path / "worker-0.jsonl")
    assert step.wall_ms < 60


def test_what_was_put_off_counts_where_it_is_made_up_for(tmp_path, monkeypatch):
    now = [1.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0] / 2, monotonic=time.monotonic)
    monkeypatch.setattr(recording, "time", clock)
    recorder = Recorder(tmp_path, 0)
    recorder.start_lap(1, 0.0)
    with recorder.untimed():
        recorder.sent += 1000
        now[0] += 32.0
        with recorder.timed():
            now[0] += 4.0
            recorder.sent += 7
        assert recorder.moment().busy_s == 4.0
        now[0] += 64.0
    with recorder.timed():
        now[0] += 2.0
        recorder.sent += 70
    recorder.end_lap()
    recorder.flush()
    (step,) = read(tmp_path / "worker-0.jsonl")
    assert (step.wall_ms, step.cpu_ms, step.sent) == (6000.0, 3000.0, 77)


def test_broken_and_unfinished_lines_are_passed_over(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    recorder = Recorder(tmp_path, 0)
    recorder.emit(Note(t=1.0, text="one"))
    recorder.flush()
    with path.open("ab") as file:
        file.write(b'\xff\xfe garbage\n{"event":"unknown","t":1}\n{"event":"note","t":"x"}\n')
    recorder.emit(Note(t=2.0, text="two"))
    recorder.flush()
    with path.open("ab") as file:
        file.write(b'{"event":"note","t":3.0,"te')
    assert [e.text for e in read(path)] == ["one", "two"]
    assert list(read(tmp_path / "nobody.jsonl")) == []


def test_a_full_disk_costs_events_and_is_said_once(tmp_path, capfd):
    (tmp_path / "worker-0.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, 0)
    for _ in range(3):
        recorder.start_lap(1, 0.0)
        recorder.end_lap()
        recorder.flush()
    recorder.close()
    assert capfd.readouterr().err.count("events are lost, training goes on") == 1


def test_events_go_on_once_there_is_room_again(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, 0)
    full = [True]
    append = event_file.EventFile._append

    def half(self, lines):
        append(self, lines[: len(lines) // 2] if full[0] else lines)
        if full[0]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(event_file.EventFile, "_append", half)
    recorder.emit(Note(t=1.0, text="lost"))
    recorder.flush()
    full[0] = False
    recorder.emit(Note(t=2.0, text="kept"))
    recorder.close()
    assert [e.text for e in read(tmp_path / "worker-0.jsonl") if isinstance(e, Note)] == ["kept"]


def test_events_do_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "MOST_BYTES", 4000)
    recorder, tail = Recorder(tmp_path, 0), EventTail(tmp_path / "worker-0.jsonl")
    hello = Hello(
        0.0, rank=0, world_size=1, method="exact", host="h", pid=1, unix=0.0, torch="2", threads=1, parameters=1
    )
    recorder.emit(hello)
    seen = []
    for i in range(200):
        recorder.emit(Note(t=0.0, text=str(i)))
        if i % 7 == 0:
            recorder.flush()
        if i % 31 == 0:
            seen += tail.new()
    recorder.close()
    seen += tail.new()
    assert [e.text for e in seen if isinstance(e, Note)] == [str(i) for i in range(200)], "a race reads them all"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    kept = list(read(tmp_path / "worker-0.jsonl"))
    assert kept[0] == hello
    texts = [e.text for e in kept if isinstance(e, Note)]
    assert texts == [str(i) for i in range(200 - len(texts), 200)], "the last ones"
    assert len(texts) > 40


def test_no_directory_no_file(tmp_path):
    recorder = Recorder(None, 0)
    recorder.start_lap(1, 0.0)
    recorder.end_lap()
    recorder.log({"loss": 1.0})
    recorder.close()
    assert recorder.step == 1
