"""Mirror descent: y = argmin ⟨g, y⟩ + D_ψ(y, x)/η. The map ψ is a setting of the optimizer's parameter groups.

With ψ = ½‖x‖² the step is the user's own optimizer: no group says anything. With ψ = Σ x·ln x, the entropy, it is the
exponentiated gradient y ∝ x·exp(−η·g), and weights stay on the simplex. A group says so by `"mirror": "entropic"`: each
of its parameters is then a distribution, or a stack of them along its last dimension. η is the group's learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.errors import MethodError, nearest

_MAPS = ("euclidean", "entropic")
_SUM = 1e-4  # how far from one the weights of a distribution may be in sum


def check(optimizer: Optimizer, name: str) -> None:
    """Refuse groups that the entropic map does not fit. name: of the method."""
    for i, group in enumerate(optimizer.param_groups):
        map_ = group.get("mirror", "euclidean")
        if map_ not in _MAPS:
            raise MethodError(f"{name}: mirror={map_!r} of parameter group {i}", do=nearest(str(map_), _MAPS))
        if map_ == "euclidean":
            continue
        others = [k for k in ("momentum", "weight_decay", "maximize") if group.get(k)]
        if not isinstance(optimizer, SGD) or others:
            has = f"has {others[0]}={group[others[0]]}" if others else f"is of {type(optimizer).__name__}"
            raise MethodError(
                f"{name}: parameter group {i} is entropic and {has}",
                why="the exponentiated gradient is a step of its own, of which the group gives the rate alone",
                do="use torch.optim.SGD, with momentum=0 and weight_decay=0 in this group",
            )
        for k, p in enumerate(group["params"]):
            _check_simplex(p, f"{name}: parameter {k} of group {i}, {list(p.shape)}, is entropic")


def _check_simplex(p: Tensor, what: str) -> None:
    do = "start from weights on the simplex, torch.full_like(p, 1 / p.shape[-1]) for one"
    if p.is_meta:
        raise MethodError(f"{what} and has no values yet", why="it is on the meta device", do="make it on a real one")
    if not p.dim() or not p.is_floating_point():
        raise MethodError(f"{what} and no row of real numbers", why="a distribution has several weights", do=do)
    if not bool((p > 0).all()):
        raise MethodError(
            f"{what} and has a weight of {float(p.detach().min()):g}",
            why="the exponentiated gradient multiplies weights: they must be positive, and 0 stays 0 for ever",
            do=do,
        )
    if (off := float((p.detach().double().sum(-1) - 1).abs().max())) > _SUM:
        raise MethodError(f"{what} and sums to {1 + off:g} or {1 - off:g}, not to one", do=do)


def refuse(optimizer: Optimizer, name: str) -> None:
    """Refuse entropic groups where parameters are sharded."""
    if any(group.get("mirror") == "entropic" for group in optimizer.param_groups):
        raise MethodError(
            f"{name}: a parameter group is entropic, and its parameters are sharded",
            why="a distribution is brought to the simplex as a whole, and this worker steps a shard of it",
            do="use the layout replicated",
        )


def apply(step: Callable[[], Any], optimizer: Optimizer) -> Any:
    """Make the optimizer's step, and give entropic parameters theirs in its place.

    Where the step was left out (a gradient that is not finite, found on the device perhaps) they stay as they were.
    """
    with torch.no_grad():
        mirrored = [(p, p.clone(), _exponentiated(p, p.grad, float(lr))) for p, lr in _entropic(optimizer)]
    result = step()
    with torch.no_grad():
        for p, x, y in mirrored:
            p.copy_(torch.where((p != x).any(), y, x))
    return result


def _entropic(optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    """The parameters with a gradient that are distributions, each with its rate."""
    for group in optimizer.param_groups:
        if group.get("mirror") == "entropic":
            yield from ((p, group["lr"]) for p in group["params"] if p.grad is not None)


def _exponentiated(x: Tensor, g: Tensor, lr: float) -> Tensor:
    """x·exp(−η·g) brought to the simplex, with exponents that cannot overflow."""
    tiny = torch.finfo(x.dtype).tiny  # what has underflowed could never come back
    return torch.softmax(x.clamp_min(tiny).log() - lr * g, -1).clamp_min(tiny)
