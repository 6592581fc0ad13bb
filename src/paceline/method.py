"""A method: one part for each of the six questions, checked to go together before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline import registry
from paceline.balances.even import Even
from paceline.core.facts import Fact
from paceline.core.parts import AXES, Balance, Layout, Membership, Order, Part, Reducer, Sync
from paceline.errors import MethodError, nearest
from paceline.knobs import fresh, kinds
from paceline.memberships.fixed import Fixed
from paceline.orders.backward import Backward
from paceline.reducers.exact import Exact
from paceline.sharding.replicated import Replicated
from paceline.syncs.every_step import EveryStep


@dataclass(kw_only=True)
class Method:
    """What happens between `backward` and the next step. Six axes; what is not named is the plain one."""

    reducer: Reducer = field(default_factory=Exact)
    sync: Sync = field(default_factory=EveryStep)
    layout: Layout = field(default_factory=Replicated)
    order: Order = field(default_factory=Backward)
    balance: Balance = field(default_factory=Even)
    membership: Membership = field(default_factory=Fixed)

    def __post_init__(self) -> None:
        for axis, base in AXES.items():
            if not isinstance(part := getattr(self, axis), base):
                raise MethodError(f"{axis}={part!r} is not a {base.__name__}")
        self.check()

    def axes(self) -> dict[str, Part]:
        return {axis: getattr(self, axis) for axis in AXES}

    def parts(self) -> Iterator[Part]:
        """Every part, wrapped ones included."""
        for part in self.axes().values():
            yield from part.parts()

    def copy(self) -> Method:
        """The same method with parts of its own, which remember nothing yet."""
        return Method(**{axis: fresh(part) for axis, part in self.axes().items()})

    def config(self) -> dict[str, Any]:
        return {axis: part.config() for axis, part in self.axes().items()}

    def check(self, facts: frozenset[Fact] | None = None) -> None:
        """Do the parts go together? `facts` are the job's (`optimizer:SGD`); None: there is no job yet to ask."""
        if self.balance.measures_speed() and self.sync.is_async:
            raise MethodError(
                f"{self.balance.name} does not go together with {self.sync.name}",
                why="its workers keep their own pace: there is no batch before which all could change their shares",
                do="use a sync whose workers step together, as every_step; or leave shares equal",
            )
        if self.sync.open_ended and (self.balance.measures_speed() or self.balance.adapts):
            raise MethodError(
                f"{self.balance.name} does not go together with {self.sync.name}",
                why="both decide how many samples a worker computes in a step",
                do="use one of them: the other axis plain",
            )
        job = dict.fromkeys(facts or (), "the job")
        for axis, whole in self.axes().items():
            others = [top for other, top in self.axes().items() if other != axis]
            around = job | {fact: giver for top in others for fact, giver in _given_by(top).items()}
            for part in whole.parts():
                inside = _given(p for p in part.parts() if p is not part)  # beside it in a wrapper is not with it
                for fact, reason in part.refuses.items():
                    if giver := inside.get(fact) or around.get(fact):
                        raise _refused(f"{part.name} does not go together with {giver}", reason)
                for fact, reason in part.needs.items():
                    unknown = facts is None and fact.of_optimizer
                    if not unknown and fact not in around | _given(whole.parts()):
                        raise _refused(f"{part.name} needs {fact.value}, which nothing here gives", reason)

    def __str__(self) -> str:
        plain = {axis: cls() for axis, cls in _PLAIN.items()}
        named = [_text(p) for axis, p in self.axes().items() if p.config() != plain[axis].config()]
        return " + ".join(named) or _text(self.reducer)


_PLAIN: dict[str, type[Part]] = {
    "reducer": Exact,
    "sync": EveryStep,
    "layout": Replicated,
    "order": Backward,
    "balance": Even,
    "membership": Fixed,
}


def _refused(what: str, reason: str) -> MethodError:
    """A part says why, and behind the last semicolon what to do."""
    why, _, do = reason.rpartition("; ")
    return MethodError(what, why=why, do=do)


def _given(parts: Iterable[Part]) -> dict[Fact, str]:
    return {fact: part.name for part in parts for fact in part.gives}


def _given_by(top: Part) -> dict[Fact, str]:
    """The facts of a part and of those inside it, without those that it says are not true of the whole."""
    return {fact: giver for fact, giver in _given(top.parts()).items() if fact in top.facts()}


def _text(part: Part) -> str:
    changed = [
        f"{f.name}={_text(v) if isinstance(v, Part) else v}"
        for f in dataclasses.fields(part)
        if (v := getattr(part, f.name)) != f.default
    ]
    return part.name + (f"({', '.join(changed)})" if changed else "")


def method(spec: str | Method | Part, **knobs: Any) -> Method:
    """A method from its name (`"powersgd"`, `"local_sgd+qsgd"`), a part, or a Method; knobs go to the part that has
    them. A wrapper wraps what is named after it: `"warmup+powersgd"`.
    """
    if isinstance(spec, Method):
        if knobs:
            raise MethodError(
                f"unknown argument {sorted(knobs)[0]!r}", why="a Method's knobs are set on its parts, not beside it"
            )
        return spec
    if isinstance(spec, Part):
        return method(Method(**spec.recipe()), **knobs)  # type: ignore[arg-type]
    if not isinstance(spec, str):
        raise MethodError(f"method={spec!r} is not a method", do="give a name, a Part or a paceline.Method")
    classes = [registry.find(name.strip()) for name in spec.split("+")]
    chosen: dict[str, Part] = {}
    by: dict[str, str] = {}
    for cls, own in reversed(list(zip(classes, _split(classes, knobs), strict=True))):
        if _wraps(cls) and cls.axis in chosen and "of" not in own:
            inner = chosen.pop(cls.axis)
            own["of"] = inner.of if isinstance(inner, cls) else inner  # the name's own recipe may bring the wrapper
        for axis, part in cls(**own).recipe().items():
            if axis in chosen:
                raise MethodError(
                    f"{spec!r} names two parts for the axis {axis!r}",
                    why=f"{cls.name} and {by[axis]} both answer the same question",
                    do="name one of them, a wrapper before what it wraps, or nest them with paceline.Method",
                )
            chosen[axis], by[axis] = part, cls.name
    return Method(**chosen)  # type: ignore[arg-type]


def _wraps(cls: type[Part]) -> bool:
    """Does it hold another part of its axis, as `of`?"""
    kind = kinds(cls).get("of")
    return isinstance(kind, type) and issubclass(kind, Part)


def _split(classes: list[type[Part]], knobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Which knob is whose: by its name alone where only one part has it, `part.knob` where several do."""
    owners: dict[str, list[int]] = {}
    for i, cls in enumerate(classes):
        for f in dataclasses.fields(cls):
            owners.setdefault(f.name, []).append(i)
            owners[f"{cls.name}.{f.name}"] = [i]
    split: list[dict[str, Any]] = [{} for _ in classes]
    names = " + ".join(cls.name for cls in classes)
    for key, value in knobs.items():
        if key not in owners:
            plain = [k for k in owners if "." not in k]
            raise MethodError(
                f"{names} has no knob {key!r}", do=nearest(key, plain) if plain else f"{names} takes no knobs"
            )
        if len(owners[key]) > 1:
            raise MethodError(
                f"the knob {key!r} is ambiguous", do=" or ".join(f"{classes[i].name}.{key}=" for i in owners[key])
            )
        split[owners[key][0]][key.rpartition(".")[2]] = value
    return split
