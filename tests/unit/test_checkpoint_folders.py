"""Which folders a save may remove: its own run's checkpoints, and drafts that nobody writes any more. Nothing else."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import time

import pytest
import torch

import paceline
import processes
from paceline.checkpoint import drafts, folders, save
from paceline.checkpoint.drafts import Draft
from paceline.checkpoint.reader import Checkpoint
from paceline.errors import CheckpointError
from rig import adamw, mlp


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def saves(tmp_path, quick):
    """Save as one and the same run does."""
    model = mlp()
    opt = adamw(model)

    def one(step, **how):
        return paceline.save(tmp_path / "run", model, opt, step=step, extra={"step": step}, **how)

    yield one
    another_job()


def another_job():
    """What this process has saved so far was saved by somebody else."""
    folders._runs.clear()


def load(path):
    model = mlp(1)
    return paceline.load(path, model, adamw(model))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------ whose it is


def test_the_checkpoints_of_another_run_stay(saves, tmp_path, capsys):
    saves(1)
    saves(2)
    another_job()
    for step in (2, 3, 4):
        saves(step, keep=1)
    assert capsys.readouterr().err.count("2 checkpoints of other runs, which keep=1 does not count") == 1
    assert names(tmp_path / "run") == ["step-000001", "step-000002", "step-000004"]
    assert load(tmp_path / "run") == {"step": 4}
    assert "checkpoints of 2 runs" in capsys.readouterr().err


def test_a_run_that_goes_on_is_the_same_run(saves, tmp_path):
    for step in (1, 2):
        saves(step)
    another_job()
    assert load(tmp_path / "run") == {"step": 2}
    saves(3, keep=2)
    assert names(tmp_path / "run") == ["step-000002", "step-000003"]


def test_a_manifest_that_was_put_there_stays(saves, tmp_path):
    """A checkpoint of another run, copied into a step's folder: it is of the same step as the new one, and old."""
    other = saves(1)
    shutil.copytree(other, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run")
    another_job()
    saves(2)
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "run" / "step-000001")
    saves(1, keep=1)
    assert names(tmp_path / "run") == ["step-000001", "step-000001-1"]
    assert load(tmp_path / "run" / "step-000001") == {"step": 1}


def test_a_linked_step_is_not_followed(saves, tmp_path):
    """The link points to a checkpoint of this very run, which lies elsewhere."""
    saves(1).rename(tmp_path / "kept")
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "kept")
    before = names(tmp_path / "kept")
    for step in (1, 2, 3):
        saves(step, keep=1)
    assert names(tmp_path / "run") == ["step-000001", "step-000003"]
    assert (tmp_path / "run" / "step-000001").is_symlink()
    assert names(tmp_path / "kept") == before
    assert load(tmp_path / "kept") == {"step": 1}


def test_a_linked_step_is_named_and_passed_over(saves, tmp_path, capsys):
    saves(1)
    saves(2).rename(tmp_path / "kept")
    (tmp_path / "run" / "step-000002").symlink_to(tmp_path / "kept")
    assert load(tmp_path / "run") == {"step": 1}
    assert "step-000002 is a link" in capsys.readouterr().err
    assert load(tmp_path / "run" / "step-000002") == {"step": 2}, "the user has named it"


def test_links_in_a_checkpoint_are_removed_and_not_followed(saves, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (saves(1) / "linked").symlink_to(tmp_path / "mine")
    saves(2, keep=1)
    assert names(tmp_path / "run") == ["step-000002"]
    assert names(tmp_path / "mine") == ["file"]


def test_what_cannot_be_removed_does_not_end_the_save(saves, tmp_path, monkeypatch, capsys):
    saves(1)

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert saves(2, keep=1).name == "step-000002"
    assert "could not be removed: Permission denied" in capsys.readouterr().err
    monkeypatch.undo()
    saves(3, keep=1)
    assert names(tmp_path / "run") == ["step-000003"]


# ------------------------------------------------------------------------------------------------ drafts


def draft(folder, run, machine=None, step=7):
    """What a kill leaves: nobody holds it."""
    path = drafts._named(folder, run, step)
    if machine:
        path = path.with_name(path.name.replace(drafts._machine(), machine))
    path.mkdir()
    (path / "model-00000.safetensors").write_text("half of it")
    return path


def test_drafts_that_nobody_writes_go(saves, tmp_path, capsys):
    folder = saves(1).parent
    mine, other = folders.run_in(folder), drafts.new_run()
    gone = [draft(folder, mine), draft(folder, mine, machine="0" * 8), draft(folder, other)]
    stay = [draft(folder, other, machine="0" * 8)]
    for name in (".draft-9-dead", ".draft-12", ".draft-" + "x" * 60, ".tmp", "notes"):
        stay.append(folder / name)
        stay[-1].mkdir()
    linked = drafts._named(folder, mine, 3)
    linked.symlink_to(tmp_path)
    saves(2)
    assert not any(path.exists() for path in gone)
    assert all(path.is_dir() for path in stay)
    assert linked.is_symlink()
    assert tmp_path.is_dir()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("same_run", [False, True])
def test_a_draft_that_is_being_written_stays(saves, same_run):
    """By another job, and by the same run, started twice by mistake."""
    folder = saves(1).parent
    other = Draft(folder, folders.run_in(folder) if same_run else drafts.new_run(), 5)
    saves(2, keep=1)
    assert other.path.is_dir()
    other.close()
    saves(3, keep=1)
    assert not other.path.exists()


def test_without_locks_only_the_own_runs_drafts_go(saves, monkeypatch):
    def none(fd, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    folder = saves(1).parent
    mine, other = draft(folder, folders.run_in(folder)), draft(folder, drafts.new_run())
    saves(2)
    assert not mine.exists()
    assert other.exists()


def test_a_failed_save_leaves_no_draft(saves, tmp_path, monkeypatch):
    saves(1)
    monkeypatch.setattr(save, "_write", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saves(2)
    assert names(tmp_path / "run") == ["step-000001"]


# ------------------------------------------------------------------------------------------------ kills


class KilledError(BaseException):
    """A kill, as far as Python code can tell."""


def test_a_kill_at_any_instant_of_removing(saves, tmp_path, monkeypatch):
    """After each system call that removes or renames: what is called step-... is whole, and the rest goes later."""
    folder = tmp_path / "run"
    calls = {name: getattr(os, name) for name in ("rename", "unlink", "rmdir")}
    for die_at in itertools.count(1):
        left = iter(range(die_at, -1, -1))

        def dying(name, left=left):
            def call(*args, **kwargs):
                if not next(left):
                    raise KilledError
                return calls[name](*args, **kwargs)

            return call

        saves(1)
        saves(2)
        with monkeypatch.context() as m, contextlib.suppress(KilledError):
            for name in calls:
                m.setattr(os, name, dying(name))
            saves(3, keep=1)
        done = next(left, 0) > 0
        for path in folder.glob("step-*"):
            assert load(path)
        assert load(folder) in ({"step": 3}, {"step": 2})
        saves(4, keep=1)
        assert names(folder) == ["step-000004"]
        shutil.rmtree(folder)
        if done:
            break
    assert die_at > 8


def test_a_half_removed_folder_is_no_checkpoint(saves, tmp_path, capsys):
    """As a removal by hand leaves it, or a copy: all is there but the manifest. Its name is not used again either."""
    saves(1)
    half = saves(2)
    (half / "manifest.json").unlink()
    before = names(half)
    assert load(tmp_path / "run") == {"step": 1}
    assert "step-000002 is not a checkpoint: manifest.json cannot be read: No such file" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(half)
    assert saves(2, keep=1).name == "step-000002-1"
    assert names(half) == before
    (half / "model-00000.safetensors").unlink()
    assert load(tmp_path / "run") == {"step": 2}


def test_a_name_that_is_taken(saves, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000001").symlink_to("nowhere")
    (tmp_path / "run" / "step-000001-1").write_text("a file")
    assert saves(1).name == "step-000001-2"
    assert load(tmp_path / "run") == {"step": 1}


def _saving(folder, begun):
    model, last = torch.nn.Linear(64, 64), 0
    with contextlib.suppress(CheckpointError):
        last = paceline.load(folder, model)["n"]
    begun.set()
    for n in itertools.count(last + 1):
        with torch.no_grad():
            model.weight.fill_(n)
        paceline.save(folder, model, step=n, extra={"n": n}, keep=2)


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kill_9_at_random_instants(tmp_path, kills):
    """What is called step-... is whole and the newest is never lost; and the next run leaves two checkpoints alone."""
    draw, newest, left = random.Random(kills), 0, 0
    for _ in range(kills):
        begun = processes._context.Event()
        process = processes._context.Process(target=_saving, args=(tmp_path, begun))
        process.start()
        begins = begun.wait(60)
        time.sleep(draw.random() * 0.15)
        process.kill()
        process.join()
        assert begins
        found = {}
        for path in tmp_path.glob("step-*"):
            saved = Checkpoint(path)
            for i in range(len(saved.manifest.files)):
                saved.check_file(i)
            found[saved.manifest.extra["n"]] = path
        assert max(found, default=0) >= newest
        newest = max(found, default=0)
        left += sum(path.name.startswith(".draft-") for path in tmp_path.iterdir())
        assert len(names(tmp_path)) <= 6, "what was left behind before has gone"
    model = torch.nn.Linear(64, 64)
    another_job()
    if newest:
        assert paceline.load(tmp_path, model) == {"n": newest}
        assert (model.weight == newest).all()
    paceline.save(tmp_path, model, step=newest + 1, keep=2)
    assert all(name.startswith("step-") for name in names(tmp_path))
    assert len(names(tmp_path)) <= 2
    assert left or kills < 100
