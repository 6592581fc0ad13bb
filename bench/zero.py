"""State that is shared out, beside torch's: memory of a worker, and time of a step.

    python bench/zero.py --out bench/results/zero.json

The job is a GPT of 6.4 million fp32 parameters with AdamW (bench/zero_job.py). Ours are zero1, zero2 and zero3; theirs
DDP with ZeroRedundancyOptimizer, which shares out what zero1 does, and FSDP2, which shares out what zero3 does; DDP and
exact hold everything. For memory, the live bytes of tensors are counted, between two steps and at the most during one,
in a run of its own; what the system says of the process (rss) is the second figure, and noisier. For time, all take
turns as in `paceline race`. `ratio` is theirs over ours: at least 1 is the goal. Wants root for the shaped links; leave
the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.files import check_writable, write
from paceline.tools.lab import namespaces
from paceline.tools.race import result, runner, score
from paceline.tools.race.contenders import Contender
from paceline.tools.race.network import open_network
from paceline.tools.race.runner import RaceRules

JOB = str(Path(__file__).with_name("zero_job.py"))
METHODS = ("torch:ddp", "exact", "torch:zero1", "zero1", "zero2", "torch:fsdp2", "zero3")
PEER = {"exact": "torch:ddp", "zero1": "torch:zero1", "zero2": "torch:zero1", "zero3": "torch:fsdp2"}
LINKS = {"unlimited": 9, "100mbit": 4}  # steps that count

Cell = dict[str, Any]


def memory(method: str, workers: int) -> Cell:
    """The worker that takes the most."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", "--workers", str(workers), "--method", method, JOB, "--batch", "1", "--memory", folder]
        subprocess.run([sys.executable, "-m", "paceline.tools.cli.main", *command], check=True, stdout=sys.stderr)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    most = {key: max(one[key] for one in found) for key in found[0]}
    count = most.pop("parameters")
    return {f"{key}_bytes": round(value / count, 2) for key, value in most.items()}


def times(workers: int, link: str, steps: int) -> list[score.RaceRow]:
    racing = [Contender(method, [sys.executable, JOB]) for method in METHODS]
    rules = RaceRules(steps=steps, warmup=2, turn=3)
    with open_network(link, workers, None) as links, tempfile.TemporaryDirectory() as folder:
        if not runner.run(racing, rules, links, Path(folder)):
            raise KeyboardInterrupt
    for one in racing:
        if one.error:
            raise SystemExit(f"{one.method}: {one.error}")
    return [score.rows([one.record(workers)], link=link, warmup=rules.warmup)[0] for one in racing]


def with_ratios(cells: Sequence[Cell], keys: Sequence[str]) -> list[Cell]:
    """Each of ours beside its peer: how many times as much theirs takes."""
    of = {cell["method"]: cell for cell in cells}
    for ours, theirs in PEER.items():
        of[ours]["ratio"] = {key: round(of[theirs][key] / of[ours][key], 3) for key in keys}
    return list(cells)


def measure_memory(workers: int) -> list[Cell]:
    cells = [{"workers": workers, "method": method, **memory(method, workers)} for method in METHODS]
    return with_ratios(cells, ["between_steps_bytes", "peak_bytes", "rss_bytes", "peak_rss_bytes"])


def measure_time(workers: int, link: str) -> list[Cell]:
    rows = times(workers, link, LINKS[link])
    cells = [
        {
            "workers": workers,
            "link": link,
            "method": row.method,
            "step_ms": row.step_ms_median,
            "sent_bytes": row.sent_bytes_per_step,
            "wire_bytes": row.wire_bytes_per_step,
        }
        for row in rows
    ]
    return with_ratios(cells, ["step_ms"])


def show(cells: Sequence[Cell]) -> None:
    for cell in cells:
        words = [f"{key} {value}" for key, value in cell.items() if value is not None and key != "ratio"]
        print("  ".join(words), "  over:", cell.get("ratio", ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--parts", default="memory,unlimited,100mbit", help="the last on two workers only")
    args = parser.parse_args()
    check_writable(args.out)
    asked = args.parts.split(",")
    if "100mbit" in asked and (why := namespaces.available()):
        raise SystemExit(f"shaped links need the lab: {why}")
    found: dict[str, list[Cell]] = {"memory": [], "time": []}
    if args.out.exists():
        found = {key: json.loads(args.out.read_text())[key] for key in found}
    worlds = [int(w) for w in args.workers.split(",")]
    runs = [(part, w) for part in asked for w in worlds if part != "100mbit" or w == min(worlds)]
    for part, workers in runs:
        key = "memory" if part == "memory" else "time"
        new = measure_memory(workers) if part == "memory" else measure_time(workers, part)
        show(new)
        where = (workers, new[0].get("link"))
        found[key] = [c for c in found[key] if (c["workers"], c.get("link")) != where] + new
        write(args.out, json.dumps({**result.header("zero"), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
