"""Writing a checkpoint: [Note: checkpoints]."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import paceline
from paceline import consensus
from paceline.checkpoint import folders, holdings, manifest, names
from paceline.checkpoint.holdings import Holding, Owned, share_out
from paceline.checkpoint.manifest import Entry, File, Group, Manifest, OptimizerEntry, Stretch, Value
from paceline.checkpoint.names import Names
from paceline.checkpoint.tensors import Spec, TensorFile
from paceline.engine import Engine
from paceline.errors import CheckpointError, UsageError
from paceline.parts import Comm
from paceline.things import Things
from paceline.words import tell


def save(
    folder: Path, things: Things, engines: Sequence[Engine], comm: Comm, *, step: int, extra: Mapping[str, Any]
) -> Path:
    """A checkpoint of `things` in a folder of its own, `step-000123`. Every worker calls it.

    engines: of the optimizers, in their order; none for what is not prepared.
    """
    for engine in engines:
        check_between_steps(engine, "save")
    run = Run(things, engines, comm.rank)
    draft = _begin(folder, step, comm)
    try:
        said = _all_well(tell(comm, run.write(draft, comm.rank, comm.world)), draft)
        done = {}
        if comm.rank == 0:
            done = _attempt(lambda: _commit(folder, draft, run.manifest(said, step, comm.world, extra)))
        [final, *_] = _all_well(tell(comm, done), draft)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder / str(final["name"])


def check_between_steps(engine: Engine, what: str) -> None:
    """Half a step is not saved, and not loaded into."""
    if not engine.idle:
        engine.settle()
    if engine.exchanged or engine.window.several or engine.window.micro:
        raise UsageError(
            f"paceline.{what} was called in the middle of a step",
            why="gradients have been added up or exchanged, and no checkpoint holds gradients",
            do="call it after optimizer.step(); with accumulate=N, if paceline.stepping(optimizer) was true before",
        )


class NotWrittenError(CheckpointError):
    """A disk did not take it. What was saved before is as it was, and training can go on."""


class Run:
    """What of a run this worker writes."""

    def __init__(self, things: Things, engines: Sequence[Engine], rank: int) -> None:
        self.things, self.engines = things, engines
        self.names, owned = Names(things.models), Owned(engines)
        self.apart = any(not e.idle and consensus.AGREE not in e.method.sync.facts() for e in engines)
        self.model = list(holdings.model(self.names, owned))
        memories: list[Holding] = []
        self.values: dict[str, Value] = {}
        for i, opt in enumerate(things.optimizers):
            self._check_known(opt)
            some, values = holdings.optimizer(i, opt, self.names, owned)
            memories += some
            self.values |= values
        mine = holdings.random()
        own: dict[str, Value] = {}
        for i, engine in enumerate(engines):
            some, values = holdings.parts(i, engine)
            mine += some
            own |= values
        if self.apart:  # each trains weights of its own
            mine += self.model + memories
            own, memories, self.values = own | self.values, [], {}
        prefix = names.own(rank)
        self.values |= {prefix + key: value for key, value in own.items()}
        self.rest = memories + holdings.prefixed(prefix, mine)

    def _check_known(self, opt: Optimizer) -> None:
        if any(id(p) not in self.names.of for group in opt.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer holds a parameter that is in none of the models given",
                do="give paceline.save and paceline.load every model the optimizer updates",
            )

    def write(self, draft: Path, rank: int, world: int) -> dict[str, Any]:
        """This worker's two files, and what the manifest is to say of them. Nobody fails where others wait."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(consensus.agreed(engine))
            model = _attempt(lambda: _write(draft, f"model-{rank:05d}", share_out(self.model, rank, world)))
        rest = _attempt(lambda: _write(draft, f"state-{rank:05d}", share_out(self.rest, rank, world)))
        wrong = {"error": (model | rest)["error"]} if "error" in model | rest else {}
        return {"files": [model, rest], "values": self.values} | wrong

    def manifest(self, said: Sequence[Any], step: int, world: int, extra: Mapping[str, Any]) -> Manifest:
        tensors: dict[str, Entry] = {}
        values: dict[str, Value] = {}
        written = [file for words in said for file in words["files"]]
        for words in said:
            values |= words["values"]
        for number, file in enumerate(written):
            for key, dtype, shape, strides, start, stop in file["tensors"]:
                laid = tuple(strides) if strides else None
                entry = tensors.setdefault(key, Entry(dtype=dtype, shape=tuple(shape), strides=laid, pieces=[]))
                entry.pieces.append(Stretch(number, start, stop))
        for entry in tensors.values():
            entry.pieces.sort(key=lambda piece: piece.start)
        place = {names.MODEL + name: i for i, name in enumerate(self.names.tensors)}
        return Manifest(
            format="paceline checkpoint",
            version=manifest.VERSION,
            serial=0,
            step=step,
            world=world,
            method=[engine.method.config() for engine in self.engines],
            paceline=paceline.__version__,
            torch=str(torch.__version__),
            files=[File(*file["file"]) for file in written],
            tensors=dict(sorted(tensors.items(), key=lambda one: (place.get(one[0], len(place)), one[0]))),
            values=values,
            ties=self.names.ties,
            optimizers=[_groups(opt, self.names) for opt in self.things.optimizers],
            extra=dict(extra),
        )


def _write(draft: Path, name: str, some: Sequence[Holding]) -> dict[str, Any]:
    specs = [Spec(h.key, h.entry.real, (h.stop - h.start,)) for h in some]
    with TensorFile(draft / f"{name}.safetensors", specs) as file, torch.no_grad():
        for h in some:
            file.put(h.get())
    return {
        "file": [file.path.name, file.nbytes, file.sha256()],
        "tensors": [[h.key, h.entry.dtype, h.entry.shape, h.entry.strides, h.start, h.stop] for h in some],
    }


def _groups(opt: Optimizer, known: Names) -> OptimizerEntry:
    groups = [
        Group(
            params=[known.of[id(p)] for p in group["params"]],
            settings={key: _setting(key, value) for key, value in group.items() if key != "params"},
        )
        for group in opt.param_groups
    ]
    return OptimizerEntry(kind=type(opt).__name__, groups=groups)


def _setting(key: str, value: Any) -> Any:
    """Of a group: numbers, words, and lists of them."""
    if isinstance(value, (list, tuple)):
        return [_setting(key, one) for one in value]
    return holdings.single(f"the optimizer's {key!r}", value)


# ------------------------------------------------------------------------------------------------------ the folder


def check_extra(extra: Any, where: str = "extra") -> None:
    """What JSON can say, and say back."""
    plain = isinstance(extra, (str, int, type(None))) or (isinstance(extra, float) and math.isfinite(extra))
    if isinstance(extra, dict) and all(isinstance(key, str) for key in extra):
        for key, value in extra.items():
            check_extra(value, f"{where}[{key!r}]")
    elif isinstance(extra, (list, tuple)) and where != "extra":
        for i, value in enumerate(extra):
            check_extra(value, f"{where}[{i}]")
    elif where == "extra" or not plain:
        raise UsageError(
            f"{where} cannot be saved: it is {repr(extra)[:80]}",
            why="extra is a dictionary and becomes JSON: words, finite numbers, lists, dictionaries with words as keys",
            do="of a scheduler or a loader give its state_dict()",
        )


def _attempt(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What comes of it, or why nothing does: for everybody to hear."""
    try:
        return do()
    except OSError as error:
        return {"error": f"{error.strerror or error}: {error.filename or ''}".removesuffix(": ")}


def _all_well(said: list[Any], draft: Path) -> list[Any]:
    for rank, words in enumerate(said):
        if "error" in words:
            raise NotWrittenError(
                f"worker {rank} could not write its part of a checkpoint to {draft.parent}",
                why=words["error"],
                do="make room or choose another folder; checkpoints saved before are as they were",
            )
    return said


def _begin(folder: Path, step: int, comm: Comm) -> Path:
    """An empty folder that no reader takes for a checkpoint, made by worker 0 and seen by all."""
    name = f"{folders.DRAFT}{step}-{secrets.token_hex(4)}"

    def make() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir()
        return {"name": name}

    [first, *_] = _all_well(tell(comm, _attempt(make) if comm.rank == 0 else {}), folder / name)
    draft = folder / str(first["name"])
    here = _attempt(lambda: {"seen": draft.stat().st_ino})
    _all_well(tell(comm, here), draft)
    return draft


def _commit(folder: Path, draft: Path, book: Manifest) -> dict[str, Any]:
    """The manifest last, then the name: from here on it is a checkpoint."""
    others = folders.known(folder)[0]
    book.serial = max((other.serial for _, other in others), default=0) + 1
    with (draft / manifest.NAME).open("xb") as file:
        file.write(book.encode())
        file.flush()
        os.fsync(file.fileno())
    folders.sync(draft)
    name = f"step-{book.step:06d}"
    final = next(path for k in range(len(others) + 2) if not (path := folder / (f"{name}-{k}" if k else name)).exists())
    draft.rename(final)
    folders.sync(folder)
    for path, other in others:
        if other.step == book.step:
            folders.remove(path)
    return {"name": final.name}
