"""The optimizer's state: whole out of the workers' pieces, and pieces out of a whole.

Whole it is what the unwrapped optimizer would have: keyed by parameter, in the parameter's shape, with what is not
per element (a step count) once. So it can be loaded at another world size, into another layout, or without Paceline.
The fp32 master of a 16-bit parameter goes along under a name of its own, which optimizers pass over.
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

from paceline.bucket import Bucket
from paceline.comm import NARROW
from paceline.errors import UsageError
from paceline.words import tell

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.shards.piece import Piece

MASTER = "master"
_ELEMENTS = "elements"


def take(b: Bucket, pieces: Sequence[Piece], optimizer: Optimizer) -> None:
    """Each piece takes its stretch of what the optimizer remembers of the parameter, which then goes."""
    if not any(s.param in optimizer.state for s in b.slots):
        return
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    with _at_hand(pieces, changed=True):
        for piece in pieces:
            known = optimizer.state.get(p := piece.slot.param, {})
            mine = {key: _cut(key, value, piece, group_of.get(id(p), {})) for key, value in known.items()}
            master = mine.pop(MASTER, None)
            if master is not None and piece.apart:
                piece.param.copy_(master)
            if mine:
                optimizer.state[piece.param] = piece.remember(mine)
    for s in b.slots:
        optimizer.state.pop(s.param, None)


def _at_hand(pieces: Sequence[Piece], *, changed: bool) -> AbstractContextManager[Any]:
    """Those of one bucket."""
    return pieces[0].at_hand(changed=changed) if pieces else contextlib.nullcontext()


def _cut(key: str, value: Any, piece: Piece, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _per_element(key, value, piece.slot.view):
        on_device = group.get("capturable") or group.get("fused")
        return value.to(piece.param.device, copy=True) if on_device else value.clone()
    x = piece.of(value)
    wide = piece.param.dtype if value.is_floating_point() or value.is_complex() else x.dtype
    return x.to(wide, copy=True)


def _per_element(key: str, value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and key != "step" and value.shape == p.shape


def state(pieces: Mapping[int, Sequence[Piece]], ex: Exchange) -> defaultdict[Tensor, Any]:
    """Everybody's pieces put together. All workers call it."""
    shared = {id(piece.param) for some in pieces.values() for piece in some}
    whole = {p: known for p, known in ex.optimizer.state.items() if id(p) not in shared}  # of what is not trained
    words = {piece.slot.name: _words(piece, ex) for some in pieces.values() for piece in some}
    said: dict[str, dict[str, Any]] = {}
    for worker in tell(ex.comm, words, ex.buckets[0].device):
        for name, about in worker.items():
            said.setdefault(name, {}).update(about)
    for b in ex.buckets:
        with _at_hand(pieces[b.index], changed=False):
            assembled = _assemble(b, pieces[b.index], said, ex)
        for s, known in zip(b.slots, assembled, strict=True):
            if known:
                whole[s.param] = known
    params = [p for group in ex.optimizer.param_groups for p in group["params"]]
    return defaultdict(dict, {p: whole[p] for p in params if p in whole})


def _words(piece: Piece, ex: Exchange) -> dict[str, Any]:
    """What there is of a piece, as JSON: a key's kind and value; of what is per element, its dtype."""
    about: dict[str, Any] = {}
    for key, value in _remembered(piece, ex).items():
        if key == MASTER and not _stepped(piece, ex):
            continue
        if _per_element(key, value, piece.param):
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


def _remembered(piece: Piece, ex: Exchange) -> dict[str, Any]:
    known = dict(ex.optimizer.state.get(piece.param, {}))
    return known | {MASTER: piece.param} if piece.slot.param.dtype in NARROW else known


def _stepped(piece: Piece, ex: Exchange) -> bool:
    """Of one that never was, an optimizer must not find anything."""
    if ex.optimizer.state.get(piece.param):
        return True
    with piece.at_hand(changed=False):
        return not torch.equal(piece.param, piece.now().to(piece.param))


def _assemble(b: Bucket, pieces: Sequence[Piece], said: Any, ex: Exchange) -> list[dict[str, Any]]:
    """For each of the bucket's parameters, what there is of it."""
    about = [said.get(s.name, {}) for s in b.slots]
    whole: list[dict[str, Any]] = [
        {key: _value(kind, value) for key, (kind, value) in known.items() if kind != _ELEMENTS} for known in about
    ]
    for key, dtype in sorted({(k, w[1]) for known in about for k, w in known.items() if w[0] == _ELEMENTS}):
        mine = torch.zeros(b.own.stop - b.own.start, dtype=getattr(torch, dtype), device=b.device)
        for piece in pieces:
            if (value := _remembered(piece, ex).get(key)) is not None:
                mine[piece.here] = value
        views = b.views(ex.comm.gather(mine).wait().view(-1))
        for known, its, view in zip(about, whole, views, strict=True):
            if key in known:
                its[key] = view.clone()
    return whole


def _value(kind: str, value: Any) -> Any:
    return torch.tensor(value, dtype=getattr(torch, kind)) if kind else value
