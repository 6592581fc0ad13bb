"""What adapting is worth: shares by speed, rounds with a deadline, compression by regime. Everything is a ratio.

    python bench/adapt.py --out bench/results/adapt.json [--parts slow,random,accordion]

slow        One worker of half the speed among three and among four, which then recovers (adapt_job.py): samples that
            count in a second, over `even`'s in the same round. Ideal are 1.67 and 1.75; the goal is 92 % of that.
random      Every worker's speed is drawn anew all the time, as in Anytime Minibatch: seconds of `every_step` to an
            error over those of `any_batch` and the others. Logistic regression, and a small perceptron, on fashion.
accordion   Whole runs, three seeds: accuracy at the end and bytes, beside the low and the high setting all along. The
            learning rate stays: one that falls in every step is critical in every step.

Contenders take turns, so that what the machine does meanwhile meets all of them; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from paceline.telemetry.events import Metric, Step, read
from paceline.tools.race.result import commit, machine

JOB = Path(__file__).with_name("adapt_job.py")
RATE = ["--lr-warmup", "10"]

# Each with the arguments of `paceline run` and those of the job.
SLOW: dict[str, tuple[list[str], list[str]]] = {
    "even": (["--method", "exact"], []),
    "measured": (["--method", "measured"], []),
    "torch:ddp join": ([], ["--ddp"]),
    "backup_workers": (["--method", "backup_workers"], ["--counts", "{counts}"]),
}
IDEAL = {3: 5 / 3, 4: 7 / 4}

RANDOM: dict[str, tuple[list[str], list[str]]] = {
    "every_step": (["--method", "exact"], []),
    "any_batch": (["--method", "any_batch"], []),
    "measured": (["--method", "measured"], []),
    "torch:ddp join": ([], ["--ddp"]),
    "backup_workers": (["--method", "backup_workers"], []),
}
ERRORS = {"logistic": 0.19, "fashion": 0.17}  # chosen beforehand, from what such models are known to reach

ACCORDION: dict[str, list[str]] = {
    "low": ["--method", "powersgd", "--set", "rank={low}"],
    "high": ["--method", "powersgd", "--set", "rank={high}"],
    "accordion": ["--method", "accordion+powersgd", "--set", "turn=rank", "--set", "low={low}", "--set", "high={high}",
                  "--set", "window={window}"],
}  # fmt: skip
WINDOWS = 20  # of a run, of which the first two are critical by rule
# Ranks as far apart as the goal of 40 % of the bytes asks for.
TASKS = {"fashion": {"steps": 400, "low": 8, "high": 1}, "text": {"steps": 480, "low": 16, "high": 2}}


def run(workers: int, options: list[str], script: list[str]) -> str:
    """The output of worker 0."""
    command = [sys.executable, "-m", "paceline.tools.cli.main", "run", "--workers", str(workers), *options, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def job(workers: int, contender: tuple[list[str], list[str]], *arguments: str) -> dict[str, Any]:
    options, own = contender
    own = [text.format(counts=f"{(workers - 1) / workers:.4f}") for text in own]
    out = run(workers, options, [str(JOB), *arguments, *own])
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))


def slow(rounds: int) -> Iterator[dict[str, Any]]:
    for workers in (3, 4):
        rates: dict[str, list[list[float]]] = {name: [] for name in SLOW}
        for _ in range(rounds):
            for name, contender in SLOW.items():
                rates[name].append(job(workers, contender, "--slow", str(workers - 1), "--batch", "240")["per_s"])
                print(workers, name, rates[name][-1], flush=True)
        for name, seen in rates.items():
            over = [
                [mine / even for mine, even in zip(own, base, strict=True)]
                for own, base in zip(seen, rates["even"], strict=True)
            ]
            slowed, recovered = (round(statistics.median(column), 3) for column in zip(*over, strict=True))
            yield {
                "workers": workers,
                "method": name,
                "over_even": slowed,
                "over_even_recovered": recovered,
                "of_ideal": round(slowed / IDEAL[workers], 3),
                "samples_per_s": seen,
            }


def reached(curve: list[tuple[float, float]], error: float) -> float | None:
    return next((seconds for seconds, found in curve if found <= error), None)


def random(rounds: int, workers: int) -> Iterator[dict[str, Any]]:
    for task, error in ERRORS.items():
        arguments = ["--task", task, "--random", "--batch", "256", "--sample-ms", "0.4"]
        seconds: dict[str, list[float | None]] = {name: [] for name in RANDOM}
        for seed in range(rounds):
            for name, contender in RANDOM.items():
                found = job(workers, contender, *arguments, "--seed", str(seed), "--seconds", "12")
                seconds[name].append(reached(found["curve"], error))
                print(task, seed, name, seconds[name][-1], found["curve"][-1], flush=True)
        for name, seen in seconds.items():
            pairs = [(a, b) for a, b in zip(seconds["every_step"], seen, strict=True) if a and b]
            yield {
                "task": task,
                "workers": workers,
                "error": error,
                "method": name,
                "speedup": round(statistics.median(a / b for a, b in pairs), 3) if pairs else None,
                "seconds": seen,
            }


def accordion(seeds: int) -> Iterator[dict[str, Any]]:
    for task, chosen in TASKS.items():
        window = chosen["steps"] // WINDOWS
        ends: dict[str, list[tuple[float, int]]] = {name: [] for name in ACCORDION}
        for seed in range(seeds):
            for name, options in ACCORDION.items():
                with tempfile.TemporaryDirectory() as folder:
                    own = [text.format(window=window, **chosen) for text in options]
                    steps = str(chosen["steps"])
                    script = ["-m", f"paceline.tools.tasks.{task}", "--steps", steps, "--eval-every", steps, *RATE]
                    run(2, [*own, "--events", folder], [*script, "--seed", str(seed)])
                    events = list(read(Path(folder) / "worker-0.jsonl"))
                accuracies = [e.value for e in events if isinstance(e, Metric) and e.name == "accuracy"]
                assert accuracies[-1] is not None
                ends[name].append((accuracies[-1], sum(e.sent for e in events if isinstance(e, Step))))
                print(task, seed, name, ends[name][-1], flush=True)
        low_accuracy, low_sent = (statistics.mean(column) for column in zip(*ends["low"], strict=True))
        for name, seen in ends.items():
            accuracy, sent = (statistics.mean(column) for column in zip(*seen, strict=True))
            yield {
                "task": task,
                "method": name,
                **chosen,
                "window": window,
                "points_over_low": round(100 * (accuracy - low_accuracy), 2),
                "bytes_over_low": round(sent / low_sent, 3),
                "runs": seen,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="slow,random,accordion")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a part, or seeds")
    parser.add_argument("--workers", type=int, default=4, help="of the part `random`")
    args = parser.parse_args()
    parts = {
        "slow": lambda: slow(args.rounds),
        "random": lambda: random(args.rounds, args.workers),
        "accordion": lambda: accordion(args.rounds),
    }
    result = json.loads(args.out.read_text()) if args.out.exists() else {"bench": "adapt", "parts": {}}
    for name in args.parts.split(","):
        rows = list(parts[name]())
        result["parts"][name] = {
            "commit": commit(),
            "machine": asdict(machine()),
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        for row in rows:
            print({key: value for key, value in row.items() if not isinstance(value, list)})


if __name__ == "__main__":
    main()
