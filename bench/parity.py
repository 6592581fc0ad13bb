"""`exact` beside torch DDP: same model, data and seeds, taking turns, on one machine.

    python bench/parity.py --out bench/results/parity.json

Every cell is a `paceline race` of floor, torch:ddp and exact. `ratio` is DDP's median step time over that of exact:
at least 1 is the goal. Wants root for the shaped links; leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = {("text", "unlimited"): 40, ("text", "100mbit"): 24, ("fashion", "unlimited"): 80, ("fashion", "100mbit"): 20}


def cell(task: str, workers: int, link: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "race.json"
        command = ["race", task, "--methods", "floor,torch:ddp,exact", "--workers", str(workers), "--link", link]
        command += ["--steps", str(STEPS[task, link]), "--json", str(out)]
        subprocess.run([sys.executable, "-m", "paceline.tools.cli.main", *command], check=True, stdout=sys.stderr)
        race = json.loads(out.read_text())
    rows = {row["method"]: row for row in race["rows"]}
    ours, ddp = rows["exact"], rows["torch:ddp"]
    return {
        "task": task,
        "workers": workers,
        "link": link,
        "link_kind": race["link_kind"],
        "ratio": round(ddp["step_ms_median"] / ours["step_ms_median"], 3),
        "ratio_of_means": round(ours["samples_per_s"] / ddp["samples_per_s"], 3),
        "commit": race["commit"],
        "machine": race["machine"],
        "rows": race["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="text,fashion")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--links", default="unlimited,100mbit")
    args = parser.parse_args()
    asked = [args.tasks.split(","), [int(w) for w in args.workers.split(",")], args.links.split(",")]
    cells = []
    for task, workers, link in itertools.product(*asked):
        cells.append(cell(task, workers, link))
        print(f"{task:8s} {workers} workers  {link:10s} exact/ddp {cells[-1]['ratio']:.3f}", flush=True)
        result = {"bench": "parity", "date": time.strftime("%Y-%m-%d"), "cells": cells}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
