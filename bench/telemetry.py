"""What telemetry costs a step: the share of a 10 ms step that a lap, its event and two metrics take.

python bench/telemetry.py --out bench/results/telemetry.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from paceline.telemetry.recorder import Recorder

STEPS = 20_000


def step_us(directory: Path | None) -> float:
    recorder = Recorder(directory, 0)
    began = time.perf_counter()
    for _ in range(STEPS):
        recorder.start_lap(32, 0.0)
        recorder.log({"loss": 1.0, "accuracy": 0.5})
        recorder.end_lap()
    recorder.flush()
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = [step_us(Path(folder)) for _ in range(7)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "bench": "telemetry",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": platform.processor() or platform.machine(),
        "us_per_step": round(statistics.median(times), 2),
        "share_of_a_10_ms_step": round(statistics.median(times) / 10_000, 5),
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
