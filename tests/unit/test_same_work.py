"""A job without a loader whose workers are all given the same is told so, once; nobody else is."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from paceline.session.hooks import watch_for_same_work


class Board:
    """What a board has of it: a place to write to, which all workers share."""

    def __init__(self, rank: int, shared: dict) -> None:
        self.rank, self.world_size, self.shared = rank, 2, shared

    def write(self, key: str, value: object) -> None:
        self.shared[key] = value

    def others(self, key: str) -> dict:
        return {r: self.shared[f"{key}/{r}"] for r in range(2) if r != self.rank and f"{key}/{r}" in self.shared}


def run(inputs, *, has_loader=lambda: False):
    """Both workers' forwards in turn. inputs(rank, i): of forward i."""
    shared: dict = {}
    models = [nn.Linear(3, 1) for _ in range(2)]
    for rank, model in enumerate(models):
        watch_for_same_work([model], Board(rank, shared), has_loader)
    for i in range(5):
        for rank, model in enumerate(models):
            model(input=inputs(rank, i)) if i % 2 else model(inputs(rank, i))
            with torch.no_grad():
                model(torch.ones(1, 3))
            copy.deepcopy(model)(torch.zeros(1, 3))
    assert not any(model._forward_pre_hooks for model in models), "the look is over"
    return shared


def some(seed):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def test_the_same_inputs_are_said_once(capfd):
    run(lambda rank, i: some(i))
    assert capfd.readouterr().err.count("paceline: all workers were given the same inputs") == 1


@pytest.mark.parametrize("share", [lambda rank, i: some(2 * i + rank), lambda rank, i: some(i if i < 1 else rank + 10)])
def test_shares_of_their_own_are_not(share, capfd):
    run(share)
    assert capfd.readouterr().err == ""


def test_with_a_loader_it_does_not_look(capfd):
    assert run(lambda rank, i: some(i), has_loader=lambda: True) == {}
    assert capfd.readouterr().err == ""
    assert threading.active_count() >= 1
