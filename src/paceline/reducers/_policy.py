"""Policies: which reducer, at which setting, reduces this bucket now?

A policy is a reducer that leaves every mean to one inside it. It may turn a knob of that: the reducer itself is never
changed, because exchanges of other buckets may be under way. What is used is a copy that shares the reducer's state.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import knobs
from paceline.comm.protocol import Comm
from paceline.core.bucket import Bucket
from paceline.core.parts import Part, Reduced, Reducer
from paceline.errors import MethodError, nearest
from paceline.reducers._memory import vectors
from paceline.telemetry.events import Choice

_SIDE = 1 << 14  # of a matrix by which two settings are compared


@dataclass(kw_only=True)
class Policy(Reducer):
    """The base of policies. They override `choose`."""

    def choose(self, b: Bucket) -> Reducer:
        """The reducer for this bucket in this step. It depends only on what is the same on all workers."""
        raise NotImplementedError

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return await self.choose(b).mean(b, x, comm)

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return await self.choose(b).mine(b, x, comm)

    def sends(self, b: Bucket, world_size: int) -> int:
        return self.choose(b).sends(b, world_size)


class Dial:
    """A knob inside a reducer that a policy turns. Its value must be a number above zero."""

    def __init__(self, policy: Policy, of: Reducer, name: str, *, purpose: str, instead: str) -> None:
        """Raise if there is no such knob. purpose, instead: what the error says of it, and what else can be done."""
        path = _path(of, name)
        if path is None:
            known = [name for part in of.parts() for name in numbers(part)]
            raise MethodError(
                f"{policy.name}: {of.name} has no knob {f'{name!r} ' if name else ''}that could be {purpose}",
                why="its values must be positive numbers",
                do=nearest(name, known) if known else instead,
            )
        self.policy, self.name, self._path = policy.name, name, path
        part = self._owner(of)
        field = next(f for f in dataclasses.fields(part) if f.name == name)
        self.choices: Sequence[float] = knobs.choices(knobs.kinds(type(part))[name])
        self.whole = isinstance(getattr(part, name), int)
        self.least: float = field.metadata.get("low") or 0.0
        self.most: float = max(self.choices) if self.choices else field.metadata.get("high") or 0.0

    def _owner(self, of: Reducer) -> Reducer:
        """The part whose knob it is: the outermost that has one of this name."""
        return functools.reduce(getattr, self._path, of)

    def value(self, of: Reducer) -> float:
        """The reducer's own value."""
        value: float = getattr(self._owner(of), self.name)
        return value

    def legal(self, value: float) -> float:
        """The legal value nearest to this positive one: a whole number is rounded, a choice nearest by factor."""
        if self.choices:
            return min(self.choices, key=lambda choice: abs(math.log(choice / value)))
        return round(value) if self.whole else value

    def plain(self, value: float) -> float:
        """The same value as the knob's own type has it, where it can."""
        return int(value) if self.whole and value == int(value) else value

    def at(self, of: Reducer, value: float) -> Reducer:
        """A copy of the reducer with the knob at this value, which shares the reducer's state and scratch vectors."""
        turned = part = _copy(of)
        for field in self._path:
            inner = _copy(getattr(part, field))
            setattr(part, field, inner)
            part = inner
        setattr(part, self.name, value)
        return turned

    def check(self, of: Reducer, value: float) -> None:
        """Raise if the knob cannot have this value."""
        try:
            for part in self.at(of, value).parts():
                knobs.check(part)
        except MethodError as error:
            raise MethodError(f"{self.policy}: {error.what}", why=error.why, do=error.do) from None

    def check_low_and_high(self, of: Reducer, low: float, high: float) -> None:
        """Raise unless `low` is less compression than `high`: of one large matrix it must send more."""
        matrix = Bucket(0, [("matrix", torch.empty(_SIDE, _SIDE, device="meta"))], 2)
        sent = []
        for value in (low, high):
            self.check(of, value)
            sent.append(self._owner(self.at(of, value)).sends(matrix, 2))
        if sent[0] <= sent[1]:
            wrong = sent[0] < sent[1]
            raise MethodError(
                f"{self.policy}: low={low:g} compresses {'more than' if wrong else 'as much as'} high={high:g}",
                why=f"of a matrix of {_SIDE} rows and columns {self._owner(of).name} sends {sent[0]} bytes with "
                f"{self.name}={low:g} and {sent[1]} with {self.name}={high:g}",
                do="swap low and high" if wrong else "give a low= and a high= that differ",
            )

    def choice(self, step: int, layer: str, value: float, *, critical: bool, ratio: float | None) -> Choice:
        """What telemetry is told when a policy has chosen a value."""
        now = time.monotonic()
        return Choice(t=now, step=step, layer=layer, knob=self.name, value=value, critical=critical, ratio=ratio)


def numbers(part: Part) -> list[str]:
    """The knobs of a part, without those inside, that are positive numbers now."""
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return [name for name, v in values.items() if type(v) in (int, float) and v > 0]


def _path(part: Part, name: str) -> tuple[str, ...] | None:
    """The fields that lead to the outermost part with this knob. None: there is no such part."""
    if name in numbers(part):
        return ()
    for f in dataclasses.fields(part):
        inner = getattr(part, f.name)
        if isinstance(inner, Part) and (rest := _path(inner, name)) is not None:
            return (f.name, *rest)
    return None


def _copy(reducer: Reducer) -> Reducer:
    vectors(reducer)  # created before the copy, so that the copy shares them
    return copy.copy(reducer)
