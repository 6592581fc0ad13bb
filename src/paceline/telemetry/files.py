"""Files a command leaves behind: refused before the work begins, and then whole or not there at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.errors import UsageError

_PROBE = bytes(1 << 16)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work: afterwards it is too late to hear of it."""
    if why := _obstacle(path):
        raise UsageError(f"{_short(path)} cannot be written", why=why, do="give a file in a folder that exists")


def check_folder(folder: Path, option: str, names: Iterable[str] = ()) -> Path:
    """Make the folder, and refuse it unless files of those names could be written there now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())
        why = next((f"{name}: {why}" for name in names if (why := _in_the_way(folder / name))), "")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise UsageError(
            f"{option} {_short(folder)} cannot be written to",
            why=why,
            do="name a directory of yours with free space; it is made if it does not exist",
        )
    return folder.resolve()


def _obstacle(path: Path) -> str:
    """Say what is in the way of a file, if anything is. A disk may be full, and a folder may take no new files."""
    try:
        if why := _in_the_way(path):
            return why
        probe = _beside(path)
        try:
            with create(probe) as file:
                file.write(_PROBE)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except ValueError as error:  # a name with a zero in it
        return str(error)
    except FileNotFoundError:
        return f"{path.parent} does not exist"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _in_the_way(path: Path) -> str:
    """Say why what stands there cannot be replaced; empty if it can, or if nothing stands there."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return "it is a folder"
        if not stat.S_ISREG(mode):
            return "it is a device or a pipe, and a file would take its place"
        if not os.access(path, os.W_OK):
            return "it may not be written by this user"
    return ""


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:60]}...{text[-20:]} ({len(text)} characters)"


def write(path: Path, text: str) -> None:
    """The whole file or none: a reader never sees half of it."""
    with replacing(path) as draft, create(draft) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a draft beside the file, which takes the file's place at the end, or goes if anything fails."""
    draft = _beside(path)
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Give a name beside the file that nobody can have planted."""
    return path.with_name(f".unfinished-{secrets.token_hex(8)}")


def create(path: Path) -> BinaryIO:
    """Create a file. Never open one that is there already, nor what a link points to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")
