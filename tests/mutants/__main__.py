"""`python tests/mutants`: put every fault of the table into a copy of the sources, and see whether tests notice it.

The exit code is 1 if fewer than 95 % of the faults are noticed, or if a row does not fit the code any more.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its files are modules of the package `mutants`

from mutants.mutant import mutants  # noqa: E402
from mutants.run import Result, check, run  # noqa: E402

ENOUGH = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="NAME", help="patterns, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, a process each")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without any fault before")
    options = parser.parse_args()
    rows = [row for row in mutants() if any(fnmatch.fnmatchcase(row.name, one) for one in options.only.split(","))]
    if not rows:
        parser.error(f"no row is called {options.only}")
    began = time.monotonic()
    if not options.unchecked:
        check(rows, options.jobs)
    results = run(rows, options.jobs, lambda result: print(_line(result), flush=True))
    seconds = time.monotonic() - began
    if options.out:
        options.out.write_text(json.dumps(_document(results, seconds), indent=1) + "\n")
    print("\n" + _table(results))
    left = [result for result in results if result.verdict in ("survived", "stale", "broken")]
    for result in left:
        print(f"{result.verdict}: {result.mutant.name} ({result.mutant.file})")
    print(f"{share(results):.1%} killed; {seconds:.0f} s")
    return int(share(results) < ENOUGH or any(result.verdict in ("stale", "broken") for result in left))


def share(results: Sequence[Result]) -> float:
    """Of the faults that a test can notice, the share that was noticed."""
    count = Counter(result.verdict for result in results)
    able = len(results) - count["equivalent"]
    return count["killed"] / able if able else 1.0


def _line(result: Result) -> str:
    return f"{result.verdict:10} {result.mutant.name:44} {result.seconds:5.1f} s  {result.why}"


def _table(results: Sequence[Result]) -> str:
    folders = list(dict.fromkeys(result.mutant.file.partition("/")[0] for result in results))
    lines = [f"{'':12} {'rows':>5} {'killed':>7} {'survived':>9} {'equivalent':>11}"]
    for folder in [*folders, "all"]:
        of = [r for r in results if folder in ("all", r.mutant.file.partition("/")[0])]
        count = Counter(result.verdict for result in of)
        lines.append(
            f"{folder:12} {len(of):5} {count['killed']:7} {count['survived']:9} {count['equivalent']:11}".rstrip()
        )
    return "\n".join(lines)


def _document(results: Sequence[Result], seconds: float) -> dict[str, object]:
    from paceline.tools.race.result import header  # not above: the processes of the rows import other sources

    count = Counter(result.verdict for result in results)
    rows = [{"name": r.mutant.name, "file": r.mutant.file, "verdict": r.verdict, "why": r.why} for r in results]
    return header("mutants") | {"seconds": round(seconds), "killed_share": share(results), **count, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
