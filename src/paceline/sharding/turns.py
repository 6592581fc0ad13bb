"""The user's step, made by the optimizer for shards in place of parameters.

[Note: in turns] A 16-bit gradient is stepped in fp32, which for all of a model is as much memory as its masters. So
gradients are widened for a few buckets, these are stepped, and their memory serves the next. Calling an optimizer
several times gives the bits of calling it once, if it counts steps by parameter: torch's own do, others are called
once. Hooks that the user has on the step are called once in any case, before the first turn and after the last.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.shard import Shard
from paceline.offload.memory_model import AT_ONCE, STRETCH
from paceline.sharding.elementwise import KNOWN

BucketShards = Sequence[Shard]  # this worker's shards of one bucket


def in_turns(
    step: Callable[[], Any], optimizer: Optimizer, buckets: Sequence[BucketShards], take: Callable[[BucketShards], None]
) -> Any:
    """Make the step for these buckets: [Note: in turns].

    take: takes the values of a bucket's parameters and gradients as they are now, before its step.
    """
    turns = list(_turns(buckets)) if type(optimizer) in KNOWN else [buckets]
    result = None
    for i, turn in enumerate(turns):
        shards = [shard for some in turn for shard in some]
        try:
            with torch.no_grad():
                for some in turn:
                    take(some)
            with _holding(optimizer, shards), _with_hooks(optimizer, before=i == 0, after=i == len(turns) - 1):
                result = step()
        finally:
            for shard in shards:
                shard.param.grad = None
    return result


def _turns(buckets: Sequence[BucketShards]) -> Iterator[Sequence[BucketShards]]:
    """Give the buckets of each turn. There is at least one turn."""
    turn: list[BucketShards] = []
    size = 0
    for some in buckets:
        wide = sum(shard.param.nbytes for shard in some if shard.apart)
        if turn and size + wide > AT_ONCE:
            yield turn
            turn, size = [], 0
        turn.append(some)
        size += wide
    yield turn


@contextlib.contextmanager
def _holding(optimizer: Optimizer, shards: BucketShards) -> Iterator[None]:
    """Let the optimizer's groups hold shards in place of parameters inside the context."""
    of: dict[int, list[Tensor]] = defaultdict(list)
    for shard in shards:
        of[id(shard.slot.param)].append(shard.param)
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
def _with_hooks(optimizer: Any, *, before: bool, after: bool) -> Iterator[None]:
    """Let a step inside the context call the user's hooks before it, after it, or not."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = hooks[0] if before else OrderedDict()
    optimizer._optimizer_step_post_hooks = hooks[1] if after else OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def take_all(shards: Sequence[Shard], master: Tensor) -> None:
    """Call `take` for all shards of a bucket whose masters lie in one vector, with a few operations for all of them."""
    if not shards:
        return
    b, now = shards[0].bucket, shards[0].source
    if now is None:
        now = torch.empty_like(master, dtype=b.flat.dtype)
        torch._foreach_copy_([now[shard.here] for shard in shards], [shard.now() for shard in shards])
    for known, theirs in zip(master.split(STRETCH), now.split(STRETCH), strict=True):
        wide = theirs.to(known.dtype)
        known.copy_(torch.where(known.to(theirs.dtype) == theirs, known, wide, out=wide))
    mean = b.kept.to(master.dtype)
    for shard in shards:
        shard.show(mean[shard.here])
