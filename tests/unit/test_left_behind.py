"""Saved and copied models and optimizers are plain ones: torch.save, copy.deepcopy and pickle."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.errors import MethodError
from rig import Rig, data, mlp, same, sgd, weights


def saved(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(one):
    return pickle.loads(pickle.dumps(one))


def step(model, optimizer, x, y):
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("spec", "again"),
    [("exact", saved), ("exact", pickled), ("exact", copy.deepcopy), ("local_sgd", saved), ("zero1", copy.deepcopy)],
)
def test_a_prepared_model_and_optimizer_come_back_as_plain_ones(spec, again):
    """What comes back trains by itself, and the original goes on as if nothing had happened."""
    batches = data(4)

    def work(comm, look):
        model = mlp()
        optimizer = sgd(model)
        rig = Rig(comm, model, optimizer, spec=spec)
        for k, (x, y) in enumerate(batches):
            if look and k == 2:
                before, steps = weights(model), rig.engine.ex.step
                other, others = again((model, optimizer)) if spec != "zero1" else (again(model), None)
                others = others or sgd(other)
                assert torch.equal(weights(other), before)
                assert others.step.__func__ is not optimizer.step.__func__
                want = mlp()
                want.load_state_dict(model.state_dict())
                plain = sgd(want)
                plain.load_state_dict(copy.deepcopy(others.state_dict()))
                for _ in range(2):
                    step(other, others, x, y)
                    step(want, plain, x, y)
                assert torch.equal(weights(other), weights(want)), "it does not train as a plain model does"
                assert torch.equal(weights(model), before)
                assert rig.engine.ex.step == steps
            step(model, optimizer, *rig.take(x, y))
        return weights(model)

    looked, plain = (threads.run(2, lambda comm, look=look: work(comm, look)) for look in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(looked, plain, strict=True))
    if spec != "local_sgd":
        same(looked)


def test_a_copy_does_not_keep_the_engine_alive():
    def work(comm):
        model = mlp()
        Rig(comm, model, sgd(model))
        hooks = list(model._forward_pre_hooks.values())
        assert hooks
        assert not set(hooks) & set(copy.deepcopy(model)._forward_pre_hooks.values())

    threads.run(1, work)


def test_a_saved_model_needs_no_paceline_to_be_read():
    def work(comm):
        model = nn.Linear(6, 3)
        Rig(comm, model, sgd(model))
        return pickle.dumps(model)

    [file] = threads.run(1, work)
    assert b"paceline" not in file
    assert pickle.loads(file)(torch.ones(2, 6)).shape == (2, 3)


def test_sharded_parameters_are_not_saved_as_an_object():
    def work(comm):
        model = mlp()
        Rig(comm, model, sgd(model), spec="zero3")
        with pytest.raises(MethodError, match="cannot be saved as an object"):
            saved(model)

    threads.run(2, work)
