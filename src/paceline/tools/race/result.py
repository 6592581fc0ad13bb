"""The result of a race as JSON: its rows, and enough about the machine to know what they are worth."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from paceline.tools.race.network import LinkKind
from paceline.tools.race.score import RaceRow


class Machine(msgspec.Struct, kw_only=True):
    """The machine that a measurement was made on."""

    cores: int  # that this process may use
    cpu: str
    memory_gb: float


class RaceResult(msgspec.Struct, kw_only=True):
    """The result of a whole race. The fields are the keys of the JSON, in this order."""

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
    link_kind: LinkKind
    threads: int
    rows: list[RaceRow]


@dataclass(frozen=True, kw_only=True)
class RaceSetting:
    """What all contenders of a race have in common."""

    task: str
    workers: int
    link: str
    link_kind: LinkKind
    threads: int


def describe(rows: Sequence[RaceRow], setting: RaceSetting, arguments: Sequence[str]) -> RaceResult:
    """The rows with where, when and how they were measured. `arguments` are those of the command line."""
    return RaceResult(
        paceline=_version(),
        torch=str(torch.__version__),  # a subclass of str, which msgspec does not encode
        machine=machine(),
        date=now(),
        command=shlex.join(["paceline", *arguments]),
        commit=commit(),
        rows=list(rows),
        **asdict(setting),
    )


def header(bench: str) -> dict[str, Any]:
    """The first keys of every file in bench/results: what was measured, where and when."""
    return {
        "bench": bench,
        "commit": commit(),
        "machine": msgspec.to_builtins(machine()),
        "torch": str(torch.__version__),
        "date": now(),
        "command": shlex.join(["python", *sys.argv]),
    }


def now() -> str:
    """The time in UTC, to the second, in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def encode(result: RaceResult) -> str:
    """The result as an indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def machine() -> Machine:
    """This machine."""
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=_cpu_model(),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
    )


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:  # run from the sources
        from paceline._version import __version__

        return __version__


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "")


def commit() -> str | None:
    """The commit of the sources this runs from; None for an installed package."""
    # An installed package may lie in a virtual environment inside another repository, whose commit means nothing here.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return _git("rev-parse", "HEAD") if tracked else None


def _git(*words: str) -> str | None:
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
