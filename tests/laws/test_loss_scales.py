"""GradScaler where workers train alone: scales are agreed on with the weights, and an unknown one is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.errors import UsageError
from rig import Rig, close, data, mlp, same, sgd, weights


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=100)


def train(comm, spec, *, handed, knobs, steps=8):
    model = mlp()
    opt, mine = sgd(model), scaler()
    one = Rig(comm, model, opt, spec=spec, knobs=knobs, scaler=mine if handed else None)
    for step, (x, y) in enumerate(data(steps)):
        x, y = one.take(x, y)
        x = x * float("inf") if comm.rank == 1 and step == 2 else x
        mine.scale(cross_entropy(model(x), y)).backward()
        mine.step(opt)
        mine.update()
        opt.zero_grad()
    one.engine.settle()
    return mine.get_scale()


@pytest.mark.parametrize(
    ("spec", "knobs"),
    [
        ("local_sgd", {"every": 4}),
        ("gossip", {"every": 4}),
        ("gossip_lowbit", {}),
        ("any_batch_gossip", {"deadline_ms": 0, "micro": 6}),
    ],
    ids=["local_sgd", "gossip", "gossip_lowbit", "any_batch_gossip"],
)
def test_scales_are_agreed_on_where_weights_are(spec, knobs):
    assert threads.run(2, lambda comm: train(comm, spec, handed=True, knobs=knobs)) == [2048.0, 2048.0]


@pytest.mark.parametrize(("spec", "knobs"), [("local_sgd", {"every": 4}), ("topk", {})])
def test_one_that_was_not_handed_over_is_refused(spec, knobs):
    with pytest.raises(UsageError, match="needs to know your GradScaler"):
        threads.run(2, lambda comm: train(comm, spec, handed=False, knobs=knobs))


def test_what_a_scaler_does_to_gradients_is_not_compared():
    """It does the same on all workers: a step sends its buckets and nothing else."""

    def work(comm):
        model = mlp()
        opt, mine = sgd(model), scaler()
        one = Rig(comm, model, opt, scaler=mine)
        for x, y in data(3):
            x, y = one.take(x, y)
            before = comm.ops
            mine.scale(cross_entropy(model(x), y)).backward()
            mine.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            mine.step(opt)
            mine.update()
            opt.zero_grad()
        assert comm.ops - before == len(one.engine.buckets)

    threads.run(2, work)


@pytest.mark.parametrize("when", ["before", "after", "without"])
def test_what_the_user_adds_to_gradients_is_averaged(when):
    """A gradient of each worker's own, before or after `unscale_`, or with the scaler's own in `step`."""

    def loop(model, opt, mine, take):
        params = list(model.parameters())
        for x, y in data(4):
            x, y = take(x, y)
            mine.scale(cross_entropy(model(x), y)).backward()
            if when == "after":
                mine.unscale_(opt)
            more = model(x).square().mean()
            for p, g in zip(
                params, torch.autograd.grad(more if when == "after" else mine.scale(more), params), strict=True
            ):
                p.grad += g
            if when == "before":
                mine.unscale_(opt)
            mine.step(opt)
            mine.update()
            opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt, mine = sgd(model), scaler()
        return loop(model, opt, mine, Rig(comm, model, opt, scaler=mine).take)

    model = mlp()
    want = loop(model, sgd(model), scaler(), lambda *t: t)
    with warnings.catch_warnings(action="ignore"):
        close(same(threads.run(2, work)), want)


@pytest.mark.parametrize("spec", ["exact", "priority"])
def test_where_it_need_not_be_known_all_scales_stay_equal(spec):
    assert threads.run(2, lambda comm: train(comm, spec, handed=False, knobs={})) == [2048.0, 2048.0]
