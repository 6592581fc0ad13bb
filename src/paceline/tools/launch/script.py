"""The user's program as a command: a script by its path, or a module as in `python -m`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from paceline.errors import UsageError


def script_command(script: str) -> list[str]:
    """The command that runs a Python script."""
    path = Path(script)
    try:
        path.stat()
    except OSError as error:
        raise UsageError(f"there is no script {script!r}", why=error.strerror or "", do="check the path") from None
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "not a file"
        raise UsageError(f"{script!r} is {kind}", do="name the Python script itself")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script!r} cannot be read", do="check its permissions")
    # Python would take a leading dash for an option.
    return [sys.executable, f"./{script}" if script.startswith("-") else script]


def module_command(name: str) -> list[str]:
    """The command that runs a module as a script, found from the current directory as `python -m` does."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{name!r} is not the name of a module",
            why="-m runs a module, as python -m does",
            do="write -m package.module, or leave -m out to run a script by its path",
        )
    package = name.partition(".")[0]
    if not _can_import(package):
        raise UsageError(
            f"there is no module {name!r}",
            why=f"{package!r} is neither in {Path.cwd()} nor installed",
            do="start it from the folder that holds the package; a method is chosen with --method",
        )
    return [sys.executable, "-m", name]


def _can_import(package: str) -> bool:
    """Whether workers started here would find the package. Nothing is imported: that is the workers' business."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module of this process without a spec, `__main__`
        return False
    finally:
        sys.path[:] = before
