"""The columns: every registered method at its exact limit, where it must go as plain training on the whole batch.

Most methods are estimates; at their loosest knobs they are none, so whatever error is left is a fault of the way the
loop is handled and not of the method. The few that have no such knob are held to a law instead: replicas agree, nothing
is NaN, and the weights are near those of the plain run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import Method, registry
from paceline.core.facts import Fact

ROUNDING = 2e-5  # of fp32 after a few steps, relative to the largest weight
ANY = 0.5  # for the law: near enough not to be nonsense

DENSE: dict[str, tuple[dict[str, Any], float]] = {  # knobs of reducers, and the error they leave
    "exact": ({}, ROUNDING),
    "topk": ({"ratio": 1.0}, ROUNDING),
    "randomk": ({"ratio": 1.0}, ROUNDING),
    "dgc": ({"ratio": 1.0, "momentum": 0.0, "warmup": 0}, ROUNDING),
    "powersgd": ({"rank": 64}, 1e-4),
    "error_feedback": ({}, ROUNDING),
    "warmup": ({"steps": 1000}, ROUNDING),
    "per_bucket": ({}, ROUNDING),
    "accordion": ({"threshold": 0.0, "window": 2}, ROUNDING),  # always at the low setting, which is dense
    "half": ({}, 3e-3),
    "int8": ({}, 3e-2),
    "qsgd": ({"bits": 8, "d": 32}, 3e-2),
    "nuqsgd": ({"bits": 8, "d": 32}, ANY),
    "sign": ({"d": 32}, ANY),
}
EVEN = 4  # samples of a batch of job.py's for each of two workers
WITHOUT_LIMIT = {"onebit_adam": {"warmup": 1000}, "qadam": {"warmup": 1000}}  # a warm-up that never ends is exact


@dataclass(frozen=True)
class Column:
    """A method as the table runs it."""

    name: str
    make: Callable[[], Any]  # what `prepare(method=...)` is given
    own: str  # the optimizer of loops that name none
    tolerance: float
    law: bool  # it has no exact limit
    alone: bool  # its workers step by their own gradients, and agree on weights
    agree: bool  # replicas are equal, bit for bit, after every step


@functools.cache
def columns() -> dict[str, Column]:
    """All columns by name: the registry's reducers, syncs, layouts and orders, and what people put together."""
    found = [
        *(_reducer(name) for name in _first("exact", registry.parts("reducer"))),
        _plain("priority"),
        *(_plain(name) for name in ("zero1", "zero2", "zero3")),
        *(_stored(name) for name in ("zero1", "zero3")),
        _combined("zero2+topk", {"ratio": 1.0}),
        _plain("measured", every=1, gain=0.0),  # shares move wherever they can
        *(_sync(name) for name in registry.parts("sync") if name != "every_step"),
        _combined("local_sgd+topk", {"every": 1, "ratio": 1.0}, alone=True),
    ]
    unlike = {str(column.make()): column for column in found}  # error_feedback is topk's own recipe: the last one stays
    return {column.name: column for column in unlike.values()}


def _first(name: str, names: Any) -> list[str]:
    return [name, *(n for n in names if n != name)]


def _column(name: str, make: Callable[[], Any], tolerance: float = ROUNDING, **facts: Any) -> Column:
    plain = {"own": "sgd", "law": False, "alone": False, "agree": True}
    return Column(name, make, tolerance=tolerance, **plain | facts)


def _reducer(name: str) -> Column:
    cls = registry.find(name)
    knobs, tolerance = DENSE.get(name, ({}, ANY))
    extra: dict[str, Any] = {}
    if name == "error_feedback":
        extra = {"of": registry.find("topk")(ratio=1.0)}
    elif name in ("accordion", "per_bucket"):
        extra = {"of": registry.find("topk")(ratio=1.0), "smallest": 30}
    return _column(name, lambda: Method(**cls(**knobs, **_fresh(extra)).recipe()), tolerance, law=tolerance == ANY)


def _fresh(knobs: dict[str, Any]) -> dict[str, Any]:
    from paceline.knobs import fresh

    return {k: fresh(v) if isinstance(v, registry.Part) else v for k, v in knobs.items()}


def _plain(name: str, **knobs: Any) -> Column:
    cls = registry.find(name)
    return _column(name, lambda: Method(**cls(**knobs).recipe()))


def _stored(name: str) -> Column:
    cls = registry.find(name)
    return _column(f"{name}-cpu", lambda: Method(**cls(store="cpu").recipe()))


def _combined(spec: str, knobs: dict[str, Any] | None = None, tolerance: float = ROUNDING, **facts: Any) -> Column:
    from paceline.method import method

    return _column(spec, lambda: method(spec, **(knobs or {})), tolerance, agree=not facts.get("alone"), **facts)


def _sync(name: str) -> Column:
    cls: Any = registry.find(name)
    knobs = cls.limit if cls.limit is not None else WITHOUT_LIMIT.get(name)
    if cls.open_ended:
        knobs = {**(knobs or {}), "micro": EVEN}  # a round is then a batch
    return _column(
        name,
        lambda: Method(**cls(**(knobs or {})).recipe()),
        own="adam" if Fact.ADAM in cls.needs else "sgd",
        law=knobs is None,
        tolerance=ANY if knobs is None else ROUNDING,
        alone=Fact.REPLICAS_AGREE not in cls.gives,
        agree=Fact.REPLICAS_AGREE in cls.gives and not cls.is_async,  # they read at their own pace
    )
