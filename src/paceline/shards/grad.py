"""What `p.grad` is where no worker holds the whole gradient.

[Note: p.grad in slices] After a backward `p.grad` is one of these. It has the parameter's shape and no memory; each
worker keeps its slice of the mean, and what is asked of the whole is answered by all of them together: norms are
taken over the slices of all workers, a loss scaler's check for infinity finds what any of them has, scaling and
clamping reach every slice. So clipping with torch.nn.utils and torch's GradScaler are right as they are. Like a
collective, these must then be called on every worker. What would need the elements themselves is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from paceline.errors import UsageError
from paceline.parts import Comm

if TYPE_CHECKING:
    from paceline.shards.piece import Piece

_EACH = {"mul_", "div_", "add_", "sub_", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"}


class SlicedGrad(Tensor):
    """A gradient in slices, one on each worker: [Note: p.grad in slices]."""

    # Or results would be made SlicedGrads.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    pieces: Sequence[Piece]
    comm: Comm

    @staticmethod
    def __new__(cls, like: Tensor, pieces: Sequence[Piece], comm: Comm) -> SlicedGrad:
        """pieces: this worker's, which may be none."""
        shape, strides = like.shape, like.stride()
        grad: SlicedGrad = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=like.dtype, device=like.device
        )
        grad.pieces, grad.comm = pieces, comm
        return grad

    def arrive(self) -> None:
        """What of it is on its way to this worker's memory is there."""
        for piece in self.pieces:
            piece.grad()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SlicedGrad({list(self.shape)}, in slices on {self.comm.world} workers)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, rest, kwargs = func.__name__.partition(".")[0], args[1:], kwargs or {}
        several = isinstance(args[0], (list, tuple))
        grads: Sequence[Tensor] = args[0] if several else args[:1]
        plain = not (grads[0].is_complex() and "clamp" in name) and all(
            not isinstance(x, (list, tuple)) and not (isinstance(x, Tensor) and x.dim()) for x in rest
        )
        if name.removeprefix("_foreach_") in _EACH and plain:
            _each(name, grads, rest, kwargs)
            return None if several else args[0]
        if name in ("_foreach_norm", "linalg_vector_norm") and len(rest) <= 1 + several:
            norms = _norms(grads, float(rest[0]) if rest else 2.0)
            return norms if several else norms[0]
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(grads, *rest)
        if name == "detach":
            return SlicedGrad(args[0], args[0].pieces, args[0].comm)
        raise UsageError(
            f"{name}: this gradient is in slices, one on each worker",
            why="with this layout no worker holds the elements of a whole mean gradient",
            do="clip with torch.nn.utils, scale it in place, take its norm; for more, use the layout replicated",
        )


# Or torch would ask for every norm by itself.
_foreach_utils._foreach_supported_types.append(SlicedGrad)  # type: ignore[arg-type]


def _here(grads: Sequence[Tensor]) -> tuple[list[Piece], list[Tensor]]:
    """What of them is on this worker: pieces that remember factors, and memory. What is not in slices is memory."""
    pieces = [piece for grad in grads if isinstance(grad, SlicedGrad) for piece in grad.pieces]
    memory = [piece.grad() for piece in pieces if not piece.remembers()]
    memory += [grad for grad in grads if not isinstance(grad, SlicedGrad)]
    return [piece for piece in pieces if piece.remembers()], memory


def _each(name: str, grads: Sequence[Tensor], rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
    remembering, memory = _here(grads)
    plain = name.removeprefix("_foreach_")
    if remembering and plain not in ("mul_", "div_", "zero_"):
        raise UsageError(
            f"{plain}: this gradient has left the device",
            why="its state is on the host, and so is it; it may be stepped already",
            do="clip by norm with torch.nn.utils, or multiply it; for more, use store=device",
        )
    for piece in remembering:
        piece.scale(0.0 if plain == "zero_" else rest[0] if plain == "mul_" else 1.0 / rest[0])
    if name.startswith("_foreach_"):
        if memory:
            getattr(torch, name)(memory, *rest, **kwargs)
        return
    for x in memory:
        getattr(x, name)(*rest, **kwargs)


def _comms(grads: Sequence[Tensor]) -> list[Comm]:
    return list({id(g.comm): g.comm for g in grads if isinstance(g, SlicedGrad)}.values())


def _norms(grads: Sequence[Tensor], p: float) -> list[Tensor]:
    """Of each gradient, over all workers' slices: one exchange for all of them."""
    if p <= 0 or (p != 2 and any(g.is_complex() for g in grads)):
        raise UsageError(
            f"norm_type={p:g}: gradients in slices have norms of a positive order, complex ones of order 2 only",
            why="a slice's norm must say enough for the norm of the whole",
        )
    whole = {i: g for i, g in enumerate(grads) if not isinstance(g, SlicedGrad)}
    norms = {i: torch.linalg.vector_norm(g, p) for i, g in whole.items()}
    for comm in _comms(grads):
        sliced = {i: g for i, g in enumerate(grads) if isinstance(g, SlicedGrad) and g.comm is comm}
        mine = torch.stack([_norm(g, p) for g in sliced.values()])
        norms |= zip(sliced, torch.linalg.vector_norm(comm.gather(mine).wait(), p, dim=0).unbind(), strict=True)
    return [norms[i] for i in range(len(grads))]


def _norm(grad: SlicedGrad, p: float) -> Tensor:
    """Of what is here, in fp32 at least."""
    real = grad.dtype.to_real() if grad.is_complex() else grad.dtype
    wide = torch.promote_types(real, torch.float32)
    norms = [piece.norm(p, wide) for piece in grad.pieces]
    return torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.zeros((), dtype=wide, device=grad.device)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A GradScaler's: what one worker finds, all have found."""
    remembering, memory = _here(grads)
    if memory:
        torch._amp_foreach_non_finite_check_and_unscale_(memory, found_inf, inv_scale)
    for piece in remembering:
        found_inf.logical_or_(~piece.finite())
        piece.scale(inv_scale)
    for comm in _comms(grads):
        anywhere = comm.sum(found_inf.reshape(1).clone()).wait() > 0
        found_inf.copy_(anywhere.reshape(found_inf.shape))
