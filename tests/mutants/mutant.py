"""A fault that a tired engineer might make, and what must notice it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES, TESTS = ROOT / "src", ROOT / "tests"


class Mutant(NamedTuple):
    """One row. Either `tests` or `equivalent` says something, never both."""

    name: str
    file: str  # below src/paceline
    old: str  # stands in the file exactly once
    new: str
    tests: str = ""  # what pytest is given, below tests/, with blanks between
    equivalent: str = ""  # why no test can tell the change from what was there

    def applied(self, text: str) -> str:
        """The text of the file with the fault in it."""
        if (count := text.count(self.old)) != 1:
            raise StaleError(f"{self.name}: its text stands {count} times in {self.file}, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    def apply_to(self, sources: Path) -> None:
        """Put the fault into a copy of the sources."""
        path = sources / "paceline" / self.file
        path.write_text(self.applied(path.read_text(encoding="utf-8")), encoding="utf-8")


class StaleError(Exception):
    """The code has changed, and a row does not fit it any more."""


def mutants() -> list[Mutant]:
    """All rows, in the order of their files."""
    table = importlib.import_module("mutants.table")
    files = sorted(module.name for module in pkgutil.iter_modules(table.__path__))
    return [row for file in files for row in importlib.import_module(f"mutants.table.{file}").ROWS]
