"""The tests of a row, run over a copy of the sources that has its fault.

Each row has a process of its own. It is forked from one that has imported torch and what else takes long, but nothing
of ours, so that a row takes hardly longer than its tests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from mutants.mutant import ROOT, SOURCES, TESTS, Mutant, StaleError

Verdict = Literal["killed", "survived", "equivalent", "stale", "broken"]
TIMEOUT_S = 240.0  # of one row: whoever does not end by then hangs, which a run of the tests would show as well
_FAILED, _BROKEN = 1, (2, 3, 4, 5)  # exit codes of pytest: tests failed; nothing was collected, or not all of it
_WORDS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--tb=line")
_FOREIGN = ["hypothesis", "msgspec", "numba", "pytest", "safetensors", "torch._dynamo", "torch.distributed", "typer"]


class Result(NamedTuple):
    """What became of a row."""

    mutant: Mutant
    verdict: Verdict
    seconds: float = 0.0
    why: str = ""  # the test that failed, or what is wrong with the row


class BrokenTestsError(Exception):
    """The tests fail without any fault, so that they can tell nothing."""


def run(rows: Sequence[Mutant], jobs: int, tell: Callable[[Result], None]) -> list[Result]:
    """Run all these rows, so many at a time. tell: called with each result as it is known."""

    def one(row: Mutant) -> Result:
        result = _run(row)
        tell(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, rows))


def check(rows: Sequence[Mutant], jobs: int) -> None:
    """Raise if the rows' tests fail without any fault. Those of each file are run together."""
    files: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for row in rows for test in row.tests.split()):
        files.setdefault(test.partition("::")[0], []).append(test)
    whole = [[file] if file in tests else tests for file, tests in files.items()]
    with ThreadPoolExecutor(jobs) as pool:
        failed = [output for code, output in pool.map(lambda tests: _pytest(SOURCES, tests), whole) if code != 0]
    if failed:
        raise BrokenTestsError("the tests fail without any fault:\n" + "\n".join(failed))


def _run(row: Mutant) -> Result:
    if row.equivalent:
        return Result(row, "equivalent", why=row.equivalent)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        sources = Path(folder) / "src"
        shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.egg-info"))
        try:
            row.apply_to(sources)
        except StaleError as error:
            return Result(row, "stale", why=str(error))
        for compiled in (sources / "paceline" / row.file).parent.glob("__pycache__/*.pyc"):
            compiled.unlink()
        code, output = _pytest(sources, row.tests.split())
    verdict: Verdict = "survived" if code == 0 else "broken" if code in _BROKEN else "killed"
    return Result(row, verdict, time.monotonic() - began, _first_failure(code, output) if code != 0 else "")


def _pytest(sources: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """The exit code and the output of these tests over these sources; None: they took too long."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as in conftest.py, but here torch is imported earlier
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_FOREIGN)
    with tempfile.NamedTemporaryFile(mode="r", prefix="mutant-") as output:
        process = context.Process(target=_in_process, args=(sources, tests, output.name))
        process.start()
        process.join(TIMEOUT_S)
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # the workers that it has started go with it
        process.join()
        return code, output.read()


def _in_process(sources: Path, tests: Sequence[str], output: str) -> None:
    import pytest

    os.setsid()
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert "paceline" not in sys.modules, "the sources without the fault were imported before"
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(sources)
    sys.path.insert(0, str(sources))
    sys.exit(pytest.main([*_WORDS, *(str(TESTS / test) for test in tests)]))


def _first_failure(code: int | None, output: str) -> str:
    if code == _FAILED:
        failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].removeprefix("FAILED ").partition(" - ")[0].removeprefix("tests/") if failed else output[-300:]
    if code is None:
        return f"not through after {TIMEOUT_S:g} s"
    return output[-300:] if code > 0 else f"ended by signal {-code}"
