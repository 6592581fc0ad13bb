"""Which checkpoints a folder holds: the newest good one, and those that are to go."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint import drafts, manifest, names
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.read_manifest import read
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.together import check_same, together
from paceline.comm.protocol import Comm
from paceline.errors import CheckpointError

_NAME = re.compile(r"step-\d{6,}(-\d+)?")
_MOST = 3  # reasons that an error gives

_runs: dict[str, str] = {}  # by the real path of a folder: the run whose checkpoints this process writes there
_told: set[str] = set()  # runs of which it was said that there are checkpoints of others beside theirs


class Saved(NamedTuple):
    """A checkpoint in a folder, and its manifest."""

    path: Path
    manifest: Manifest


def run_in(folder: Path, run: str | None = None) -> str:
    """Give the run whose checkpoints this process writes into a folder. run: it goes on with this one."""
    place = os.path.realpath(folder)
    if run is not None:
        _runs[place] = run
    return _runs.setdefault(place, drafts.new_run())


def known(folder: Path) -> tuple[list[Saved], list[CheckpointError]]:
    """Give the checkpoints in a folder, oldest first, and what is wrong with all else that is called like one."""
    good, broken = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _NAME.fullmatch(path.name):
            continue
        try:
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link", why="the checkpoints of a folder lie in it", do="load it alone"
                )
            good.append(Saved(path, read(path)[0]))
        except CheckpointError as error:
            broken.append(error)
    return sorted(good, key=lambda one: one.manifest.serial), broken


def _has_manifest(path: Path) -> bool:
    return os.path.lexists(path / manifest.NAME)


# ------------------------------------------------------------------------------------------------- the one to load


def newest(path: Path, comm: Comm) -> Checkpoint:
    """Give the checkpoint `path`, or the newest good one in that folder. Those that are not good are named.

    Worker 0 says which there are. Every file is checked by one worker, and all hear of it, so all decide alike.
    """
    found = together(comm, lambda: _candidates(path) if comm.rank == 0 else {})[0]
    refused = [CheckpointError(what, why=why, do=do) for what, why, do in found["broken"]]
    for name in found["paths"]:
        try:
            checked = _checked(Path(name), comm, as_it_is=found["asked_for"])
        except CheckpointError as error:
            refused.append(error)
            continue
        if comm.rank == 0:
            for one in refused:
                _say(f"{one.what}: {one.why}; {checked.path} is loaded in its place")
            if checked.manifest.not_finite:
                _say(f"{checked.path} is loaded as it is, and {not_finite(checked.manifest)}")
            if found["runs"] > 1:
                _say(
                    f"{path} has checkpoints of {found['runs']} runs; {checked.path} is loaded, the newest of them all"
                )
        return checked
    if len(refused) == 1:
        raise refused[0]
    reasons = [f"{one.what}: {one.why}" for one in reversed(refused)]
    more = f"; and {len(reasons) - _MOST} more" if len(reasons) > _MOST else ""
    raise CheckpointError(
        f"no checkpoint in {path} can be loaded", why="; ".join(reasons[:_MOST]) + more, do=refused[-1].do
    )


def _candidates(path: Path) -> dict[str, Any]:
    """Give the checkpoints to try, the newest first, and what is wrong with others."""
    try:
        if _has_manifest(path):
            return {"paths": [str(path)], "broken": [], "runs": 1, "asked_for": True}
        good, broken = known(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    if not good and not broken:
        raise CheckpointError(
            f"there is no checkpoint in {path}",
            why="no folder step-... in it has a manifest" if path.is_dir() else "it is not a folder",
            do="give the folder that was given to paceline.save, or one of the checkpoints in it",
        )
    wrong = [[error.what, error.why, error.do] for error in broken]
    runs = len({one.manifest.run for one in good})
    return {"paths": [str(one.path) for one in reversed(good)], "broken": wrong, "runs": runs, "asked_for": False}


def _checked(path: Path, comm: Comm, *, as_it_is: bool) -> Checkpoint:
    """Open a checkpoint after every worker has checked its share of the files.

    as_it_is: it may hold NaN and infinity.
    """
    opened: Checkpoint | None = None

    def look() -> str:
        nonlocal opened
        opened = Checkpoint(path)
        if opened.manifest.not_finite and not as_it_is:
            raise CheckpointError(
                f"{path} is not good to go on from",
                why=not_finite(opened.manifest),
                do=f"load {path} itself, if that is what you want",
            )
        files = range(len(opened.manifest.files))
        mine = [i for i in files if i // 2 % comm.world_size == comm.rank]  # a worker writes two files
        with ThreadPoolExecutor() as pool:
            list(pool.map(opened.check_file, mine))
        return opened.checksum

    check_same(path, together(comm, look))
    assert opened is not None
    return opened


def not_finite(book: Manifest) -> str:
    """Say what of a checkpoint is not finite."""
    keys = [key.removeprefix(names.MODEL) for key in book.not_finite]
    return f"it holds NaN or infinity in {', '.join(keys)}"


def _say(words: str) -> None:
    print(f"paceline: {words}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- those that go


def tidy(folder: Path, saved: Sequence[Saved], keep: int | None) -> None:
    """Remove what a new checkpoint makes superfluous, of its run alone: what it replaces, and the oldest ones.

    saved: the checkpoints in the folder, the new one last. keep: how many stay, the newest good one aside. None: all.
    Nothing here ends a save: what cannot be removed is said.
    """
    new, run = saved[-1], saved[-1].manifest.run
    ours = [one for one in saved[:-1] if one.manifest.run == run]
    same_step = [one for one in ours if one.manifest.step == new.manifest.step]
    replaced = [one for one in same_step if one.manifest.not_finite or not new.manifest.not_finite]
    left = [one for one in ours if one not in replaced] + [new]
    old = left[:-keep] if keep is not None else []
    if old and all(one.manifest.not_finite for one in left[len(old) :]):
        good = [one for one in old if not one.manifest.not_finite]
        old = [one for one in old if one not in good[-1:]]
    if keep is not None and (others := len(saved) - 1 - len(ours)) and run not in _told:
        _told.add(run)
        _say(f"{folder} has {others} checkpoints of other runs, which keep={keep} does not count and does not remove")
    for one in replaced + old:
        drafts.remove(one.path, run, one.manifest.step)
