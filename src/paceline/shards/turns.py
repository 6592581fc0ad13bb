"""The user's step, made by his optimizer for pieces in place of parameters.

[Note: in turns] A 16-bit gradient is stepped in fp32, which for all of a model is as much memory as its masters. So it
is widened for a few buckets, these are stepped, and their memory serves the next. Calling an optimizer several times
gives the bits of calling it once, if it counts steps by parameter: torch's own do, others are called once. Hooks that
the user has on the step are called once in any case, before the first turn and after the last.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.shards.elementwise import KNOWN
from paceline.shards.piece import Piece

AT_ONCE = 1 << 30  # bytes of gradients in fp32: enough for a device to be busy with

Some = Sequence[Piece]  # of one bucket


def in_turns(
    step: Callable[[], Any], optimizer: Optimizer, buckets: Sequence[Some], take: Callable[[Some], None]
) -> Any:
    """[Note: in turns]. take: before its step, what a bucket's parameters and gradients are now."""
    turns = list(_turns(buckets)) if type(optimizer) in KNOWN else [buckets]
    result = None
    for i, turn in enumerate(turns):
        pieces = [piece for some in turn for piece in some]
        try:
            with torch.no_grad():
                for some in turn:
                    take(some)
            with _holding(optimizer, pieces), _heard(optimizer, before=i == 0, after=i == len(turns) - 1):
                result = step()
        finally:
            for piece in pieces:
                piece.param.grad = None
    return result


def _turns(buckets: Sequence[Some]) -> Iterator[Sequence[Some]]:
    """At least one."""
    turn: list[Some] = []
    size = 0
    for some in buckets:
        wide = sum(piece.param.nbytes for piece in some if piece.apart)
        if turn and size + wide > AT_ONCE:
            yield turn
            turn, size = [], 0
        turn.append(some)
        size += wide
    yield turn


@contextlib.contextmanager
def _holding(optimizer: Optimizer, pieces: Some) -> Iterator[None]:
    """Inside, the optimizer's groups hold pieces in place of parameters."""
    of: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        of[id(piece.slot.param)].append(piece.param)
    groups, params = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [x for p in group["params"] for x in of[id(p)]]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, its in zip(groups, params, strict=True):
            group["params"] = its


@contextlib.contextmanager
def _heard(optimizer: Any, *, before: bool, after: bool) -> Iterator[None]:
    """Inside, a step calls the user's hooks only as said."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = hooks[0] if before else OrderedDict()
    optimizer._optimizer_step_post_hooks = hooks[1] if after else OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
