"""Hear of gradients that torch is about to clip, and of the moment when it has.

All of torch's functions that clip group the tensors by one function first, and go over what it gives with `items()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Listener(Protocol):
    """Whoever wants to hear of clipping: an engine."""

    def before_clipping(self, grads: Sequence[Tensor]) -> bool:
        """Torch is about to look at these, and perhaps to scale them. Gives: are any of them ours?"""

    def after_clipping(self) -> None:
        """Torch has done so."""


class _Groups(dict[Any, Any]):
    """What the function gives, and who wants to hear when all of it has been gone over."""

    concerned: Sequence[Listener]

    def items(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().items()
        for one in self.concerned:
            one.after_clipping()


_listeners: list[weakref.ref[Listener]] = []


def watch(listener: Listener) -> None:
    """Tell this engine of clipping, from now on."""
    theirs: Any = torch.nn.utils.clip_grad
    group = theirs._group_tensors_by_device_and_dtype

    def told(tensors: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
        known = [one for ref in _listeners if (one := ref()) is not None]
        concerned = [one for one in known if one.before_clipping(tensors[0])]
        found = _Groups(group(tensors, *args, **kwargs))
        found.concerned = concerned
        return found

    if group.__name__ != told.__name__:
        theirs._group_tensors_by_device_and_dtype = told
    _listeners[:] = [*(ref for ref in _listeners if ref() is not None), weakref.ref(listener)]
