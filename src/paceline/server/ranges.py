"""Key ranges: where each parameter lies in one long vector, and which server holds which stretch of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.state import State
from paceline.errors import MethodError, UsageError
from paceline.server.server import OptimizerSnapshot, ParameterShard

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

WEIGHTS = "weights"  # the key of the server's weights in a checkpoint, where the worker's are of a narrower type


class KeyRanges:
    """The parameters of all buckets back to back, cut into equal ranges. A range may end within a parameter."""

    def __init__(self, ex: Exchange, servers: int) -> None:
        self.buckets: list[Bucket] = list(ex.buckets)
        # Every bucket starts at an even number, where a complex parameter can be viewed as pairs of real numbers.
        starts = list(itertools.accumulate((-(-b.n // 2) * 2 for b in self.buckets), initial=0))
        self.n = starts.pop()
        if servers > self.n:
            raise MethodError(f"servers={servers} for {self.n} numbers", do=f"choose servers <= {self.n}")
        self.slots = [s for b in self.buckets for s in b.slots]
        spans = [(at + s.start, at + s.stop) for at, b in zip(starts, self.buckets, strict=True) for s in b.slots]
        self.bounds = [self.n * i // servers for i in range(servers + 1)]
        # For each server: which parameters, from where to where of each, and where in the range.
        self.cuts = [
            [
                (i, max(a, low) - a, min(z, high) - a, max(a, low) - low)
                for i, (a, z) in enumerate(spans)
                if _meet(a, z, low, high)
            ]
            for low, high in itertools.pairwise(self.bounds)
        ]
        wide = any(b.flat.dtype == torch.float64 for b in self.buckets)
        self.grad = torch.zeros(self.n, dtype=torch.float64 if wide else torch.float32)
        self._starts = starts
        self._grads = self.views(self.grad)
        self._written: Tensor | None = None  # what `write` was given last

    def check(self, ex: Exchange) -> None:
        """Raise if there are other parameters now than when the ranges were made."""
        if len(ex.buckets) != len(self.buckets):
            raise UsageError(
                "parameters were added or thawed after the first step",
                why="the servers have been told which parameters there are",
                do="make all parameters trainable before the first step, or use another method",
            )

    def views(self, x: Tensor) -> list[Tensor]:
        """Views of a vector over all parameters, one for each parameter and in its shape."""
        return [v for at, b in zip(self._starts, self.buckets, strict=True) for v in b.views(x[at : at + b.n])]

    def take_gradients(self) -> list[int]:
        """Copy every p.grad into `grad`; return which parameters have none."""
        params = [s.param for s in self.slots]
        absent = [i for i, p in enumerate(params) if p.grad is None]
        if absent:
            self.grad.zero_()
        pairs = [(v, p.grad) for v, p in zip(self._grads, params, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_([v for v, _ in pairs], [g.to_dense() if g.is_sparse else g.detach() for _, g in pairs])
        return absent

    def absent(self, server: int, absent: Sequence[int]) -> list[int]:
        """Which shards of a server's range belong to the parameters that have no gradient."""
        return [k for k, (i, *_) in enumerate(self.cuts[server]) if i in absent] if absent else []

    def part(self, server: int, x: Tensor) -> Tensor:
        """A server's range of a vector over all parameters."""
        return x[self.bounds[server] : self.bounds[server + 1]]

    def weights(self, state: State) -> Tensor:
        """All parameters as one vector; the wider weights of a checkpoint take precedence over the worker's own."""
        x = torch.zeros_like(self.grad)
        torch._foreach_copy_(self.views(x), [s.param.detach() for s in self.slots])
        for (i, first, _, place), at in ((cut, self.bounds[k]) for k, cuts in enumerate(self.cuts) for cut in cuts):
            if first == 0 and (own := state.get((self.slots[i].name, WEIGHTS))) is not None:
                x[at + place : at + place + own.numel()] = own
        return x

    def write(self, x: Tensor) -> None:
        """Copy a vector over all parameters into them."""
        torch._foreach_copy_([s.param.detach() for s in self.slots], self.views(x))
        self._written = x

    def check_unwritten(self) -> None:
        """Raise if weights were written since `write`: the next one would overwrite them.

        Values are compared, because a version counter does not see what goes through `.data`.
        """
        if self._written is None:
            return
        for s, x in zip(self.slots, self.views(self._written), strict=True):
            now, then = s.param.detach(), x.to(s.param)
            if not torch.equal(now, then) and not torch.equal(now.nan_to_num(), then.nan_to_num()):
                raise UsageError(
                    f"the weights of {s.name} were written at the worker after the last step",
                    why="the servers hold the weights: what is written at a worker is lost when they are pulled again",
                    do="write them before the first step, or use a method whose workers hold their weights (exact, "
                    "local_sgd)",
                )

    def shards(self, server: int, groups: Sequence[dict[str, Any]]) -> list[ParameterShard]:
        """What of each parameter lies in a server's range."""
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        return [
            ParameterShard(self.slots[i].name, group_of[id(self.slots[i].param)], place, place + last - first)
            for i, first, last, place in self.cuts[server]
        ]

    # ------------------------------------------------------------------------------------------------ checkpoints

    def remember(self, saved: Sequence[tuple[OptimizerSnapshot, Tensor]], weights: Tensor) -> dict[Any, Any]:
        """Put together what the servers saved, as entries of a `State` by parameter name."""
        found: dict[Any, Any] = {"version": saved[0][0].version}
        for cuts, (remembered, vectors) in zip(self.cuts, saved, strict=True):
            place = 0
            for (i, first, last, _), slots in zip(cuts, remembered.slots, strict=True):
                for slot, value in slots.items():
                    key = (self.slots[i].name, slot)
                    if value is not None:
                        found[key] = torch.tensor(value)
                        continue
                    whole = found.setdefault(key, vectors.new_zeros(self.slots[i].stop - self.slots[i].start))
                    whole[first:last] = vectors[place : place + last - first]
                    place += last - first
        for s, view in zip(self.slots, self.spans(weights), strict=True):
            if s.view.itemsize < weights.itemsize:
                found[s.name, WEIGHTS] = view.clone()
        return found

    def spans(self, x: Tensor) -> list[Tensor]:
        """Flat views of a vector over all parameters, one for each parameter."""
        return [
            x[at + s.start : at + s.stop] for at, b in zip(self._starts, self.buckets, strict=True) for s in b.slots
        ]

    def recall(self, server: int, state: State) -> tuple[OptimizerSnapshot, Tensor]:
        """Cut one server's part out of what `remember` put together."""
        slots: list[dict[str, float | None]] = []
        vectors = [self.grad[:0]]
        for i, first, last, _ in self.cuts[server]:
            name = self.slots[i].name
            known = {k[1]: v for k, v in state.items() if isinstance(k, tuple) and k[0] == name and k[1] != WEIGHTS}
            slots.append({slot: None if v.dim() else float(v) for slot, v in known.items()})
            vectors += [v[first:last].to(self.grad) for v in known.values() if v.dim()]
        return OptimizerSnapshot(state["version"], slots), torch.cat(vectors)


def _meet(a: int, z: int, low: int, high: int) -> bool:
    return max(a, low) < min(z, high)
