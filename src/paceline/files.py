"""Files a command leaves behind: refused before the work begins, and then whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError


def check_writable(path: Path) -> None:
    """Before the work: afterwards it is too late to hear that a folder does not exist."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written",
            why="it is a folder" if path.is_dir() else f"{path.parent} is not a folder one may write to",
            do="give a file in a folder that exists",
        )


def write(path: Path, text: str) -> None:
    """The whole file or none: a reader never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
