"""Low rank: a matrix as the product of two thin ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Part, Reduced, Reducer
from paceline.kernels import BlockCode, key
from paceline.knobs import knob
from paceline.reducers._memory import scratch
from paceline.reducers._slices import mean_by_slices, sent_by_slices
from paceline.reducers._thin import orthonormal, over_n, scaled
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket, Slot


# Short blocks: a factor's neighbouring values are of similar size, but its columns differ much from each other.
_CODES = {f"int{bits}": BlockCode("uniform", bits, 64, "max") for bits in (8, 4)}


@register
@dataclass(kw_only=True)
class PowerSGD(Reducer):
    """Low-rank compression: M ≈ P·Qᵀ, with P (n×r) and Q (m×r) averaged over the workers instead of M (n×m).

    One step of power iteration each step: P = M·Q, averaged and made orthonormal; Q = Mᵀ·P, averaged; the estimate is
    P·Qᵀ. Q is kept as the start of the next step, where it is nearly right already. The leftover is M − P·(this
    worker's own Q)ᵀ: the local form, which does not grow with the difference between workers. Vectors, scalars and
    matrices too small to gain anything are averaged exactly. All matrices of a bucket are sent together: two means a
    bucket. It needs error feedback.
    """

    name: ClassVar[str] = "powersgd"
    paper: ClassVar[str] = "Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019"
    formula: ClassVar[str] = (
        "2·w·(W−1)/W · (Σ r·(n+m) over matrices + the rest whole), w = 4 bytes, bf16 2, int8 1 1/16, int4 9/16"
    )
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.LEFTOVER, Fact.WHOLE_MATRICES})
    tolerance: ClassVar[float] = 2.0**-8  # with wire="bf16" every partial sum is rounded; otherwise 1e-5

    rank: int = knob(4, "higher: nearer to the exact mean, more bytes", low=1, high=4096)
    share: float = knob(0.0, "if not 0: each matrix's rank is what takes this share of its bytes", low=0.0, high=1.0)
    wire: Literal["fp32", "bf16", "int8", "int4"] = knob("fp32", "fewer bytes: P, Q and the rest are rounded to it")
    seed: int = knob(0, "of the first Q, the same on all workers, and of the dice", low=0)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        thin, whole = self._split(b)
        flat = x.float()  # P and Q are computed in fp32 whatever the type of the gradients; no copy if x is fp32
        M, rest = [_of(s, flat).view(_shape(s)) for s in thin], [_of(s, flat) for s in whole]
        Pt = [qt @ m.T for m, qt in zip(M, scaled([self._last(s) for s in thin]), strict=True)]
        first, averaged = await self._agree(b, [*Pt, *rest], comm, 0)
        P = orthonormal(averaged[: len(thin)])
        mine, Qt = await self._agree(b, [p.T @ m for p, m in zip(over_n(P), M, strict=True)], comm, 1)
        mean = scratch(self, b, flat)
        mean[b.n :] = 0.0
        for s, p, qt in zip(thin, P, Qt, strict=True):
            torch.mm(p, qt, out=_of(s, mean).view(_shape(s)))
            self.state[s.name, "Q"] = qt.clone()
        if whole:
            torch._foreach_copy_([_of(s, mean) for s in whole], averaged[len(thin) :])

        def left() -> Tensor:
            for m, p, qt in zip(M, P, mine, strict=True):
                m.addmm_(p, qt, alpha=-1.0)
            if rest:
                torch._foreach_sub_(rest, first[len(thin) :])
            return flat

        return Reduced(mean.to(x.dtype), left)

    def _split(self, b: Bucket) -> tuple[list[Slot], list[Slot]]:
        """The tensors that two thin factors make smaller, sorted by shape, and the tensors that are sent whole."""
        thin: list[Slot] = []
        whole: list[Slot] = []
        for s in b.slots:
            if s.stop > s.start:
                gains = s.param.dim() > 1 and self._rank(s) * sum(_shape(s)) < s.stop - s.start
                (thin if gains else whole).append(s)
        return sorted(thin, key=_shape), whole

    def _rank(self, s: Slot) -> int:
        n, m = _shape(s)
        return max(1, int(self.share * n * m / (n + m))) if self.share else self.rank

    def _last(self, s: Slot) -> Tensor:
        """Qᵀ of the step before; in the first step, and for columns added by a higher rank, random numbers."""
        (_, m), r = _shape(s), self._rank(s)
        qt: Tensor | None = self.state.get((s.name, "Q"))
        if qt is None or len(qt) < r:
            generator = torch.Generator().manual_seed(self.seed + sum(map(ord, s.name)))
            dice = torch.randn(r, m, generator=generator).to(s.param.device)
            qt = dice if qt is None else torch.cat(scaled([qt, dice[len(qt) :]]))
        return qt[:r]

    def sends(self, b: Bucket, world_size: int) -> int:
        thin, whole = self._split(b)
        first = sum(_shape(s)[0] * self._rank(s) for s in thin) + sum(s.stop - s.start for s in whole)
        second = sum(_shape(s)[1] * self._rank(s) for s in thin)
        if code := _CODES.get(self.wire):
            return sum(sent_by_slices(n, world_size, code) for n in (first, second) if n)
        size = 2 if self.wire == "bf16" else 4
        return sum(2 * size * n * (world_size - 1) // world_size for n in (first, second))

    async def _agree(self, b: Bucket, parts: list[Tensor], comm: Comm, leg: int) -> tuple[list[Tensor], list[Tensor]]:
        """What this worker contributes to the mean of `parts` (rounded as it is sent), and the mean itself."""
        if not parts:
            return [], []
        flat = torch.cat([p.reshape(-1) for p in parts])
        if code := _CODES.get(self.wire):
            dice = [key(self.seed, comm.rank, b.index, b.step, leg, rounding) for rounding in (0, 1)]
            mean, added = await mean_by_slices(flat, comm, code, dice)
            return _cut(added(), parts), _cut(mean, parts)
        if self.wire == "bf16":
            flat = flat.bfloat16()
            parts = _cut(flat.float(), parts)
        return parts, _cut((await comm.mean(flat)).float(), parts)


def _shape(s: Slot) -> tuple[int, int]:
    rows = s.param.shape[0]
    return rows, (s.stop - s.start) // rows


def _of(s: Slot, flat: Tensor) -> Tensor:
    return flat[s.start : s.stop]


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [piece.view(p.shape) for piece, p in zip(flat.split([p.numel() for p in like]), like, strict=True)]
