"""What the laws are checked on: every registered part with every choice of its knobs' alternatives, and some
buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from marks import slow
from paceline import registry
from paceline.core.bucket import Bucket
from paceline.core.parts import Reduced, Reducer
from paceline.core.pipeline import Pipeline
from paceline.knobs import choices, kinds

WORLDS = (1, 2, 3, 4)

# `make test` runs a law on two workers and on an odd number of them, `make test-slow` on the others.
on_every_world = pytest.mark.parametrize("world_size", [n if n in (2, 3) else slow(n) for n in WORLDS])


def variants(cls: type) -> list[dict[str, Any]]:
    """The defaults, and one variant for each further value of a knob with named choices."""
    found: list[dict[str, Any]] = [{}]
    for name, kind in kinds(cls).items():
        found += [{name: value} for value in choices(kind)[1:]]
    return found


def brisk(cls: type) -> dict[str, Any]:
    """Knobs at which something happens within a few steps, and which no clock decides."""
    found: dict[str, Any] = {name: 3 for name in ("every", "warmup", "window") if name in kinds(cls)}
    return found | ({"deadline_ms": 1e-3} if "deadline_ms" in kinds(cls) else {})


def parts(axis: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, knobs) for name, cls in registry.parts(axis).items() for knobs in variants(cls)]


def reducers() -> list[tuple[str, dict[str, Any]]]:
    return parts("reducer")


def fresh(name: str, knobs: dict[str, Any]) -> Any:
    return registry.find(name)(**knobs)


def _bucket(*shapes: tuple[int, ...]) -> Any:
    def build(world_size: int) -> Bucket:
        named = [(f"p{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
        return Bucket(0, named, world_size)

    return build


BUCKETS = [_bucket((17, 9), (33,), (4, 3, 2)), _bucket(()), _bucket((1,)), _bucket((128, 64), (7,))]


def vector(b: Bucket, rank: int) -> torch.Tensor:
    """This worker's gradients: different on every worker, padding zero."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.zeros_like(b.flat)
    x[: b.n] = torch.randn(b.n, generator=generator)
    return x


def together(*coroutines: Any) -> list[Any]:
    """All of them under way at once, as buckets are; what each gave."""
    out, pipeline = [None] * len(coroutines), Pipeline()

    async def keep(i: int, coroutine: Any) -> None:
        out[i] = await coroutine

    for i, coroutine in enumerate(coroutines):
        pipeline.start(keep(i, coroutine))
    pipeline.drain()
    return out


def reduce(comm: Any, reducer: Any, b: Bucket, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One mean, and what this worker did not send."""
    [reduced] = together(reducer.mean(b, x, comm))
    mean, left = reduced.mean.clone(), reduced.left()
    return mean, torch.zeros_like(mean) if left is None else left.clone()


@dataclass(kw_only=True)
class Messy(Reducer):
    """Leaves something behind the gradients, as rounding to levels that have no zero does; and wants nothing there."""

    name: ClassVar[str] = "messy"

    async def mean(self, b, x, comm):
        assert not x[b.n :].any(), "the padding is not zero"
        mean = await comm.mean(x.clone())
        mean[b.n :] = 7.0
        return Reduced(mean)
