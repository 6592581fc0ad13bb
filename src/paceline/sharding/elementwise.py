"""Which optimizers may be given shards of parameters in place of parameters.

Those whose update of an element looks at that element alone: its gradient, its own moments, and numbers that are the
same for all. The step of a shard is then the shard of the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from paceline.errors import MethodError

KNOWN = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Rprop,
    optim.ASGD,
)
_WHOLE = {  # by a part of the class's name, because many libraries have one of these
    "lamb": "it scales a layer's update by the norms of the layer's weights and update",
    "lars": "it scales a layer's update by the norms of the layer's weights and gradient",
    "muon": "it orthogonalises the momentum of a whole matrix",
    "shampoo": "it multiplies by roots of a matrix's statistics over rows and columns",
    "soap": "it works in the eigenbasis of a matrix's statistics",
    "adafactor": "it keeps means over rows and columns of a matrix, and looks at the norm of the update",
    "lbfgs": "its direction is made of inner products of whole gradients",
    "sparseadam": "it wants gradients that are sparse tensors",
}
_SHAPE, _CUT, _STEPS = (6, 4), 11, 3


def check(name: str, optimizer: Optimizer) -> None:
    """Refuse for the layout `name` an optimizer that must see whole parameters."""
    kind = type(optimizer)
    if kind in KNOWN:
        return
    why = next((reason for word, reason in _WHOLE.items() if word in kind.__name__.lower()), None)
    if why is None and not _steps_shards_as_the_whole(optimizer):
        why = "on a small matrix its step of two shards was not that of the whole"
    if why is not None:
        raise MethodError(
            f"{name} does not go together with the optimizer {kind.__name__}",
            why=f"workers step shards of parameters, and {why}",
            do="use an elementwise optimizer (SGD, Adam, AdamW, ...), or the layout replicated",
        )


def _steps_shards_as_the_whole(optimizer: Optimizer) -> bool:
    """Try an unknown optimizer on a small matrix: whole, and in two shards."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SHAPE, generator=generator)
    grads = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
    try:
        whole = _stepped(optimizer, x, grads).flatten()
        flat = [g.flatten() for g in grads]
        ends = (slice(0, _CUT), slice(_CUT, x.numel()))
        halves = [_stepped(optimizer, x.flatten()[end], [g[end] for g in flat]) for end in ends]
    except Exception:  # it wants something of its parameters that a shard does not have
        return False
    return torch.allclose(torch.cat(halves), whole, rtol=1e-5, atol=1e-7)


def _stepped(optimizer: Optimizer, x: Tensor, grads: list[Tensor]) -> Tensor:
    """Give x after a few steps of an optimizer with the same settings and no state."""
    p = torch.nn.Parameter(x.clone())
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for method in ("step", "zero_grad"):  # a scheduler may have wrapped those of the original
        vars(twin).pop(method, None)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[0], "params": [p]}]
    for grad in grads:
        p.grad = grad.clone()
        twin.step()
    return p.detach()
