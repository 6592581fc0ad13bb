"""What looks at parameters and gradients from outside while an update is under way.

[Note: lookout] Between `step()` and the next forward, and between `backward` and `step()`, an order that crosses the
barrier owes the user values that have not landed. Any torch operation on memory of a parameter, of a gradient or of the
optimizer's state has them land first: a mode on torch's stack sees each one, attribute reads like `.data`, methods like
`.numpy()` and copies included. Only what asks for no element (shapes, types, `p.grad` itself) passes. During a forward
of the model every layer waits for its own parameters, and what is used in another way (a weight that another module
reads, a parametrization) lands when it is touched; once all have landed the mode leaves the stack until the forward
ends. Of a backward torch's stack sees one call. A loop that never calls the model is not watched, and has its barrier.

The mode lies at the bottom of the stack: whoever has pushed another one before may pop it at any time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATTRIBUTES = (
    "grad", "grad_fn", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim", "names", "_version",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "data",
    "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_shared", "is_pinned", "get_device", "register_hook", "requires_grad_",
    "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__len__", "backward",
)  # fmt: skip
# Functions that look at no element. What `.data` gives shares the memory, so that an operation on it is seen.
_TORCH: Any = Tensor
_HARMLESS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(getattr(Tensor, name, None), "__get__")),
        _TORCH.grad.__set__,  # what the user puts there is the user's: overlap.py
        _TORCH.requires_grad.__set__,
        *(getattr(Tensor, name) for name in _METHODS),
    ]
)


class Owing(Protocol):
    """An update under way."""

    @property
    def owes(self) -> bool:
        """Are there values that have not landed?"""

    def owed(self) -> Container[int]:
        """The memory where these values are to be: what `memory` gives."""

    def looked_at(self, touched: Iterable[int], *, in_forward: bool) -> None:
        """Somebody looks at this memory now: have the values there."""


class Lookout(TorchFunctionMode):
    """One for each thread that trains: [Note: lookout]."""

    def __init__(self) -> None:
        super().__init__()
        self._owing: list[weakref.ref[Owing]] = []
        self._depth = 0  # forwards under way
        self._there = False  # on the stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            for one in self._all():
                if one.owes:
                    owed = one.owed()
                    if touched := [x for x in memory(_tensors((args, kwargs))) if x in owed]:
                        one.looked_at(touched, in_forward=self._depth > 0)
        return func(*args, **(kwargs or {}))

    def _all(self) -> Iterator[Owing]:
        return (one for ref in self._owing if (one := ref()) is not None)

    def begin_forward(self, one: Owing) -> None:
        """A forward of a whole model begins."""
        if all(known is not one for known in self._all()):
            self._owing = [*(ref for ref in self._owing if ref() is not None), weakref.ref(one)]
        self._depth += 1
        self.rest()

    def end_forward(self) -> None:
        """It has ended, or raised."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth and not self._there:
            self._there = True
            _restack(lambda modes: [self, *modes])

    def rest(self) -> None:
        """Leave the stack until a forward ends, if nothing is owed: no thread may end with a mode on its stack."""
        if self._there and not any(one.owes for one in self._all()):
            self._there = False
            _restack(lambda modes: [mode for mode in modes if mode is not self])

    def rest_in_forward(self) -> None:
        """The same, in the middle of a forward alone."""
        if self._depth:
            self.rest()

    def watches(self, one: Owing) -> bool:
        """Would it see now who looks at what this one owes?"""
        return self._there and any(known is one for known in self._all())


_here = threading.local()


def lookout() -> Lookout:
    """The one of this thread."""
    if not hasattr(_here, "lookout"):
        _here.lookout = Lookout()
    found: Lookout = _here.lookout
    return found


def _restack(change: Callable[[list[Any]], list[Any]]) -> None:
    """Take all modes off this thread's stack and put others there, the bottom one first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    for mode in change(modes[::-1]):
        torch._C._push_on_torch_function_stack(mode)


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))


def memory(tensors: Iterable[Tensor]) -> Iterator[int]:
    """What tells memory apart, whatever tensors share it. Those without memory of their own have none."""
    for x in tensors:
        if x.layout is torch.strided and not x.is_meta:
            yield x.untyped_storage()._cdata
