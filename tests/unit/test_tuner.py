"""tuned=FILE: sizes searched for while training, agreed on, kept and used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

import threads
from paceline.errors import DataError, UsageError
from paceline.session.tuner import CANDIDATES, RUN_OFF, Tuner
from rig import Rig, data, mlp, same, sgd, weights

QUICK = {"candidates": 5, "window": 2}
STEPS = (5 + RUN_OFF) * 4 + 3


def tuned(world_size, spec, path, *, tuner=None, steps=STEPS, **knobs):
    """Trained with a tuner: (weights, the values it ended with, every cut) of each worker."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec, knobs=knobs)
        own = (tuner or Tuner)(one.engine, path, **QUICK)
        one.engine.on_forward(own.forward)
        cuts = []
        for x, y in data(steps):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            cuts.append((len(one.engine.buckets), dict(own.values)))
        model.state_dict()
        return weights(model), own.values, cuts

    return threads.run(world_size, work)


@pytest.mark.parametrize("spec", ["backward", "priority"])
def test_all_workers_try_the_same_and_learn_as_without(tmp_path, spec):
    results = tuned(3, spec, tmp_path / "tuned.json")
    assert all(r[1:] == results[0][1:] for r in results)
    tried = {json.dumps(values) for _, values in results[0][2]}
    assert len(tried) >= 4, "it never changed anything"

    def plain(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt)
        for x, y in data(STEPS):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    assert torch.equal(same([r[0] for r in results]), same(threads.run(3, plain)))


class Told(Tuner):
    """A clock that likes small buckets."""

    clock = 0.0

    def _moment(self):
        self.clock += next(iter(self.values.values()))
        return self.clock


def test_the_fastest_is_kept_and_used_again(tmp_path):
    path = tmp_path / "tuned.json"
    _, values, _ = tuned(2, "backward", path, tuner=Told)[0]
    known = json.loads(path.read_text())
    best = min(known["tried"], key=lambda one: one["step_ms"])
    assert known["values"] == values == best["values"]
    assert len(known["tried"]) == QUICK["candidates"]
    again = tuned(2, "backward", path, steps=1)
    assert [r[1] for r in again] == [values, values]


class Lucky(Told):
    """A clock that is the same for all, and now and then fast."""

    windows = 0

    def _next(self):
        self.windows += 1
        super()._next()

    def _moment(self):
        self.clock += 0.5 if self.windows == 2 else 1.0
        return self.clock


def test_who_was_lucky_once_is_not_kept(tmp_path):
    path = tmp_path / "tuned.json"
    _, values, cuts = tuned(2, "backward", path, tuner=Lucky)[0]
    known = json.loads(path.read_text())
    lucky = min(known["tried"], key=lambda one: one["step_ms"])["values"]
    assert [one["values"] for one in known["again"]] == [lucky, cuts[0][1], cuts[0][1], lucky]
    assert values == known["values"] == cuts[0][1] != lucky


def test_pieces_never_make_a_bucket_larger(tmp_path):
    """As with the knob in hand: the first candidate, when it runs off, is what ran at first."""
    results = tuned(2, "priority", tmp_path / "tuned.json")
    first, values = results[0][2][0]
    assert {cut for cut, tried in results[0][2] if tried == values} == {first}
    assert all(cut >= first for cut, _ in results[0][2])


class Switched(Told):
    """A clock that likes it flat."""

    def __init__(self, engine, *args, **kwargs):
        engine.comm.hierarchical = True
        super().__init__(engine, *args, **kwargs)

    def _moment(self):
        self.clock += 1 + self.values["hierarchical"]
        assert self.engine.comm.hierarchical == bool(self.values["hierarchical"])
        return self.clock


@pytest.mark.parametrize("spec", ["backward", "priority"])
def test_between_hosts_the_hierarchy_is_switched_too(tmp_path, spec):
    path = tmp_path / "tuned.json"
    results = tuned(2, spec, path, tuner=Switched)
    assert {values["hierarchical"] for _, values in results[0][2]} == {0.0, 1.0}
    assert [values["hierarchical"] for _, values, _ in results] == [0.0, 0.0]
    with pytest.raises(DataError, match="tuned for another job"):  # which has one host
        tuned(2, spec, path, steps=1)


def test_memory_moves_to_the_new_buckets(tmp_path):
    """Error feedback by parameter: a cut in the middle changes nothing, where a bucket is a tensor's worth anyway."""

    def run(cuts):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            one = Rig(comm, model, opt, spec="topk", knobs={"ratio": 0.2})
            for t, (x, y) in enumerate(data(8)):
                if t in cuts:
                    one.engine.recut(cuts[t])
                x, y = one.take(x, y)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            return weights(model)

        return same(threads.run(2, work))

    assert torch.equal(run({3: 100_000, 6: 200}), run({}))


def test_the_file_is_of_another_job(tmp_path):
    path = tmp_path / "tuned.json"
    tuned(2, "backward", path)
    with pytest.raises(DataError, match="tuned for another job"):
        tuned(3, "backward", path, steps=1)
    with pytest.raises(DataError, match="tuned for another job"):
        tuned(2, "priority", path, steps=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": {}, "values": {"bucket_mb": "x"}}', "\0"])
def test_a_file_of_something_else(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is not what a tuning run has written"):
        tuned(2, "backward", path, steps=1)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        tuned(2, "backward", tmp_path / "nowhere" / "tuned.json", steps=1)


def test_not_with_steps_that_differ(tmp_path):
    with pytest.raises(UsageError, match="does not go together with local_sgd"):
        tuned(2, "local_sgd", tmp_path / "tuned.json", steps=1)


SCRIPT = """
import torch, paceline
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = [torch.randn(8, 64) for _ in range({steps})]
model, optimizer, loader = paceline.prepare(model, optimizer, batches)
for x in loader:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(steps=(CANDIDATES + RUN_OFF) * 10 + 2))
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "-n", "2", "--method", "priority"]
    command += ["--set", "tuned=tuned.json", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
    assert first.returncode == 0, first.stderr
    assert "paceline: tuned: partition" in first.stderr
    assert json.loads((tmp_path / "tuned.json").read_text())["job"]["workers"] == 2
