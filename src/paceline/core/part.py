"""What every part has: knobs, facts and a memory.

A part is a keyword-only dataclass: its fields are its knobs. What it remembers between steps is in `self.state` and
nowhere else, so saving, moving, staging and resetting work for every part alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from paceline import knobs
from paceline.core.facts import Fact
from paceline.core.state import State
from paceline.telemetry.events import AnyEvent

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@dataclass(kw_only=True)
class Part:
    """What every part has: knobs (its fields), facts, and state."""

    name: ClassVar[str] = ""
    axis: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # author, title, venue; empty for plumbing
    formula: ClassVar[str] = ""  # payload bytes one worker sends a step for n elements of s bytes, W workers
    gives: ClassVar[frozenset[Fact]] = frozenset()  # facts others may need or refuse
    needs: ClassVar[Mapping[Fact, str]] = {}  # fact -> why it is needed and what to do
    refuses: ClassVar[Mapping[Fact, str]] = {}  # fact -> why it cannot be and what to do

    def __post_init__(self) -> None:
        self.state = State()
        knobs.check(self)

    @classmethod
    def knobs(cls) -> list[knobs.Knob]:
        return knobs.describe(cls)

    def recipe(self) -> dict[str, Part]:
        """How the paper combines it, axis -> part. A part that wants company overrides this."""
        return {self.axis: self}

    def parts(self) -> Iterator[Part]:
        """Itself and the parts inside it."""
        yield self
        for f in dataclasses.fields(self):
            if isinstance(inner := getattr(self, f.name), Part):
                yield from inner.parts()

    def facts(self) -> frozenset[Fact]:
        """What it gives with all that is inside it. A wrapper of which that is not true says what is."""
        return self.gives.union(*(part.facts() for part in vars(self).values() if isinstance(part, Part)))

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that it cannot work with, before anything is started."""

    def flush(self, b: Bucket) -> Tensor | None:
        """What it has kept back of this bucket's gradients, to be added to the next ones when the method changes."""
        return None

    def recut(self) -> None:
        """Buckets are going to be cut anew: forget what is kept by bucket index outside of `state`."""

    def news(self, step: int) -> Iterable[AnyEvent]:
        """What telemetry has not heard of yet. `step` steps have counted, and what they staged is real."""
        return ()

    def config(self) -> dict[str, Any]:
        """Name and knobs, as canonical data: compared between workers, written to checkpoints."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"name": self.name, **{k: v.config() if isinstance(v, Part) else v for k, v in values.items()}}
