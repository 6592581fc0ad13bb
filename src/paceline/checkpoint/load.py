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
from paceline.checkpoint.folders import newest, run_in
from paceline.checkpoint.holdings import number
from paceline.checkpoint.manifest import TensorEntry, Value
from paceline.checkpoint.names import Names
from paceline.checkpoint.reader import Checkpoint, PlainFile, TensorSource, whole
from paceline.checkpoint.together import check_same, together
from paceline.comm.messages import all_gather_json
from paceline.comm.protocol import Comm
from paceline.core.change import check_between_steps
from paceline.core.engine import Engine
from paceline.core.shard import MASTER, Owned, Shard
from paceline.core.state import State
from paceline.data import random_streams
from paceline.data.random_streams import KINDS
from paceline.errors import CheckpointError, MismatchError, PacelineError, UsageError
from paceline.session.objects import Objects

_MOST = 10  # differences that are listed


def load(path: Path, objects: Objects, engines: Sequence[Engine], comm: Comm) -> dict[str, Any]:
    """Load a checkpoint into the run, and give what was saved as `extra`. Every worker calls it."""
    for engine in engines:
        check_between_steps(engine, "paceline.load")
        if engine.method.sync.is_async:
            raise UsageError(
                f"with {engine.method.sync.name} a checkpoint cannot be loaded after prepare",
                why="workers keep their own pace, and others may be on their way with what was before",
                do="call paceline.load first: prepare starts from the weights it is given",
            )
    saved = source(path, comm)
    if not isinstance(saved, Checkpoint):
        load_model(saved, objects, engines, comm)
        return {}
    together(comm, lambda: _load(Loading(saved, objects, engines, comm)))
    run_in(saved.path.parent, saved.manifest.run)
    return saved.manifest.extra


def _load(loading: Loading) -> None:
    """Load, and name the checkpoint where its numbers are none that torch takes, though its sums are right."""
    try:
        loading.load()
    except PacelineError:
        raise
    except (TypeError, LookupError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{loading.saved.path} cannot be loaded",
            why=f"{type(error).__name__}: {error}",
            do="load an earlier checkpoint",
        ) from error


def source(path: Path, comm: Comm) -> TensorSource:
    """Open a safetensors file, or the newest good checkpoint of a folder. Worker 0 says which of them it is."""
    if not all_gather_json(comm, comm.rank == 0 and _is_file(path))[0]:
        return newest(path, comm)
    opened: PlainFile | None = None

    def look() -> str:
        nonlocal opened
        opened = PlainFile(path)
        return opened.fingerprint()

    check_same(path, together(comm, look))
    assert opened is not None
    return opened


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be looked into, or a name that is too long
        return False


def load_model(source: TensorSource, objects: Objects, engines: Sequence[Engine], comm: Comm) -> None:
    """Load only the weights and buffers."""
    together(comm, lambda: _load_model(source, objects, engines))


def _load_model(source: TensorSource, objects: Objects, engines: Sequence[Engine]) -> None:
    known, owned = Names(objects.models), Owned(engines)
    _refuse(_differences(source, known), source)
    _reshard(engines)
    _read_model(lambda name: _source_name(source, names.MODEL + name, known), source, known, owned)


# -------------------------------------------------------------------------------------------------- does it fit


def _source_name(source: TensorSource, key: str, known: Names) -> str:
    """Give the key of a tensor, which may be in the source under another of its names."""
    name = key.removeprefix(names.MODEL)
    others = [other for other, first in known.ties.items() if first == name]
    return next((k for n in (name, *others) if source.entry(k := names.MODEL + n)), key)


def _differences(source: TensorSource, known: Names) -> list[str]:
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


def _refuse(wrong: list[str], source: TensorSource) -> None:
    if wrong:
        more = f" and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise CheckpointError(
            f"{source.path} is of another model or optimizer",
            why="; ".join(wrong[:_MOST]) + more,
            do="build the model and the optimizer as they were when it was saved",
        )


# -------------------------------------------------------------------------------------------------- into the run


def _read_model(name_of: Callable[[str], str], source: TensorSource, known: Names, owned: Owned) -> None:
    with torch.no_grad():
        for name, x in known.tensors.items():
            key, shard = name_of(name), owned.of_model(x)
            if shard is not None:
                shard.write(_stretch(source, key, shard))
            if id(x) not in owned.gathered:
                x.copy_(whole(source, key))
        for shard in owned.shards.values():
            shard.published()


def _stretch(source: TensorSource, key: str, shard: Shard) -> Tensor:
    """Read a shard's elements of a tensor that may have other strides in the source."""
    entry = source.entry(key)
    assert entry is not None
    if entry.strides == TensorEntry.of(shard.slot.view).strides:
        return source.read(key, shard.inside.start, shard.inside.stop)
    return shard.of(whole(source, key))


def _reshard(engines: Sequence[Engine]) -> None:
    """Free gathered parameters: their shards are about to be written, and the gathered values would be old."""
    for engine in engines:
        engine.method.layout.reshard()


class Loading:
    """One load of a checkpoint.

    A key is looked for as this worker's own, if as many workers saved as load, then as one of all workers. What each
    of the workers that saved had for itself is merged otherwise.
    """

    def __init__(self, saved: Checkpoint, objects: Objects, engines: Sequence[Engine], comm: Comm) -> None:
        self.saved, self.objects, self.engines, self.comm = saved, objects, engines, comm
        self.manifest = saved.manifest
        self.names, self.owned = Names(objects.models), Owned(engines)
        self.own = names.own(comm.rank) if self.manifest.world_size == comm.world_size else None
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
        _refuse(wrong + _other_optimizers(self.saved, self.objects.optimizers, self.names), self.saved)
        _reshard(self.engines)
        _read_model(self._weights, self.saved, self.names, self.owned)
        for i, opt in enumerate(self.objects.optimizers):
            self._groups(i, opt)
            for group in opt.param_groups:
                for p in group["params"]:
                    self._memory(i, opt, p, beside=bool(group.get("capturable") or group.get("fused")))
        self._say_what_is_left()
        for i, engine in enumerate(self.engines):
            self._parts(i, engine)
            engine.ex.step = self.manifest.made[i] if i < len(self.manifest.made) else self.manifest.step
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
        """Load what an optimizer remembers of a parameter, or of this worker's shard of it.

        beside: the step count lies on the parameter's device.
        """
        shard, name = self.owned.shards.get(id(p)), self.names.of[id(p)]
        if shard is None and id(p) in self.owned.ids:
            return
        slots = self._slots[names.slot(i, name, "")]
        values = {slot: self._value(names.slot(i, name, slot), shard) for slot in sorted(slots)}
        master = values.pop(MASTER, None)
        target = p if shard is None else shard.param
        # Moments of shards are as wide as the master; those of whole parameters as the optimizer made them.
        wide = target.dtype if shard is not None or master is not None else None
        opt.state.pop(target, None)
        with contextlib.nullcontext() if shard is None else shard.at_hand(changed=True):
            if master is not None and shard is not None and shard.apart:
                shard.param.copy_(master)
            state = {slot: _placed(slot, value, target, wide, beside) for slot, value in values.items()}
            if state:
                opt.state[target] = state if shard is None else shard.remember(state)

    def _value(self, key: str, shard: Shard | None) -> Any:
        if (found := self._find(self.manifest.values, key)) is not None:
            return number(found)
        at = next((k for k in self._candidates(key) if k in self.manifest.tensors), None)
        if at is not None:
            return whole(self.saved, at) if shard is None else self._cut(at, shard)
        return self._merged(key, lambda k: whole(self.saved, k) if shard is None else self._cut(k, shard))

    def _cut(self, key: str, shard: Shard) -> Tensor:
        elements = self.manifest.tensors[key].shape == tuple(shard.slot.view.shape)
        return _stretch(self.saved, key, shard) if elements else whole(self.saved, key)

    def _candidates(self, key: str) -> list[str]:
        return [f"{self.own}{key}", key] if self.own else [key]

    def _find(self, values: dict[str, Value], key: str) -> Value | None:
        found = next((values[k] for k in self._candidates(key) if k in values), None)
        theirs = [values[k] for r in range(self.manifest.world_size) if (k := names.own(r) + key) in values]
        if found is None and theirs:
            if any(value != theirs[0] for value in theirs):
                self._cannot_merge(f"workers had different values of {key}")
            return theirs[0]
        return found

    def _merged(self, key: str, read: Callable[[str], Tensor]) -> Tensor:
        """Give the mean of what every worker had for itself."""
        theirs = [at for r in range(self.manifest.world_size) if (at := names.own(r) + key) in self.manifest.tensors]
        return self._merge([{key: read(at)} for at in theirs])[key]  # type: ignore[no-any-return]

    def _merge(self, saves: list[dict[Any, Any]]) -> dict[Any, Any]:
        try:
            return State.merge(saves)
        except MismatchError as error:
            return self._cannot_merge(error.what)

    def _cannot_merge(self, what: str) -> NoReturn:
        raise CheckpointError(
            f"{self.saved.path} was saved by {self.manifest.world_size} workers, and "
            f"{self.comm.world_size} cannot go on with it",
            why=f"{what}, which cannot be averaged",
            do=f"load it on {self.manifest.world_size} workers",
        )

    # ---------------------------------------------------------------------------------------------- the method

    def _parts(self, i: int, engine: Engine) -> None:
        """Load what the parts remember. In a world of one the parts are not used, and keep what they have."""
        if engine.idle:
            return
        places = {s.name for b in engine.buckets for s in b.slots}
        for path, part in names.paths(engine.method):
            prefix = names.part(i, path)
            if self.own:
                part.state.load(self._remembered(self.own + prefix, places), engine.buckets)
                continue
            saves = [self._remembered(names.own(r) + prefix, places) for r in range(self.manifest.world_size)]
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
        """Restore the random streams; of another number of workers, those that worker 0's lead to."""
        prefix = (self.own or names.own(0)) + names.RANDOM
        saved = {kind: whole(self.saved, key) for kind in KINDS if (key := prefix + kind) in self.manifest.tensors}
        if self.own or self.comm.rank == 0:
            random_streams.restore(saved)
        elif "cpu" in saved:
            random_streams.begin(random_streams.origins(saved), self.comm.rank)


def _setting(value: Any, here: Any) -> Any:
    """Give a setting as the optimizer has it: a tuple stays a tuple, and a rate in a tensor keeps its device."""
    if value and isinstance(value[0], str):
        found = number(tuple(value))
        return found.to(here.device) if isinstance(here, Tensor) and isinstance(found, Tensor) else found
    found = [_setting(one, None) for one in value]
    return tuple(found) if isinstance(here, tuple) or here is None else found


def _placed(slot: str, value: Any, target: Tensor, wide: torch.dtype | None, beside: bool) -> Any:
    """Place a loaded value as the optimizer would: elements where the parameter is, a count where it looks for it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == target.shape and slot != "step":
        real = value.is_floating_point() or value.is_complex()
        return torch.empty_like(target, dtype=wide if wide and real else value.dtype).copy_(value)
    return value.to(target.device if value.dim() or beside else "cpu", copy=True)
