"""What a cell is called, from the answers of two workers and the plain run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loops.job import LAW, Loop
from loops.methods import ANY, Column
from loops.workers import Answer

RIGHT, DRIFTS, REFUSED, SILENT, BROKEN = "right", "drifts", "refused", "silent", "broken"
FAILURES = (SILENT, BROKEN)


@dataclass(frozen=True)
class Cell:
    """One loop under one method."""

    loop: str
    column: str
    verdict: str
    why: str = ""
    trace: str = ""
    seconds: float = 0.0

    @property
    def fails(self) -> bool:
        return self.verdict in FAILURES


def judge(loop: Loop, column: Column, answers: list[Answer], plain: Answer) -> Cell:
    seconds = max(a.seconds for a in answers)
    verdict, why = _judge(loop, column, answers, plain)
    return Cell(loop.name, column.name, verdict, why, next((a.trace for a in answers if a.trace), ""), seconds)


def _judge(loop: Loop, column: Column, answers: list[Answer], plain: Answer) -> tuple[str, str]:
    if not plain.fine:
        return BROKEN, f"the plain run: {plain.error}: {plain.what}"
    if failed := [a for a in answers if not a.fine]:
        return _failed(loop, answers, failed)
    if column.agree and (name := _differs(answers, "own")):
        return SILENT, f"replicas differ in {name} by {_distance(answers[0].own, answers[1].own):.2g}"
    if name := _differs(answers, "agreed"):
        return SILENT, f"under consensus() workers differ in {name}"
    if answers[0].agreed.keys() != plain.agreed.keys():
        missing = sorted(set(answers[0].agreed) ^ set(plain.agreed))
        return SILENT, f"other tensors than the plain run: {missing[0]}"
    if name := _not_finite(answers[0].agreed, plain.agreed):
        return SILENT, f"{name} is not finite"
    error = _distance(answers[0].agreed, plain.agreed)
    if column.alone and loop.apart:
        return DRIFTS, f"error {error:.2g}"
    exact = not column.law and not (column.alone and loop.nonlinear)
    tolerance = loop.tolerance * column.tolerance if exact else max(ANY, column.tolerance)
    if not error <= tolerance:
        return SILENT, f"error {error:.2g}"
    return (RIGHT if exact else DRIFTS), f"error {error:.2g}"


def _failed(loop: Loop, answers: list[Answer], failed: list[Answer]) -> tuple[str, str]:
    """Both workers must have an error of ours that says what to do, and none that a wait has run out.

    Where the workers' scripts do different things, one may have ended by then.
    """
    raw = [f"{a.error}: {_line(a.what)} (in the {a.stage})" for a in failed if not a.ours]
    if raw:
        return BROKEN, raw[0]
    said = f"{failed[0].error}: {_line(failed[0].what)}"
    if any(a.waited for a in failed):
        return BROKEN, f"a wait ran out: {said} (in the {failed[0].stage})"
    if len(failed) < len(answers) and not loop.apart:
        return BROKEN, f"only worker {answers.index(failed[0])}: {said} (in the {failed[0].stage})"
    if not any(a.do for a in failed):
        return BROKEN, f"it does not say what to do: {said}"
    return REFUSED, said


def _line(text: str) -> str:
    return text.strip().splitlines()[0][:150] if text.strip() else ""


def _differs(answers: list[Answer], which: str) -> str:
    """The first tensor that the workers have different bits of."""
    first, second = (getattr(a, which) for a in answers)
    if first.keys() != second.keys():
        return sorted(set(first) ^ set(second))[0] + " (one has it, the other has not)"
    return next((name for name in first if first[name] != second[name]), "")


def _not_finite(a: dict[str, bytes], plain: dict[str, bytes]) -> str:
    """The first tensor with NaN or infinity that the plain run's has not."""
    finite = {name for name, x in plain.items() if np.isfinite(np.frombuffer(x)).all()}
    return next((name for name in a if name in finite and not np.isfinite(np.frombuffer(a[name])).all()), "")


def _distance(a: dict[str, bytes], b: dict[str, bytes]) -> float:
    """The largest difference, relative to the largest value beside it; infinite where shapes differ or one is not
    finite. Beside it: in the same layer, or in the same list of numbers, so that a loss scale hides no weight.
    """
    found = {name: (np.frombuffer(a[name]), np.frombuffer(b.get(name, b""))) for name in a if _group(name) != LAW}
    if any(x.shape != y.shape for x, y in found.values()):
        return float("inf")
    largest: dict[str, float] = {}
    for name, (_, y) in found.items():
        largest[_group(name)] = max(largest.get(_group(name), 0.0), _largest(y))
    least = 0.1 * min(1.0, max(largest.values(), default=0.0))  # a layer of zeros has rounding errors too
    worst = 0.0
    for name, (x, y) in found.items():
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        gap = np.abs(np.where(same, 0.0, x - y))
        if not np.isfinite(gap).all():
            return float("inf")
        worst = max(worst, float(gap.max(initial=0.0)) / max(largest[_group(name)], least, 1e-12))
    return worst


def _group(name: str) -> str:
    return name.split(".")[0]


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
