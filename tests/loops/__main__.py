"""`python tests/loops`: the table, or a part of it.

Every cell that fails is printed as it is found. The exit code is 1 if one does that known.py does not name, or if none
fails any more of those that a line of it names.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its files are modules of the package `loops`

from loops.job import loops  # noqa: E402
from loops.known import KNOWN, known, line  # noqa: E402
from loops.methods import columns  # noqa: E402
from loops.report import render, tally  # noqa: E402
from loops.run import fill  # noqa: E402
from loops.verdict import Cell  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/loops", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", default="*", help="patterns, with commas between")
    parser.add_argument("--methods", default="*", help="patterns, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time, two processes each")
    parser.add_argument("--report", action="store_true", help="print the table")
    parser.add_argument("--all", action="store_true", help="print every cell, those that are right too")
    parser.add_argument("--traces", action="store_true", help="print the traceback of what fails")
    options = parser.parse_args()
    rows = [one for name, one in loops().items() if _chosen(name, options.loops)]
    cols = [one for name, one in columns().items() if _chosen(name, options.methods)]
    began = time.monotonic()

    def tell(cell: Cell) -> None:
        if cell.fails or options.all:
            why = known(cell.loop, cell.column) if cell.fails else ""
            note = f"   [known: {why}]" if why else ""
            print(f"{cell.verdict:8} {cell.loop} x {cell.column}: {cell.why} ({cell.seconds:.1f} s){note}", flush=True)
            if options.traces and cell.trace:
                print(cell.trace, flush=True)

    cells = fill(rows, cols, tell, options.jobs)
    failing = [cell for cell in cells if cell.fails]
    new = [cell for cell in failing if not known(cell.loop, cell.column)]
    fixed = (
        []
        if options.loops + options.methods != "**"
        else sorted({*KNOWN} - {line(cell.loop, cell.column) for cell in failing})
    )
    if options.report:
        print(render(cells))
    for first, second in fixed:
        print(f"no cell of {first} x {second} fails any more: take the line out of tests/loops/known.py")
    print(f"{tally(cells)}; {len(failing) - len(new)} fail as known, {len(new)} are new")
    print(f"{time.monotonic() - began:.0f} s")
    return int(bool(new or fixed))


def _chosen(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))


if __name__ == "__main__":
    sys.exit(main())
