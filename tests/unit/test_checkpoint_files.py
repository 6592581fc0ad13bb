"""What is on disk: whole or not there, broken and named, or as plain safetensors."""

from __future__ import annotations

import enum
import errno
import hashlib
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner

import paceline
from paceline.checkpoint import drafts, folders
from paceline.checkpoint.tensors import TensorFile, TensorSpec
from paceline.errors import CheckpointError, UsageError
from paceline.tools.cli.main import app
from rig import adamw, data, loop, mlp


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def job(seed=0, steps=2):
    model = mlp(seed)
    opt = adamw(model)
    loop(data(steps), model, opt)
    return model, opt


def flat(model):
    return torch.cat([v.flatten() for v in model.state_dict().values()])


# ------------------------------------------------------------------------------------------------ there and back


def test_a_plain_model_and_its_optimizer(tmp_path):
    model, opt = job()
    path = paceline.save(tmp_path, model, opt, step=7, extra={"epoch": 3, "best": [0.5, None]})
    assert path == tmp_path / "step-000007"
    other, other_opt = job(1, 0)
    assert paceline.load(tmp_path, other, other_opt) == {"epoch": 3, "best": [0.5, None]}
    assert torch.equal(flat(other), flat(model))
    assert torch.equal(loop(data(2), other, other_opt), loop(data(2), model, opt))


def test_what_an_optimizer_remembered_before_is_gone(tmp_path):
    """A checkpoint from before the first step brings no moments, and leaves none."""
    model, opt = job(steps=0)
    paceline.save(tmp_path, model, opt, step=0)
    want = loop(data(2), model, opt)
    paceline.load(tmp_path, model, opt)
    assert torch.equal(loop(data(2), model, opt), want)


def test_only_the_model(tmp_path):
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1)
    other = mlp(1)
    paceline.load(tmp_path / "step-000001", other)
    assert torch.equal(flat(other), flat(model))


def test_buffers_and_several_models(tmp_path):
    a, b = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)
    a.register_buffer("passing", torch.ones(2), persistent=False)
    a(torch.randn(9, 6))
    opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    paceline.save(tmp_path, a, b, opt, step=0)
    c, d = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)
    paceline.load(tmp_path, c, d, torch.optim.SGD([*c.parameters(), *d.parameters()], lr=0.5))
    assert torch.equal(flat(c), flat(a))
    assert torch.equal(flat(d), flat(b))
    assert c[1].num_batches_tracked == 1


def test_random_numbers_go_on(tmp_path):
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1)
    want = torch.rand(3)
    paceline.load(tmp_path, model, opt)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor])
def test_whatever_an_optimizer_remembers(tmp_path, kind):
    def made(seed):
        model = mlp(seed)
        return model, kind(model.parameters(), lr=0.01)

    (model, opt), (other, other_opt) = made(0), made(1)
    loop(data(3), model, opt)
    paceline.save(tmp_path, model, opt, step=3)
    paceline.load(tmp_path, other, other_opt)
    assert torch.equal(loop(data(3), other, other_opt), loop(data(3), model, opt))


def held_by_itself():
    loop = {}
    loop["x"] = [loop]
    return loop


@pytest.mark.parametrize(
    "extra",
    [
        {"x": torch.ones(1)},
        {1: 2},
        [1],
        [],
        {"x": float("nan")},
        {"a": {"b": [float("inf")]}},
        {"x": {1, 2}},
        {"x": 2**64},
        {"x": "\ud800"},
        {"\ud800": 1},
        {"x": np.int64(1)},
        held_by_itself(),
    ],
)
def test_extra_that_is_not_json_is_refused(tmp_path, extra):
    with pytest.raises(UsageError, match="cannot be saved"):
        paceline.save(tmp_path, *job(steps=0), step=0, extra=extra)
    assert not list(tmp_path.iterdir())


class Level(enum.IntEnum):
    HIGH = 2


def test_numbers_of_numpy_and_of_enums(tmp_path):
    """Subclasses of Python's own numbers: an encoder of JSON knows some of them, and worker 0 alone would fail."""
    model, opt = job()
    opt.param_groups[0]["lr"], opt.param_groups[0]["level"] = np.float64(0.25), Level.HIGH
    extra = {"a": np.float64(0.5), "b": Level.HIGH, "c": (1, True), "d": np.str_("e")}
    paceline.save(tmp_path, model, opt, step=1, extra=extra)
    opt.param_groups[0]["lr"] = 0.1
    assert paceline.load(tmp_path, model, opt) == {"a": 0.5, "b": 2, "c": [1, True], "d": "e"}
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["level"]) == (0.25, 2)


@pytest.mark.parametrize("key", ["global_step", 3])
def test_what_an_optimizer_remembers_of_no_parameter_is_refused(tmp_path, key):
    """It would be lost without a word."""
    model, opt = job()
    opt.state[key] = {"n": 1}
    with pytest.raises(CheckpointError, match="cannot be saved"):
        paceline.save(tmp_path, model, opt, step=1)
    del opt.state[key]
    for slot in ("a/b", 7):
        opt.state[model[0].weight][slot] = torch.zeros(16, 6)
        with pytest.raises(CheckpointError, match="cannot be saved"):
            paceline.save(tmp_path, model, opt, step=1)
        del opt.state[model[0].weight][slot]
    assert paceline.save(tmp_path, model, opt, step=1)


def test_wrong_arguments_are_refused(tmp_path):
    model, opt = job(steps=0)
    for how in ({}, {"step": -1}, {"step": True}, {"step": 1, "keep": 0}, {"step": 2**53 + 1}, {"step": 10**400}):
        with pytest.raises(UsageError):
            paceline.save(tmp_path, model, opt, **how)
    for folder in (model, None, "", "a\0b", 3, b"bytes"):
        with pytest.raises(UsageError, match="a folder first"):
            paceline.save(folder, model, opt, step=1)
        with pytest.raises(UsageError, match="a folder first"):
            paceline.load(folder, model, opt)
    with pytest.raises(UsageError, match="takes models"):
        paceline.load(tmp_path, opt)

    class Extra(nn.Linear):
        def get_extra_state(self):
            return object()

    with pytest.raises(CheckpointError, match="extra state"):
        paceline.save(tmp_path, Extra(2, 2), step=0)


# ------------------------------------------------------------------------------------------------ whole or not there


def test_the_newest_stay(tmp_path):
    model, opt = job()
    for step in (5, 1, 2, 2, 3):
        paceline.save(tmp_path, model, opt, step=step, extra={"step": step}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[1] == "step-000003"
    assert names[0].startswith("step-000002")
    assert paceline.load(tmp_path, model, opt) == {"step": 3}


def test_a_kill_at_any_write_leaves_the_one_before(tmp_path, monkeypatch):
    """Whatever the moment, the newest whole checkpoint is found."""
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1, extra={"n": 1})

    class Killed(BaseException):
        pass

    calls = 0

    def dying(real, at):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return real(*args, **kwargs)

        return call

    at = done = 0
    while not done:
        at, calls = at + 1, 0
        with monkeypatch.context() as m:
            m.setattr(TensorFile, "_write", dying(TensorFile._write, at))
            m.setattr(os, "fsync", dying(os.fsync, at))
            m.setattr(drafts, "remove_files", lambda path: None)  # a kill tidies nothing up
            try:
                paceline.save(tmp_path, model, opt, step=2, extra={"n": 2})
                done = True
            except Killed:
                pass
        renamed = (tmp_path / "step-000002").exists()
        assert paceline.load(tmp_path, *job(1)) == {"n": 2 if renamed else 1}
        shutil.rmtree(tmp_path / "step-000002", ignore_errors=True)
    assert at > 20


def test_a_full_disk_keeps_the_last_good_one(tmp_path, monkeypatch, capsys):
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1)

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(TensorFile, "_write", full)
        assert paceline.save(tmp_path, model, opt, step=2) is None
        assert paceline.save(tmp_path, model, opt, step=3) is None
        assert "No space left" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="could not write"):
            paceline.save(tmp_path, model, opt, step=4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    monkeypatch.setattr(paceline.api, "_lost", 0)


def test_a_folder_that_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(paceline.api, "_lost", 2)
    with pytest.raises(CheckpointError, match="could not write"):
        paceline.save(tmp_path / "file", *job(), step=0)
    monkeypatch.setattr(paceline.api, "_lost", 0)


# ------------------------------------------------------------------------------------------------ broken


@pytest.fixture
def saved(tmp_path):
    model, opt = job()
    return paceline.save(tmp_path / "run", model, opt, step=1, extra={"n": 1})


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_one_bit_anywhere_is_found_and_the_file_named(saved):
    draw = random.Random(0)
    for path in sorted(saved.glob("*.safetensors")):
        good = path.read_bytes()
        for _ in range(25):
            flip(path, draw.randrange(8 * len(good)))
            with pytest.raises(CheckpointError, match=path.name) as error:
                paceline.load(saved, mlp())
            assert error.value.exit_code == 3
            path.write_bytes(good)
    paceline.load(saved, mlp())


def test_it_falls_back_to_the_one_before_and_names_the_file(saved, capsys):
    model, opt = job()
    for n in (2, 3):
        paceline.save(saved.parent, model, opt, step=n, extra={"n": n})
    flip(saved.parent / "step-000003" / "model-00000.safetensors", 12345)
    (saved.parent / "step-000002" / "manifest.json").write_text("{")
    assert paceline.load(saved.parent, model, opt) == {"n": 1}
    said = capsys.readouterr().err
    assert "step-000003/model-00000.safetensors" in said
    assert "step-000002/manifest.json" in said
    with pytest.raises(CheckpointError, match="sha256"):
        paceline.load(saved.parent / "step-000003", model, opt)  # this one was asked for


def test_missing_short_and_linked_files(saved, tmp_path):
    path = saved / "model-00000.safetensors"
    good = path.read_bytes()
    for break_ in (path.unlink, lambda: path.write_bytes(good[:-100]), lambda: path.write_bytes(b"")):
        break_()
        with pytest.raises(CheckpointError, match="model-00000"):
            paceline.load(saved, mlp())
        path.write_bytes(good)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        paceline.load(saved, mlp())


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "text"):
        with pytest.raises(CheckpointError):
            paceline.load(path, mlp())


# ------------------------------------------------------------------------------------------------ plain safetensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out.weight = self.embed.weight


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_export_is_what_the_library_reads(tmp_path):
    model = mlp().to(memory_format=torch.contiguous_format)
    paceline.save(tmp_path, model, adamw(model), step=3)
    done = run("export", tmp_path, tmp_path / "out.safetensors", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["step"] == 3
    other = mlp(1)
    other.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert torch.equal(flat(other), flat(model))
    again = mlp(1)
    assert paceline.load(tmp_path / "out.safetensors", again) == {}
    assert torch.equal(flat(again), flat(model))
    assert not list(tmp_path.glob(".out*"))


def test_ties_are_written_once_or_under_every_name(tmp_path):
    model = Tied()
    paceline.save(tmp_path, model, step=0)
    assert run("export", tmp_path, tmp_path / "once.safetensors").exit_code == 0
    once = load_file(tmp_path / "once.safetensors")
    assert "out.weight" not in once
    with safe_open(tmp_path / "once.safetensors", "pt") as file:
        assert json.loads(file.metadata()["ties"]) == {"out.weight": "embed.weight"}
    for load in (
        lambda m: load_model(m, tmp_path / "once.safetensors"),
        lambda m: m.load_state_dict(once, strict=False),
        lambda m: paceline.load(tmp_path / "once.safetensors", m),
    ):
        other = Tied()
        load(other)
        assert torch.equal(flat(other), flat(model))
    assert run("export", tmp_path, tmp_path / "all.safetensors", "--repeat-ties").exit_code == 0
    other = Tied()
    other.load_state_dict(load_file(tmp_path / "all.safetensors"))
    assert torch.equal(flat(other), flat(model))


def test_export_in_another_order_of_memory_and_type(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    paceline.save(tmp_path, model, step=0)
    assert run("export", tmp_path, tmp_path / "out.safetensors", "--dtype", "bf16").exit_code == 0
    got = load_file(tmp_path / "out.safetensors")
    assert torch.equal(got["0.weight"], model[0].weight.bfloat16())
    assert got["1.num_batches_tracked"].dtype == torch.int64


def test_export_refuses(tmp_path, saved):
    flip(saved / "model-00000.safetensors", 9999)
    for args, code in (
        ((saved, tmp_path / "no" / "out.safetensors"), 2),
        ((saved, tmp_path / "out.safetensors"), 3),
        ((tmp_path / "none", tmp_path / "out.safetensors"), 3),
    ):
        done = run("export", *args)
        assert done.exception.exit_code == code
    assert not (tmp_path / "out.safetensors").exists()


def test_a_number_too_large_for_its_new_type_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    paceline.save(tmp_path, model, step=0)
    done = run("export", tmp_path, tmp_path / "out.safetensors", "--dtype", "fp16")
    assert done.exception.exit_code == 3
    assert "1e+06, too large for float16" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"]
    assert run("export", tmp_path, tmp_path / "out.safetensors", "--dtype", "bf16").exit_code == 0


def test_a_plain_file_that_is_changed_gives_no_bare_traceback(tmp_path):
    """It has no sums, so other numbers cannot be seen; but whatever it is, it is loaded or refused by name."""
    paceline.save(tmp_path, mlp(), step=0)
    assert run("export", tmp_path, tmp_path / "out.safetensors").exit_code == 0
    good, draw = (tmp_path / "out.safetensors").read_bytes(), random.Random(0)
    path, refused = tmp_path / "other.safetensors", 0
    for _ in range(200):
        changed, start = bytearray(good), draw.randrange(600)
        if draw.random() < 0.2:
            del changed[draw.randrange(len(good)) :]
        elif draw.random() < 0.5:
            changed[start] ^= 1 << draw.randrange(8)
        else:
            changed[start : start + draw.randrange(9)] = draw.choice(
                [b"", b"99999999", b"[", b'"', b"-1", b"F64", b"F8_E8M0"]
            )
        path.write_bytes(changed)
        try:
            paceline.load(path, mlp())
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_a_type_that_safetensors_has_not(tmp_path):
    with pytest.raises(CheckpointError, match="no type"):
        TensorFile(tmp_path / "x", [TensorSpec("x", torch.complex128, (2,))])


def test_empty_tensors_and_scalars(tmp_path):
    model = nn.Module()
    model.none, model.one = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.5))
    paceline.save(tmp_path, model, step=0)
    model.one.data.zero_()
    paceline.load(tmp_path, model)
    assert model.one == 2.5
    written = next(tmp_path.glob("*/model-*")).read_bytes()
    assert hashlib.sha256(written).hexdigest() == folders.known(tmp_path)[0][0].manifest.files[0].sha256
