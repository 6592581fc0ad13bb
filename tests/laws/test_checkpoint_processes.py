"""paceline.save and paceline.load between real processes, and `paceline export` of what they wrote."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import processes
from marks import slow
from paceline.checkpoint.reader import Checkpoint
from paceline.tools.cli.main import app
from rig import adamw, close, data, same


def _job(rank, layout, folder, saves, loads, steps):
    import paceline

    torch.manual_seed(0 if not loads else 9)
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.1), nn.Tanh(), nn.Linear(40, 3)).bfloat16()
    opt = adamw(model)
    model, opt = paceline.prepare(model, opt, method=layout, bucket_mb=0.0005)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    if loads:
        scheduler.load_state_dict(paceline.load(folder, model, opt)["scheduler"])
    for step, (x, y) in enumerate(data(max(steps, default=-1) + 1)):
        if step not in steps:
            continue
        share = slice(rank * 12 // paceline.world_size(), (rank + 1) * 12 // paceline.world_size())
        cross_entropy(model(x[share].bfloat16()), y[share]).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        if step == saves:
            path = paceline.save(folder, model, opt, extra={"scheduler": scheduler.state_dict()}, keep=1)
            assert path.name == f"step-{step + 1:06d}"
    return torch.cat([v.flatten() for v in model.state_dict().values()]).float()


def job(world_size, *args):
    return same(processes.values(processes.run(world_size, _job, *args)))


@pytest.mark.parametrize("layout", [slow("replicated"), "zero3"])
def test_to_go_on_is_not_to_have_stopped(tmp_path, layout):
    """With dropout, a schedule, 16 bits: bit for bit on as many workers; and it can be exported."""
    straight = job(2, layout, tmp_path, 2, False, range(6))
    assert torch.equal(job(2, layout, tmp_path, None, True, range(3, 6)), straight)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    out = tmp_path / "out.safetensors"
    assert CliRunner().invoke(app, ["export", str(tmp_path), str(out), "--dtype", "fp32"]).exit_code == 0
    plain = load_file(out)
    exported = torch.cat([plain[name].flatten() for name in ("0.weight", "0.bias", "3.weight", "3.bias")])
    weights = job(3, "zero2", tmp_path, None, True, range(0))
    assert torch.equal(exported.bfloat16().float(), weights), "on other workers, with another layout"
    if layout != "replicated":
        assert not torch.equal(exported, weights), "the masters know more"
    close(exported, weights, tol=1e-2)


def _disk(rank, folder):
    """One worker's disk is full."""
    import errno
    import os

    import paceline
    from paceline.checkpoint.tensors import TensorFile

    model = nn.Linear(6, 3)
    opt = adamw(model)
    model, opt = paceline.prepare(model, opt, method="zero2")
    paceline.save(folder, model, opt, step=1)
    if rank == 1:

        def full(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        TensorFile._write = full
    return paceline.save(folder, model, opt, step=2) is None


def test_a_full_disk_of_one_worker_is_heard_by_all(tmp_path):
    assert processes.values(processes.run(2, _disk, tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def _saving(rank, folder, last):
    """Save for ever, or `last` times."""
    import contextlib

    import paceline
    from paceline.errors import CheckpointError

    model = nn.Linear(64, 64)
    opt = adamw(model)
    model, opt = paceline.prepare(model, opt, method="zero3")
    n = 0
    with contextlib.suppress(CheckpointError):
        n = paceline.load(folder, model, opt)["n"]
    (folder.parent / f"begun-{rank}").touch()
    for _ in itertools.count() if last is None else range(last):
        n += 1
        paceline.save(folder, model, opt, step=n, extra={"n": n}, keep=2)
    return n


def _killed(folder, whom, delay_s):
    """Start two workers that save for ever, kill some, and see that the others end."""
    marks = [folder.parent / f"begun-{rank}" for rank in range(2)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    workers, pipes = [], []
    for rank in range(2):
        own = {**env, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        here, there = processes._context.Pipe()
        args = (rank, own, _saving, (folder, None), there)
        workers.append(processes._context.Process(target=processes._worker, args=args))
        workers[-1].start()
        pipes.append(here)
    try:
        for _ in range(6000):
            if all(mark.exists() for mark in marks):
                break
            time.sleep(0.01)
        time.sleep(delay_s)
        for rank in whom:
            workers[rank].kill()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive(), "a survivor waits for ever"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_of_workers_while_they_save(tmp_path):
    """Of worker 0, of the other, of both: what is called step-... is whole, and the next job leaves nothing else."""
    folder, draw, newest = tmp_path / "run", random.Random(0), 0
    for turn in range(9):
        _killed(folder, ([0], [1], [0, 1])[turn % 3], draw.random() * 0.3)
        found = []
        for path in folder.glob("step-*"):
            saved = Checkpoint(path)
            for i in range(4):
                saved.check_file(i)
            found.append(saved.manifest.extra["n"])
        assert max(found, default=0) >= newest
        newest = max(found, default=0)
    assert processes.values(processes.run(2, _saving, folder, 2)) == [newest + 2] * 2
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{newest + n:06d}" for n in (1, 2)]


def _wrong(rank, folder):
    import paceline

    model = nn.Linear(6, 4)
    opt = adamw(model)
    model, opt = paceline.prepare(model, opt, method="zero3")
    paceline.load(folder, model, opt)


def test_a_foreign_model_ends_every_worker_with_the_same_words(tmp_path):
    processes.values(processes.run(2, _disk, tmp_path))
    for outcome in processes.run(2, _wrong, tmp_path):
        assert outcome.error == "CheckpointError"
        assert "weight is float32[3, 6] in it, float32[4, 6] here" in outcome.message
