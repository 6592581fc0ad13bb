"""Two workers with their tensors on one CUDA device. NCCL wants a device for each, so gloo carries them here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import processes
from paceline.telemetry.pace import Pace, clock_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def job(rank, method, optimizer, knobs):
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(384, 64), torch.randint(0, 8, (384,))), batch_size=32)
    model, opt, loader = paceline.prepare(model, opt, loader, method=method, backend="gloo", bucket_mb=0.1, **knobs)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        (loss * float("nan") if (rank, step) == (1, 5) else loss).backward()
        opt.step()
        opt.zero_grad()
    with paceline.consensus():
        return nn.utils.parameters_to_vector(model.parameters()).cpu()


def trained(method, optimizer, **knobs):
    results = processes.values(processes.run(2, job, method, optimizer, knobs))
    assert torch.equal(results[0], results[1])
    return results[0]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("reducer", ["exact", "qsgd", "powersgd"])
def test_priority_changes_nothing_but_the_order(optimizer, reducer):
    """A step of NaN on one worker, which counts on none, is among them."""
    whole = trained(reducer, optimizer)
    assert whole.isfinite().all()
    urgent = trained(f"{reducer}+priority", optimizer, partition=0.05, credit=0.0)
    assert torch.equal(whole, urgent) or (reducer == "qsgd" and urgent.isfinite().all())  # whose dice fall on pieces


@pytest.mark.parametrize("method", ["local_sgd", "sma", "gossip", "delayed", "topk", "onebit_adam", "measured"])
def test_others_run(method):
    assert trained(method, "AdamW" if method == "onebit_adam" else "SGD").isfinite().all()


def test_a_lap_is_read_when_the_device_has_got_there():
    pace, x = Pace(clock_of(torch.device("cuda"))), torch.randn(4096, 4096, device="cuda")
    pace.begin(4)
    x @ x
    with pace.without(waiting=True):
        x @ x
    pace.backward_ended()
    pace.end()
    torch.cuda.synchronize()
    [lap] = pace.take()
    assert lap.samples == 4
    assert lap.computed_s > 0
    assert lap.waited_s > 0


SCRIPT = """
import os, sys
sys.path[:0] = {path!r}
from test_workers_cuda import job
job(int(os.environ["RANK"]), "priority", "SGD", {{}})
"""


def test_a_trace_of_streams(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        SCRIPT.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    )
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "-n", "2", "--trace", str(trace)]
    ended = subprocess.run([*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    sent = [e for e in events if e["ph"] == "X" and "bucket" in e["args"]]
    assert len({e["pid"] for e in sent}) == 2
    assert all(0 < e["dur"] < 60e6 for e in sent)
