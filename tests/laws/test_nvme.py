"""store=nvme: the optimizer's state is on disk, and nothing else changes. What is compared with store=cpu is compared
bit for bit: both are stepped by one kernel.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from marks import slow
from paceline.errors import MethodError, StoreError, UsageError
from paceline.method import method
from paceline.offload import placement
from paceline.offload.copies import CopyStreams
from paceline.offload.disk import Disk, DiskSpeed
from paceline.offload.file import StateFile
from paceline.offload.memory_model import STATE_BUFFERS as BUFFERS
from paceline.offload.nvme import BufferState, Pool
from rig import Rig, adamw, built, data, same, sgd, small_disk, weights


def _layers():
    middle = [layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 3))


layers = built(_layers)
BUCKETS = 11  # one a layer


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    monkeypatch.setattr(placement, "speed", lambda folder: DiskSpeed(read=3.4e9, write=2.5e9))


def plain(one, x, y):
    cross_entropy(one.model(x), y).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def clipped(one, x, y):
    cross_entropy(one.model(x), y).backward()
    nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
    one.optimizer.step()
    one.optimizer.zero_grad()


def mixed(one, x, y):
    """Sometimes clipped, sometimes after two backwards: steps ahead that are undone."""
    if one.engine.ex.step % 5 == 1:
        cross_entropy(one.model(x), y).backward()
    if one.engine.ex.step % 5 > 2:
        clipped(one, x, y)
    else:
        plain(one, x, y)


def own_gradient(one, x, y):
    cross_entropy(one.model(x), y).backward()
    one.model[2].weight.grad = torch.full_like(one.model[2].weight, 0.5)
    one.model[4].bias.grad = None
    one.optimizer.step()
    one.optimizer.zero_grad()


def written_into(one, x, y):
    if one.engine.ex.step % 4 == 2:
        with torch.no_grad():
            one.model[6].weight.clamp_(-0.1, 0.1)
            one.model[18].bias.data = torch.zeros(8)
    plain(one, x, y)


def recut(one, x, y):
    if one.engine.ex.step == 5:
        one.engine.recut(400)
    plain(one, x, y)


def trained(
    world_size, stage="zero2", *, loop=plain, batches=None, make=layers, optimizer=adamw, begin=None, end=None, **on
):
    """A loop on every worker; what `end` gives, or the weights."""

    def work(comm):
        model = make()
        opt = optimizer(model)
        one = Rig(comm, model, opt, spec=stage, knobs=on, bucket_mb=0.0003)
        if begin is not None:
            begin(one)
        for x, y in data(20) if batches is None else batches:
            loop(one, *one.take(x, y))
        return end(one) if end is not None else torch.cat([v.flatten() for v in model.state_dict().values()])

    return threads.run(world_size, work)


def pool(one) -> Pool:
    return one.engine.method.layout.offload.pool


def still(pool) -> None:
    """Nothing is on its way any more."""

    def moving():
        with pool._news:
            return any(x.state in (BufferState.COMING, BufferState.GOING) for x in pool.all)

    timeout = time.monotonic() + 10
    while moving():
        assert time.monotonic() < timeout
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ the same steps


@pytest.mark.filterwarnings("ignore:paceline")
@pytest.mark.parametrize("when", ["ahead", slow("on_step")])
@pytest.mark.parametrize(("world_size", "stage"), [(1, "zero2"), slow(2, "zero1"), slow(3, "zero3")])
def test_twenty_steps_are_those_in_memory(tmp_path, world_size, stage, when):
    batches = data(20)
    batches[7][0][1] = torch.nan  # a step that is given up
    how = {"loop": mixed, "batches": batches, "step": when}
    want = same(trained(world_size, stage, store="cpu", **how))
    assert torch.equal(same(trained(world_size, stage, store="nvme", path=str(tmp_path), **how)), want)
    assert not [*tmp_path.iterdir()], "the file has a name"


@pytest.mark.filterwarnings("ignore:paceline")
@pytest.mark.parametrize("step", [own_gradient, written_into, slow(recut)])
def test_whatever_else_a_loop_does(tmp_path, step):
    how = {"loop": step, "batches": data(8)}
    want = same(trained(2, store="cpu", **how))
    assert torch.equal(same(trained(2, store="nvme", path=str(tmp_path), **how)), want)
    torch.testing.assert_close(want, same(trained(2, "replicated", **how)), rtol=1e-5, atol=1e-5)


def test_16_bit_parameters(tmp_path):
    def step(one, x, y):
        plain(one, x.bfloat16(), y)

    how = {"make": lambda: layers().bfloat16(), "loop": step, "batches": data(8)}
    want = same(trained(2, store="cpu", **how))
    assert torch.equal(same(trained(2, store="nvme", path=str(tmp_path), **how)), want)


def test_what_is_stepped_first_goes_farthest(tmp_path, capsys):
    def end(one):
        of = one.engine.method.layout.offload.buckets
        return [type(of[i].vectors).__name__ if i in of else "device" for i in range(BUCKETS)]

    last = 12 * sum(p.numel() for p in layers()[:3].parameters()) / 1e9
    middle = 12 * 3 * 72 / 1e9
    [places] = trained(1, batches=data(1), end=end, store="nvme", path=str(tmp_path), device_gb=last, host_gb=middle)
    assert places == ["OnDisk"] * 6 + ["InMemory"] * 3 + ["device"] * 2
    assert (
        f"0.0 MB on the device, 0.0 MB in memory, 0.0 MB in {tmp_path} (2.5 GB/s out, 3.4 in)"
        in capsys.readouterr().err
    )
    want = same(trained(1, store="cpu", batches=data(6)))
    got = same(trained(1, store="nvme", batches=data(6), path=str(tmp_path), host_gb=middle))
    assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------ turns


def test_few_buffers_take_turns_and_no_bucket_is_read_twice_a_step(tmp_path):
    steps, most, reads = 6, [0], [0]

    def begin(one):
        its, read = pool(one), pool(one).disk.read
        its.start()
        still(its)

        def counted(*args):
            most[0] = max(most[0], sum(x.buffer.numel() > 0 for x in its.all))
            reads[0] += 1
            return read(*args)

        its.disk.read = counted

    def end(one):
        still(pool(one))
        return [x.state for x in pool(one).all]

    [places] = trained(1, batches=data(steps), begin=begin, end=end, store="nvme", path=str(tmp_path))
    assert places == [BufferState.HERE] * BUFFERS + [BufferState.AWAY] * (BUCKETS - BUFFERS), (
        "the next step's first are not there"
    )
    assert most[0] == BUFFERS
    # One that is still there when its turn comes again is not read: who is first, the disk or the step, is chance.
    assert (BUCKETS - BUFFERS) * steps <= reads[0] <= BUCKETS * steps


def test_pieces_have_elements_only_while_they_are_at_hand(tmp_path):
    def end(one):
        shards = [shard for some in one.engine.method.layout.bucket_shards.values() for shard in some]
        state = one.optimizer.state
        held = sum(x.numel() for shard in shards for x in (shard.param, state[shard.param]["exp_avg"]))
        with shards[5].at_hand(changed=False):
            assert shards[5].param.numel() == state[shards[5].param]["exp_avg_sq"].numel() > 0
        return held

    assert trained(1, batches=data(2), end=end, store="nvme", path=str(tmp_path)) == [0]


@pytest.fixture
def small_pool(tmp_path):
    with Disk(tmp_path, 1 << 20, timeout_s=5.0) as disk:
        its = Pool(disk, CopyStreams(torch.device("cpu")), buffers=2)
        for i in range(6):
            with its.add(100 + 500 * i).at_hand(changed=True) as now:
                assert not now.v.any()
                for x in now:
                    x.fill_(i)
        its.start()
        yield its


def test_out_of_turn(small_pool):
    for i in (3, 0, 5, 4, 4, 1, 0, 2):
        with small_pool.all[i].at_hand(changed=i % 2 == 0) as now:
            assert [x.unique().tolist() for x in now] == [[i]] * 3
            assert [len(x) for x in now] == [100 + 500 * i] * 3
    still(small_pool)
    assert [x.state is BufferState.HERE for x in small_pool.all] == [False, False, False, True, True, False]


def test_two_who_ask_at_once_both_get_theirs(small_pool):
    """As many buffers as they are: neither may take what the other waits for."""
    errors = []

    def ask(order):
        try:
            for i in order * 30:
                vectors = small_pool.all[i]
                assert vectors.take().p.unique().tolist() == [i]
                vectors.give(changed=True)
        except BaseException as error:
            errors.append(error)

    two = [threading.Thread(target=ask, args=(order,)) for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0])]
    for thread in two:
        thread.start()
    for thread in two:
        thread.join(20)
    assert not errors
    assert not any(thread.is_alive() for thread in two)


@pytest.mark.parametrize("every", [1, 2])
def test_a_transfer_may_end_before_who_began_it_goes_on(tmp_path, every):
    """As on a busy machine, where he waits for a core. The end of one must not change things under his hands."""
    begun = itertools.count(1)

    def read(*args, real=Disk.read):
        transfer = real(disk, *args)
        if next(begun) % every == 0:
            transfer.exception(5)
        return transfer

    def read_slowly(at, view, real=StateFile.read):
        real(disk._file, at, view)
        time.sleep(0.002 * (at // 4096 % 2))

    with Disk(tmp_path, 1 << 20, threads=16, timeout_s=5.0) as disk:
        its = Pool(disk, CopyStreams(torch.device("cpu")), buffers=3)
        for i in range(7):
            with its.add(100).at_hand(changed=True) as now:
                now.p.fill_(i)
        still(its)
        disk.read, disk._file.read = read, read_slowly
        its.start()
        for turn in range(5):
            for i, x in enumerate(its.all):
                with x.at_hand(changed=True) as now:
                    assert now.p.unique().tolist() == [i + turn]
                    now.p.add_(1)
            still(its)
            with its.all[3].at_hand(changed=False):  # out of turn: those after it are read, several at once
                pass
        held = [x.buffer.data_ptr() for x in its.all if x.buffer.numel()]
        assert len(held) == len({*held}) == 3, "a buffer was lost, or is two buckets'"


@pytest.mark.parametrize("failing", ["read", "write"])
def test_whatever_fails_in_the_background_is_told_to_who_takes_something(small_pool, failing):
    def fail(*args):
        raise MemoryError("no buffer")

    def go_through():
        for x in small_pool.all:
            with x.at_hand(changed=True):
                pass

    still(small_pool)
    setattr(small_pool.disk, failing, fail)
    with pytest.raises(MemoryError, match="no buffer"):
        go_through()


def test_who_waits_too_long_is_told(tmp_path):
    with Disk(tmp_path, 1 << 16, timeout_s=0.1) as disk:
        vectors = Pool(disk, CopyStreams(torch.device("cpu"))).add(10)
        vectors.take()
        with pytest.raises(StoreError, match=r"\.state has not ended after"):
            vectors.take()
        vectors.give(changed=True)


# ------------------------------------------------------------------------------------------------ state


def saved(world_size, stage="zero2", steps=4, **how):
    def end(one):
        return one.model.state_dict(), one.optimizer.state_dict()

    return trained(world_size, stage, batches=data(8)[:steps], end=end, **how)


def load(saved):
    def begin(one):
        model, state = copy.deepcopy(saved)
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(state)

    return begin


def alike(a, b):
    assert list(a["state"]) == list(b["state"])
    for i, known in a["state"].items():
        assert sorted(known) == sorted(b["state"][i])
        assert all(torch.equal(value, b["state"][i][key]) for key, value in known.items()), i


def test_the_state_goes_into_another_layout_and_back(tmp_path):
    disk = {"store": "nvme", "path": str(tmp_path)}
    before = saved(3, **disk)
    want = saved(3, store="cpu")
    for (model, state), (want_model, want_state) in zip(before, want, strict=True):
        alike(state, want_state)
        assert all(torch.equal(model[key], x) for key, x in want_model.items())
    straight = same(trained(3, batches=data(8), store="cpu"))
    on = {"batches": data(8)[4:], "begin": load(before[0])}
    assert torch.equal(same(trained(3, **disk, **on)), same(trained(3, store="cpu", **on)))
    other = same(trained(2, "zero1", **on))
    assert torch.equal(same(trained(2, "replicated", **on)), other)
    torch.testing.assert_close(other, straight, rtol=1e-5, atol=1e-5)
    again = saved(2, "zero3", steps=0, begin=load(before[0]), **disk)[0]
    alike(again[1], want[0][1])


def open_in(folder):
    links = Path("/proc/self/fd").iterdir()
    return sum(str(folder) in str(link.readlink()) for link in links if link.is_symlink())


def test_the_space_is_given_back_when_buckets_are_cut_anew(tmp_path):
    def end(one):
        before = open_in(tmp_path)
        one.engine.recut(400)
        return open_in(tmp_path) == before > 0

    assert trained(1, batches=data(2), end=end, store="nvme", path=str(tmp_path)) == [True]


def test_the_space_is_given_back_with_the_pool(tmp_path):
    def use():
        its = Pool(Disk(tmp_path, 1 << 16), CopyStreams(torch.device("cpu")))
        with its.add(10).at_hand(changed=True):
            assert open_in(tmp_path)

    use()
    timeout = time.monotonic() + 10
    while open_in(tmp_path) and time.monotonic() < timeout:
        gc.collect()
        time.sleep(0.01)
    assert not open_in(tmp_path)


# ------------------------------------------------------------------------------------------------ faults


def truncated(file):
    os.ftruncate(file._plain, file.size // 2)


def flipped(file):
    """The last bucket's: those that come first are read already."""
    at = file.size - 3 * 4096
    [byte] = os.pread(file._plain, 1, at)
    os.pwrite(file._plain, bytes([byte ^ 1]), at)


def full(file):
    def write(at, view):
        raise OSError(errno.ENOSPC, "No space left on device")

    file.write = write


@pytest.mark.parametrize("when", ["ahead", "on_step"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("harm", [truncated, flipped, full])
def test_a_disk_that_fails_is_named_and_nothing_committed_is_lost(tmp_path, harm, world_size, when):
    kept = []

    def end(one):
        x, y = one.take(*data(1)[0])
        still(pool(one))
        if one.comm.rank == world_size - 1:
            harm(pool(one).disk._file)
        for _ in range(3 if harm is full else 1):  # what is not written in a step is missed in the next
            before = weights(one.model)
            try:
                plain(one, x, y)
            except BaseException:
                kept.append(torch.equal(weights(one.model), before))
                if world_size == 1:  # or it would ask the others
                    with pytest.raises(StoreError):
                        one.optimizer.state_dict()
                raise

    with pytest.raises(StoreError, match=f"{tmp_path}/paceline-{world_size - 1}-"):
        trained(world_size, batches=data(3), end=end, store="nvme", path=str(tmp_path), step=when)
    assert kept == [True] * world_size


def test_a_part_on_the_device_does_not_step_without_the_rest(tmp_path):
    def end(one):
        x, y = one.take(*data(1)[0])
        before = weights(one.model)
        still(pool(one))
        truncated(pool(one).disk._file)
        with pytest.raises(StoreError, match="ends at"):
            plain(one, x, y)
        return torch.equal(weights(one.model), before)

    half = 12 * sum(p.numel() for p in layers()[:9].parameters()) / 1e9
    assert trained(1, batches=data(2), end=end, store="nvme", path=str(tmp_path), device_gb=half, step="on_step") == [
        True
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path):
    with small_disk(tmp_path, "64k"), pytest.raises(StoreError, match=f"{tmp_path} has no room"):
        trained(1, batches=[], store="nvme", path=str(tmp_path))


SCRIPT = """
import gc, os, sys, time, torch
import paceline

def files():
    links = (f"/proc/self/fd/{link}" for link in os.listdir("/proc/self/fd"))
    return [link for link in links if sys.argv[1] in os.path.realpath(link)]

def train(harm):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = paceline.prepare(
        model, optimizer, method="zero2", store="nvme", path=sys.argv[1], bucket_mb=0.02
    )
    for step in range(5):
        if step == 3:
            harm(files())
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train(lambda links: print("open:", len(links) > 0))
until = time.monotonic() + 10
while files() and time.monotonic() < until:
    gc.collect()
print("left:", len(files()), flush=True)
train(lambda links: [os.truncate(link, 4096) for link in links])
"""


@pytest.mark.slow
def test_a_script_gives_the_space_back_and_ends_with_the_error(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert ended.stdout == "open: True\nleft: 0\n"
    assert "StoreError: " in ended.stderr
    assert f"{tmp_path}/paceline-0-" in ended.stderr
    assert f"0.4 MB in {tmp_path} (" in ended.stderr
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------ who may


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (sgd, layers),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), layers),
        (adamw, lambda: layers().double()),
    ],
    ids=["sgd", "amsgrad", "double"],
)
def test_what_cannot_be_stepped_on_disk_is_refused(tmp_path, optimizer, make):
    with pytest.raises(MethodError, match="store=nvme does not go together with this optimizer"):
        trained(1, batches=[], store="nvme", path=str(tmp_path), optimizer=optimizer, make=make)


def test_a_group_that_changes_its_mind_is_refused_too(tmp_path):
    def end(one):
        one.optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(MethodError, match="amsgrad"):
            plain(one, *one.take(*data(1)[0]))

    trained(1, batches=data(2), end=end, store="nvme", path=str(tmp_path))


def test_a_folder_is_needed(tmp_path):
    with pytest.raises(MethodError, match="needs a folder"):
        method("zero2", store="nvme")
    with pytest.raises(MethodError, match="needs a folder"):
        method("zero2", store="cpu", path=str(tmp_path))
    with pytest.raises(UsageError, match="is not a folder"):
        trained(1, batches=[], store="nvme", path=str(tmp_path / "none"))
