"""A hint for losses that are sums over samples, where gradients are averaged over workers.

Autograd remembers how a loss was reduced. So in the first backward the loss itself is looked at: a term of it with
reduction="sum" is a sum. One that is divided by something is not, and neither is one that is computed in another way:
there is no guessing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_SUM = 2  # torch's code of reduction="sum"
_MOST = 32  # terms of a loss that are looked at


def summed_term() -> str | None:
    """Name a term that is a sum over samples in the loss whose backward is running, if it has one.

    On a GPU hooks run on a thread of autograd's own, so the call of backward is looked for on every thread.
    """
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is torch.autograd.backward.__code__:
                losses = at.f_locals.get("tensors")
                for loss in (losses,) if isinstance(losses, torch.Tensor) else losses or ():
                    for node in _terms(loss.grad_fn):
                        if getattr(node, "_saved_reduction", None) == _SUM:
                            return str(node.name()).removesuffix("Backward0")
            at = at.f_back
    return None


def _terms(node: Any) -> Iterator[Any]:
    waiting = [node]
    for _ in range(_MOST):
        if not waiting:
            return
        node = waiting.pop()
        if node is not None and node.name() == "AddBackward0":
            waiting += [inner for inner, _ in node.next_functions]
        elif node is not None:
            yield node
