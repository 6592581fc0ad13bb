"""A look at the models' first inputs, where no loader was handed over: do all workers do the same work?

Workers that are given the same samples train as one worker would, only slower, and nothing else shows it. So each
worker posts what its first two inputs look like, as a number. Worker 0 compares them some forwards later, without
waiting for any of them, and says it once.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from paceline.comm.board import StoreBoard
from paceline.errors import PeerError

_POSTED, _LAST = 2, 50  # after which forwards the numbers are posted, and looked at for the last time
_MOST = 2**18  # elements of a tensor that are looked at
_SAID = (
    "paceline: all workers were given the same inputs so far, so all do the same work: hand the DataLoader to "
    "paceline.prepare, or give each worker a share of its own, by paceline.rank()"
)


def watch_for_same_work(models: Sequence[nn.Module], board: StoreBoard, has_loader: Callable[[], bool]) -> None:
    """Say once if all workers are given the same inputs. has_loader: whether a loader has been handed over by now."""
    numbers: list[int] = []
    forwards = 0
    watches: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal forwards
        if not any(module is model for model in models) or not torch.is_grad_enabled():
            return  # a copy of a model, or an evaluation
        forwards += 1
        if forwards <= _POSTED:
            numbers.extend(_numbers(args, kwargs))
        over = has_loader() or forwards > _LAST
        with contextlib.suppress(PeerError):  # the store is gone, which is somebody else's to say
            if forwards == _POSTED and not over:
                board.write(f"inputs/{board.rank}", numbers)
                over = board.rank > 0 or not numbers
            elif forwards > _POSTED and not over:
                over = _compared(board, numbers)
        if over:
            for watch in watches:
                watch.remove()

    watches += [model.register_forward_pre_hook(before, with_kwargs=True) for model in models]


def _compared(board: StoreBoard, mine: list[int]) -> bool:
    """Compare the workers' numbers, if all have posted theirs."""
    theirs = board.others("inputs")
    if len(theirs) < board.world_size - 1:
        return False
    if all(numbers == mine for numbers in theirs.values()):
        print(_SAID, file=sys.stderr, flush=True)
    return True


def _numbers(*inputs: Any) -> list[int]:
    """A number for each tensor: equal ones have equal numbers."""
    found = []
    for leaf in _pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
            some = leaf.detach().reshape(-1)[:_MOST].contiguous().cpu()
            found.append(zlib.crc32(some.view(torch.uint8).numpy().tobytes()))
    return found
