"""What goes first: `priority` against the order of backward and torch DDP, where communication is 0.5, 1 and 2 times
the computing of a step.

    python bench/order.py --out bench/results/order.json

The job is a stack of equal layers (bench/order_job.py). Its step without any communication (`floor`) is measured first;
then the link between the workers gets the speed at which the bytes of a mean take that long, times the ratio. All
contenders take turns, as in `paceline race`; `priority tuned` has the sizes that the tuner found in a run of its own on
that link, just before. No schedule can be faster than the larger of the two: `ideal` is that, and `near` how much of it
is reached.

The lab's links are made of this machine's processors too, and the more bytes a step has the less is left to compute
with: four workers on two cores with 12 MB of gradients keep both busy all the time, a third of it with sending, and
then there is nothing to hide behind. So four workers have a model of a quarter of the size and four times the batch;
on a machine with cores enough give `--width 512`.
Wants root for the shaped links; leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.telemetry.files import check_writable, write
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import parse_link
from paceline.tools.race import result, runner, score
from paceline.tools.race.contenders import Contender
from paceline.tools.race.network import open_network
from paceline.tools.race.runner import RaceRules

RATIOS = (0.5, 1.0, 2.0)
LAYERS = 12
WIDTHS = {2: 512, 4: 256}  # by the number of workers
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "floor": ("floor", {}),
    "torch:ddp": ("torch:ddp", {}),
    "backward": ("exact", {}),
    "priority": ("priority", {}),
    "priority tuned": ("priority", {}),
}
GOAL, NEVER_BELOW = 1.3, 0.98  # priority over torch DDP: where communication equals computing, anywhere

TUNING_STEPS = 130  # more than the tuner takes

Cell = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is trained, by how many; the batch is each worker's."""

    workers: int
    width: int
    batch: int

    @classmethod
    def of(cls, workers: int, batch: int, width: int | None) -> Job:
        """As much to compute in all whatever the number of workers and the width."""
        width = width or WIDTHS.get(workers, min(WIDTHS.values()))
        return cls(workers, width, max(1, batch * 2 * WIDTHS[2] ** 2 // (workers * width**2)))

    @property
    def gradient_bytes(self) -> int:
        return 4 * LAYERS * self.width * (self.width + 1)

    def wire_s(self, mbit: float) -> float:
        """Seconds the bytes of a mean need on a link of that speed."""
        return 2 * self.gradient_bytes * (self.workers - 1) / self.workers * 8 / (mbit * 1e6)

    def command(self) -> list[str]:
        layer_mb = 4 * self.width**2 / 2**20
        model = {"layers": LAYERS, "width": self.width, "batch": self.batch, "bucket-mb": f"{layer_mb:g}"}
        words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
        return [sys.executable, str(Path(__file__).with_name("order_job.py")), *words]


def contender(name: str, job: Job, sizes: Path) -> Contender:
    """sizes: the file that the tuner writes, if it does not exist yet, and reads."""
    method, knobs = METHODS[name]
    knobs = {**knobs, "tuned": str(sizes)} if name.endswith("tuned") else knobs
    return Contender(method, job.command(), knobs, alias=name.replace(" ", "-"))


def race(names: Sequence[str], job: Job, link: str, sizes: Path, rules: RaceRules) -> list[score.RaceRow]:
    """The rows of all, in the order of their names."""
    racing = [contender(name, job, sizes) for name in names]
    with open_network(link, job.workers, None) as links, tempfile.TemporaryDirectory() as folder:
        if not runner.run(racing, rules, links, Path(folder)):
            raise KeyboardInterrupt
    rows = []
    for name, one in zip(names, racing, strict=True):
        if one.error:
            raise SystemExit(f"{name}: {one.error}")
        rows.append(score.rows([one.record(job.workers)], link=link, warmup=rules.warmup)[0])
    return rows


def measure(job: Job, ratio: float, sizes: Path, rules: RaceRules) -> list[Cell]:
    floor = race(["floor"], job, "unlimited", sizes, rules)[0]
    floor_ms = floor.step_ms_median or math.nan
    link = f"{max(job.wire_s(1.0) / (ratio * floor_ms / 1e3), 1.0):.0f}mbit"
    race(["priority tuned"], job, link, sizes, replace(rules, steps=TUNING_STEPS, turn=TUNING_STEPS))
    found = json.loads(sizes.read_text())
    rows = race(list(METHODS), job, link, sizes, rules)
    ms = {name: row.step_ms_median or math.nan for name, row in zip(METHODS, rows, strict=True)}
    ideal = max(ms["floor"], 1e3 * job.wire_s((parse_link(link).bits_per_second or 0) / 1e6))
    return [
        {
            "workers": job.workers,
            "ratio": ratio,
            "gradient_bytes": job.gradient_bytes,
            "link": link,
            "method": name,
            "step_ms": ms[name],
            "exposed_comm_ms": row.exposed_comm_ms,
            "over_ddp": round(ms["torch:ddp"] / ms[name], 3),
            "near_ideal": round(ideal / ms[name], 3),
            **({"sizes": found} if name.endswith("tuned") else {}),
        }
        for name, row in zip(METHODS, rows, strict=True)
        if name != "floor"
    ]


def table(cells: Sequence[Cell]) -> None:
    """Fits 80 columns."""
    print(f"{'workers':>7s}{'comm/comp':>10s}{'link':>9s}  {'method':16s}{'step ms':>8s}{'over DDP':>9s}{'near':>6s}")
    for c in cells:
        where = f"{c['workers']:7d}{c['ratio']:10.1f}{c['link']:>9s}"
        print(f"{where}  {c['method']:16s}{c['step_ms']:8.1f}{c['over_ddp']:9.2f}{c['near_ideal']:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--steps", type=int, default=24, help="that count, for each contender")
    parser.add_argument("--turn", type=int, default=12, help="steps at a time: each turn ends with all landed")
    parser.add_argument(
        "--batch",
        type=int,
        default=2048,
        help="samples for each of two workers; of more, who share the machine, there is as much to compute in all",
    )
    parser.add_argument("--width", type=int, help="of a layer; 512, for more than two workers 256")
    args = parser.parse_args()
    check_writable(args.out)
    if why := namespaces.available():
        raise SystemExit(f"shaped links need the lab: {why}")
    cells: list[Cell] = json.loads(args.out.read_text())["cells"] if args.out.exists() else []
    rules = RaceRules(steps=args.steps, warmup=3, turn=args.turn)
    for workers in map(int, args.workers.split(",")):
        job = Job.of(workers, args.batch, args.width)
        for ratio in map(float, args.ratios.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                new = measure(job, ratio, Path(folder) / "sizes.json", rules)
            table(new)
            cells = [c for c in cells if (c["workers"], c["ratio"]) != (workers, ratio)] + new
            save(args.out, sorted(cells, key=lambda c: (c["workers"], c["ratio"])))


def save(path: Path, cells: Sequence[Cell]) -> None:
    """After every cell: what is known stays known."""
    whole = {**result.header("order"), "cells": cells}
    write(path, json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
