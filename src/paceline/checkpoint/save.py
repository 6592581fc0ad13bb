"""Writing a checkpoint: [Note: checkpoints]."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from paceline._version import __version__
from paceline.checkpoint import drafts, folders, holdings, manifest, names
from paceline.checkpoint.drafts import Draft
from paceline.checkpoint.folders import Saved
from paceline.checkpoint.holdings import Holding, share_out
from paceline.checkpoint.manifest import FileEntry, GroupEntry, Manifest, OptimizerEntry, Stretch, TensorEntry, Value
from paceline.checkpoint.names import Names
from paceline.checkpoint.regular_files import sync
from paceline.checkpoint.tensors import TensorFile, TensorSpec
from paceline.checkpoint.together import together
from paceline.comm.protocol import Comm
from paceline.core import consensus
from paceline.core.change import check_between_steps
from paceline.core.engine import Engine
from paceline.core.facts import Fact
from paceline.core.shard import Owned
from paceline.errors import CheckpointError, UsageError
from paceline.session.objects import Objects
from paceline.telemetry.files import create

T = TypeVar("T")
_MOST = 10  # tensors that are named


def save(
    folder: Path,
    objects: Objects,
    engines: Sequence[Engine],
    comm: Comm,
    *,
    step: int | None,
    extra: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Save a checkpoint in a folder of its own, `step-000123`, and give its path. Every worker calls it.

    engines: those of the optimizers, in their order; none for optimizers that are not prepared.
    step: its number. None: how many steps the first engine has made.
    extra: what `plain` has given. keep: how many checkpoints of this run stay.
    """
    for engine in engines:
        check_between_steps(engine, "paceline.save")
    if step is None:
        step = engines[0].ex.step
    mine = Holdings(objects, engines, comm.rank)
    in_folder: list[Saved] = []  # on worker 0, the new one last
    with _draft(folder, step, comm) as draft:
        written = _together(comm, folder, lambda: mine.write(draft, comm.rank, comm.world_size))

        def commit() -> str:
            if comm.rank:
                return ""
            book = mine.manifest(written, drafts.run_of(draft), step, comm.world_size, extra)
            in_folder.extend(_commit(folder, draft, book))
            return in_folder[-1].path.name

        path = folder / _together(comm, folder, commit)[0]
    if comm.rank == 0:
        _warn(in_folder[-1])
        folders.tidy(folder, in_folder, keep)
    return path


class NotWrittenError(CheckpointError):
    """A checkpoint could not be written. Those saved before are as they were, and training can go on."""


class Holdings:
    """What this worker writes of a run."""

    def __init__(self, objects: Objects, engines: Sequence[Engine], rank: int) -> None:
        self.objects, self.engines = objects, engines
        self.names, owned = Names(objects.models), Owned(engines)
        self.groups = [self._groups(opt) for opt in objects.optimizers]
        self.apart = any(not e.idle and Fact.REPLICAS_AGREE not in e.method.sync.facts() for e in engines)
        self.model = list(holdings.model(self.names, owned))
        memories: list[Holding] = []
        self.values: dict[str, Value] = {}
        for i, opt in enumerate(objects.optimizers):
            some, values = holdings.optimizer(i, opt, self.names, owned)
            memories += some
            self.values |= values
        mine = holdings.random()
        own: dict[str, Value] = {}
        for i, engine in enumerate(engines):
            some, values = holdings.parts(i, engine)
            mine += some
            own |= values
        if self.apart:  # each worker trains weights of its own
            mine += self.model + memories
            own, memories, self.values = own | self.values, [], {}
        prefix = names.own(rank)
        self.values |= {prefix + key: value for key, value in own.items()}
        self.rest = memories + holdings.prefixed(prefix, mine)

    def _groups(self, opt: Optimizer) -> OptimizerEntry:
        if any(id(p) not in self.names.of for group in opt.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer holds a parameter that is in none of the models given",
                do="give paceline.save and paceline.load every model the optimizer updates",
            )
        groups = [
            GroupEntry(
                params=[self.names.of[id(p)] for p in group["params"]],
                settings={key: _setting(key, value) for key, value in group.items() if key != "params"},
            )
            for group in opt.param_groups
        ]
        return OptimizerEntry(kind=type(opt).__name__, groups=groups)

    def write(self, draft: Path, rank: int, world_size: int) -> dict[str, Any]:
        """Write this worker's two files, and give what the manifest is to say of them."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(consensus.consensus_weights(engine))
            model = _write(draft, f"model-{rank:05d}", share_out(self.model, rank, world_size))
        rest = _write(draft, f"state-{rank:05d}", share_out(self.rest, rank, world_size))
        return {"files": [model, rest], "values": self.values}

    def manifest(
        self, written: Sequence[Any], run: str, step: int, world_size: int, extra: Mapping[str, Any]
    ) -> Manifest:
        """Make the manifest. written: what `write` has given on each worker."""
        tensors: dict[str, TensorEntry] = {}
        values: dict[str, Value] = {}
        files = [file for one in written for file in one["files"]]
        for one in written:
            values |= one["values"]
        for number, file in enumerate(files):
            for key, dtype, shape, strides, start, stop in file["tensors"]:
                laid = tuple(strides) if strides else None
                entry = tensors.setdefault(
                    key, TensorEntry(dtype=dtype, shape=tuple(shape), strides=laid, stretches=[])
                )
                entry.stretches.append(Stretch(number, start, stop))
        for entry in tensors.values():
            entry.stretches.sort(key=lambda stretch: stretch.start)
        place = {names.MODEL + name: i for i, name in enumerate(self.names.tensors)}
        return Manifest(
            format="paceline checkpoint",
            version=manifest.VERSION,
            run=run,
            serial=0,
            step=step,
            made=[engine.ex.step for engine in self.engines],
            world_size=world_size,
            method=[engine.method.config() for engine in self.engines],
            paceline=__version__,
            torch=str(torch.__version__),
            not_finite=self._not_finite(files, values),
            files=[FileEntry(*file["file"]) for file in files],
            tensors=dict(sorted(tensors.items(), key=lambda one: (place.get(one[0], len(place)), one[0]))),
            values=values,
            ties=self.names.ties,
            optimizers=self.groups,
            extra=dict(extra),
        )

    def _not_finite(self, files: Sequence[Any], values: Mapping[str, Value]) -> list[str]:
        """Give the keys of what spoils a checkpoint, ten at most."""
        found = [key for file in files for key in file["not_finite"]]
        found += [key for key, value in values.items() if _is_nan(value)]
        settings = [
            (opt.kind, key, value) for opt in self.groups for g in opt.groups for key, value in g.settings.items()
        ]
        found += [f"{kind}'s {key}" for kind, key, value in settings if _is_nan(value)]
        return list(dict.fromkeys(found))[:_MOST]


def _is_nan(value: Any) -> bool:
    """Say whether a value as `holdings.single` gives it is a NaN."""
    return len(value) == 2 and value[0] != "" and value[1] == "nan"


def _write(draft: Path, name: str, some: Sequence[Holding]) -> dict[str, Any]:
    specs = [TensorSpec(h.key, h.entry.real, (h.stop - h.start,)) for h in some]
    spoilt: list[str] = []
    with TensorFile(draft / f"{name}.safetensors", specs) as file, torch.no_grad():
        for h in some:
            x = h.get()
            if len(spoilt) < _MOST and h.spoilt(x):
                spoilt.append(h.key)
            file.put(x)
    return {
        "not_finite": spoilt,
        "file": [file.path.name, file.nbytes, file.sha256()],
        "tensors": [[h.key, h.entry.dtype, h.entry.shape, h.entry.strides, h.start, h.stop] for h in some],
    }


def _setting(key: str, value: Any) -> Any:
    """Give a setting of a parameter group as JSON: a number, a word, or a list of them."""
    if isinstance(value, (list, tuple)):
        return [_setting(key, one) for one in value]
    return holdings.single(f"the optimizer's {key!r}", value)


# ------------------------------------------------------------------------------------------------------ the folder


def _together(comm: Comm, folder: Path, do: Callable[[], T]) -> list[T]:
    """Do this on each worker. A disk that fails one of them is heard of by all."""

    def attempt() -> T:
        try:
            return do()
        except OSError as error:
            raise NotWrittenError(
                f"worker {comm.rank} could not write its part of a checkpoint to {folder}",
                why=f"{error.strerror or error}: {error.filename or ''}".removesuffix(": "),
                do="make room or choose another folder; checkpoints saved before are as they were",
            ) from error

    return together(comm, attempt, NotWrittenError)


@contextlib.contextmanager
def _draft(folder: Path, step: int, comm: Comm) -> Iterator[Path]:
    """Give all workers a folder that no reader takes for a checkpoint. Worker 0 makes it, and all must see it."""
    draft: Draft | None = None

    def make() -> str:
        nonlocal draft
        if comm.rank:
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        drafts.clear(folder, folders.run_in(folder))  # before the disk is written to, which they may have filled
        draft = Draft(folder, folders.run_in(folder), step)
        return draft.path.name

    try:
        path = folder / _together(comm, folder, make)[0]
        _together(comm, folder, lambda: path.stat().st_mode)
        folders.run_in(folder, drafts.run_of(path))
        yield path
    except BaseException:
        if draft is not None:
            drafts.remove_files(draft.path)
        raise
    finally:
        if draft is not None:
            draft.close()


def _commit(folder: Path, draft: Path, book: Manifest) -> list[Saved]:
    """Write the manifest, then rename the folder: from then on it is a checkpoint.

    Gives the checkpoints that are in the folder now, this one last.
    """
    before, _ = folders.known(folder)
    book.serial = min(max((other.manifest.serial for other in before), default=0) + 1, manifest.MOST)
    text = book.encode()
    if len(text) > manifest.MOST_BYTES:
        raise OSError(errno.EFBIG, f"the manifest would have {len(text)} bytes, too many to be read again")
    with create(draft / manifest.NAME) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(draft)
    name = f"step-{book.step:06d}"
    for k in itertools.count():
        final = folder / (f"{name}-{k}" if k else name)
        try:
            if not os.path.lexists(final):
                draft.rename(final)
                break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):  # another job was quicker
                raise
    sync(folder)
    return [*before, Saved(final, book)]


def _warn(saved: Saved) -> None:
    """Say so where a checkpoint holds what training cannot go on from."""
    if not saved.manifest.not_finite:
        return
    print(
        f"paceline: {saved.path} is saved, but training should not go on from it\n"
        f"  why: {folders.not_finite(saved.manifest)}\n"
        f"  do:  stop, or go on from an earlier one: paceline.load of {saved.path.parent} takes the newest good one",
        file=sys.stderr,
        flush=True,
    )
