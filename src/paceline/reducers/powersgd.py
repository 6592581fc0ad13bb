"""Low rank: a matrix as the product of two thin ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Part, Reduced, Reducer
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket, Slot


@register
@dataclass(kw_only=True)
class PowerSGD(Reducer):
    """One step of power iteration a step, warm: M ≈ P·Qᵀ, with P (n×r) and Q (m×r) averaged instead of M (n×m).

    P = M·Q, averaged over the workers, made orthonormal; Q = Mᵀ·P, averaged; the estimate is P·Qᵀ. Q is kept for the
    next step, where it is nearly right already. What this worker did not send is M − P·(its own Q)ᵀ: the local form,
    which does not grow with the difference between workers. Vectors, scalars and matrices too small to gain anything
    are averaged exactly. All matrices of a bucket travel together: two means a bucket. Wants error feedback.
    """

    name: ClassVar[str] = "powersgd"
    paper: ClassVar[str] = "Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019"
    formula: ClassVar[str] = "2·4·(W−1)/W · (Σ r·(n+m) over matrices + the rest whole)"
    gives: ClassVar[frozenset[str]] = frozenset({"leftover", "whole matrices"})
    tolerance: ClassVar[float] = 1e-5

    rank: int = knob(4, "higher: nearer to the exact mean, more bytes", low=1, high=4096)
    seed: int = knob(0, "of the first Q, the same on all workers", low=0)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        matrices, whole = self._split(b)
        M = [x[s.start : s.stop].view(*_shape(s)).float() for s in matrices]
        Q = [self._start(s) for s in matrices]
        P, rest = _cut(
            await comm.mean(_join([m @ q for m, q in zip(M, Q, strict=True)], [x[s.start : s.stop] for s in whole])),
            [(m.shape[0], q.shape[1]) for m, q in zip(M, Q, strict=True)],
        )
        P = [torch.linalg.qr(p).Q for p in P]
        mine = [m.T @ p for m, p in zip(M, P, strict=True)]
        Q, _ = _cut(await comm.mean(_join(mine, [])), [tuple(q.shape) for q in mine])
        mean = torch.zeros_like(x)
        for s, p, q in zip(matrices, P, Q, strict=True):
            mean[s.start : s.stop] = (p @ q.T).flatten()
            self.state[s.name, "Q"] = q
        for s in whole:
            mean[s.start : s.stop], rest = rest[: s.stop - s.start], rest[s.stop - s.start :]

        def left() -> Tensor:
            unsent = torch.zeros_like(x)
            for s, m, p, q in zip(matrices, M, P, mine, strict=True):
                unsent[s.start : s.stop] = (m - p @ q.T).flatten()
            return unsent

        return Reduced(mean, left)

    def _split(self, b: Bucket) -> tuple[list[Slot], list[Slot]]:
        """Which tensors gain from two thin factors."""
        gains = [s for s in b.slots if s.param.dim() > 1 and self._thin(s) < s.stop - s.start]
        return gains, [s for s in b.slots if s not in gains and s.stop > s.start]

    def _thin(self, s: Slot) -> int:
        n, m = _shape(s)
        return min(self.rank, n, m) * (n + m)

    def _start(self, s: Slot) -> Tensor:
        n, m = _shape(s)
        q: Tensor | None = self.state.get((s.name, "Q"))
        if q is None:
            generator = torch.Generator().manual_seed(self.seed + sum(map(ord, s.name)))
            q = torch.randn(m, min(self.rank, n, m), generator=generator).to(s.param.device)
        return q

    def sends(self, b: Bucket, world: int) -> int:
        matrices, whole = self._split(b)
        first = sum(_shape(s)[0] * min(self.rank, *_shape(s)) for s in matrices) + sum(s.stop - s.start for s in whole)
        second = sum(_shape(s)[1] * min(self.rank, *_shape(s)) for s in matrices)
        return sum(2 * 4 * n * (world - 1) // world for n in (first, second))


def _shape(s: Slot) -> tuple[int, int]:
    rows = s.param.shape[0]
    return rows, (s.stop - s.start) // rows


def _join(matrices: list[Tensor], vectors: list[Tensor]) -> Tensor:
    parts = [m.flatten() for m in matrices] + [v.float() for v in vectors]
    return torch.cat(parts) if parts else torch.zeros(0)


def _cut(flat: Tensor, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], Tensor]:
    out = []
    for shape in shapes:
        size = shape[0] * shape[1]
        out.append(flat[:size].view(*shape))
        flat = flat[size:]
    return out, flat
