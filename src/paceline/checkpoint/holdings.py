"""What this worker holds of a run: stretches of tensors, and single values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.bucket import memory
from paceline.checkpoint import names
from paceline.checkpoint.manifest import Entry, Value
from paceline.checkpoint.names import Names
from paceline.comm import NARROW
from paceline.engine import Engine
from paceline.errors import CheckpointError
from paceline.shards.piece import Piece
from paceline.shards.pieces import Shards
from paceline.shards.whole import MASTER


@dataclass(frozen=True)
class Holding:
    """A stretch of a tensor, as it is when it is asked for."""

    key: str
    entry: Entry
    start: int
    stop: int
    get: Callable[[], Tensor]
    shared: bool = False  # all workers hold it alike

    @classmethod
    def whole(cls, key: str, x: Tensor, *, shared: bool) -> Holding:
        entry = Entry.of(x)
        return cls(key, entry, 0, entry.length, lambda: memory(x), shared)

    @classmethod
    def piece(cls, key: str, piece: Piece, dtype: torch.dtype, get: Callable[[], Tensor]) -> Holding:
        like = Entry.of(piece.slot.view)
        wide = dtype.to_complex() if piece.slot.view.is_complex() and not dtype.is_complex else dtype
        entry = Entry(dtype=str(wide).removeprefix("torch."), shape=like.shape, strides=like.strides)
        return cls(key, entry, piece.inside.start, piece.inside.stop, get)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.entry.real.itemsize

    def cut(self, start: int, stop: int) -> Holding:
        """Of what all hold alike, this worker's share."""
        return Holding(self.key, self.entry, start, stop, lambda: self.get()[start:stop])


def share_out(holdings: Iterable[Holding], rank: int, world: int) -> list[Holding]:
    """What this worker writes: what is its own, and of what all hold as many bytes as any other."""
    known = list(holdings)
    shared = [h for h in known if h.shared]
    total = sum(h.nbytes for h in shared)
    low, high = total * rank // world, total * (rank + 1) // world
    mine, end = [h for h in known if not h.shared], 0
    for h in shared:
        begin, end, size = end, end + h.nbytes, h.entry.real.itemsize
        # Rounded alike on both sides of a border, so that neighbours meet.
        start, stop = (min(max(-(-(at - begin) // size), 0), h.stop) for at in (low, high))
        if start < stop or (not h.stop and rank == 0):
            mine.append(h.cut(start, stop))
    return mine


class Owned:
    """Parameters that are shared out over the workers, and this worker's pieces of them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.ids: set[int] = set()
        self.lent: set[int] = set()  # whole only while a module computes with them, trained or frozen
        self.pieces: dict[int, Piece] = {}  # by the parameter's id
        self.frozen: dict[int, Piece] = {}  # ... of those that are lent and not trained
        for engine in engines:
            layout = engine.method.layout
            if isinstance(layout, Shards) and layout.pieces:
                ids = {id(s.param) for b in engine.buckets for s in b.slots}
                self.ids |= ids
                self.lent |= layout.lent()
                self.frozen |= {id(piece.slot.param): piece for piece in layout.frozen()}
                self.pieces |= {id(piece.slot.param): piece for some in layout.pieces.values() for piece in some}

    def of_model(self, p: Tensor) -> Piece | None:
        return self.pieces.get(id(p)) or self.frozen.get(id(p))


def model(known: Names, owned: Owned) -> Iterator[Holding]:
    in_slices = owned.ids | owned.lent
    for name, x in known.tensors.items():
        if id(x) not in in_slices:
            yield Holding.whole(names.MODEL + name, x, shared=True)
        elif piece := owned.of_model(x):
            yield Holding.piece(names.MODEL + name, piece, piece.bucket.flat.dtype, piece.now)


def optimizer(i: int, opt: Optimizer, known: Names, owned: Owned) -> tuple[list[Holding], dict[str, Value]]:
    """What it remembers of each parameter."""
    holdings: list[Holding] = []
    values: dict[str, Value] = {}
    for p in (p for group in opt.param_groups for p in group["params"]):
        name, piece = known.of[id(p)], owned.pieces.get(id(p))
        if piece is None and id(p) in owned.ids:
            continue
        state: dict[str, Any] = dict(opt.state.get(p if piece is None else piece.param, {}))
        if piece is not None and p.dtype in NARROW:
            state[MASTER] = piece.param
        for key, value in state.items():
            at = names.slot(i, name, key)
            if not isinstance(value, Tensor) or (not value.dim() and (piece or key == "step" or p.dim())):
                values[at] = single(at, value)
            elif piece is None:
                holdings.append(Holding.whole(at, value, shared=True))
            elif value.shape == piece.param.shape:
                holdings.append(Holding.piece(at, piece, value.dtype, functools.partial(piece.look, value)))
            else:
                raise CheckpointError(
                    f"{type(opt).__name__} remembers {key!r} of {name}, which cannot be saved in slices",
                    why=f"it is a tensor of shape {list(value.shape)}, neither a number nor one for each element",
                    do="use the layout replicated with this optimizer",
                )
    return holdings, values


def parts(i: int, engine: Engine) -> tuple[list[Holding], dict[str, Value]]:
    """What the parts of the method remember: each worker its own."""
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
    """A number or a word, as JSON can say it."""
    if isinstance(value, Tensor):
        kind, value = str(value.dtype).removeprefix("torch."), value.item()
    else:
        kind = "float" if isinstance(value, float) else ""
    if isinstance(value, float):
        return kind, value if math.isfinite(value) else str(value)
    if isinstance(value, (bool, int, str, type(None))):
        return kind, value
    raise CheckpointError(
        f"{key} cannot be saved",
        why=f"it is a {type(value).__name__}; a checkpoint holds tensors, numbers and words",
        do="pass what it stands for through extra=",
    )


def number(value: Value) -> Any:
    """The other way round."""
    kind, it = value
    if not kind:
        return it
    if kind == "float":
        return float(it)
    dtype = Entry(dtype=kind, shape=()).torch_dtype
    return torch.tensor(float(it) if isinstance(it, str) else it, dtype=dtype)


def random() -> list[Holding]:
    """Where this worker's streams of random numbers stand."""
    streams: Mapping[str, Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams = {**streams, "cuda": torch.cuda.get_rng_state()}
    return [Holding.whole(names.RANDOM + device, state, shared=False) for device, state in streams.items()]


def prefixed(prefix: str, holdings: Iterable[Holding]) -> list[Holding]:
    """As this worker's own."""
    return [Holding(prefix + h.key, h.entry, h.start, h.stop, h.get) for h in holdings]
