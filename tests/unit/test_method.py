"""Methods, knobs and facts; and a part that comes from outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch

import paceline
from paceline import registry
from paceline.core.facts import Fact
from paceline.core.parts import Part, Reduced, Reducer, Sync
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.method import Method, method
from paceline.reducers.exact import Exact
from paceline.reducers.half import Half
from rig import alone, data, train


@pytest.fixture
def outside():
    """What a user writes in a file of their own: one class, one decorator."""

    @paceline.register
    @dataclass(kw_only=True)
    class Thrifty(Reducer):
        """Sends every element in turn, exactly; for this test alone."""

        name: ClassVar[str] = "thrifty"
        formula: ClassVar[str] = "2·n·s·(W−1)/W"
        gives: ClassVar[frozenset[Fact]] = frozenset({Fact.EXACT_MEAN})
        pieces: int = knob(2, "in how many pieces the vector travels", unit="pieces", low=1, high=64)
        style: Literal["plain", "fancy"] = knob("plain", "nothing at all")
        ratio: float = knob(0.5, "nothing either", above=0.0, high=1.0)

        async def mean(self, b, x, comm):
            for piece in x.chunk(self.pieces):
                piece.copy_(await comm.mean(piece.clone()))
            return Reduced(x)

    yield Thrifty
    registry._parts.pop("thrifty")


def test_a_part_from_outside_is_used_like_any_other(outside):
    assert "thrifty" in registry.parts("reducer")
    batches = data(6)
    for world_size in (1, 2, 3):
        for result in train(world_size, batches, spec="thrifty", knobs={"pieces": 3}):
            torch.testing.assert_close(result, alone(batches), rtol=2e-6, atol=2e-6)
    assert str(method("thrifty", pieces=3)) == "thrifty(pieces=3)"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"pieces": 0}, "pieces=0 is out of range.*\n.*pieces >= 1, <= 64"),
        ({"pieces": 65}, "out of range"),
        ({"pieces": 2.0}, "pieces is a int, not a float"),
        ({"pieces": True}, "wrong type"),
        ({"pieces": "2"}, "wrong type"),
        ({"style": "fancyy"}, "did you mean 'fancy'"),
        ({"ratio": 0.0}, "ratio > 0, <= 1"),
        ({"ratio": float("nan")}, "out of range"),
        ({"ratio": "0.1"}, "ratio is a float"),
        ({"peices": 2}, "did you mean 'pieces'"),
    ],
)
def test_knobs_are_strict(outside, knobs, words):
    with pytest.raises(MethodError, match=words):
        method("thrifty", **knobs)


def test_a_whole_number_will_do_for_a_real_one(outside):
    assert method("thrifty", ratio=1).reducer.ratio == 1.0


def test_names_parts_and_methods():
    assert method("exact").config() == Method().config()
    assert method(Half(dtype="bf16")).reducer.dtype == "bf16"
    assert str(method("half+every_step", dtype="bf16")) == "half(dtype=bf16)"
    assert str(Method()) == "exact"
    with pytest.raises(MethodError, match="is not a Sync"):
        Method(sync=Exact())
    with pytest.raises(MethodError, match="takes no knobs"):
        method("exact", rank=3)
    with pytest.raises(MethodError, match="unknown argument 'rank'"):
        method(Method(), rank=3)


def test_a_wrapper_wraps_what_is_named_after_it():
    grown = method("warmup+powersgd", schedule="rank", start=8, rank=32)
    assert str(grown) == "warmup(of=error_feedback(of=powersgd(rank=32)), schedule=rank, start=8.0)"
    assert str(method("local_sgd+warmup+qsgd", bits=2)) == "warmup(of=qsgd(bits=2)) + local_sgd"
    assert str(method("per_bucket+warmup+half")).startswith("per_bucket(of=warmup(of=half)")
    # What needs error feedback brings its own: to name it as well changes nothing.
    assert str(method("error_feedback+topk")) == str(method("topk"))
    with pytest.raises(MethodError, match=r"(?s)powersgd and warmup both answer.*a wrapper before what it wraps"):
        method("powersgd+warmup")


def test_two_parts_cannot_share_a_name():
    with pytest.raises(MethodError, match="two parts are called 'exact'"):

        @paceline.register
        @dataclass(kw_only=True)
        class Impostor(Reducer):
            name: ClassVar[str] = "exact"


def test_a_part_needs_a_name():
    with pytest.raises(MethodError, match="cannot be registered"):

        @paceline.register
        class Nobody(Part):
            pass


def test_facts_decide_what_goes_together():
    @dataclass(kw_only=True)
    class Loner(Sync):
        name: ClassVar[str] = "loner"
        refuses: ClassVar = {Fact.LEFTOVER: "it has nowhere to put leftovers; use exact"}

    @dataclass(kw_only=True)
    class Needy(Reducer):
        name: ClassVar[str] = "needy"
        needs: ClassVar = {Fact.WHOLE_MATRICES: "it eats nothing else; add one"}

    Method(sync=Loner())
    with pytest.raises(MethodError, match=r"loner does not go together with half.*\n.*nowhere to put leftovers"):
        Method(sync=Loner(), reducer=Half())
    with pytest.raises(MethodError, match="needy needs whole matrices"):
        Method(reducer=Needy())


def test_a_copy_has_a_memory_of_its_own():
    first = method("half", dtype="bf16")
    first.reducer.state["x"] = 1
    second = first.copy()
    assert second.config() == first.config()
    assert "x" not in second.reducer.state


def test_a_load_replaces_what_was_staged():
    state = Exact().state
    state["calls"] = 1
    state.load({"calls": 2}, [])
    assert state["calls"] == 2


def test_staged_state_becomes_real_on_commit_only():
    state = Exact().state
    state["a"] = 1
    state.commit()
    state["a"] = 2
    assert state["a"] == 2
    assert state.save([]) == {"a": 1}
    state.rollback()
    assert dict(state) == {"a": 1}
