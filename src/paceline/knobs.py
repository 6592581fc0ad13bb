"""A part's fields are its knobs: declared with their effect, unit and range, checked when the part is made."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

from paceline.errors import MethodError, nearest


def knob(
    default: Any,
    effect: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A part's field: its default, what it does, its unit, and the range it must lie in (above: exclusive)."""
    meta = {"effect": effect, "unit": unit, "low": low, "high": high, "above": above}
    if _is_part(default):  # a part inside a part: a fresh one each
        return field(default_factory=lambda: fresh(default), metadata=meta)
    return field(default=default, metadata=meta)


def fresh(part: Any) -> Any:
    """The same part, and those inside it, with nothing remembered."""
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return type(part)(**{name: fresh(v) if _is_part(v) else v for name, v in values.items()})


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@dataclass(frozen=True)
class Knob:
    """One knob as documentation and the command line show it."""

    name: str
    kind: str
    default: Any
    effect: str
    unit: str
    range: str


def kinds(cls: type[Any]) -> dict[str, Any]:
    """Each knob's resolved type."""
    return {k: v for k, v in typing.get_type_hints(cls).items() if get_origin(v) is not ClassVar}


def describe(cls: type[Any]) -> list[Knob]:
    types = kinds(cls)
    return [
        Knob(
            name=f.name,
            kind="choice" if choices(types[f.name]) else getattr(types[f.name], "__name__", str(types[f.name])),
            default=f.default_factory() if callable(f.default_factory) else f.default,
            effect=f.metadata.get("effect", ""),
            unit=f.metadata.get("unit", ""),
            range=_range(f, types[f.name]),
        )
        for f in dataclasses.fields(cls)
    ]


def _said(kind: Any) -> Any:
    """Without `| None`, which is for what somebody else chooses."""
    inside = [k for k in get_args(kind) if k is not type(None)]
    return inside[0] if isinstance(kind, UnionType) and len(inside) == 1 else kind


def choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _range(f: dataclasses.Field[Any], kind: Any) -> str:
    low, high, above = (f.metadata.get(k) for k in ("low", "high", "above"))
    if choices(kind):
        return " | ".join(str(c) for c in choices(kind))
    sides = [f"> {above:g}" if above is not None else "", f">= {low:g}" if low is not None else ""]
    return ", ".join(s for s in [*sides, f"<= {high:g}" if high is not None else ""] if s)


def check(part: Any) -> None:
    """Strict types, allowed choices, ranges; a whole number is accepted where a real one is meant."""
    types = kinds(type(part))
    for f in dataclasses.fields(part):
        kind, value = types[f.name], getattr(part, f.name)
        if value is not None or _said(kind) is kind:
            _check(part, f, _said(kind), value)


def _check(part: Any, f: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    where = f"{part.name}: {f.name}={value!r}"
    if allowed := choices(kind):
        if value not in allowed:
            raise MethodError(f"{where} is not a choice", do=nearest(str(value), map(str, allowed)))
        return
    if kind is float and type(value) is int:
        value = float(value)
        setattr(part, f.name, value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        raise MethodError(
            f"{where} has the wrong type", why=f"{f.name} is a {kind.__name__}, not a {type(value).__name__}"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = (f.metadata.get(k) for k in ("low", "high", "above"))
        inside = (low is None or value >= low) and (high is None or value <= high)
        if not (inside and (above is None or value > above)):  # NaN is inside nothing
            raise MethodError(f"{where} is out of range", do=f"choose {f.name} {_range(f, kind)}")
