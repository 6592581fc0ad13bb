"""`paceline.retry()`: the body of a loop, which is left when memory runs out, and entered again with smaller parts.

What the body had computed must be free before the next attempt. What functions hold that have returned by the error is
forgotten with its traceback. What the loop's own variables hold stays, because they are the user's: a loss or an output
still refers to everything that its backward would have needed. So the tensors among them are detached, in place.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import Tensor

from paceline.errors import UsageError, out_of_memory
from paceline.session.session import current


class Retry:
    """Leaves its block when memory runs out, so that the loader can deal the batch again in smaller parts."""

    def __enter__(self) -> None:
        here = current()
        if here is not None and here.redeal is None:
            raise UsageError(
                "paceline.retry() has no batch to deal again",
                why="it is the body of a loop over a loader that was prepared with micro_batch='auto'",
                do="prepare(model, optimizer, loader, micro_batch='auto')",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        here = current()
        if here is None or error is None or not out_of_memory(error):
            return False
        if here.redeal is None or not here.redeal.possible:
            error.add_note(
                "paceline: this was not in a forward or a backward of training, so smaller micro-batches do not help:"
                " it may be the optimizer's state (the layouts zero1 to zero3 and store='cpu' make that smaller)"
            )
            return False
        here.redeal.ran_out(error)
        _free(error, trace, sys._getframe(1))
        return True


def retry() -> Retry:
    """A block that is left when memory runs out inside: `with paceline.retry():` around the body of the loop.

    With prepare(..., micro_batch="auto"). The loader then deals the same batch again, to all workers, in micro-batches
    of half the size, and the step that did not fit has left no trace. Only out-of-memory errors are caught, and only
    in forward and backward. What stands in the block may run several times for one batch.
    """
    return Retry()


def _free(error: BaseException, trace: TracebackType | None, loop: FrameType) -> None:
    """Free what the block had computed."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    traceback.clear_frames(trace)
    for x in _tensors(list(loop.f_locals.values())):
        _detach(x)
    error.__traceback__ = None
    gc.collect()  # of what is in circles
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what is free in pieces of another size


def _tensors(values: list[object]) -> Iterator[Tensor]:
    """The tensors that have a graph among these values, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif type(value) in (list, tuple):
            yield from _tensors(list(value))  # type: ignore[call-overload]
        elif type(value) is dict or hasattr(value, "to_tuple"):
            yield from _tensors(list(value.values()))  # type: ignore[attr-defined]


def _detach(x: Tensor) -> None:
    """Have a tensor forget its graph. Torch detaches no views in place: they become another tensor."""
    if x._base is None:
        x.detach_()
        return
    with contextlib.suppress(RuntimeError):  # something in torch holds it too
        torch.utils.swap_tensors(x, x.detach())
