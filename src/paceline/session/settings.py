"""The arguments of `prepare` that are not the method's, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from paceline.errors import UsageError, nearest


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `prepare` that are not the method's, checked."""

    batch: Literal["global", "per_worker"] = "global"
    accumulate: int = 1
    micro_batch: int | Literal["auto"] | None = None
    memory_gb: float | None = None
    weight: Callable[[Any], float] | None = None
    loss: Literal["mean", "sum"] = "mean"
    random: Literal["per_worker", "as_seeded"] = "per_worker"
    guard: Literal["skip", "raise", "off"] = "skip"
    timeout: float = 300.0
    backend: str | None = None
    bucket_mb: float | None = None
    weights: str | PathLike[str] | None = None
    tuned: str | PathLike[str] | None = None
    group: Any = None
    check_replicas: int = 50
    advice: int = 0

    def __post_init__(self) -> None:
        _choice("batch", self.batch, ("global", "per_worker"))
        _choice("loss", self.loss, ("mean", "sum"))
        _choice("random", self.random, ("per_worker", "as_seeded"))
        _choice("guard", self.guard, ("skip", "raise", "off"))
        for name in ("check_replicas", "advice"):
            if type(steps := getattr(self, name)) is not int or steps < 0:
                raise UsageError(f"{name}={steps!r} is not a whole number of 0 or more")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise UsageError(f"accumulate={self.accumulate!r} is not a whole number of 1 or more")
        if self.micro_batch not in (None, "auto") and (type(self.micro_batch) is not int or self.micro_batch < 1):
            raise UsageError(
                f"micro_batch={self.micro_batch!r} is not a whole number of 1 or more",
                do="give the most samples that a worker computes at once, or micro_batch='auto' to have it found",
            )
        if self.memory_gb is not None:
            _number("memory_gb", self.memory_gb, high=65536.0, unit=" GB")
        _number("timeout", self.timeout, high=86400.0, unit=" seconds")
        if self.bucket_mb is not None:
            _number("bucket_mb", self.bucket_mb, high=65536.0, unit=" MB")
        for name in ("weights", "tuned"):
            if (path := getattr(self, name)) is not None and not isinstance(path, (str, PathLike)):
                raise UsageError(f"{name}={path!r} is not a path")
        if self.weight is not None and not callable(self.weight):
            raise UsageError(f"weight={self.weight!r} is not a function of a batch")
        if self.weight is not None and self.loss == "sum":
            raise UsageError(
                "loss='sum' and weight= do not go together",
                why="in a sum every sample counts by itself, and there is no mean to weigh",
                do="leave weight= out, or let the loss be a mean",
            )

    def bucket_bytes(self, *, slow_link: bool) -> int:
        """Where the link is the bottleneck small buckets keep it busy from the start of backward; where it is not,
        every further operation only takes time from computing."""
        return int((self.bucket_mb or (1 if slow_link else 25)) * 2**20)


def _choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is not a choice", do=nearest(str(value), known))


def _number(name: str, value: Any, *, high: float, unit: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 < value <= high:
        raise UsageError(f"{name}={value!r} is out of range", do=f"choose {name} above 0 and at most {high:g}{unit}")
