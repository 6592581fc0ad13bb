"""One reducer for the large matrices, another for the rest."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Reducer
from paceline.knobs import knob
from paceline.reducers._policy import Policy
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.exact import Exact
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class PerBucket(Policy):
    """Picks one of two reducers by a parameter's size, dimensions and name; nest it for more than two.

    Small tensors cost few bytes and lose most by compression, and so may embeddings and the last layer. The two kinds
    never share a bucket; if a bucket was cut otherwise, its first parameter decides.
    """

    name: ClassVar[str] = "per_bucket"
    formula: ClassVar[str] = "as the reducer chosen for the bucket"

    of: Reducer = knob(ErrorFeedback(), "for the large matrices")
    other: Reducer = knob(Exact(), "for the rest")
    smallest: int = knob(1024, "tensors with fewer elements belong to the rest", unit="elements", low=0)
    dims: int = knob(2, "tensors with fewer dimensions belong to the rest", low=0)
    names: str = knob("", "patterns, with commas between, of parameters that belong to the rest: 'embed.*,*.head.*'")

    def facts(self) -> frozenset[Fact]:
        return super().facts() - {Fact.EXACT_MEAN, Fact.CLOSE_MEAN}  # only some buckets have one

    def _pick(self, name: str, p: Tensor) -> Reducer:
        small = p.numel() < self.smallest or p.dim() < self.dims
        named = any(fnmatchcase(name, pattern.strip()) for pattern in self.names.split(","))
        return self.other if small or named else self.of

    def kind(self, name: str, p: Tensor) -> Hashable:
        chosen = self._pick(name, p)
        return chosen is self.of, chosen.kind(name, p)

    def choose(self, b: Bucket) -> Reducer:
        return self._pick(b.slots[0].name, b.slots[0].param)
