"""What a race leaves behind, as JSON: its rows, and enough about the machine to know what they are worth."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from paceline.race.network import Kind
from paceline.race.score import Row


class Machine(msgspec.Struct, kw_only=True):
    """Where it ran."""

    cores: int  # this process may use
    cpu: str
    memory_gb: float


class Result(msgspec.Struct, kw_only=True):
    """A whole race. The fields are the keys of the JSON, in this order."""

    schema: int = 1
    paceline: str
    torch: str
    machine: Machine
    date: str  # UTC
    command: str
    commit: str | None
    task: str
    workers: int
    link: str
    link_kind: Kind
    threads: int
    rows: list[Row]


def describe(
    rows: Sequence[Row],
    arguments: Sequence[str],
    *,
    task: str,
    workers: int,
    link: str,
    kind: Kind,
    threads: int,
) -> Result:
    """The rows with where, when and how they were measured. `arguments` are those of the command line."""
    return Result(
        paceline=_version(),
        torch=str(torch.__version__),  # a str, but of a class of its own
        machine=machine(),
        date=now(),
        command=shlex.join(["paceline", *arguments]),
        commit=commit(),
        task=task,
        workers=workers,
        link=link,
        link_kind=kind,
        threads=threads,
        rows=list(rows),
    )


def header(bench: str) -> dict[str, Any]:
    """What the file of a benchmark begins with."""
    return {
        "bench": bench,
        "commit": commit(),
        "machine": msgspec.to_builtins(machine()),
        "torch": str(torch.__version__),
        "date": now(),
        "command": shlex.join(["python", *sys.argv]),
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def encode(result: Result) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=_cpu_model(),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
    )


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:  # run from the sources
        import paceline

        return paceline.__version__


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "")


def commit() -> str | None:
    """The commit of the sources this runs from; None for an installed package."""
    # An installed package may lie inside somebody else's repository, in a virtual environment: not its commit.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return _git("rev-parse", "HEAD") if tracked else None


def _git(*words: str) -> str | None:
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
