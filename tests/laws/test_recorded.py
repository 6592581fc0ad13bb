"""Every method's weights after 50 steps are those that were recorded, to the last bit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "recorded"
ENVIRONMENT = {  # kernels that give the same bits on every x86 processor
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
elsewhere = pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.__version__.startswith("2.13."),
    reason="recorded with torch 2.13 on x86: other versions and processors round otherwise",
)


def compare(*arguments: str) -> None:
    run = [sys.executable, str(SCRIPT), *arguments]
    out = subprocess.run(run, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True).stdout
    known, now = json.loads((SCRIPT / "weights.json").read_text()), json.loads(out)
    assert now, "nothing was trained"
    assert {case: now[case] for case in now if now[case] != known.get(case)} == {}


@elsewhere
def test_the_plain_setting_of_every_method_with_three_workers():
    compare("--worlds", "3", "--plain")


@elsewhere
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_setting_of_every_method(world_size):
    compare("--worlds", str(world_size))
