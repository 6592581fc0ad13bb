"""Reading a checkpoint into a run that may be of another size and another layout."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint import names
from paceline.checkpoint.folders import newest
from paceline.checkpoint.holdings import Owned, number
from paceline.checkpoint.manifest import Entry, Value
from paceline.checkpoint.names import Names
from paceline.checkpoint.reader import Checkpoint, PlainFile, Source, whole
from paceline.checkpoint.save import check_between_steps
from paceline.engine import Engine
from paceline.errors import CheckpointError, MismatchError, UsageError
from paceline.parts import Comm
from paceline.shards.piece import Piece
from paceline.shards.pieces import Shards
from paceline.shards.whole import MASTER
from paceline.state import State
from paceline.things import Things

_MOST = 10  # differences that are listed


def load(path: Path, things: Things, engines: Sequence[Engine], comm: Comm) -> dict[str, Any]:
    """What was saved goes on here; what was given as `extra` then. Every worker calls it."""
    for engine in engines:
        check_between_steps(engine, "load")
        if engine.method.sync.own_pace:
            raise UsageError(
                f"with {engine.method.sync.name} a checkpoint cannot be loaded after prepare",
                why="workers keep their own pace, and others may be on their way with what was before",
                do="call paceline.load first: prepare starts from the weights it is given",
            )
    saved = source(path, comm)
    if not isinstance(saved, Checkpoint):
        load_model(saved, things, engines)
        return {}
    Loading(saved, things, engines, comm).load()
    return saved.manifest.extra


def source(path: Path, comm: Comm) -> Source:
    """A safetensors file, or the newest good checkpoint."""
    return PlainFile(path) if path.is_file() else newest(path, comm)


def load_model(source: Source, things: Things, engines: Sequence[Engine]) -> None:
    """Only the weights and buffers."""
    known, owned = Names(things.models), Owned(engines)
    _refuse(_differences(source, known), source)
    _put_away(engines)
    _read_model(lambda name: _source_name(source, names.MODEL + name, known), source, known, owned)


# -------------------------------------------------------------------------------------------------- does it fit


def _source_name(source: Source, key: str, known: Names) -> str:
    """Of a tensor with several names, the one that is there."""
    name = key.removeprefix(names.MODEL)
    others = [other for other, first in known.ties.items() if first == name]
    return next((k for n in (name, *others) if source.entry(k := names.MODEL + n)), key)


def _differences(source: Source, known: Names) -> list[str]:
    found = []
    for name, x in known.tensors.items():
        entry = source.entry(_source_name(source, names.MODEL + name, known))
        here = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if entry is None:
            found.append(f"{name} is not in it")
        elif (there := f"{entry.dtype}{list(entry.shape)}") != here:
            found.append(f"{name} is {there} in it, {here} here")
    return found


def _strangers(saved: Checkpoint, known: Names) -> list[str]:
    mine = {*known.tensors, *known.ties}
    theirs = [k.removeprefix(names.MODEL) for k in saved.manifest.tensors if k.startswith(names.MODEL)]
    return [f"{name} is only in it" for name in theirs if name not in mine]


def _other_optimizers(saved: Checkpoint, optimizers: Sequence[Optimizer], known: Names) -> list[str]:
    theirs = saved.manifest.optimizers
    if not optimizers:
        return []
    if len(theirs) != len(optimizers):
        return [f"it is of {len(theirs)} optimizers, here are {len(optimizers)}"]
    wrong = []
    for opt, entry in zip(optimizers, theirs, strict=True):
        groups = [[known.of.get(id(p), "?") for p in group["params"]] for group in opt.param_groups]
        if type(opt).__name__ != entry.kind:
            wrong.append(f"the optimizer is {entry.kind} in it, {type(opt).__name__} here")
        elif groups != [_here(group.params, known) for group in entry.groups]:
            wrong.append(f"the parameter groups of {entry.kind} are others, or in another order")
    return wrong


def _here(params: Iterable[str], known: Names) -> list[str]:
    return [known.ties.get(name, name) for name in params]


def _refuse(wrong: list[str], source: Source) -> None:
    if wrong:
        more = f" and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise CheckpointError(
            f"{source.path} is of another model or optimizer",
            why="; ".join(wrong[:_MOST]) + more,
            do="build the model and the optimizer as they were when it was saved",
        )


# -------------------------------------------------------------------------------------------------- into the run


def _read_model(name_of: Callable[[str], str], source: Source, known: Names, owned: Owned) -> None:
    with torch.no_grad():
        for name, x in known.tensors.items():
            key, piece = name_of(name), owned.of_model(x)
            if piece is not None:
                piece.write(_stretch(source, key, piece))
            if id(x) not in owned.lent:
                x.copy_(whole(source, key))
        for piece in owned.pieces.values():
            piece.published()


def _stretch(source: Source, key: str, piece: Piece) -> Tensor:
    """A piece's elements, of a tensor that may lie in another order there."""
    entry = source.entry(key)
    assert entry is not None
    if entry.strides == Entry.of(piece.slot.view).strides:
        return source.read(key, piece.inside.start, piece.inside.stop)
    return piece.of(whole(source, key))


def _put_away(engines: Sequence[Engine]) -> None:
    """Slices are going to be written: what was made whole out of them is old."""
    for engine in engines:
        if isinstance(layout := engine.method.layout, Shards):
            layout.put_away()


class Loading:
    """One load. Keys are looked for as this worker's own where as many workers saved, then as everybody's; what only
    others have is merged.
    """

    def __init__(self, saved: Checkpoint, things: Things, engines: Sequence[Engine], comm: Comm) -> None:
        self.saved, self.things, self.engines, self.comm = saved, things, engines, comm
        self.manifest = saved.manifest
        self.names, self.owned = Names(things.models), Owned(engines)
        self.own = names.own(comm.rank) if self.manifest.world == comm.world else None
        self._slots: dict[str, set[str]] = defaultdict(set)  # of optimizer/I/NAME/
        self._words: dict[str, list[str]] = defaultdict(list)  # of worker/R/part/I/PATH
        for key in (*self.manifest.tensors, *self.manifest.values):
            common = key.split("/", 2)[2] if key.startswith("worker/") else key
            if common.startswith("optimizer/"):
                before, _, slot = common.rpartition("/")
                self._slots[before + "/"].add(slot)
            elif common.startswith("part/"):
                before, _, word = key.partition(" ")
                self._words[before + " "].append(word)

    def load(self) -> None:
        wrong = _differences(self.saved, self.names) + _strangers(self.saved, self.names)
        _refuse(wrong + _other_optimizers(self.saved, self.things.optimizers, self.names), self.saved)
        _put_away(self.engines)
        _read_model(self._weights, self.saved, self.names, self.owned)
        for i, opt in enumerate(self.things.optimizers):
            self._groups(i, opt)
            for group in opt.param_groups:
                for p in group["params"]:
                    self._memory(i, opt, p, beside=bool(group.get("capturable") or group.get("fused")))
        self._say_what_is_left()
        for i, engine in enumerate(self.engines):
            self._parts(i, engine)
            engine.ex.step = self.manifest.step
            engine.over(made=False)
        self._random()

    def _weights(self, name: str) -> str:
        key = _source_name(self.saved, names.MODEL + name, self.names)
        own = f"{self.own}{key}"
        return own if self.own and own in self.manifest.tensors else key

    # ---------------------------------------------------------------------------------------------- the optimizer

    def _groups(self, i: int, opt: Optimizer) -> None:
        for group, theirs in zip(opt.param_groups, self.manifest.optimizers[i].groups, strict=True):
            for key, value in theirs.settings.items():
                group[key] = _setting(value, group.get(key))

    @torch.no_grad()
    def _memory(self, i: int, opt: Optimizer, p: Tensor, *, beside: bool) -> None:
        """What it remembers of a parameter, or of this worker's piece of it. beside: a count lies on the device too."""
        piece, name = self.owned.pieces.get(id(p)), self.names.of[id(p)]
        if piece is None and id(p) in self.owned.ids:
            return
        slots = self._slots[names.slot(i, name, "")]
        values = {slot: self._value(names.slot(i, name, slot), piece) for slot in sorted(slots)}
        master = values.pop(MASTER, None)
        target = p if piece is None else piece.param
        # In slices moments are as wide as the master; whole, as the optimizer made them.
        wide = target.dtype if piece is not None or master is not None else None
        opt.state.pop(target, None)
        with contextlib.nullcontext() if piece is None else piece.at_hand(changed=True):
            if master is not None and piece is not None and piece.apart:
                piece.param.copy_(master)
            state = {slot: _placed(slot, value, target, wide, beside) for slot, value in values.items()}
            if state:
                opt.state[target] = state if piece is None else piece.remember(state)

    def _value(self, key: str, piece: Piece | None) -> Any:
        if (found := self._find(self.manifest.values, key)) is not None:
            return number(found)
        at = next((k for k in self._candidates(key) if k in self.manifest.tensors), None)
        if at is not None:
            return whole(self.saved, at) if piece is None else self._cut(at, piece)
        return self._merged(key, lambda k: whole(self.saved, k) if piece is None else self._cut(k, piece))

    def _cut(self, key: str, piece: Piece) -> Tensor:
        elements = self.manifest.tensors[key].shape == tuple(piece.slot.view.shape)
        return _stretch(self.saved, key, piece) if elements else whole(self.saved, key)

    def _candidates(self, key: str) -> list[str]:
        return [f"{self.own}{key}", key] if self.own else [key]

    def _find(self, values: dict[str, Value], key: str) -> Value | None:
        found = next((values[k] for k in self._candidates(key) if k in values), None)
        theirs = [values[k] for r in range(self.manifest.world) if (k := names.own(r) + key) in values]
        if found is None and theirs:
            if any(value != theirs[0] for value in theirs):
                self._cannot_merge(f"workers had different values of {key}")
            return theirs[0]
        return found

    def _merged(self, key: str, read: Callable[[str], Tensor]) -> Tensor:
        """Of what every worker had for itself, the mean."""
        theirs = [at for r in range(self.manifest.world) if (at := names.own(r) + key) in self.manifest.tensors]
        return self._merge([{key: read(at)} for at in theirs])[key]  # type: ignore[no-any-return]

    def _merge(self, saves: list[dict[Any, Any]]) -> dict[Any, Any]:
        try:
            return State.merge(saves)
        except MismatchError as error:
            return self._cannot_merge(error.what)

    def _cannot_merge(self, what: str) -> NoReturn:
        raise CheckpointError(
            f"{self.saved.path} was saved by {self.manifest.world} workers, and {self.comm.world} cannot go on with it",
            why=f"{what}, which cannot be averaged",
            do=f"load it on {self.manifest.world} workers",
        )

    # ---------------------------------------------------------------------------------------------- the method

    def _parts(self, i: int, engine: Engine) -> None:
        """What the parts remember. In a world of one there is nobody to agree with, and they are left alone."""
        if engine.idle:
            return
        places = {s.name for b in engine.buckets for s in b.slots}
        for path, part in names.paths(engine.method):
            prefix = names.part(i, path)
            if self.own:
                part.state.load(self._remembered(self.own + prefix, places), engine.buckets)
                continue
            saves = [self._remembered(names.own(r) + prefix, places) for r in range(self.manifest.world)]
            part.state.load(self._merge(saves), engine.buckets)

    def _say_what_is_left(self) -> None:
        busy = [(i, engine.method) for i, engine in enumerate(self.engines) if not engine.idle]
        here = {names.part(i, path) for i, method in busy for path, _ in names.paths(method)}
        lost = sorted({prefix.split("/", 2)[2] for prefix in self._words} - here)
        if lost and self.engines and self.comm.rank == 0:
            parts = ", ".join(prefix.split("/", 2)[2].strip() for prefix in lost)
            print(f"paceline: left behind, for it is not in use here: what {parts} remembered", file=sys.stderr)

    def _remembered(self, prefix: str, places: set[str]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for word in self._words[prefix]:
            value = self.manifest.values.get(prefix + word)
            found[names.key(word)] = whole(self.saved, prefix + word) if value is None else number(value)
        strange = [key for key in found if isinstance(key, tuple) and key[0] not in places]
        if strange:
            raise CheckpointError(
                f"{self.saved.path} remembers something of {strange[0][0]}, which is not trained here",
                do="freeze and thaw parameters as they were when it was saved, then load",
            )
        return found

    def _random(self) -> None:
        """Streams go on where they stood, where there are as many workers as then."""
        streams = {"cpu": torch.set_rng_state}
        if torch.cuda.is_available():
            streams["cuda"] = torch.cuda.set_rng_state
        for device, put in streams.items():
            if self.own and (key := f"{self.own}{names.RANDOM}{device}") in self.manifest.tensors:
                put(whole(self.saved, key).clone())


def _setting(value: Any, here: Any) -> Any:
    """Of a parameter group, as the optimizer has it: a tuple stays one, a rate in a tensor keeps its device."""
    if value and isinstance(value[0], str):
        found = number(tuple(value))
        return found.to(here.device) if isinstance(here, Tensor) and isinstance(found, Tensor) else found
    found = [_setting(one, None) for one in value]
    return tuple(found) if isinstance(here, tuple) or here is None else found


def _placed(slot: str, value: Any, target: Tensor, wide: torch.dtype | None, beside: bool) -> Any:
    """As the optimizer would have made it: elements like the parameter's, a count where it looks for it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == target.shape and slot != "step":
        real = value.is_floating_point() or value.is_complex()
        return torch.empty_like(target, dtype=wide if wide and real else value.dtype).copy_(value)
    return value.to(target.device if value.dim() or beside else "cpu", copy=True)
