"""The optimizer's full state out of the workers' shards, and shards out of a full state.

The full state is what the unwrapped optimizer would have: keyed by parameter, in the parameter's shape, with what is
not per element (a step count) once. So it can be loaded at another world size, into another layout, or without
Paceline. The fp32 master of a 16-bit parameter goes along under a name of its own, which optimizers pass over.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.lane import NARROW
from paceline.comm.messages import all_gather_json
from paceline.core.bucket import Bucket
from paceline.core.shard import MASTER
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.core.shard import Shard

_ELEMENTS = "elements"


class ShardedState(defaultdict[Tensor, Any]):
    """The optimizer's state where workers have shards of it: who asks for that of a whole parameter is refused.

    It would be empty, as if the optimizer had never stepped, and an optimizer whose other methods look there (`eval` of
    a schedule-free one, `first_step`) would do nothing at all.
    """

    def __init__(self, known: Mapping[Tensor, Any], buckets: Sequence[Bucket]) -> None:
        super().__init__(dict, known)
        self._buckets = buckets

    def __missing__(self, key: Tensor) -> Any:
        if name := next((s.name for b in self._buckets for s in b.slots if s.param is key), None):
            raise UsageError(
                f"the optimizer's state of {name} is asked for, and is in shards, one on each worker",
                why="with this layout no worker holds the state of a whole parameter",
                do="read optimizer.state_dict(), which every worker must call, or use the layout replicated",
            )
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


def take(b: Bucket, shards: Sequence[Shard], optimizer: Optimizer) -> None:
    """Let each shard take its part of what the optimizer remembers of the parameter, which is then removed."""
    if not any(s.param in optimizer.state for s in b.slots):
        return
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    with _at_hand(shards, changed=True):
        for shard in shards:
            known = optimizer.state.get(p := shard.slot.param, {})
            mine = {key: _cut(key, value, shard, group_of.get(id(p), {})) for key, value in known.items()}
            master = mine.pop(MASTER, None)
            if master is not None and shard.apart:
                shard.param.copy_(master)
            if mine:
                optimizer.state[shard.param] = shard.remember(mine)
    for s in b.slots:
        optimizer.state.pop(s.param, None)


def _at_hand(shards: Sequence[Shard], *, changed: bool) -> AbstractContextManager[Any]:
    """Have the shards of one bucket and their state in memory inside the context."""
    return shards[0].at_hand(changed=changed) if shards else contextlib.nullcontext()


def _cut(key: str, value: Any, shard: Shard, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _per_element(key, value, shard.slot.view):
        on_device = group.get("capturable") or group.get("fused")
        return value.to(shard.param.device, copy=True) if on_device else value.clone()
    x = shard.of(value)
    wide = shard.param.dtype if value.is_floating_point() or value.is_complex() else x.dtype
    return x.to(wide, copy=True)


def _per_element(key: str, value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and key != "step" and value.shape == p.shape


def state(shards: Mapping[int, Sequence[Shard]], ex: Exchange) -> defaultdict[Tensor, Any]:
    """Give the full state, put together from the shards of all workers. All workers call it."""
    shared = {id(shard.param) for some in shards.values() for shard in some}
    whole = {p: known for p, known in ex.optimizer.state.items() if id(p) not in shared}  # of what is not trained
    words = {shard.slot.name: _words(shard, ex) for some in shards.values() for shard in some}
    said: dict[str, dict[str, Any]] = {}
    for worker in all_gather_json(ex.comm, words, ex.buckets[0].device):
        for name, about in worker.items():
            said.setdefault(name, {}).update(about)
    for b in ex.buckets:
        with _at_hand(shards[b.index], changed=False):
            assembled = _assemble(b, shards[b.index], said, ex)
        for s, known in zip(b.slots, assembled, strict=True):
            if known:
                whole[s.param] = known
    params = [p for group in ex.optimizer.param_groups for p in group["params"]]
    return defaultdict(dict, {p: whole[p] for p in params if p in whole})


def _words(shard: Shard, ex: Exchange) -> dict[str, Any]:
    """Describe a shard's state as JSON: the kind and value of each key, or the dtype of what is per element."""
    about: dict[str, Any] = {}
    for key, value in _remembered(shard, ex).items():
        if key == MASTER and not _stepped(shard, ex):
            continue
        if _per_element(key, value, shard.param):
            about[key] = [_ELEMENTS, str(value.dtype).removeprefix("torch.")]
        elif isinstance(value, Tensor) and value.numel() == 1:
            about[key] = [str(value.dtype).removeprefix("torch."), value.item()]
        elif isinstance(value, (bool, int, float, str, type(None))):
            about[key] = ["", value]
        else:
            raise UsageError(
                f"{type(ex.optimizer).__name__} remembers {key!r} of a parameter, which cannot be put together",
                why=f"it is a {type(value).__name__} that is neither a number nor one for each element",
                do="use the layout replicated with this optimizer",
            )
    return about


def _remembered(shard: Shard, ex: Exchange) -> dict[str, Any]:
    known = dict(ex.optimizer.state.get(shard.param, {}))
    return known | {MASTER: shard.param} if shard.slot.param.dtype in NARROW else known


def _stepped(shard: Shard, ex: Exchange) -> bool:
    """Say whether a shard was ever stepped. Of one that was not, an optimizer must not find a state."""
    if ex.optimizer.state.get(shard.param):
        return True
    with shard.at_hand(changed=False):
        return not torch.equal(shard.param, shard.now().to(shard.param))


def _assemble(b: Bucket, shards: Sequence[Shard], said: Any, ex: Exchange) -> list[dict[str, Any]]:
    """Give the full state of each of the bucket's parameters."""
    about = [said.get(s.name, {}) for s in b.slots]
    whole: list[dict[str, Any]] = [
        {key: _value(kind, value) for key, (kind, value) in known.items() if kind != _ELEMENTS} for known in about
    ]
    for key, dtype in sorted({(k, w[1]) for known in about for k, w in known.items() if w[0] == _ELEMENTS}):
        mine = torch.zeros(b.own.stop - b.own.start, dtype=getattr(torch, dtype), device=b.device)
        for shard in shards:
            if (value := _remembered(shard, ex).get(key)) is not None:
                mine[shard.here] = value
        views = b.views(ex.comm.all_gather(mine).wait().view(-1))
        for known, its, view in zip(about, whole, views, strict=True):
            if key in known:
                its[key] = view.clone()
    return whole


def _value(kind: str, value: Any) -> Any:
    return torch.tensor(value, dtype=getattr(torch, kind)) if kind else value
