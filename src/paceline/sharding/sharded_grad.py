"""What `p.grad` is where no worker holds the whole gradient.

[Note: sharded gradients] After a backward `p.grad` is a ShardedGrad. It has the parameter's shape and no memory; each
worker keeps its shard of the mean, and what is asked of the whole is answered by all of them together: norms are
taken over the shards of all workers, a loss scaler's check for infinity finds what any of them has, scaling and
clamping reach every shard. So clipping with torch.nn.utils and torch's GradScaler are right as they are. Like a
collective, these must then be called on every worker. What would need the elements themselves is refused.

A mean is there until the next one. Who puts `p.grad` aside, and lets another backward come, holds a gradient that is
gone: whatever is done with it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from paceline.comm.protocol import Comm
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.bucket import Slot
    from paceline.core.shard import Shard

_EACH = {"mul_", "div_", "add_", "sub_", "neg_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"}


class ShardedGrad(Tensor):
    """A gradient in shards, one on each worker: [Note: sharded gradients]."""

    # Without this torch would make ShardedGrads of results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    shards: Sequence[Shard]
    comm: Comm
    gone: list[str]  # the name of its parameter, when another mean has taken its place; shared by what is made of it

    @staticmethod
    def __new__(cls, like: Tensor, shards: Sequence[Shard], comm: Comm, gone: list[str] | None = None) -> ShardedGrad:
        """Make a gradient like this tensor. shards: those of this worker, which may be none."""
        shape, strides = like.shape, like.stride()
        grad: ShardedGrad = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=like.dtype, device=like.device
        )
        grad.shards, grad.comm = shards, comm
        grad.gone = [] if gone is None else gone
        return grad

    @classmethod
    def show(cls, slot: Slot, shards: Sequence[Shard], comm: Comm) -> None:
        """Let a slot's gradient be shown by one, which is over when the slot wants another."""

        def renew() -> None:
            if isinstance(slot.shown, ShardedGrad):
                slot.shown.gone.append(slot.name)
            slot.shown = ShardedGrad(slot.view, shards, comm)

        slot.renew = renew
        renew()

    def wait(self) -> None:
        """Wait until what is on its way to this worker's memory is there."""
        for shard in self.shards:
            shard.grad()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refused("numpy")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refused("numpy")

    def tolist(self) -> NoReturn:
        raise _refused("tolist")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refused("dlpack")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGrad({list(self.shape)}, in shards on {self.comm.world_size} workers)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, rest, kwargs = func.__name__.partition(".")[0], args[1:], kwargs or {}
        _check_there(name, (*args, *kwargs.values()))
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
            return ShardedGrad(args[0], args[0].shards, args[0].comm, args[0].gone)
        raise _refused(name)


# Without this torch would ask for every norm by itself, in an exchange each.
_foreach_utils._foreach_supported_types.append(ShardedGrad)  # type: ignore[arg-type]


def _refused(what: str) -> UsageError:
    return UsageError(
        f"{what}: this gradient is in shards, one on each worker",
        why="with this layout no worker holds the elements of a whole mean gradient",
        do="clip with torch.nn.utils, scale it in place, take its norm; for more, use the layout replicated",
    )


def _check_there(what: str, args: Sequence[Any]) -> None:
    for x in args:
        if isinstance(x, (list, tuple)):
            _check_there(what, x)
        elif isinstance(x, ShardedGrad) and x.gone:
            raise UsageError(
                f"{what}: the gradient of {x.gone[0]} that was put aside is gone",
                why="with this layout a mean is kept in shards, and only until the next backward",
                do="use each gradient before the next backward, or use the layout replicated",
            )


def _here(grads: Sequence[Tensor]) -> tuple[list[Shard], list[Tensor]]:
    """Give what of some gradients is on this worker: shards that remember factors, and memory for all else."""
    shards = [shard for grad in grads if isinstance(grad, ShardedGrad) for shard in grad.shards]
    memory = [shard.grad() for shard in shards if not shard.remembers()]
    memory += [grad for grad in grads if not isinstance(grad, ShardedGrad)]
    return [shard for shard in shards if shard.remembers()], memory


def _each(name: str, grads: Sequence[Tensor], rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
    remembering, memory = _here(grads)
    plain = name.removeprefix("_foreach_")
    if remembering and plain not in ("mul_", "div_", "zero_"):
        raise UsageError(
            f"{plain}: this gradient has left the device",
            why="its state is on the host, and so is it; it may be stepped already",
            do="clip by norm with torch.nn.utils, or multiply it; for more, use store=device",
        )
    for shard in remembering:
        shard.scale(0.0 if plain == "zero_" else rest[0] if plain == "mul_" else 1.0 / rest[0])
    if name.startswith("_foreach_"):
        if memory:
            getattr(torch, name)(memory, *rest, **kwargs)
        return
    for x in memory:
        getattr(x, name)(*rest, **kwargs)


def _comms(grads: Sequence[Tensor]) -> list[Comm]:
    return list({id(g.comm): g.comm for g in grads if isinstance(g, ShardedGrad)}.values())


def _norms(grads: Sequence[Tensor], p: float) -> list[Tensor]:
    """Give the norm of each gradient over the shards of all workers, in one exchange for all of them."""
    if p <= 0 or (p != 2 and any(g.is_complex() for g in grads)):
        raise UsageError(
            f"norm_type={p:g}: gradients in shards have norms of a positive order, complex ones of order 2 only",
            why="a shard's norm must say enough for the norm of the whole",
        )
    whole = {i: g for i, g in enumerate(grads) if not isinstance(g, ShardedGrad)}
    norms = {i: torch.linalg.vector_norm(g, p) for i, g in whole.items()}
    for comm in _comms(grads):
        sharded = {i: g for i, g in enumerate(grads) if isinstance(g, ShardedGrad) and g.comm is comm}
        mine = torch.stack([_norm(g, p) for g in sharded.values()])
        norms |= zip(sharded, torch.linalg.vector_norm(comm.all_gather(mine).wait(), p, dim=0).unbind(), strict=True)
    return [norms[i] for i in range(len(grads))]


def _norm(grad: ShardedGrad, p: float) -> Tensor:
    """Give the norm of this worker's shards of a gradient, in fp32 at least."""
    real = grad.dtype.to_real() if grad.is_complex() else grad.dtype
    wide = torch.promote_types(real, torch.float32)
    norms = [shard.norm(p, wide) for shard in grad.shards]
    return torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.zeros((), dtype=wide, device=grad.device)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale for a GradScaler. Infinity that one worker finds, all have found."""
    remembering, memory = _here(grads)
    if memory:
        torch._amp_foreach_non_finite_check_and_unscale_(memory, found_inf, inv_scale)
    for shard in remembering:
        found_inf.logical_or_(~shard.finite())
        shard.scale(inv_scale)
    for comm in _comms(grads):
        anywhere = comm.sum(found_inf.reshape(1).clone()).wait() > 0
        found_inf.copy_(anywhere.reshape(found_inf.shape))
