"""Checkpoints: to save, to load and to go on is not to have stopped; on other workers too, with another layout too."""

from __future__ import annotations

import copy
import os
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import WORLDS, brisk
from paceline import registry
from paceline.checkpoint import folders
from paceline.checkpoint import load as loading
from paceline.checkpoint import save as saving
from paceline.checkpoint.holdings import Holding, share_out
from paceline.checkpoint.reader import Checkpoint, PlainFile, whole
from paceline.comm.threads import ThreadComm
from paceline.core import consensus
from paceline.errors import CheckpointError, UsageError
from paceline.method import Method, method
from paceline.session.objects import Objects
from rig import Complex, Rig, adamw, built, close, data, mlp, same, sgd, weights

LAYOUTS = list(registry.parts("layout"))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def args(one):
    lane = vars(one).setdefault("lane", ThreadComm(one.comm.room, one.comm.rank, "checkpoint"))
    return Objects.sort([one.model, one.optimizer]), [one.engine], lane


def save(one, folder, **extra):
    return saving.save(folder, *args(one), step=one.engine.ex.step, extra=extra)


def load(one, folder):
    return loading.load(folder, *args(one))


def walk(one, batches, narrow=False):
    for x, y in batches:
        x, y = one.take(x, y)
        cross_entropy(one.model(x.bfloat16() if narrow else x), y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()


def trained(world_size, spec, batches, *, optimizer=adamw, make=mlp, begin=None, end=None, narrow=False, **rig):
    def work(comm):
        model = make()
        one = Rig(comm, model, optimizer(model), spec=spec, **rig)
        if begin is not None:
            begin(one)
        walk(one, batches, narrow)
        if end is not None:
            end(one)
        return torch.cat([v.flatten() for v in model.state_dict().values()])

    return threads.run(world_size, work)


def goes_on(tmp_path, world_size, spec, *, then=None, again=None, steps=(4, 4), saves=False, **how):
    """The weights without a stop, and those of a second run that loads what the first saved half-way.

    saves: what goes on saves too, where that lets arrive what would have been under way for longer.
    """
    batches = data(sum(steps))
    first, rest = batches[: steps[0]], batches[steps[0] :]

    def end(one):
        if saves:
            save(one, tmp_path / "aside")
        walk(one, rest, how.get("narrow", False))

    straight = trained(world_size, spec, first, end=end, **how)
    trained(world_size, spec, first, end=lambda one: save(one, tmp_path), **how)
    return straight, trained(then or world_size, again or spec, rest, begin=lambda one: load(one, tmp_path), **how)


def equal(straight, after):
    for a, b in zip(straight, after, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# ------------------------------------------------------------------------------------------------ bit for bit


@layouts
@pytest.mark.parametrize(("world_size", "optimizer"), [(1, adamw), (2, sgd), (3, adamw)], ids=["1", "2", "3"])
def test_to_go_on_is_not_to_have_stopped(tmp_path, layout, world_size, optimizer):
    equal(*goes_on(tmp_path, world_size, layout, optimizer=optimizer))


@layouts
def test_16_bits_and_their_masters(tmp_path, layout):
    equal(*goes_on(tmp_path, 2, layout, make=lambda: mlp().bfloat16(), narrow=True))


def test_masters_that_were_not_saved_are_the_weights(tmp_path):
    def narrow():
        return mlp().bfloat16()

    def end(one):
        load(one, tmp_path / "a")
        save(one, tmp_path / "b")

    trained(2, "replicated", [], make=narrow, end=lambda one: save(one, tmp_path / "a"))
    trained(2, "zero1", data(3), make=narrow, narrow=True, end=end)
    saved = Checkpoint(tmp_path / "b" / "step-000000")
    assert torch.equal(whole(saved, "optimizer/0/0.weight/master"), whole(saved, "model/0.weight").float())


@layouts
@pytest.mark.parametrize("reducer", ["topk", "powersgd", "dgc", "accordion"])
def test_what_a_reducer_remembers_goes_along(tmp_path, layout, reducer):
    chosen = method(reducer, **brisk(registry.find(reducer))).reducer
    spec = Method(reducer=chosen, layout=registry.find(layout)())
    plain = (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) if reducer == "dgc" else adamw
    equal(*goes_on(tmp_path, 2, spec, optimizer=plain))


@pytest.mark.parametrize("sync", ["local_sgd", "slowmo", "diloco", "sma", "gossip", "gossip_lowbit", "delayed"])
def test_workers_with_weights_of_their_own(tmp_path, sync):
    equal(*goes_on(tmp_path, 3, sync, optimizer=sgd, steps=(5, 6), saves=True))


@layouts
def test_complex_ones_and_another_order_of_memory(tmp_path, layout):
    def conv():
        net = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))
        return net.to(memory_format=torch.channels_last)

    equal(*goes_on(tmp_path / "a", 2, layout, make=built(conv)))
    equal(*goes_on(tmp_path / "b", 2, layout, make=built(Complex)))


def test_the_number_of_a_checkpoint_is_not_the_methods_clock(tmp_path):
    """Saved as step=1, an epoch: local_sgd still agrees after the steps it would have agreed after."""
    batches, spec = data(7), method("local_sgd", every=4)

    def end(one):
        saving.save(tmp_path, *args(one), step=1, extra={})
        walk(one, batches[3:5])

    straight = trained(2, spec, batches[:3], optimizer=sgd, end=end)
    assert torch.equal(straight[0], straight[1]) is False
    after = trained(2, spec, batches[3:5], optimizer=sgd, begin=lambda one: load(one, tmp_path))
    equal(straight, after)


# ------------------------------------------------------------------------------- another world, another layout


@pytest.mark.parametrize(
    ("worlds", "before", "after"),
    [
        ((3, 2), "zero3", "zero3"),
        ((2, 3), "replicated", "zero3"),
        ((4, 1), "zero3", "replicated"),
        ((1, 4), "replicated", "zero2"),
        ((3, 2), "zero2", "zero1"),
    ],
)
def test_on_other_workers_with_another_layout(tmp_path, worlds, before, after):
    straight, then = goes_on(tmp_path, worlds[0], before, then=worlds[1], again=after)
    close(same(then), same(straight), tol=1e-5)


@pytest.mark.parametrize("orders", [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, None)])
def test_another_order_of_memory_than_it_was_saved_in(tmp_path, orders):
    def conv(order):
        net = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))
        return lambda: built(lambda: net)().to(memory_format=order or torch.channels_last)

    before, after = (conv(order) for order in orders)
    trained(3, "zero3", data(3), make=before, end=lambda one: save(one, tmp_path / "a"))
    saved = Checkpoint(tmp_path / "a" / "step-000003")

    def again(one):
        load(one, tmp_path / "a")
        save(one, tmp_path / "b")

    trained(2, "zero2", [], make=after, begin=again)
    other = Checkpoint(tmp_path / "b" / "step-000003")
    for key in ("model/1.weight", "optimizer/0/1.weight/exp_avg"):
        assert saved.manifest.tensors[key].strides != other.manifest.tensors[key].strides
        assert torch.equal(whole(saved, key), whole(other, key)), key


def test_sharing_it_out_anew_changes_no_bit(tmp_path):
    trained(3, "zero3", data(4), end=lambda one: save(one, tmp_path / "0"))
    for i, (world_size, layout) in enumerate([(2, "zero1"), (4, "replicated"), (1, "zero3"), (3, "zero3")]):

        def again(one, i=i):
            load(one, tmp_path / str(i))
            save(one, tmp_path / str(i + 1))

        trained(world_size, layout, [], begin=again)
    first, last = (Checkpoint(tmp_path / name / "step-000004") for name in ("0", "4"))
    keys = [key for key in first.manifest.tensors if not key.startswith("worker/")]
    assert keys
    assert sorted(keys) == sorted(key for key in last.manifest.tensors if not key.startswith("worker/"))
    assert first.manifest.values == last.manifest.values
    for key in keys:
        assert torch.equal(whole(first, key), whole(last, key)), key


def test_the_mean_of_leftovers_stays_what_it_was(tmp_path):
    spec = Method(reducer=method("topk").reducer, layout=registry.find("zero2")())
    means = {}

    def leftovers(one):
        part = one.engine.method.reducer
        saved = part.state.save(one.engine.buckets)
        means[one.comm.world_size, one.comm.rank] = torch.cat([saved[key].double() for key in sorted(saved)])

    def end(one):
        save(one, tmp_path)
        leftovers(one)

    trained(3, spec, data(4), end=end)

    def begin(one):
        load(one, tmp_path)
        leftovers(one)

    trained(2, spec, [], begin=begin)
    before, after = (sum(means[w, r] for r in range(w)) / w for w in (3, 2))
    assert before.abs().max() > 0
    close(after, before)


@pytest.mark.parametrize("sync", ["local_sgd", "sma"])
def test_on_other_workers_all_begin_where_those_agreed(tmp_path, sync):
    centre = {}

    def end(one):
        save(one, tmp_path)
        with consensus.consensus_weights(one.engine):
            centre[one.comm.rank] = weights(one.model).clone()
        assert not torch.equal(weights(one.model), centre[one.comm.rank]), "a worker's own"

    trained(3, sync, data(5), optimizer=sgd, end=end)
    for got in trained(2, sync, [], optimizer=sgd, begin=lambda one: load(one, tmp_path)):
        assert torch.equal(got, centre[0])


def test_what_was_made_whole_before_is_not_used_after(tmp_path):
    """zero3: an evaluation leaves parameters behind, whole, that a load makes old."""
    x, y = data(1)[0]

    def loss(one):
        with torch.no_grad():
            return cross_entropy(one.model(x), y)

    def end(one):
        save(one, tmp_path)
        before = loss(one)
        walk(one, data(3))
        assert not torch.equal(loss(one), before)
        load(one, tmp_path)
        assert torch.equal(loss(one), before)

    trained(2, "zero3", data(2), end=end, bucket_mb=1.0)


@layouts
def test_into_a_plain_model(tmp_path, layout):
    from paceline.comm.single import SingleComm

    straight = trained(2, layout, data(4), end=lambda one: save(one, tmp_path, epoch=3))
    model = mlp(1)
    opt = adamw(model)
    assert loading.load(tmp_path, Objects.sort([model, opt]), [], SingleComm()) == {"epoch": 3}
    assert torch.equal(torch.cat([v.flatten() for v in model.state_dict().values()]), straight[0])
    assert opt.state[model[0].weight]["step"] == 4
    assert opt.state[model[0].weight]["exp_avg"].shape == (16, 6)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_all_hold_is_shared_out_whole(world_size):
    held = [
        Holding.whole("a", torch.arange(7.0), shared=True),
        Holding.whole("b", torch.arange(5).short(), shared=True),
    ]
    for one in held:
        parts = [h for rank in range(world_size) for h in share_out(held, rank, world_size) if h.key == one.key]
        assert torch.equal(torch.cat([h.get() for h in parts]), one.get())


@layouts
def test_no_byte_is_written_twice(tmp_path, layout):
    trained(3, layout, data(2), end=lambda one: save(one, tmp_path))
    book = Checkpoint(tmp_path / "step-000002").manifest
    elements = sum(p.numel() for p in mlp().parameters())
    common = [entry for key, entry in book.tensors.items() if not key.startswith("worker/")]
    written = sum(stretch.stop - stretch.start for entry in common for stretch in entry.stretches)
    assert written == 3 * elements  # parameters and two moments
    if layout == "replicated":
        sizes = [sum(p.stop - p.start for e in common for p in e.stretches if p.file // 2 == r) for r in range(3)]
        assert max(sizes) - min(sizes) <= 2, "one is larger than another"


def test_a_schedule_and_groups(tmp_path):
    def grouped(model):
        some = [{"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.03}]
        rest = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
        return torch.optim.AdamW([*some, rest], lr=0.01, betas=(0.8, 0.9))

    def end(one):
        one.optimizer.param_groups[0]["lr"] = 0.007
        save(one, tmp_path)

    trained(2, "zero1", data(2), optimizer=grouped, end=end)

    def begin(one):
        one.optimizer.param_groups[1]["betas"] = (0.1, 0.1)
        load(one, tmp_path)
        first, second = one.optimizer.param_groups
        assert first["lr"] == 0.007
        assert (first["betas"], second["weight_decay"]) == ((0.8, 0.9), 0.1)
        assert second["betas"] == (0.8, 0.9)

    trained(2, "zero1", [], optimizer=grouped, begin=begin)


# ------------------------------------------------------------------------------------------------ what is refused


def test_another_method_goes_on_without_what_the_old_one_remembered(tmp_path, capsys):
    straight = trained(2, "topk", data(3), end=lambda one: save(one, tmp_path))
    after = trained(2, "exact", [], begin=lambda one: load(one, tmp_path))
    assert torch.equal(same(after), same(straight))
    assert "reducer/0/error_feedback" in capsys.readouterr().err


def test_half_a_step_is_not_saved(tmp_path):
    def work(comm):
        model = mlp()
        one = Rig(comm, model, adamw(model), spec="zero2", accumulate=2)
        x, y = one.take(*data(1)[0])
        cross_entropy(model(x), y).backward()
        one.optimizer.step()
        save(one, tmp_path)

    with pytest.raises(UsageError, match="in the middle of a step"):
        threads.run(2, work)


@layouts
def test_another_model_or_optimizer_is_named_on_all_workers(tmp_path, layout):
    trained(2, layout, data(1), end=lambda one: save(one, tmp_path))
    wide = built(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    for how, word in (
        ({"make": wide}, r"0\.weight is float32\[16, 6\] in it, float32\[8, 6\] here"),
        ({"make": lambda: mlp().bfloat16()}, "bfloat16"),
        ({"optimizer": sgd}, "AdamW in it, SGD here"),
        ({"make": built(lambda: nn.Sequential(*mlp(), nn.Linear(3, 3)))}, r"5\.weight is not in it"),
        ({"make": built(lambda: nn.Sequential(*list(mlp())[:3]))}, r"4\.weight is only in it"),
    ):
        with pytest.raises(CheckpointError, match=word):
            trained(2, layout, [], begin=lambda one: load(one, tmp_path), **how)


def test_workers_that_see_different_folders_are_told(tmp_path, monkeypatch):
    """Each host has a disk of its own: the path is the same, and what lies there is not."""
    trained(2, "exact", data(1), end=lambda one: save(one, tmp_path))

    class Other(Checkpoint):
        def __init__(self, path):
            super().__init__(path)
            self.checksum += f" {threading.get_ident()}"

    monkeypatch.setattr(folders, "Checkpoint", Other)
    with pytest.raises(CheckpointError, match="not the same for all workers"):
        trained(2, "exact", [], begin=lambda one: load(one, tmp_path))


def test_workers_that_see_different_plain_files_are_told(tmp_path, monkeypatch):
    for name, seed in (("0", 0), ("1", 1)):
        save_file(mlp(seed).state_dict(), tmp_path / name)
    first = threading.Lock()  # the worker who takes it reads the first file
    real = PlainFile.__init__

    def init(self, path):
        real(self, path if first.acquire(blocking=False) else tmp_path / "1")

    monkeypatch.setattr(PlainFile, "__init__", init)
    with pytest.raises(CheckpointError, match="not the same for all workers"):
        trained(2, "exact", [], begin=lambda one: load(one, tmp_path / "0"))


def test_what_one_worker_cannot_read_is_heard_by_all(tmp_path, monkeypatch):
    trained(2, "zero3", data(1), end=lambda one: save(one, tmp_path))
    real, heard = loading.Loading.load, []

    def load_(self):
        if self.comm.rank == 1:
            raise CheckpointError("the disk has gone")
        real(self)

    def begin(one):
        with pytest.raises(CheckpointError, match="the disk has gone"):
            load(one, tmp_path)
        heard.append(one.comm.rank)

    monkeypatch.setattr(loading.Loading, "load", load_)
    trained(2, "zero3", [], begin=begin)
    assert sorted(heard) == [0, 1]


def test_methods_that_keep_their_own_pace_load_before(tmp_path):
    trained(2, "exact", data(1), end=lambda one: save(one, tmp_path))
    with pytest.raises(UsageError, match="cannot be loaded after prepare"):
        trained(2, "async_average", [], begin=lambda one: load(one, tmp_path))


def test_a_copy_is_not_what_is_loaded(tmp_path):
    """What is read is copied: the files may go."""

    def end(one):
        save(one, tmp_path)

    trained(2, "zero3", data(2), end=end)

    def begin(one):
        load(one, tmp_path)
        state = copy.deepcopy(one.optimizer.state_dict())
        for path in (tmp_path / "step-000002").glob("*.safetensors") if one.comm.rank == 0 else ():
            path.write_bytes(bytes(path.stat().st_size))
        again = one.optimizer.state_dict()
        assert all(torch.equal(state["state"][i]["exp_avg"], s["exp_avg"]) for i, s in again["state"].items())

    trained(2, "zero3", [], begin=begin)
