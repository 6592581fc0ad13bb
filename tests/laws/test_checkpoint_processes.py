"""paceline.save and paceline.load between real processes, and `paceline export` of what they wrote."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import processes
from paceline.cli.main import app
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
        share = slice(rank * 12 // paceline.world(), (rank + 1) * 12 // paceline.world())
        cross_entropy(model(x[share].bfloat16()), y[share]).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        if step == saves:
            path = paceline.save(folder, model, opt, extra={"scheduler": scheduler.state_dict()}, keep=1)
            assert path.name == f"step-{step + 1:06d}"
    return torch.cat([v.flatten() for v in model.state_dict().values()]).float()


def job(world, *args):
    return same(processes.values(processes.run(world, _job, *args)))


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
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
