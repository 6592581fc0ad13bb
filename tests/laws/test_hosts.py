"""Shared memory inside a host, three legs between hosts: the same results, agreed on alike, and nothing goes around a
link.

Most of it runs with workers as threads: outboxes do not mind whose they are. Faults and hosts take processes.
"""

from __future__ import annotations

import json
import math
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

import paceline
import processes
from marks import slow
from paceline.comm.moves import Moves
from paceline.comm.outboxes import SIDE, open_outboxes
from paceline.comm.progress import Progress, Steps
from paceline.comm.route import choose, grouped
from paceline.comm.shared_memory import SharedMemoryComm
from paceline.errors import MismatchError, PeerError, PeerTimeoutError, UsageError
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab
from processes import run, values

several = pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
PIECES = SIDE // 4 * 2 + 3  # elements: more than a piece of any world, in fp32


class Board:
    """What a lane asks of one, between threads. `patience_s`: how long a worker waits before it gives up."""

    def __init__(self, rank, posts, changed, patience_s):
        self.rank, self.posts, self.changed, self.patience_s = rank, posts, changed, patience_s
        self.world_size = 0

    def write(self, key, value):
        with self.changed:
            self.posts[key] = value
            self.changed.notify_all()

    def wait_for_all(self, key, what):
        keys = {r: f"{key}/{r}" for r in range(self.world_size) if r != self.rank}
        with self.changed:
            assert self.changed.wait_for(lambda: all(k in self.posts for k in keys.values()), 20), what
            return {r: self.posts[k] for r, k in keys.items()}

    def agree(self, key, what, text):
        pass

    def pulse(self, lane, op, label, waited_s):
        if waited_s > self.patience_s:
            raise PeerTimeoutError(f"gave up {label}")

    def clear(self):
        pass

    def lost(self, label, error):
        return PeerError(label, why=str(error))


def on_threads(world_size, work, patience_s=20.0):
    """work(lane) on every worker; what each returned or raised."""
    posts, changed, results = {}, threading.Condition(), [None] * world_size

    def one(rank):
        board = Board(rank, posts, changed, patience_s)
        board.world_size = world_size
        try:
            boxes = open_outboxes(board, "boxes", list(range(world_size)))
            results[rank] = work(SharedMemoryComm(boxes, name="test", board=board, timeout_s=20.0))
        except Exception as error:
            results[rank] = error

    workers = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def fine(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def vector(n, dtype, rank):
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 50
    return x.abs().to(dtype) if dtype in OTHERS else x.to(dtype)


# ---------------------------------------------------------------------------------------------------- one host


def total(xs):
    """In rank order; narrow types in fp32."""
    wide = torch.float32 if xs[0].dtype in (torch.float16, torch.bfloat16) else xs[0].dtype
    result = xs[0].to(wide)
    for x in xs[1:]:
        result = result + x.to(wide)
    return result


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@several
def test_means_and_sums_to_the_last_bit(world_size, dtype):
    sizes = [0, 1, 13, 2048 * world_size + 1, PIECES]

    def work(comm):
        given = [vector(n, dtype, comm.rank) for n in sizes]
        return [
            (comm.mean(x.clone()).wait(), comm.sum(x.clone()).wait(), _slice(comm, x.clone()).wait()) for x in given
        ]

    for n, found in zip(sizes, zip(*fine(on_threads(world_size, work)), strict=True), strict=True):
        xs = [vector(n, dtype, rank) for rank in range(world_size)]
        mean, added = (total(xs) / world_size).to(dtype), total(xs).to(dtype)
        whole = n // world_size * world_size
        slices = (total([x[:whole] for x in xs]) / world_size).to(dtype).view(world_size, -1)
        for rank, (of_mean, of_sum, of_slice) in enumerate(found):
            assert torch.equal(of_mean, mean)
            assert torch.equal(of_sum, added)
            assert torch.equal(of_slice, slices[rank])


def _slice(comm, x):
    return comm.reduce_scatter_mean(x[: x.numel() // comm.world_size * comm.world_size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *OTHERS], ids=str)
@several
def test_what_is_passed_on_arrives_whole(world_size, dtype):
    sizes = [0, 3, PIECES // 2]

    def work(comm):
        results = []
        for n in sizes:
            x = vector(n * comm.world_size, dtype, comm.rank)
            results += [
                comm.all_gather(x).wait(),
                comm.all_to_all(x.view(comm.world_size, n)).wait(),
                comm.shift(x, -1).wait(),
                comm.broadcast(x.clone(), comm.world_size - 1).wait(),
                comm.swap(x, comm.rank ^ 1 if comm.rank ^ 1 < comm.world_size else comm.rank).wait(),
                comm.all_gather(x.sum()).wait(),
            ]
        return results

    found = fine(on_threads(world_size, work))
    for i, n in enumerate(sizes):
        xs = [vector(n * world_size, dtype, rank) for rank in range(world_size)]
        for rank in range(world_size):
            gathered, traded, shifted, told, swapped, scalars = found[rank][6 * i : 6 * i + 6]
            assert torch.equal(gathered, torch.stack(xs))
            assert torch.equal(traded, torch.stack([x.view(world_size, n)[rank] for x in xs]))
            assert torch.equal(shifted, xs[(rank + 1) % world_size])
            assert torch.equal(told, xs[-1])
            assert torch.equal(swapped, xs[rank ^ 1 if rank ^ 1 < world_size else rank])
            assert torch.equal(scalars, torch.stack([x.sum() for x in xs]))


def test_many_under_way_at_once_and_taken_in_any_order():
    def work(comm):
        sizes = (5, PIECES, 70_000, 1, 300_000)
        handles = [comm.mean(torch.full((n,), float(i + comm.rank))) for i, n in enumerate(sizes)]
        return [handle.wait() for handle in reversed(handles)]

    for results in fine(on_threads(2, work)):
        assert all((x == i + 0.5).all() for i, x in enumerate(reversed(results)))


def test_a_vector_of_a_step_before_is_not_seen_again():
    """Sides are used in turn: 200 operations of one piece each, every one with other numbers."""

    def work(comm):
        return [
            comm.sum(torch.full((6000,), float(i * comm.world_size + comm.rank))).wait()[::5999] for i in range(200)
        ]

    for results in fine(on_threads(3, work)):
        assert all((x == 9 * i + 3).all() for i, x in enumerate(results))


def test_infinities_pass_without_a_word(recwarn):
    def work(comm):
        return comm.mean(torch.tensor([float("inf"), float("nan"), 1e38 * 3] * 9000)).wait()

    for x in fine(on_threads(2, work)):
        assert x[:3].tolist() == pytest.approx([math.inf, math.nan, math.inf], nan_ok=True)
    assert not [w for w in recwarn if "paceline" in str(w.filename)]


def test_what_has_no_mean_or_sum_is_refused():
    def work(comm):
        with pytest.raises(UsageError, match="int64 has no mean"):
            comm.mean(torch.ones(3, dtype=torch.int64))
        with pytest.raises(UsageError, match="float8_e4m3fn cannot be added up"):
            comm.sum(torch.ones(3).to(torch.float8_e4m3fn))

    fine(on_threads(2, work))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda c: c.sum(torch.ones(5)), lambda c: c.mean(torch.ones(5))),
        (lambda c: c.mean(torch.ones(5)), lambda c: c.mean(torch.ones(6))),
        (lambda c: c.broadcast(torch.ones(5), 0), lambda c: c.broadcast(torch.ones(5), 1)),
    ],
)
def test_another_operation_is_named_on_all(one, other):
    """Each time, not only before the first use of a shape: bytes of another operation would be taken for one's own."""
    for result in on_threads(3, lambda comm: (one if comm.rank == 2 else other)(comm).wait()):
        assert isinstance(result, MismatchError)
        assert result.worker == 2


def test_who_gives_up_finds_nothing_written_later():
    came = threading.Event()

    def work(comm):
        if comm.rank == 1:
            came.wait(20)
            handle = comm.mean(torch.ones(PIECES))
            time.sleep(0.5)
            assert not handle.done()
            return None
        x = torch.zeros(PIECES)
        with pytest.raises(PeerTimeoutError, match="gave up mean #0"):
            comm.mean(x).wait()
        came.set()
        time.sleep(0.5)
        with pytest.raises(PeerTimeoutError):  # and the lane is dead
            comm.sum(torch.ones(3)).wait()
        return x

    x, _ = fine(on_threads(2, work, patience_s=0.6))
    assert not x.any()


def test_giving_up_waits_for_what_is_being_written():
    boxes = fine(on_threads(1, lambda comm: comm._progress.boxes))[0]
    progress, begun, written = Progress(boxes, "test", 20.0), threading.Event(), []

    def take(k):
        begun.set()
        time.sleep(0.3)
        written.append(k)

    work = progress.start("slow", Steps(3, lambda k: None, take))
    begun.wait(20)
    progress.abandon(PeerTimeoutError("enough"))
    seen = list(written)
    with pytest.raises(PeerTimeoutError, match="enough"):
        work.wait()
    assert written == seen == [0]


# ---------------------------------------------------------------------------------------------------- processes


def _join(places=None, timeout_s=10.0):
    """A world of real processes; `places`: which host each takes itself to be on."""
    from paceline.comm import host_memory as sharing
    from paceline.comm.environment import Environment

    env = Environment.read()
    if places is not None:
        sharing.place = lambda: places[env.rank]
    return processes.join(timeout_s, env)


def killed(rank, places):
    session = _join(places)
    lane = session.group.lane("test")
    lane.mean(torch.ones(9)).wait()
    if rank == 2:

        def put(k):
            os.kill(os.getpid(), signal.SIGKILL)

        real = Moves.hand_round
        Moves.hand_round = lambda *args: real(*args)._replace(put=put)
    lane.all_gather(torch.ones(PIECES)).wait()
    lane.mean(torch.ones(9)).wait()  # another host may have got all it wanted of the first


@pytest.mark.parametrize("places", [[0, 0, 0], slow([0, 0, 1, 1])], ids=["host", "hierarchical"])
def test_a_worker_killed_in_an_operation_is_named(places):
    outcomes = run(len(places), killed, places)
    for rank, outcome in enumerate(outcomes):
        if rank != 2:
            assert outcome.error == "PeerError", outcome
            assert "worker 2 stopped answering" in outcome.message


def silent(rank):
    lane = _join(timeout_s=1.5).group.lane("test")
    if rank == 1:
        time.sleep(3.5)
        return
    lane.mean(torch.ones(PIECES)).wait()


def test_a_worker_that_does_not_come_is_named_at_the_deadline():
    outcome = run(2, silent)[0]
    assert outcome.error == "PeerTimeoutError"
    assert "workers [1] are not waiting" in outcome.message


def nothing_left(rank):
    session = _join()
    lane = session.group.lane("test")
    before = _opened()
    for comm in (lane, session.group.lane("more")):
        comm.mean(torch.ones(PIECES)).wait()
    return type(lane).__name__, _opened() - before


def _opened():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_one_host_is_found_and_nothing_lies_about():
    for name, opened in values(run(2, nothing_left)):
        assert name == "SharedMemoryComm"
        assert opened == 2  # a lane's memory, and the other worker's process, to see its end
    assert not list(Path("/dev/shm").glob("*paceline*"))


# ---------------------------------------------------------------------------------------------------- several hosts


def operations(comm):
    """The result of each, on small and large vectors."""
    w, results = comm.world_size, []
    for n in (5, 40_000):
        x = vector(n * w, torch.float32, comm.rank)
        results += [
            comm.mean(x.clone()).wait(),
            comm.sum(x.clone()).wait(),
            comm.mean(x[:-1].to(torch.bfloat16)).wait().float(),
            comm.all_gather(x).wait(),
            comm.reduce_scatter_mean(x.clone()).wait(),
            comm.all_to_all(x.view(w, n)).wait(),
            comm.broadcast(x.clone(), 1).wait(),
            comm.shift(x, 1).wait(),
        ]
    return results


def every_operation(rank, places, hierarchical):
    session = _join(places)
    comm = session.group.lane("test")
    comm.hierarchical = hierarchical
    results, before = operations(comm), comm.across.sent
    comm.mean(torch.zeros(80_000)).wait()
    return results, session.rendezvous.route.way, comm.sent, comm.across.sent - before


@pytest.mark.parametrize(("places", "legs"), [([0, 0, 1, 1], 1), slow([0, 1, 1, 0], 1), slow([0, 0, 1, 1], 0)], ids=str)
def test_every_operation_between_hosts_as_threads_do(places, legs):
    """And where the legs are switched off."""
    import threads

    w = len(places)

    def plain(comm):
        results = operations(comm)
        comm.mean(torch.zeros(80_000)).wait()
        return results, comm.sent

    found, wanted = values(run(w, every_operation, places, bool(legs))), threads.run(w, plain)
    for (results, taken, sent, crossed), (expected, counted) in zip(found, wanted, strict=True):
        assert taken == "hierarchical"
        assert sent == counted
        # 2 * n/L * (H - 1)/H bytes: half of what a ring over all workers sends, and the same for every worker.
        assert crossed == legs * 2 * 320_000 // 2 // 2
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            loose = {"rtol": 2e-2, "atol": 0.5} if i % 8 == 2 else {"rtol": 1e-5, "atol": 1e-4}
            torch.testing.assert_close(a, b, **loose)
        for i in (0, 1, 2, 8, 9, 10):
            assert torch.equal(results[i], found[0][0][i]), "a mean differs between workers"


def trained(rank, places):
    import paceline
    from paceline.comm import host_memory as sharing

    sharing.place = lambda: places[rank]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
    model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=10.0)
    for step in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_training_goes_the_same_on_any_hosts():
    flat, *others = (values(run(4, trained, places)) for places in ([0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1]))
    for workers in others:
        for mine in workers:
            assert all(torch.equal(a, b) for a, b in zip(mine, workers[0], strict=True))
            for a, b in zip(mine, flat[0], strict=True):
                torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------------------------- the choice


def test_hosts_are_found_from_places():
    assert grouped([7, 7, 7]) == [[0, 1, 2]]
    assert grouped([7, 3, 3, 7]) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("places", "way"),
    [([1, 1], "host"), ([1, 2], "flat"), ([1, 1, 2, 2], "hierarchical"), ([1, 1, 2], "flat"), ([1, 2, 3], "flat")],
)
def test_the_way_follows_from_the_hosts(places, way):
    hosts = grouped(places)
    assert choose(hosts, None) == way
    assert choose(hosts, way) == way
    assert choose(hosts, "flat") == "flat"
    assert choose(hosts, None, why_flat="a link is emulated") == "flat"
    for other in {"host", "hierarchical"} - {way}:
        with pytest.raises(UsageError, match=f"PACELINE_COLLECTIVES={other} cannot be done here"):
            choose(hosts, other)


def lane_of(rank, own):
    os.environ.update(own.get(rank, {}))
    return type(_join().group.lane("test")).__name__


def test_the_environment_may_say_flat_to_all():
    assert values(run(2, lane_of, {}, env={"PACELINE_COLLECTIVES": "flat"})) == ["DistComm"] * 2
    assert values(run(2, lane_of, {}, env={"PACELINE_PACE": "1e9"})) == ["DistComm"] * 2  # an emulated link
    for outcome in run(2, lane_of, {1: {"PACELINE_COLLECTIVES": "flat"}}):
        assert outcome.error == "MismatchError"
        assert "PACELINE_COLLECTIVES" in outcome.message


def closed_memory(rank, asked):
    if asked:
        os.environ["PACELINE_COLLECTIVES"] = "host"
    real = os.open

    def other_users(path, *args, **kwargs):
        if rank == 1 and "/fd/" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    os.open = other_users
    session = _join()
    lane = session.group.lane("test")
    return type(lane).__name__, session.rendezvous.route.says(), lane.sum(torch.ones(1)).wait()


def test_where_one_cannot_share_memory_none_does():
    for name, says, x in values(run(2, closed_memory, False)):
        assert (name, says, x.item()) == ("DistComm", "", 2.0)
    for outcome in run(2, closed_memory, True):
        assert outcome.error == "UsageError"
        assert re.search("worker 1: .*Permission denied", outcome.message)


# ---------------------------------------------------------------------------------------------------- the lab

SRC = Path(next(iter(paceline.__path__))).parent

ACROSS = """
import json
from pathlib import Path
import torch
from paceline.comm.environment import Environment
from paceline.session.session import close_session, open_session
from paceline.session.settings import Settings
torch.set_num_threads(1)
session = open_session(Environment.read(), Settings(backend="gloo", timeout=30.0))
lane = session.group.lane("test")
lane.mean(torch.ones(250_000)).wait()
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
lane.sum(torch.ones(1)).wait()
before = int(counter.read_text())
for _ in range(4):
    lane.mean(torch.ones(250_000)).wait()
lane.sum(torch.ones(1)).wait()
print(json.dumps([type(lane).__name__, session.rendezvous.route.hosts, int(counter.read_text()) - before]))
close_session()
"""


def _in_the_lab(tmp_path, workers):
    """Workers on two hosts: what each prints."""
    script = tmp_path / "script.py"
    script.write_text(ACROSS)
    with Lab(2) as lab:
        base = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(workers)}
        base |= {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": lab.interface}
        started = [
            subprocess.Popen(
                [*lab.exec_prefix(rank * 2 // workers), sys.executable, str(script)],
                env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(workers)
        ]  # fmt: skip
        try:
            done = [worker.communicate(timeout=60) for worker in started]
        finally:
            for worker in started:
                worker.kill()
    return [json.loads(out) if out else pytest.fail(err) for out, err in done]


@pytest.mark.lab
@pytest.mark.parametrize(
    ("workers", "name", "hosts", "means"),
    [
        (2, "DistComm", [[0], [1]], 1.0),
        slow(4, "HierarchicalComm", [[0, 1], [2, 3]], 1.0),
    ],
)
def test_shared_memory_never_crosses_from_one_host_of_the_lab_to_another(tmp_path, workers, name, hosts, means):
    """Two hosts must exchange a whole mean's worth, whatever memory they could share: their interfaces saw it."""
    if why := namespaces.available():
        pytest.skip(f"no network lab: {why}")
    for kind, found, sent in _in_the_lab(tmp_path, workers):
        assert (kind, found) == (name, hosts)
        assert sent == pytest.approx(4 * 1_000_000 * means, rel=0.1)
