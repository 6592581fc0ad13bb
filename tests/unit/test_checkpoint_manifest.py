"""A manifest is what was written, or it is refused by name; and nothing else in a folder keeps a reader waiting."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket

import pytest
import torch

import paceline
from paceline.checkpoint import manifest
from paceline.checkpoint.read_manifest import read
from paceline.errors import CheckpointError, DataError
from rig import adamw, data, loop, mlp


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def saved(tmp_path):
    model = mlp()
    opt = adamw(model)
    loop(data(2), model, opt)
    return paceline.save(tmp_path / "run", model, opt, step=1, extra={"n": 1})


def book(path):
    return path / "manifest.json"


def load(path):
    model = mlp(1)
    return paceline.load(path, model, adamw(model))


def signed(text):
    """Give a manifest with a right checksum, as somebody who means harm would write it."""
    body = text.encode("utf-8", "surrogatepass").removesuffix(b"\n}").removesuffix(b"}")
    return body + manifest.tail(body)


def edited(path, change):
    found = json.loads(book(path).read_text())
    del found["sha256"]
    change(found)
    book(path).write_bytes(signed(json.dumps(found)))


# ------------------------------------------------------------------------------------------------ what was written


def test_it_is_json_that_ends_with_its_checksum(saved):
    found = json.loads(book(saved).read_text())
    assert list(found)[-1] == "sha256"
    body = book(saved).read_bytes().partition(b',\n "sha256"')[0]
    assert book(saved).read_bytes() == body + manifest.tail(body)


@pytest.mark.parametrize("every", [197, pytest.param(5, marks=pytest.mark.slow)])
def test_one_bit_anywhere_in_it_is_found(saved, every):
    """Of all bits of the manifest; the fast run takes a part of them, another in each byte, and all of the end."""
    good = book(saved).read_bytes()
    last = 8 * (len(good) - 90)
    for bit in [*range(0, last, every), *range(last, 8 * len(good), min(every, 3))]:
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        book(saved).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"manifest\.json") as error:
            read(saved)
        assert error.value.why
    book(saved).write_bytes(good)
    assert load(saved) == {"n": 1}


def test_a_flipped_bit_falls_back_to_the_one_before(saved, capsys):
    model = mlp()
    opt = adamw(model)
    newer = paceline.save(saved.parent, model, opt, step=2, extra={"n": 2})
    good, draw = book(newer).read_bytes(), random.Random(0)
    for _ in range(20):
        data, bit = bytearray(good), draw.randrange(8 * len(good))
        data[bit // 8] ^= 1 << bit % 8
        book(newer).write_bytes(data)
        assert load(saved.parent) == {"n": 1}
        said = capsys.readouterr().err
        assert f"{book(newer)}" in said
        assert f"{saved} is loaded in its place" in said
    book(newer).write_bytes(good)
    assert load(saved.parent) == {"n": 2}


def test_a_learning_rate_cannot_change_unseen(saved):
    text = book(saved).read_bytes()
    book(saved).write_bytes(text.replace(b"0.01", b"0.05"))
    assert text != book(saved).read_bytes()
    with pytest.raises(CheckpointError, match="sha256"):
        load(saved)


def test_other_formats_are_refused_by_name(saved):
    whole = json.loads(book(saved).read_text())
    del whole["sha256"]
    for version, word in ((manifest.VERSION + 1, "a newer Paceline"), (1, "another Paceline")):
        text = json.dumps({**whole, "version": version, "files": None})
        for written in (text.encode(), signed(text)):  # the first format had no checksum
            book(saved).write_bytes(written)
            with pytest.raises(CheckpointError, match=word) as error:
                load(saved)
            assert f"its format is {version}" in str(error.value)


# ------------------------------------------------------------------------------------------------ what is no manifest


def refused(path):
    for where in (path, path.parent):
        with pytest.raises(CheckpointError) as error:
            load(where)
        assert str(path) in str(error.value)
        assert error.value.exit_code == 3
    return str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other", "version": 1}', "[" * 100_000, "\x00\xff", "1" * 9999]
)
def test_what_is_no_manifest(saved, text):
    for written in (text.encode("latin-1"), signed(text)):
        book(saved).write_bytes(written)
        assert "manifest" in refused(saved)


def test_names_that_stand_twice_and_what_is_no_number(saved):
    good = json.dumps({k: v for k, v in json.loads(book(saved).read_text()).items() if k != "sha256"})
    for old, new, why in (
        ('"step": 1,', '"step": 1, "step": 2,', "twice"),
        ('"n": 1', '"n": 1, "n": 3', "twice"),
        ('"n": 1', '"n": NaN', "no JSON"),
        ('"n": 1', '"n": -Infinity', "no JSON"),
        ('"n": 1', '"n": 1e999', "too large"),
        ('"n": 1', '"n": ' + "9" * 5000, "manifest"),
        ('"n": 1', '"n": ' + "[" * 5000 + "]" * 5000, "manifest"),
        ('"step": 1,', '"step": 1, "other": 2,', "unknown"),
    ):
        assert good.count(old) == 1
        book(saved).write_bytes(signed(good.replace(old, new)))
        assert why in refused(saved)


def test_a_large_file_is_not_read(saved):
    os.truncate(book(saved), 1 << 40)
    assert "too large" in refused(saved)
    os.truncate(book(saved), manifest.MOST_BYTES)  # mostly a hole
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "does not end as one" in refused(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < manifest.MOST_BYTES >> 11


# Lies with a right checksum, in the order of the manifest.


def at(*path, value):
    def change(found):
        *before, last = path
        for step in before:
            found = found[step]
        found[last] = value

    return change


WEIGHT = ("tensors", "model/0.weight")
STEP = "optimizer/0/0.weight/step"
LIES = {
    "run": at("run", value="../../x"),
    "serial": at("serial", value=10**30),
    "step": at("step", value=-1),
    "world": at("world_size", value=10**18),
    "no world": at("world_size", value=0),
    "two worlds": at("world_size", value=2),
    "made": at("made", value=[7]),
    "outside": at("files", 0, "name", value="../../secret"),
    "one file twice": at("files", 0, "name", value="state-00000.safetensors"),
    "bytes": at("files", 0, "bytes", value=-5),
    "no files": at("files", value=[]),
    "gap": at(*WEIGHT, "pieces", value=[[0, 0, 5]]),
    "no such file": at(*WEIGHT, "pieces", 0, 0, value=99),
    "another file": at(*WEIGHT, "pieces", 0, 0, value=1),
    "huge": at(*WEIGHT, value={"dtype": "float32", "shape": [2**50], "pieces": [[0, 0, 2**50]]}),
    "overflow": at(*WEIGHT, "shape", value=[2**40, 2**40]),
    "many dimensions": at(*WEIGHT, "shape", value=[1] * 1000),
    "negative": at(*WEIGHT, "shape", value=[-16, -6]),
    "strides": at(*WEIGHT, "strides", value=[2**40, 1]),
    "strides that overlap": at(*WEIGHT, "strides", value=[1, 1]),
    "no type": at(*WEIGHT, "dtype", value="load"),
    "odd type": at(*WEIGHT, "dtype", value="quint8"),
    "key": at("tensors", "worker/", value={"dtype": "float32", "shape": [0]}),
    "no such worker": at("values", "worker/5/part/0/reducer/0/topk 1", value=["", 1]),
    "no such optimizer": at("values", "optimizer/3/0.weight/step", value=["", 1]),
    "not a word": at("values", "worker/0/part/0/reducer/0/topk {", value=["", 1]),
    "value": at("values", STEP, value=["float32", "many"]),
    "value's type": at("values", STEP, value=["load", 1]),
    "no value": at("values", STEP, value=["float", None]),
    "value too large": at("values", STEP, value=["int8", 2**40]),
    "value is a list": at("values", STEP, value=["", []]),
    "tie": at("ties", "x", value="nothing"),
    "no groups": at("optimizers", 0, "groups", value=[]),
    "params": at("optimizers", 0, "groups", 0, "settings", "params", value=["", 1]),
    "setting": at("optimizers", 0, "groups", 0, "settings", "lr", value=7),
    "no setting": at("optimizers", 0, "groups", 0, "settings", "lr", value=None),
    "setting's type": at("optimizers", 0, "groups", 0, "settings", "lr", value=["float", "fast"]),
    "extra": at("extra", value=[]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(saved, lie):
    edited(saved, LIES[lie])
    refused(saved)


def _changed(draw, value):
    """Give JSON that is like this one in all but one place."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.1:
            return {**value, draw.choice(["", "worker/0/", key + "x", "part/0/"]): value[key]}
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        i = draw.randrange(len(value))
        if draw.random() < 0.15:
            return value[:i] + value[i + 1 :]
        return [*value[:i], _changed(draw, value[i]), *value[i + 1 :]]
    words = ["", "x", "nan", "load", "float64", "int64", "\x1b[31m", "\ud800", "../x", "worker/0/part/0/a/0/b 1"]
    numbers = [0, 1, -1, 2, 3, 10**18, 2**53, 2**64, 10**40, 0.5, -1e308, 5e-324]
    return draw.choice([*words, *numbers, None, True, [], {}, [[]], [1], {"a": 1}, ["", 1], ["float", "inf"]])


@pytest.mark.parametrize("times", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_lie_gives_a_bare_traceback(saved, times):
    """What is loaded in spite of a lie was none that matters, as another number in `extra` is none."""
    good, draw, caught = json.loads(book(saved).read_text()), random.Random(times), 0
    del good["sha256"]
    for _ in range(times):
        lie = good
        for _ in range(draw.choice([1, 1, 2])):
            lie = _changed(draw, lie)
        book(saved).write_bytes(signed(json.dumps(lie)))
        try:
            load(saved)
        except CheckpointError:
            caught += 1
    assert caught > times // 2


@pytest.mark.parametrize("times", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_file_gives_a_bare_traceback(saved, times):
    """Bits, stretches and ends of every file of a checkpoint."""
    draw, files = random.Random(times), sorted(saved.iterdir())
    for n in range(times):
        path = files[n % len(files)]
        good = path.read_bytes()
        data, start = bytearray(good), draw.randrange(len(good))
        how = draw.randrange(5)
        if how == 0:
            data[start] ^= 1 << draw.randrange(8)
        elif how == 1:
            del data[start:]
        elif how == 2:
            data[start : start + draw.randrange(1, 50)] = draw.randbytes(draw.randrange(50))
        elif how == 3:
            data[start:start] = data[: draw.randrange(1, 200)]
        else:
            data[:8] = draw.choice([2**60, 2**63, 0, 1, len(data)]).to_bytes(8, "little")
        if data == good:
            continue
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=path.name):
            load(saved)
        path.write_bytes(good)
    load(saved)


# ------------------------------------------------------------------------------------------------ what is no file


def planted(kind, path, tmp_path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:  # its name must be short
            one.bind(path.name)
    elif kind == "link":
        path.symlink_to(tmp_path / "kept")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "real device":
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root can make a device")
    elif kind == "gone":
        pass


SAID = {
    "pipe": "is a pipe, a socket or a device",
    "folder": "is a folder",
    "socket": "is a pipe, a socket or a device",
    "link": "is a link",
    "link to itself": "is a link",
    "device": "is a link",
    "real device": "is a pipe, a socket or a device",
    "gone": "No such file|there is no checkpoint",
}


@pytest.mark.parametrize("name", ["manifest.json", "model-00000.safetensors", "state-00000.safetensors"])
@pytest.mark.parametrize("kind", SAID)
@pytest.mark.timeout(30)
def test_a_pipe_or_a_device_is_not_waited_for(saved, tmp_path, name, kind):
    (saved / name).rename(tmp_path / "kept")
    planted(kind, saved / name, tmp_path)
    with pytest.raises(CheckpointError, match=SAID[kind]):
        load(saved)
    with pytest.raises(CheckpointError):
        load(saved.parent)
    with pytest.raises(CheckpointError):
        load(saved / name)  # as a file of its own, a plain one is opened, whatever is in it


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.timeout(30)
def test_a_step_that_is_no_folder_is_passed_over(saved, tmp_path, kind):
    planted(kind, saved.parent / "step-000002", tmp_path)
    assert load(saved.parent) == {"n": 1}


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "\x1b[31m", "s" + "/s" * 3000])
def test_odd_names(tmp_path, name):
    with pytest.raises(CheckpointError):
        load(tmp_path / name)


def test_a_folder_that_is_a_file_or_may_not_be_read(saved, monkeypatch):
    with pytest.raises(CheckpointError):
        load("/dev/null")

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(CheckpointError, match="Permission denied"):
        load(saved.parent)


def test_a_shard_of_another_checkpoint(saved):
    """The same sizes and a right file: only the sums tell."""
    model = mlp()
    opt = adamw(model)
    loop(data(3), model, opt)
    other = paceline.save(saved.parent, model, opt, step=2)
    (saved / "model-00000.safetensors").write_bytes((other / "model-00000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="sha256"):
        load(saved)


def test_a_state_that_torch_does_not_take(saved, monkeypatch):
    """A stream of random numbers that is none: its sums are right, for it was saved so."""
    model = mlp()
    with monkeypatch.context() as m:
        m.setattr(torch, "get_rng_state", lambda: torch.zeros(7, dtype=torch.uint8))
        other = paceline.save(saved.parent, model, step=2)
    with pytest.raises(DataError, match="the saved state of the cpu random numbers is damaged"):
        paceline.load(other, model)


def test_nothing_is_loaded_of_what_is_refused(saved):
    edited(saved, LIES["value"])
    model = mlp(1)
    before = torch.cat([p.flatten() for p in model.parameters()]).clone()
    with pytest.raises(CheckpointError):
        paceline.load(saved, model, adamw(model))
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), before)
