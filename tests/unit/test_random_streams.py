"""The random numbers of a script: each worker's own, from worker 0's and its rank, saved and restored."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import paceline
from paceline.comm.single import SingleComm
from paceline.data import random_streams
from paceline.data.random_streams import SideStreams
from paceline.errors import DataError
from processes import run, values
from rig import mlp, sgd


def draw():
    """Numbers of all streams of this process, normal ones too: two of each, because they are made in pairs."""
    return [
        torch.rand(3).tolist(),
        torch.randn(2).tolist(),
        np.random.rand(3).tolist(),
        [np.random.randn()],
        [random.random(), random.gauss(0, 1)],
    ]


def seed(number=0):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.fixture(autouse=True)
def as_before():
    """The other tests of this process draw what they would have drawn."""
    before = random_streams.states()
    yield
    random_streams.restore(before)


def prepared(rank, **arguments):
    seed()
    model = mlp()
    paceline.prepare(model, sgd(model), **arguments)
    first = draw()
    seed(5)
    own = draw()  # the script's own word
    other = mlp()
    paceline.prepare(other, sgd(other), **arguments)
    return first, own, draw()


def plain(number=0):
    seed(number)
    return draw()


def test_each_worker_draws_numbers_of_its_own_and_worker_0_those_of_one_process():
    two, three = values(run(2, prepared)), values(run(3, prepared))
    assert three[:2] == two, "the rule depends on the number of workers"
    for first, own, again in three:
        assert own == plain(5), "the script seeds again: its own word"
        assert first != again
    want = plain()
    assert three[0][0] == want
    for kind in range(len(want)):
        assert len({str(first[kind]) for first, _, _ in three}) == 3, "two workers draw alike"
        assert len({str(again[kind]) for _, _, again in three}) == 3, "two workers draw alike after another seed"


def _as_seeded(rank):
    return prepared(rank, random="as_seeded")


def test_as_seeded_leaves_the_streams_alone():
    for first, _, _ in values(run(2, _as_seeded)):
        assert first == plain()


def test_a_world_of_one_leaves_the_streams_alone():
    seed()
    random_streams.separate(SingleComm())
    assert draw() == plain()


@pytest.mark.parametrize(("kind", "reseed"), [(0, torch.manual_seed), (2, np.random.seed), (3, random.seed)])
def test_any_stream_may_be_the_seeded_one(kind, reseed):
    origins = []
    for number in (3, 4, 3):
        reseed(number)
        origins.append(random_streams.origins(random_streams.states()).tolist())
    assert origins[0][kind] == origins[2][kind] != origins[1][kind]


def test_they_are_saved_and_restored():
    seed(1)
    torch.randn(3), np.random.randn(), random.gauss(0, 1)  # a normal number of each pair is kept back
    saved = random_streams.states()
    want = draw()
    random_streams.restore(saved)
    assert draw() == want


@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind in ("cpu", "numpy", "python") for change in (lambda x: x[:-1], lambda x: x.float())]
    + [("numpy", lambda x: x.fill_(-1)), ("python", lambda x: x.fill_(700))],
)
def test_a_damaged_state_is_refused_by_name(kind, change):
    saved = random_streams.states()
    with pytest.raises(DataError, match=f"{kind} random numbers is damaged"):
        random_streams.restore({kind: change(saved[kind].clone())})


def test_side_streams_do_not_disturb_the_process():
    seed(2)
    want = draw()
    seed(2)
    a, b, other = SideStreams(1, 2), SideStreams(1, 2), SideStreams(1, 3)
    with a.entered():
        first = draw()
    with b.entered():
        assert draw() == first
    with other.entered():
        assert draw() != first
    with a.entered():
        assert draw() != first
    assert draw() == want


def _saving(rank, folder, world_size):
    seed(7)
    model = mlp()
    optimizer = sgd(model)
    paceline.prepare(model, optimizer)
    draw()
    if world_size == 2:
        paceline.save(folder, model, optimizer, step=1)
    else:
        paceline.load(folder, model, optimizer)
    return draw()


def _loading(rank, folder):
    model = mlp()
    optimizer = sgd(model)
    paceline.prepare(model, optimizer)
    paceline.load(folder, model, optimizer)
    return draw()


def test_a_checkpoint_brings_every_worker_its_own_stream(tmp_path):
    saved = values(run(2, _saving, tmp_path, 2))
    assert values(run(2, _loading, tmp_path)) == saved
    more = [values(run(3, _loading, tmp_path)) for _ in range(2)]
    assert more[0] == more[1], "another number of workers follows the same rule each time"
    assert more[0][0] == saved[0]
    assert len({str(drawn) for drawn in more[0]}) == 3
