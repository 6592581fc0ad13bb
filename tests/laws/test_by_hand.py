"""Gradients made or changed by hand: exchanged where no hook told of them, averaged where workers differ."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.core.by_hand import fingerprint
from paceline.errors import MismatchError
from rig import Rig, adamw, close, data, mlp, same, sgd, weights


def assign(model, loss, x, y):
    """No backward at all: `torch.autograd.grad`, and the result into p.grad."""
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g


def assign_some(model, loss, x, y):
    """The first layer's by hand, the others' by backward."""
    first = list(model[0].parameters())
    grads = torch.autograd.grad(loss, first, retain_graph=True)
    loss.backward(inputs=[p for p in model.parameters() if all(p is not q for q in first)])
    for p, g in zip(first, grads, strict=True):
        p.grad = g


def assign_some_before(model, loss, x, y):
    first = list(model[0].parameters())
    for p, g in zip(first, torch.autograd.grad(loss, first, retain_graph=True), strict=True):
        p.grad = g
    loss.backward(inputs=[p for p in model.parameters() if all(p is not q for q in first)])


def add(model, loss, x, y):
    """A second loss, added to what backward has left."""
    loss.backward()
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(model(x).square().mean(), params), strict=True):
        p.grad += g


def add_anew(model, loss, x, y):
    loss.backward()
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(model(x).square().mean(), params), strict=True):
        p.grad = p.grad + g


def scale(model, loss, x, y):
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(0.5)


def replace(model, loss, x, y):
    loss.backward()
    for p in model.parameters():
        p.grad = p.grad.sign() * 0.1


def leave_out(model, loss, x, y):
    loss.backward()
    model[0].weight.grad = None


WAYS = [assign, assign_some, assign_some_before, add, add_anew, scale, replace, leave_out]


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def clip_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def nothing(model):
    pass


def trained(way, clip, take, model, opt, size=12):
    for x, y in data(5, size=size):
        x, y = take(x, y)
        way(model, cross_entropy(model(x), y), x, y)
        clip(model)
        opt.step()
        opt.zero_grad()


def compare(way, clip, spec="exact", *, world_size=2, knobs=None, size=12, make=sgd, **rig):
    def work(comm):
        model = mlp()
        opt = make(model)
        one = Rig(comm, model, opt, spec=spec, knobs=knobs, **rig)
        trained(way, clip, one.take, model, opt, size)
        one.engine.settle()
        return weights(model)

    with warnings.catch_warnings(action="ignore"):
        results = threads.run(world_size, work)
    model = mlp()
    trained(way, clip, lambda *t: t, model, make(model), size)
    close(same(results), weights(model))


@pytest.mark.parametrize("clip", [nothing, clip_norm, clip_value])
@pytest.mark.parametrize("way", WAYS)
def test_exact(way, clip):
    compare(way, clip)


@pytest.mark.parametrize("way", [assign, assign_some, assign_some_before, add])
def test_shares_of_different_size(way):
    compare(way, clip_norm, world_size=3, size=11)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("spec", "knobs"),
    [("priority", {}), ("topk", {"ratio": 1.0}), ("onebit_adam", {"warmup": 100})],
    ids=["priority", "topk", "onebit_adam"],
)
def test_other_methods(way, spec, knobs):
    compare(way, clip_norm, spec, knobs=knobs, make=adamw if spec == "onebit_adam" else sgd)


@pytest.mark.parametrize("way", [assign, assign_some, assign_some_before])
@pytest.mark.parametrize("spec", ["zero1", "zero2"])
@pytest.mark.parametrize("clip", [nothing, clip_norm])
def test_sharded(way, spec, clip):
    compare(way, clip, spec)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_of_micro_batches(accumulate):
    def loop(model, opt, take, divide):
        params = list(model.parameters())
        for i, (x, y) in enumerate(data(6)):
            x, y = take(x, y)
            grads = torch.autograd.grad(cross_entropy(model(x), y) / divide, params)
            for p, g in zip(params, grads, strict=True):
                p.grad = g if p.grad is None else p.grad + g
            if divide == 1 or (i + 1) % divide == 0:
                opt.step()
                opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return loop(model, opt, Rig(comm, model, opt, accumulate=accumulate).take, 1)

    model = mlp()
    with warnings.catch_warnings(action="ignore"):
        close(same(threads.run(2, work)), loop(model, sgd(model), lambda *t: t, accumulate))


def test_what_is_added_to_the_sum_of_a_window():
    def loop(model, opt, take, divide):
        params = list(model.parameters())
        for i, (x, y) in enumerate(data(6)):
            x, y = take(x, y)
            (cross_entropy(model(x), y) / divide).backward()
            if i % 2:
                for p, g in zip(params, torch.autograd.grad(model(x).square().mean(), params), strict=True):
                    p.grad += g
            if divide == 1 or i % 2:
                opt.step()
                opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return loop(model, opt, Rig(comm, model, opt, accumulate=2).take, 1)

    model = mlp()
    with warnings.catch_warnings(action="ignore"):
        close(same(threads.run(2, work)), loop(model, sgd(model), lambda *t: t, 2))


def test_a_gradient_that_one_worker_takes_away_counts_as_zero():
    """Each worker leaves another layer out, and changes nothing else."""

    def loop(model, opt, take, rank):
        for x, y in data(3):
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            for r, layer in enumerate((model[0], model[2])):
                if rank == r:
                    layer.weight.grad = None
                elif rank is None:
                    layer.weight.grad.mul_(0.5)
            opt.step()
            opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return loop(model, opt, Rig(comm, model, opt).take, comm.rank)

    model = mlp()
    with warnings.catch_warnings(action="ignore"):
        close(same(threads.run(2, work)), loop(model, sgd(model), lambda *t: t, None))


def test_before_weights_are_what_is_agreed_on():
    """Post-local SGD exchanges gradients at first."""
    compare(add, clip_norm, "post_local_sgd", knobs={"start": 100})


def test_a_round_of_micro_batches():
    """The round ends with the gradients that are about to be clipped."""
    compare(assign, clip_norm, "any_batch", knobs={"deadline_ms": 1e-3, "micro": 6})


def test_one_worker_alone_that_takes_a_gradient_away_is_named():
    """The others do not compare anything, and the next exchange tells that they are elsewhere."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        take = Rig(comm, model, opt).take
        for x, y in data(3):
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            if comm.rank == 1:
                model[0].weight.grad = None
            opt.step()
            opt.zero_grad()

    with pytest.raises(MismatchError, match="worker 1"):
        threads.run(2, work)


def test_fingerprints_tell_bits_apart():
    x = torch.randn(100)
    y = x.clone()
    y[17] = torch.nextafter(y[17], torch.tensor(10.0))
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x) != fingerprint(y)
    assert fingerprint(x.to(torch.complex64)) != fingerprint(y.to(torch.complex64))
    assert fingerprint(x.bfloat16()) == fingerprint(x.bfloat16())
