"""`prepare` as users call it, on real processes: several models, weights, accumulation, launchers, bad batches."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from marks import slow
from processes import run, values


def _data(n=48):
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))


def _gan(prepare):
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    opts = [torch.optim.Adam(maker.parameters(), lr=1e-2), torch.optim.Adam(judge.parameters(), lr=1e-2)]
    loader = DataLoader(_data(), batch_size=8)
    maker, judge, opts[0], opts[1], loader = prepare(maker, judge, *opts, loader)
    for real, _ in loader:
        noise = real[:, :4] * 2  # a function of the samples, so that the split does not matter
        judge_loss = judge(maker(noise).detach()).mean() - judge(real).mean()
        judge_loss.backward()
        opts[1].step()
        opts[1].zero_grad()
        (-judge(maker(noise)).mean()).backward()  # also leaves gradients in the judge, which are dropped
        opts[0].step()
        opts[0].zero_grad()
        opts[1].zero_grad()
    return [p.detach() for p in (*maker.parameters(), *judge.parameters())]


def gan(rank):
    import paceline

    return _gan(paceline.prepare)


def same(results, want, tol=1e-5):
    for result in results:
        for a, b in zip(result, want, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=tol, atol=tol)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_models_and_two_optimizers(world_size):
    same(values(run(world_size, gan)), _gan(lambda *things: things))


def _tokens(prepare, batch=8):
    """A loss over the tokens that are not padding (label 0): weighed by them, not by samples."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(_data(), batch_size=batch))
    for x, y in loader:
        cross_entropy(model(x), y, ignore_index=0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def tokens(rank, accumulate):
    import paceline

    def prepare(*things):
        return paceline.prepare(*things, weight=lambda batch: (batch[1] != 0).sum(), accumulate=accumulate)

    return _tokens(prepare, 8 // accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_tokens(accumulate):
    same(values(run(2, tokens, accumulate)), _tokens(lambda *things: things))


def _held(prepare, hold):
    """Every second batch is held back: pairs count as one batch of twice the size."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(_data(), batch_size=8 if hold else 16))
    for i, (x, y) in enumerate(loader):
        if hold and i % 2 == 0:
            with hold(optimizer):
                cross_entropy(model(x), y).backward()
            continue
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def held(rank):
    import paceline

    return _held(paceline.prepare, paceline.no_sync)


def test_hold_is_the_larger_batch():
    same(values(run(2, held)), _held(lambda *things: things, None))


def bad_label(rank):
    import paceline

    data = _data()
    data.tensors[1][20] = 7
    model = nn.Linear(6, 3)
    model, optimizer, loader = paceline.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=6), timeout=10.0
    )
    for x, y in loader:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_b50_a_label_out_of_range_names_worker_step_and_samples():
    outcomes = run(3, bad_label)
    assert outcomes[1].error == "IndexError"
    for o in (outcomes[0], outcomes[2]):
        assert o.error == "PeerError"
        assert "worker 1 failed in step 3: IndexError" in o.message
        assert "samples [20, 21]" in o.message


def empty_data(rank, n):
    import paceline

    model = nn.Linear(6, 3)
    paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(_data(n), batch_size=6))


@pytest.mark.parametrize("n", [0, 2])
def test_b49_too_little_data_is_refused_on_all_workers(n):
    if n == 0:
        empty = run(2, no_data)
        assert all(o.error == "DataError" for o in empty), empty
        return
    for o in run(3, empty_data, n):
        assert o.error == "DataError", o
        assert "2" in o.message
        assert "3" in o.message


def no_data(rank):
    import paceline

    model = nn.Linear(6, 3)
    paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Nothing(), batch_size=6))


class Nothing(torch.utils.data.Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, i):
        raise IndexError(i)


SCRIPT = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
if paceline.rank() == 0:
    print("RESULT", paceline.world_size(), float(sum(p.double().sum() for p in model.parameters())))
"""


def scripted(rank, script):
    """The script by itself, in a process that has torch imported already."""
    return float(sum(p.double().sum() for p in runpy.run_path(str(script))["model"].parameters()))


@pytest.mark.parametrize(
    ("world_size", "launcher"),
    [(2, ["paceline", "run", "--workers", "2"]), slow(3, ["torchrun", "--standalone", "--nproc-per-node", "3"])],
    ids=["paceline", "torchrun"],
)
def test_the_same_script_alone_under_paceline_run_and_under_torchrun(tmp_path, world_size, launcher):
    script = tmp_path / "train me.py"
    script.write_text(SCRIPT)
    place = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in place}
    command = [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:], str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "paceline: global batch 8" in done.stderr
    line = next(line for line in done.stdout.splitlines() if "RESULT" in line)
    _, workers, total = line[line.index("RESULT") :].split()
    assert int(workers) == world_size
    [alone] = values(run(1, scripted, script, env=dict.fromkeys(place, "")))
    assert abs(float(total) - alone) < 1e-5
