"""The race's own parts: scoring on hand-made events, the gate over pipes, contenders that fail, the written results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paceline.errors import DeadlineError, MethodError, UsageError
from paceline.race import score
from paceline.race.gate import Gate
from paceline.race.peers import PEERS, prepare_peer
from paceline.race.score import Entry, Target
from paceline.race.tail import Tail
from paceline.telemetry import AnyEvent, Barrier, Bye, Metric, Recorder, Step, Wire, read

ROW_KEYS = [
    "method", "workers", "link", "steps", "step_ms_median", "samples_per_s", "speedup", "efficiency",
    "sent_bytes_per_step", "wire_bytes_per_step", "exposed_comm_ms", "barrier_ms_p50", "barrier_ms_p99", "loss",
    "accuracy", "target_s", "peak_rss_mb", "error",
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
    assert [lap.ms for lap in score.laps([fast, slow], warmup=0)] == [14, 20]
    assert [lap.samples for lap in score.laps([fast, slow], warmup=0)] == [16, 16]


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
    assert [lap.step for lap in score.laps(events, warmup=1)] == [1, 2, 4, 6]
    assert [lap.step for lap in score.laps(events, warmup=3)] == [4, 6]


def test_a_step_that_one_worker_has_not_finished_does_not_count() -> None:
    assert [lap.step for lap in score.laps([[step(0), step(1)], [step(0)]], warmup=0)] == [0]


def test_throughput_counts_rare_communication_which_the_median_hides() -> None:
    events: list[AnyEvent] = [step(i, wall=90 if i % 8 == 0 else 10) for i in range(32)]
    row = score.rows([Entry("torch:local_sgd", 1, [events])], link="none", warmup=0)[0]
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
        Entry("single", 1, single),
        Entry("floor", 2, floor, counted=False),
        Entry("exact", 2, ours),
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
    scored = score.rows([Entry("floor", 1, floor), Entry("exact", 2, ours)], link="none", warmup=0)
    assert scored[1].exposed_comm_ms == 0


def test_without_the_floor_exposed_communication_is_not_known() -> None:
    row = score.rows([Entry("exact", 2, [[step(0)], [step(0)]])], link="none", warmup=0)[0]
    assert row.exposed_comm_ms is None
    assert row.speedup is None


def test_wire_bytes_leave_out_the_turns_of_the_warm_up() -> None:
    events = [[wire(5, 5000), wire(5, 50), wire(5, 100)]]
    assert score.rows([Entry("exact", 1, events)], link="none", warmup=3)[0].wire_bytes_per_step == 15
    only = [[wire(5, 5000)]]
    assert score.rows([Entry("exact", 1, only)], link="none", warmup=3)[0].wire_bytes_per_step == 1000


def test_loss_is_the_mean_of_the_last_five_and_of_the_workers() -> None:
    one = [metric(i, i, v) for i, v in enumerate([9, 9, 1, 1, 1, 1, 1])]
    two = [metric(i, i, v) for i, v in enumerate([9, 9, 3, 3, 3, 3, 3])]
    accuracy = [metric(2, 2, 0.5, "accuracy"), metric(6, 6, 0.75, "accuracy")]
    row = score.rows([Entry("exact", 2, [[*one, *accuracy], two])], link="none", warmup=0)[0]
    assert (row.loss, row.accuracy) == (2, 0.75)


def test_target_seconds_are_the_slowest_workers_when_it_was_first_met() -> None:
    one = [metric(i, 1.0 * i, v, "accuracy") for i, v in enumerate([0.1, 0.8, 0.9, 0.7])]
    two = [metric(i, 1.5 * i, v, "accuracy") for i, v in enumerate([0.1, 0.8, 0.9, 0.7])]
    assert score.reached_s([one, two], Target.parse("accuracy=0.85")) == 3.0
    assert score.reached_s([one, two], Target.parse("accuracy=0.95")) is None
    falling = [[metric(i, i, v) for i, v in enumerate([5, 4, 3, 2, 1, 0])]]
    assert (
        score.reached_s(falling, Target.parse("loss=3")) == 4
    )  # (5+4+3+2+1)/5: one lucky batch is not enough


@pytest.mark.parametrize("text", ["", "loss", "loss=", "loss=low", "speed=3", "loss=nan", "=2"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a target"):
        Target.parse(text)


def test_barriers_and_memory() -> None:
    bye = [Bye(t=0, steps=1, peak_rss_mb=mb) for mb in (100.0, 200.0)]
    events = [[barrier(1), barrier(2), bye[0]], [barrier(3), bye[1]]]
    row = score.rows([Entry("exact", 2, events)], link="none", warmup=0)[0]
    assert (row.barrier_ms_p50, row.peak_rss_mb) == (2, 200)
    assert row.barrier_ms_p99 == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("events", [[], [[]], [[], []], [[metric(0, 0, float("nan"))]], [[step(0)], []]])
def test_nothing_measured_gives_a_row_of_unknowns(events: list[list[AnyEvent]]) -> None:
    row = score.rows([Entry("exact", 2, events, error="it broke")], link="none", warmup=3)[0]
    assert (row.step_ms_median, row.loss, row.error, row.steps) == (None, None, "it broke", 0)
    assert list(msgspec.to_builtins(row)) == ROW_KEYS


def test_no_nan_reaches_the_json() -> None:
    broken = [[step(i, wall=float("nan")) for i in range(3)]]
    row = score.rows([Entry("exact", 1, broken)], link="none", warmup=0)[0]
    json.loads(msgspec.json.encode(row), parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert row.step_ms_median is None


def test_bytes_by_step_add_up() -> None:
    own = [[step(0, sent=10), step(1, sent=20)], [step(0, sent=30), step(1, sent=40)]]
    assert score.bytes_by_step(own, wire=False) == [(0, 0), (1, 20), (2, 50)]
    assert score.bytes_by_step([[wire(5, 50), wire(5, 70)]], wire=True) == [(0, 0), (5, 50), (10, 120)]
    assert score.bytes_by_step(own, wire=True) == []


def test_tail_gives_every_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    tail = Tail(path)
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
        env = {"PACELINE_GATE": f"{self.their_in},{self.their_out}", "PACELINE_GATE_DEADLINE": "20", **env}
        self.gate = Gate(self.recorder, self._barrier, env)

    def _barrier(self) -> None:
        self.barriers += 1

    def say(self, text: str) -> None:
        os.write(self.go_fd, text.encode())

    def heard(self) -> str:
        return os.read(self.done_fd, 100).decode()

    def close(self) -> None:
        for fd in (self.their_in, self.their_out, self.go_fd, self.done_fd):
            try:
                os.close(fd)
            except OSError:
                pass


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


def test_gate_gives_up_at_its_deadline(tmp_path: Path) -> None:
    race = Race(tmp_path, PACELINE_GATE_DEADLINE="0.05")
    with pytest.raises(DeadlineError, match="no turn"):
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


def test_gate_splits_a_shared_interface_among_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = Race(tmp_path, PACELINE_WIRE="eth0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    counts = iter([(100, 10), (500, 30)])
    monkeypatch.setattr(race.gate, "_counters", lambda: next(counts))
    race.say("go 1\nstop\n")
    while race.gate():
        pass
    wires = [e for e in read(tmp_path / "worker-0.jsonl") if isinstance(e, Wire)]
    assert [(w.sent, w.received) for w in wires] == [(200, 10)]
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


# ------------------------------------------------------------------------------------------------ peers

# One pair of processes runs all peers in turn: starting torch twice for each would take most of the time.
PEER_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from paceline.race.peers import PEERS, prepare_peer

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
    names = [n for n, _ in model.named_parameters()]
    groups = [{"params": list(model.blocks.parameters()), "lr": 1e-3}, {"params": list(model.head.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)
    loader = object()
    if name == "reference":
        x_own, y_own = x, y
    else:
        x_own, y_own = x[rank::world], y[rank::world]
        model, optimizer, same = prepare_peer(name, model, optimizer, loader)
        assert same is loader
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
def test_exact_peers_follow_one_worker_with_the_whole_batch(
    peers: list[dict[str, dict[str, Any]]], name: str
) -> None:
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
