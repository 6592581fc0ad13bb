"""A group is held by reference: when it becomes another, whoever holds it sees the other's workers and lanes."""

from __future__ import annotations

import multiprocessing.reduction

import pytest

from paceline.comm.group import Group
from paceline.comm.single import SingleComm
from paceline.errors import UsageError


def group(rank, world_size, made, **more):
    def make(name):
        made.append(name)
        return SingleComm()

    return Group(rank, world_size, make, **more)


def test_lanes_are_made_once_and_anew_in_every_epoch():
    made = []
    one = group(0, 3, made)
    assert one.lane("a") is one.lane("a")
    before = one.lane("a")
    one.become(group(1, 2, made, epoch=1, joined=(1,)))
    assert (one.rank, one.world_size, one.epoch, one.source) == (1, 2, 1, 0)
    assert one.lane("a") is not before
    assert made == ["a", "a"]


def test_joiners_get_their_state_from_the_lowest_member():
    assert group(0, 3, [], joined=(0, 1)).source == 2
    assert group(0, 3, []).source == 0


def test_a_process_of_a_data_loader_has_the_numbers_and_no_lanes():
    copy = multiprocessing.reduction.ForkingPickler.loads(
        multiprocessing.reduction.ForkingPickler.dumps(group(2, 5, [], epoch=3))
    )
    assert (copy.rank, copy.world_size, copy.epoch) == (2, 5, 3)
    with pytest.raises(UsageError, match="data loader asked for the lane 'control'"):
        copy.lane("control")
