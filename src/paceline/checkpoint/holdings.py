"""What this worker holds of a run: stretches of tensors, and single values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import names
from paceline.checkpoint.manifest import MOST, TensorEntry, Value
from paceline.checkpoint.names import Names
from paceline.comm.lane import NARROW
from paceline.core.bucket import memory
from paceline.core.engine import Engine
from paceline.core.shard import MASTER, Owned, Shard
from paceline.data import random_streams
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Holding:
    """A stretch of a tensor that this worker holds. `get` gives its elements as they are then."""

    key: str
    entry: TensorEntry
    start: int
    stop: int
    get: Callable[[], Tensor]
    shared: bool = False  # all workers hold it alike
    trained: bool = False  # training changes it, so an infinity in it is none that somebody put there, as in a mask

    @classmethod
    def whole(cls, key: str, x: Tensor, *, shared: bool, trained: bool = False) -> Holding:
        """Hold all of a tensor. shared: all workers hold it alike."""
        entry = TensorEntry.of(x)
        return cls(key, entry, 0, entry.length, lambda: memory(x), shared, trained)

    @classmethod
    def shard(
        cls, key: str, shard: Shard, dtype: torch.dtype, get: Callable[[], Tensor], *, trained: bool = False
    ) -> Holding:
        """Hold a shard of something in a parameter's shape."""
        like = TensorEntry.of(shard.slot.view)
        wide = dtype.to_complex() if shard.slot.view.is_complex() and not dtype.is_complex else dtype
        entry = TensorEntry(dtype=str(wide).removeprefix("torch."), shape=like.shape, strides=like.strides)
        return cls(key, entry, shard.inside.start, shard.inside.stop, get, trained=trained)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.entry.real.itemsize

    def cut(self, start: int, stop: int) -> Holding:
        """Hold only a part of what all workers hold alike."""
        return replace(self, start=start, stop=stop, get=lambda: self.get()[start:stop], shared=False)

    def spoilt(self, x: Tensor) -> bool:
        """Say whether there is a NaN in these elements of it, or in what is trained an infinity."""
        if not x.is_floating_point() or not x.numel():
            return False
        both = torch.stack(torch.aminmax(x if x.dtype.itemsize > 1 else x.half()))  # a NaN shows in both
        return bool(both.isnan().any() or (self.trained and both.isinf().any()))


def share_out(holdings: Iterable[Holding], rank: int, world_size: int) -> list[Holding]:
    """Give what this worker writes: what is its own, and an equal share of the bytes that all hold alike."""
    known = list(holdings)
    shared = [h for h in known if h.shared]
    total = sum(h.nbytes for h in shared)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    mine, end = [h for h in known if not h.shared], 0
    for h in shared:
        begin, end, size = end, end + h.nbytes, h.entry.real.itemsize
        # Rounded alike on both sides of a border, so that neighbours meet.
        start, stop = (min(max(-(-(at - begin) // size), 0), h.stop) for at in (low, high))
        if start < stop or (not h.stop and rank == 0):
            mine.append(h.cut(start, stop))
    return mine


def model(known: Names, owned: Owned) -> Iterator[Holding]:
    """Give what this worker holds of the models' parameters and buffers."""
    sharded = owned.ids | owned.gathered
    for name, x in known.tensors.items():
        if id(x) not in sharded:
            yield Holding.whole(names.MODEL + name, x, shared=True, trained=x.requires_grad)
        elif shard := owned.of_model(x):
            dtype, trained = shard.bucket.flat.dtype, x.requires_grad
            yield Holding.shard(names.MODEL + name, shard, dtype, shard.now, trained=trained)


def optimizer(i: int, opt: Optimizer, known: Names, owned: Owned) -> tuple[list[Holding], dict[str, Value]]:
    """Give what this worker holds of the optimizer's state: stretches of tensors, and single values."""
    holdings: list[Holding] = []
    values: dict[str, Value] = {}
    _check_keys(opt)
    for p in (p for group in opt.param_groups for p in group["params"]):
        name, shard = known.of[id(p)], owned.shards.get(id(p))
        if shard is None and id(p) in owned.ids:
            continue
        state: dict[str, Any] = dict(opt.state.get(p if shard is None else shard.param, {}))
        if shard is not None and p.dtype in NARROW:
            state[MASTER] = shard.param
        for key, value in state.items():
            at = names.slot(i, name, key)
            if not isinstance(value, Tensor) or (not value.dim() and (shard or key == "step" or p.dim())):
                values[at] = single(at, value)
            elif shard is None:
                holdings.append(Holding.whole(at, value, shared=True))
            elif value.shape == shard.param.shape:
                look = functools.partial(shard.look, value)
                holdings.append(Holding.shard(at, shard, value.dtype, look, trained=key == MASTER))
            else:
                raise CheckpointError(
                    f"{type(opt).__name__} remembers {key!r} of {name}, which cannot be saved in shards",
                    why=f"it is a tensor of shape {list(value.shape)}, neither a number nor one for each element",
                    do="use the layout replicated with this optimizer",
                )
    return holdings, values


def _check_keys(opt: Optimizer) -> None:
    """Refuse what an optimizer remembers under a key that a checkpoint could not give back."""
    for place, state in opt.state.items():
        strange = [key for key in state if not isinstance(key, str) or "/" in key] if isinstance(state, dict) else []
        if not isinstance(place, Tensor) or strange:
            raise CheckpointError(
                f"{type(opt).__name__} remembers {strange[0] if strange else place!r}, which cannot be saved",
                why="a checkpoint has places for what is remembered of parameters, by names without a slash",
                do="pass it through extra=, and take it out of optimizer.state before the save",
            )


def parts(i: int, engine: Engine) -> tuple[list[Holding], dict[str, Value]]:
    """Give what the parts of the method remember on this worker."""
    holdings: list[Holding] = []
    values: dict[str, Value] = {}
    for path, part in names.paths(engine.method):
        for key, value in part.state.save(engine.buckets).items():
            at = names.part(i, path) + names.word(key)
            if isinstance(value, Tensor):
                holdings.append(Holding.whole(at, value, shared=False))
            else:
                values[at] = single(at, value)
    return holdings, values


def single(key: str, value: Any) -> Value:
    """Give a number or a word as JSON, with its type."""
    if isinstance(value, Tensor):
        kind, value = str(value.dtype).removeprefix("torch."), value.item()
    else:
        kind = "float" if isinstance(value, float) else ""
    if isinstance(value, float):  # of numpy's too, which is one
        return kind, float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (bool, str, type(None))) or (isinstance(value, int) and abs(value) <= MOST):
        return kind, value
    raise CheckpointError(
        f"{key} cannot be saved",
        why=f"it is {repr(value)[:80]}; a checkpoint holds tensors, words and numbers, whole ones up to 2**53",
        do="pass what it stands for through extra=",
    )


def number(value: Value) -> Any:
    """Give the number or word that `single` has made JSON of."""
    kind, it = value
    if not kind:
        return it
    if it is None:
        raise CheckpointError(f"a {kind} is missing in the checkpoint")
    if kind == "float":
        return float(it)
    dtype = TensorEntry(dtype=kind, shape=()).torch_dtype
    return torch.tensor(float(it) if isinstance(it, str) else it, dtype=dtype)


def random() -> list[Holding]:
    """Give the states of this worker's random streams."""
    return [Holding.whole(names.RANDOM + kind, x, shared=False) for kind, x in random_streams.states().items()]


def prefixed(prefix: str, holdings: Iterable[Holding]) -> list[Holding]:
    """Give these holdings under keys of this worker's own."""
    return [replace(h, key=prefix + h.key, shared=False) for h in holdings]
