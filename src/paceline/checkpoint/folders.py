"""Which checkpoints a folder holds: the newest, the newest good one, those that are to go."""

from __future__ import annotations

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint
from paceline.errors import CheckpointError
from paceline.parts import Comm
from paceline.words import tell

DRAFT = ".draft-"
_NAME = re.compile(r"step-\d{6,}(-\d+)?")


def known(folder: Path) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, CheckpointError]]]:
    """The checkpoints in a folder, oldest first; and what is wrong with those whose manifest cannot be read."""
    good, broken = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _NAME.fullmatch(path.name) and (path / manifest.NAME).exists():
            try:
                good.append((path, manifest.read(path)))
            except CheckpointError as error:
                broken.append((path, error))
    return sorted(good, key=lambda one: one[1].serial), broken


def newest(path: Path, comm: Comm) -> Checkpoint:
    """The checkpoint `path`, or the newest good one in it. One that is broken is named, and the one before is taken.

    Worker 0 says which there are. Every file is looked at, by one worker; so all decide alike.
    """
    candidates = [Path(name) for name in tell(comm, _candidates(path) if comm.rank == 0 else [])[0]]
    if not candidates:
        raise CheckpointError(
            f"there is no checkpoint in {path}",
            why="no folder step-... in it has a manifest" if path.is_dir() else "it is not a folder",
            do="give the folder that was given to paceline.save, or one of the checkpoints in it",
        )
    for candidate in candidates:
        wrong = next((words for words in tell(comm, _looked_at(candidate, comm)) if words), None)
        if wrong is None:
            return Checkpoint(candidate)
        what, why, do = wrong
        if candidate is candidates[-1]:
            raise CheckpointError(what, why=why, do=do)
        if comm.rank == 0:
            _go_back(what, why)
    raise AssertionError("the last candidate is taken or refused")


def _candidates(path: Path) -> list[str]:
    if (path / manifest.NAME).exists():
        return [str(path)]
    good, broken = known(path)
    if not good:
        return [str(one) for one, _ in broken[-1:]]
    for _, error in broken:
        _go_back(error.what, error.why)
    return [str(one) for one, _ in reversed(good)]


def _go_back(what: str, why: str) -> None:
    print(f"paceline: {what}: {why}; an earlier checkpoint is looked for", file=sys.stderr, flush=True)


def _looked_at(path: Path, comm: Comm) -> list[str]:
    """What is wrong with it, as far as this worker looks."""
    try:
        saved = Checkpoint(path)
        mine = [i for i in range(len(saved.manifest.files)) if i // 2 % comm.world == comm.rank]  # a worker writes two
        with ThreadPoolExecutor() as pool:
            list(pool.map(saved.check_file, mine))
    except CheckpointError as error:
        return [error.what, error.why, error.do]
    return []


def retain(folder: Path, keep: int) -> None:
    """The newest `keep` stay; of the others, and of saves that were killed, nothing does."""
    for path, _ in known(folder)[0][:-keep]:
        remove(path)
    for path in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """The manifest first: what is half removed is no checkpoint."""
    (path / manifest.NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Names in it are on the disk too."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
