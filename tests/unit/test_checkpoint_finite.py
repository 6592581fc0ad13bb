"""NaN and infinity in a checkpoint: said when it is saved, passed over when a folder is loaded, never kept alone."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import nn

import paceline
import threads
from paceline.checkpoint import save as saving
from paceline.checkpoint.reader import Checkpoint
from paceline.comm.threads import ThreadComm
from paceline.errors import CheckpointError
from paceline.session.objects import Objects
from rig import Rig, adamw, data, loop, mlp


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def job():
    model = mlp()
    opt = adamw(model)
    loop(data(1), model, opt)
    return model, opt


def spoil(x, value=math.nan):
    with torch.no_grad():
        x.view(-1)[-1] = value


def load(path):
    model = mlp(1)
    extra = paceline.load(path, model, adamw(model))
    return extra, model


def marked(path):
    return Checkpoint(path).manifest.not_finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_is_said_and_the_newest_good_one_is_loaded(tmp_path, capsys, value):
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1, extra={"n": 1})
    assert capsys.readouterr().err == ""
    spoil(model[2].weight, value)
    path = paceline.save(tmp_path, model, opt, step=2, extra={"n": 2})
    said = capsys.readouterr().err
    assert "step-000002" in said
    assert "NaN or infinity in 2.weight" in said
    assert marked(path) == ["model/2.weight"]
    assert load(tmp_path)[0] == {"n": 1}
    said = capsys.readouterr().err
    assert "step-000002 is not good to go on from" in said
    assert "2.weight" in said
    extra, loaded = load(path)
    assert extra == {"n": 2}
    assert not loaded[2].weight.isfinite().all()
    assert "is loaded as it is" in capsys.readouterr().err


def test_the_newest_good_one_is_kept(tmp_path):
    model, opt = job()
    for step in (1, 2):
        paceline.save(tmp_path, model, opt, step=step, keep=2)
    good = model[0].bias.detach().clone()
    spoil(model[0].bias)
    for step in (3, 4, 5, 6):
        paceline.save(tmp_path, model, opt, step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000005", "step-000006"]
    paceline.load(tmp_path, model, opt)
    assert torch.equal(model[0].bias, good)
    paceline.save(tmp_path, model, opt, step=7, keep=2)
    paceline.save(tmp_path, model, opt, step=8, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007", "step-000008"]


def test_a_spoilt_one_does_not_replace_a_good_one_of_its_step(tmp_path):
    model, opt = job()
    paceline.save(tmp_path, model, opt, step=1, extra={"n": 1})
    spoil(model[0].bias)
    paceline.save(tmp_path, model, opt, step=1, extra={"n": 2}, keep=1)
    assert load(tmp_path)[0] == {"n": 1}


def test_where_none_is_good_the_folder_is_refused(tmp_path):
    model, opt = job()
    spoil(model[0].bias)
    paths = [paceline.save(tmp_path, model, opt, step=step) for step in (1, 2)]
    with pytest.raises(CheckpointError, match=r"0\.bias") as error:
        load(tmp_path)
    assert str(paths[0]) in str(error.value)
    load(paths[0])


def test_what_the_optimizer_remembers_and_its_rates(tmp_path):
    model, opt = job()
    spoil(opt.state[model[0].weight]["exp_avg"])
    assert marked(paceline.save(tmp_path, model, opt, step=1)) == ["optimizer/0/0.weight/exp_avg"]
    model, opt = job()
    opt.state[model[0].weight]["step"].fill_(math.nan)
    assert marked(paceline.save(tmp_path, model, opt, step=2)) == ["optimizer/0/0.weight/step"]
    model, opt = job()
    opt.param_groups[0]["lr"] = math.nan
    assert marked(paceline.save(tmp_path, model, opt, step=3)) == ["AdamW's lr"]


def test_a_mask_may_be_infinite_and_nothing_else_is_marked(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    model.frozen = nn.Parameter(torch.tensor([-math.inf]), requires_grad=False)
    model.narrow = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    model.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model.none = nn.Parameter(torch.zeros(0, 3))
    assert marked(paceline.save(tmp_path, model, step=1)) == []
    spoil(model[1].running_mean)
    spoil(model.frozen)
    spoil(model.waves, complex(0, math.inf))
    model.narrow = nn.Parameter(torch.full((3,), math.nan).to(torch.float8_e4m3fn), requires_grad=False)
    found = marked(paceline.save(tmp_path, model, step=2))
    assert sorted(found) == ["model/1.running_mean", "model/frozen", "model/narrow", "model/waves"]


@pytest.mark.parametrize("spec", ["exact", "zero1", "zero3", "local_sgd"])
def test_of_any_worker(tmp_path, spec):
    """With sharded masters, and where one worker alone has it in weights of its own."""

    def work(comm):
        lane = ThreadComm(comm.room, comm.rank, "checkpoint")
        model = mlp().bfloat16()
        one = Rig(comm, model, adamw(model), spec=spec)
        x, y = one.take(*data(1)[0])
        nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        if spec == "local_sgd":
            if comm.rank == 1:
                spoil(model[0].weight)
        else:
            for state in one.optimizer.state.values():
                spoil(state["exp_avg"])
        return saving.save(tmp_path, Objects.sort([model, one.optimizer]), [one.engine], lane, step=1, extra={})

    path = threads.run(2, work)[0]
    found = marked(path)
    assert len(found) == len(set(found)) <= 10
    word = "worker/1/model/0.weight" if spec == "local_sgd" else "exp_avg"
    assert any(word in key for key in found), found
