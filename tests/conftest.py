"""What holds for every process of the tests."""

from __future__ import annotations

import gc
import os

# The models are tiny and the workers are many: more threads in each would only wait for each other's cores. It is set
# before anything imports torch, and the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Memory without values is NaN (paceline/core/blank.py): set before paceline is imported.
os.environ.setdefault("PACELINE_POISON", "1")


def pytest_collection_finish() -> None:
    """What thousands of tests and modules are made of stays to the end: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()
