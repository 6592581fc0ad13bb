"""zero3 with params=cpu and params=nvme: this worker's slice of the parameters is not on the device, and nothing else
changes. What is compared with params=device is compared bit for bit.
"""

from __future__ import annotations

import errno
import functools
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import processes
import threads
from laws_table import WORLDS
from marks import slow
from paceline.checkpoint import load as loading
from paceline.checkpoint import save as saving
from paceline.comm.threads import ThreadComm
from paceline.errors import MethodError, StoreError
from paceline.method import method
from paceline.offload import placement
from paceline.offload.copies import CopyStreams
from paceline.offload.disk import Disk, DiskSpeed
from paceline.offload.memory_model import PARAMETER_BUFFERS
from paceline.offload.params import DiskParameters, HostParameters, ParameterBuffers
from paceline.session.objects import Objects
from paceline.sharding import unshard as lending
from rig import Rig, built, data, same, small_disk

pytestmark = pytest.mark.filterwarnings("ignore:paceline")
HOMES = ["cpu", "nvme"]
everywhere = pytest.mark.parametrize("params", HOMES)
worlds = pytest.mark.parametrize("world_size", [w for w in WORLDS if w < 4])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(placement, "speed", lambda folder: DiskSpeed(read=3.4e9, write=2.5e9))
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Net(nn.Module):
    """A tie, a frozen layer, one that nobody uses, and layers that may be computed again in backward."""

    def __init__(self, again=False):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[4].weight = self.layers[1].weight
        self.layers[2].requires_grad_(False)
        self.unused, self.again = nn.Linear(8, 8), again

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            block = nn.Sequential(layer, nn.Tanh())
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.last(x)


net, again = built(Net), built(lambda: Net(again=True))


def trainable(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def plain(one, x, y):
    cross_entropy(one.model(x), y).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def mixed(one, x, y):
    """Clipped at times, two backwards at times, and somebody looks between backward and step."""
    step = one.engine.ex.step
    cross_entropy(one.model(x), y).backward()
    if step % 5 == 1:
        cross_entropy(one.model(x), y).backward()
    if step % 5 > 2:
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
    with torch.no_grad():
        one.seen = [*getattr(one, "seen", []), one.model(torch.ones(1, 6)).sum()]
    one.optimizer.step()
    one.optimizer.zero_grad()


def all_of(model):
    return torch.cat([v.flatten() for v in model.state_dict().values()])


def trained(
    world_size, *, loop=plain, batches=None, make=net, optimizer=trainable, begin=None, end=None, mb=3e-4, **on
):
    """A loop on every worker; what `end` gives, or the weights and what was seen between backward and step."""

    def work(comm):
        model = make()
        one = Rig(comm, model, optimizer(model), spec="zero3", knobs={"store": "cpu", **on}, bucket_mb=mb)
        if begin is not None:
            begin(one)
        for x, y in data(8) if batches is None else batches:
            loop(one, *one.take(x, y))
        if end is not None:
            return end(one)
        return torch.cat([all_of(model), torch.tensor(getattr(one, "seen", []))])

    return threads.run(world_size, work)


def on(params, tmp_path, store="cpu"):
    return {"params": params, "store": store, **({"path": str(tmp_path)} if "nvme" in (params, store) else {})}


def unsharding(one):
    return one.engine.method.layout.unsharding


# ------------------------------------------------------------------------------------------------ the same steps


def twenty(world_size, **how):
    batches = data(20)
    batches[7][0][1] = torch.nan  # a step that is given up
    return trained(world_size, loop=mixed, batches=batches, **how)


on_the_device = functools.cache(twenty)


@everywhere
@pytest.mark.parametrize(("world_size", "when"), [slow(1, "ahead"), (2, "ahead"), slow(2, "on_step"), slow(3, "ahead")])
def test_twenty_steps_are_those_with_parameters_on_the_device(tmp_path, world_size, params, when):
    want = on_the_device(world_size, step=when)
    got = twenty(world_size, step=when, **on(params, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not [*tmp_path.iterdir()], "the file has a name"


@everywhere
@pytest.mark.parametrize("store", [slow("cpu"), "nvme"])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_with_gradients_that_only_pass_through(tmp_path, world_size, params, store):
    want = trained(world_size)
    got = trained(world_size, step="stream", **on(params, tmp_path, store))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("world_size", "params"), [slow(3, "cpu"), (1, "nvme")])
def test_with_the_state_on_disk(tmp_path, world_size, params):
    how = {"loop": mixed, "batches": data(10)}
    want = same(trained(world_size, **how))
    assert torch.equal(same(trained(world_size, **how, **on(params, tmp_path, "nvme"))), want)


def narrow(one, x, y):
    mixed_inputs = x.bfloat16()
    cross_entropy(one.model(mixed_inputs), y).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def closing(one, x, y):
    """Buckets are cut anew, and a frozen layer thaws."""
    if one.engine.ex.step == 3:
        one.engine.recut(900)
    if one.engine.ex.step == 5:
        one.model.layers[2].requires_grad_(True)
    plain(one, x, y)


def everything(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


CASES = {
    "16 bits": {"loop": narrow, "make": lambda: net().bfloat16()},
    "computed again": {"make": again, "loop": mixed},
    "late": {"step": "late"},
    "another optimizer": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)},
    "cut anew": {"loop": closing, "optimizer": everything},
    "a part on the device": {"device_gb": 12 * 300 / 1e9},
}


@pytest.mark.parametrize("params", [slow("cpu"), "nvme"])
@pytest.mark.parametrize("case", CASES)
def test_whatever_else(tmp_path, case, params):
    world_size = 1 if params == "cpu" else 2
    want = same(trained(world_size, **CASES[case]))
    assert torch.equal(same(trained(world_size, **CASES[case], **on(params, tmp_path))), want)


@everywhere
@pytest.mark.parametrize("when", [slow("late"), "ahead"])
def test_what_is_loaded_into_the_model_counts(tmp_path, params, when):
    """Between two steps, and between backward and step, where a step has been made ahead with what was before."""

    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        if one.engine.ex.step in (2, 5):
            one.model.load_state_dict({k: v / 2 for k, v in one.model.state_dict().items()})
        one.optimizer.step()
        one.optimizer.zero_grad()
        if one.engine.ex.step == 3:
            one.model.load_state_dict({k: v / 2 for k, v in one.model.state_dict().items()})

    world_size = 1 if when == "late" else 2
    want = same(trained(world_size, loop=step, step=when))
    got = same(trained(world_size, loop=step, step=when, **on(params, tmp_path)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # where a step is undone it rounds otherwise


# ------------------------------------------------------------------------------------------------ where they are


@everywhere
@worlds
def test_no_slice_is_where_it_was(tmp_path, params, world_size):
    def held(one):
        one.engine.settle()
        for sharded in unsharding(one).buckets.values():
            sharded.reshard()
            tensors = [x for x in vars(sharded).values() if isinstance(x, torch.Tensor)]
            assert not sum(x.untyped_storage().nbytes() for x in tensors), "a sharded bucket has memory"
            kind = {"cpu": HostParameters, "nvme": DiskParameters}[params]
            assert type(sharded.store) is kind
        assert all(p.untyped_storage().nbytes() < p.nbytes for p in one.model.parameters())
        files = [sharded.store for sharded in unsharding(one).buckets.values() if params == "nvme"]
        return not any(isinstance(x, torch.Tensor) and x.numel() for home in files for x in vars(home).values())

    assert all(trained(world_size, batches=data(3), end=held, **on(params, tmp_path)))


@everywhere
def test_what_lies_where_is_said(tmp_path, capsys, params):
    trained(1, batches=data(1), **on(params, tmp_path))
    where = str(tmp_path) if params == "nvme" else "memory"
    assert f"in memory; parameters: 0.0 MB in {where}" in capsys.readouterr().err


def test_what_stays_on_the_device_keeps_its_parameters_there(tmp_path):
    def end(one):
        return [unsharding(one).buckets[i].store is None for i in sorted(unsharding(one).buckets) if i >= 0]

    last = 12 * sum(p.numel() for p in net().first.parameters()) / 1e9
    [places] = trained(1, batches=data(1), end=end, device_gb=last, params="cpu")
    assert places[-1]
    assert not any(places[:-1])


def test_in_memory_there_is_no_second_place(tmp_path):
    def drafts(one):
        return {sharded.store.draft_memory() is None for i, sharded in unsharding(one).buckets.items() if i >= 0}

    assert trained(1, batches=data(1), end=drafts, params="cpu") == [{True}]
    assert trained(1, batches=data(1), end=drafts, **on("cpu", tmp_path, "nvme")) == [{False}]


class Scaled(nn.Module):
    """A frozen scale and a trained one meet away from the input, whose gradient then says nothing."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Parameter(torch.rand(8, 8), requires_grad=False), nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        return x @ (self.frozen * self.trained)


class Adapted(nn.Module):
    """Frozen layers with a little that is trained around them; some share a bucket, some have two inputs."""

    def __init__(self, again=False):
        super().__init__()
        self.first, self.last, self.again = nn.Linear(6, 8), nn.Linear(8, 3), again
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)).requires_grad_(False)
        self.mixed, self.two = Scaled(), nn.Bilinear(8, 8, 8).requires_grad_(False)

    def block(self, x, k):
        return x + self.trunk[2 * k + 1](self.trunk[2 * k](x).tanh())

    def forward(self, x):
        x = self.first(x)
        for k in range(4):
            x = checkpoint(self.block, x, k, use_reentrant=False) if self.again else self.block(x, k)
            x = self.mixed(x) if k == 1 else x
        return self.last(self.two(x, x.tanh()))


adapted = built(Adapted), built(lambda: Adapted(again=True))


@pytest.mark.parametrize(
    ("world_size", "frozen", "make"),
    [(1, 1, adapted[0]), (1, 700, adapted[1]), slow(2, 1, adapted[1])],
    ids=["alone", "together", "again"],
)
def test_frozen_parameters_go_back_in_backward(monkeypatch, world_size, make, frozen):
    monkeypatch.setattr(lending, "_FROZEN_BYTES", frozen)
    want, most = same(trained(world_size, make=make)), []

    def step(one, x, y):
        hooks = [layer.register_full_backward_hook(lambda *_: most.append(lent(one))) for layer in one.model.trunk]
        plain(one, x, y)
        for hook in hooks:
            hook.remove()

    def lent(one):
        return sum(sharded.unsharded for i, sharded in unsharding(one).buckets.items() if i < 0)

    assert torch.equal(same(trained(world_size, make=make, params="cpu")), want)
    trained(world_size, make=make, params="cpu", loop=step)
    assert 1 <= max(most) <= 7, "of 19 where each is alone; three of them stay"


# ------------------------------------------------------------------------------------------------ ahead


@everywhere
def test_the_next_ones_are_asked_for_while_one_computes(tmp_path, params):
    coming = []

    def step(one, x, y):
        def look(*_):
            order, of = unsharding(one).order[True], unsharding(one).buckets
            coming.append([of[i].gathering for i in order.last[len(order.now) :][:1]])

        hooks = [layer.register_forward_hook(look) for layer in one.model.layers]
        coming.append(
            [of.gathering for i, of in unsharding(one).buckets.items() if i in unsharding(one).order[True].last[:1]]
        )
        plain(one, x, y)
        for hook in hooks:
            hook.remove()

    trained(1, batches=data(3), loop=step, mb=1e-4, **on(params, tmp_path))
    assert all(all(some) for some in coming)
    assert sum(len(some) for some in coming) > 10


def test_few_buffers_are_read_into_and_nothing_is_read_twice(tmp_path, monkeypatch):
    reads = []
    read = Disk.read
    monkeypatch.setattr(
        Disk, "read", lambda disk, at, into: reads.append((at, into.data_ptr())) or read(disk, at, into)
    )
    counts = []

    def step(one, x, y):
        plain(one, x, y)
        counts.append(len(reads))

    def borrowed(one):
        return len(unsharding(one).order[True].last)

    [borrows] = trained(1, batches=data(6), loop=step, end=borrowed, mb=1e-4, **on("nvme", tmp_path))
    assert len({memory for _, memory in reads}) <= PARAMETER_BUFFERS * 4  # of several sizes while they grow
    assert counts[-1] - counts[-2] <= borrows


@pytest.fixture
def buffers(tmp_path):
    with Disk(tmp_path, 1 << 20, timeout_s=5.0) as disk:
        yield ParameterBuffers(disk, CopyStreams(torch.device("cpu")))


def test_buffers_give_what_was_written_in_whatever_order(buffers):
    stores = [DiskParameters(buffers, 100 + 500 * i, torch.float32, drafts=True) for i in range(9)]
    for i, one in enumerate(stores):
        one.write(torch.full((one.n,), float(i)))
    for i in (3, 0, 5, 8, 8, 1, 7, 2, 6, 4):
        for k in (i + 1, i + 2, i + 3, i + 4, i + 5):
            stores[k % 9].announce()
        there = torch.empty(stores[i].n)
        stores[i].copy_to(there).wait()
        assert there.unique().tolist() == [i]
        assert stores[i].read(slice(1, 3)).tolist() == [i, i]


def test_a_draft_counts_when_it_is_accepted(buffers):
    one = DiskParameters(buffers, 1000, torch.bfloat16, drafts=True)
    one.write(torch.zeros(1000))
    for value in (1.0, 2.0):
        one.keep_draft(one.draft_memory().fill_(value))
        one.announce()
        assert one.read(slice(0, 2)).tolist() == [0, 0]
        one.drop_draft()
    one.keep_draft(one.draft_memory().fill_(3.0))
    one.announce()
    one.accept_draft(None)
    assert one.read(slice(998, 1000)).tolist() == [3, 3]


# ------------------------------------------------------------------------------------------------ saved and filled


def things(one):
    lane = vars(one).setdefault("lane", ThreadComm(one.comm.room, one.comm.rank, "checkpoint"))
    return Objects.sort([one.model, one.optimizer]), [one.engine], lane


def save(folder):
    return lambda one: saving.save(folder, *things(one), step=one.engine.ex.step, extra={})


def load(folder):
    return lambda one: loading.load(folder, *things(one))


@pytest.mark.parametrize(("params", "store"), [slow("cpu", "cpu"), ("nvme", "nvme")])
def test_a_checkpoint_goes_into_another_layout_and_back(tmp_path, params, store):
    away, folder = on(params, tmp_path, store), tmp_path / "saved"
    straight = same(trained(2, batches=data(8)))
    trained(2, batches=data(8)[:4], end=save(folder), **away)
    rest = {"batches": data(8)[4:], "begin": load(folder)}
    assert torch.equal(same(trained(2, **rest)), straight)
    assert torch.equal(same(trained(2, **rest, **away)), straight)
    one = same(trained(1, **rest))
    assert torch.equal(same(trained(1, **rest, **away)), one)
    torch.testing.assert_close(one, straight, rtol=1e-5, atol=1e-5)


@everywhere
def test_states_are_whole(tmp_path, params):
    def both(one):
        return one.model.state_dict(), one.optimizer.state_dict()["state"]

    for (model, state), (want_model, want_state) in zip(
        trained(3, end=both, **on(params, tmp_path)), trained(3, end=both), strict=True
    ):
        assert all(torch.equal(x, want_model[key]) for key, x in model.items())
        assert all(torch.equal(x, want_state[i][key]) for i, known in state.items() for key, x in known.items())


def _filled(rank, cases):
    """The weights it begins with, and the masters and moments it ends with: those of 16 bits show a step undone."""
    import paceline

    ends = []
    for device, knobs in cases:
        torch.manual_seed(5)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = Net()
        torch.set_default_dtype(torch.float32)
        optimizer = trainable(model)
        model, optimizer = paceline.prepare(model, optimizer, method="zero3", bucket_mb=0.0003, **knobs)
        ends.append(all_of(model))
        for x, y in data(6):
            cross_entropy(model(x.bfloat16()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"].values()
        ends.append(torch.cat([known[key].flatten() for known in state for key in sorted(known)]))
    return [end.float() for end in ends]


def test_a_model_on_meta_is_filled(tmp_path):
    cases = [("cpu", {"store": "cpu"}), *(("meta", on(params, tmp_path)) for params in ("device", "cpu", "nvme"))]
    for start, end, *others in processes.values(processes.run(2, _filled, cases)):
        assert all(torch.equal(one, want) for one, want in zip(others, (start, end) * 3, strict=True))


# ------------------------------------------------------------------------------------------------ faults


def truncated(file):
    os.ftruncate(file._plain, 4096)


def flipped(file):
    for at in range(0, file.size, 4096):
        [byte] = os.pread(file._plain, 1, at)
        os.pwrite(file._plain, bytes([byte ^ 1]), at)


@pytest.mark.parametrize("harm", [truncated, flipped])
def test_a_disk_that_fails_ends_the_forward_that_meets_it(tmp_path, harm):
    def end(one):
        one.engine.settle()
        harm(one.engine.method.layout.param_stores._disks[True].disk._file)
        one.model(torch.ones(1, 6))

    with pytest.raises(StoreError, match=f"{tmp_path}/paceline-0-parameters"):
        trained(1, batches=data(2), end=end, **on("nvme", tmp_path))


@pytest.mark.parametrize("when", ["ahead", "on_step"])
def test_a_disk_that_takes_no_more_leaves_the_last_step(tmp_path, when):
    kept = []

    def end(one):
        def write(at, view):
            raise OSError(errno.ENOSPC, "No space left on device")

        before = all_of(one.model)
        places = [sharded.store.at for sharded in unsharding(one).buckets.values()]
        one.engine.method.layout.param_stores._disks[True].disk._file.write = write
        try:
            plain(one, *one.take(*data(1)[0]))
        finally:
            kept.append(places == [sharded.store.at for sharded in unsharding(one).buckets.values()])
        del before

    with pytest.raises(StoreError, match="No space left"):
        trained(1, batches=data(2), end=end, step=when, **on("nvme", tmp_path))
    assert kept == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path):
    with small_disk(tmp_path, "16k"), pytest.raises(StoreError, match=f"{tmp_path} has no room"):
        trained(1, batches=[], **on("nvme", tmp_path))


# ------------------------------------------------------------------------------------------------ who may


def test_what_is_refused(tmp_path):
    with pytest.raises(MethodError, match="params=cpu with store=device"):
        method("zero3", params="cpu")
    with pytest.raises(MethodError, match="needs a folder"):
        method("zero3", store="cpu", params="nvme")
    with pytest.raises(MethodError, match="needs a folder"):
        method("zero3", store="cpu", params="cpu", path=str(tmp_path))
    with pytest.raises(MethodError, match="no knob"):
        method("zero2", store="cpu", params="cpu")
