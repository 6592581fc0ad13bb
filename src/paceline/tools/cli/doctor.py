"""`paceline doctor`: check whether this machine is fit for training, and say what to do if it is not."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline import __version__
from paceline.errors import UsageError
from paceline.tools.launch import MOST_WORKERS, JobSpec, WorkerOutput, cores, launch

_FASHION = Path("/usr/share/datasets/fashion-mnist")
_LINK_TEST_S = 60.0
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the doctor: what was looked at, the verdict, what was found, and what to do about it."""

    name: str
    verdict: Literal["ok", "warn", "bad"]
    found: str
    do: str = ""


def doctor(
    workers: Annotated[int, typer.Option("--workers", "-n", help="Workers of the link test.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Look at this machine: versions, cores, memory, network, disk, and two workers that talk to each other.

    The exit code is 1 if something is bad that training cannot do without, else 0.
    """
    if not 2 <= workers <= MOST_WORKERS:
        raise UsageError(f"--workers {workers} is not in 2..{MOST_WORKERS}", why="a link has two ends")
    checks: list[DoctorCheck] = []
    console = Console(highlight=False)
    for check in _checks(workers):
        checks.append(check)
        if not as_json:
            console.print(_row(check))  # at once, because the link test takes seconds
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    raise typer.Exit(1 if any(check.verdict == "bad" for check in checks) else 0)


def _row(check: DoctorCheck) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=12)
    row.add_column()
    found = Text(check.found)
    if check.do:
        found.append(f"\n→ {check.do}", style="dim" if check.verdict == "ok" else "")
    row.add_row(Text(check.verdict, style=_COLOURS[check.verdict]), check.name, found)
    return row


def _checks(workers: int) -> Iterator[DoctorCheck]:
    looks: dict[str, Callable[[], Iterator[DoctorCheck]]] = {
        "versions": _versions,
        "machine": _machine,
        "GPUs": _gpus,
        "clock": _clock,
        "open files": _open_files,
        "disk": _disk,
        "data": _data,
        "network": _network,
        "lab": _lab,
        "link": lambda: _link(workers),
    }
    for name, look in looks.items():
        try:
            yield from look()
        except Exception as error:  # one broken check must not hide what the others find
            yield DoctorCheck(name, "bad", f"could not be checked: {type(error).__name__}: {error}")


def _versions() -> Iterator[DoctorCheck]:
    yield DoctorCheck("paceline", "ok", __version__)
    yield DoctorCheck("python", "ok", f"{platform.python_version()}, {sys.executable}")
    import torch
    import torch.distributed as dist

    known = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if not (dist.is_available() and dist.is_gloo_available()):
        yield DoctorCheck("torch", "bad", f"{torch.__version__} without gloo", "install a torch with torch.distributed")
    elif known < (2, 11):
        yield DoctorCheck("torch", "warn", torch.__version__, "Paceline is tested with 2.11 and newer")
    else:
        yield DoctorCheck("torch", "ok", torch.__version__)


def _machine() -> Iterator[DoctorCheck]:
    import psutil

    usable, there = cores(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    some = f"{usable}" if usable == there else f"{usable} of {there}"
    if load > usable:
        yield DoctorCheck("cores", "warn", f"{some}, and {load:.1f} busy", "times measured now will be too long: wait")
    else:
        yield DoctorCheck("cores", "ok", f"{some}, {load:.1f} busy")
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    # torch alone takes a quarter of a GiB in every worker.
    if memory.available < 2**30:
        yield DoctorCheck("memory", "warn", found, "each worker needs about 0.3 GiB beside the model: use fewer")
    else:
        yield DoctorCheck("memory", "ok", found)


def _gpus() -> Iterator[DoctorCheck]:
    import torch

    if not torch.cuda.is_available():
        yield DoctorCheck("GPUs", "ok", "none: workers compute on the CPU and talk over gloo")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield DoctorCheck("GPUs", "ok", f"{len(names)}: {', '.join(sorted(set(names)))}, CUDA {torch.version.cuda}")


def _clock() -> Iterator[DoctorCheck]:
    info = time.get_clock_info("perf_counter")
    began = time.perf_counter()
    while (tick := time.perf_counter()) == began:
        pass
    found = f"{'monotonic' if info.monotonic else 'not monotonic'}, ticks of {(tick - began) * 1e9:.0f} ns"
    if not info.monotonic:
        yield DoctorCheck("clock", "bad", found, "timeouts cannot be kept on this platform")
    elif tick - began > 1e-4:
        yield DoctorCheck("clock", "warn", found, "step times below a millisecond mean nothing here")
    else:
        yield DoctorCheck("clock", "ok", found)


def _open_files() -> Iterator[DoctorCheck]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        yield DoctorCheck("open files", "warn", f"at most {soft}", f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")
    else:
        yield DoctorCheck("open files", "ok", f"at most {soft if soft >= 0 else 'any number'}")


def _disk() -> Iterator[DoctorCheck]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    chunk, count = bytes(1 << 20), 16
    try:
        with tempfile.TemporaryFile(dir=here) as probe:
            began = time.perf_counter()
            for _ in range(count):
                probe.write(chunk)
            probe.flush()
            os.fsync(probe.fileno())
            speed = count / (time.perf_counter() - began)
    except OSError as error:
        yield DoctorCheck(
            "disk", "warn", f"{here} cannot be written to: {error.strerror}", "run from another directory"
        )
        return
    found = f"{free / 2**30:.1f} GiB free in {here}, {speed:.0f} MiB/s written"
    if free < 2**30:
        yield DoctorCheck("disk", "warn", found, "a checkpoint of a large model will not fit")
    else:
        yield DoctorCheck("disk", "ok", found)


def _data() -> Iterator[DoctorCheck]:
    if _FASHION.is_dir() and any(_FASHION.iterdir()):
        yield DoctorCheck("data", "ok", f"Fashion-MNIST in {_FASHION}; text and digits are built in")
    else:
        yield DoctorCheck(
            "data",
            "warn",
            "no Fashion-MNIST; text and digits are built in",
            "for the task `fashion`: apt install dataset-fashion-mnist, or give --data",
        )


def _network() -> Iterator[DoctorCheck]:
    import psutil

    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        addresses = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses and states[name].isup:
            yield DoctorCheck("interface", "ok", f"{name}: {', '.join(addresses)}")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield DoctorCheck("loopback", "ok", f"a port can be opened ({server.getsockname()[1]} was)")
    except OSError as error:
        yield DoctorCheck("loopback", "bad", f"no port can be opened on 127.0.0.1: {error}", "bring up `lo`")


def _lab() -> Iterator[DoctorCheck]:
    from paceline.tools.lab import namespaces

    left = namespaces.leftovers()
    reason = namespaces.available()  # making a lab removes the leftovers, where that is allowed
    if reason:
        yield DoctorCheck("lab", "warn", f"not available: {reason}", "races with --link use an emulated link instead")
    else:
        yield DoctorCheck("lab", "ok", "hosts in network namespaces can be made")
    still = namespaces.leftovers()
    if still:
        yield DoctorCheck(
            "leftovers", "warn", f"{len(still)} namespaces of labs that were killed", "run doctor as root"
        )
    elif left:
        yield DoctorCheck("leftovers", "ok", f"{len(left)} namespaces of labs that were killed: removed")
    else:
        yield DoctorCheck("leftovers", "ok", "none")


def _link(workers: int) -> Iterator[DoctorCheck]:
    # -P keeps a file called torch.py in the current directory out of the test.
    command = [sys.executable, "-P", "-m", "paceline.tools.lab.gloo_probe"]
    # Another launcher may have set these variables for its own workers, but not for these.
    env = {"GLOO_SOCKET_IFNAME": "", "OMP_NUM_THREADS": "1"}
    spec = JobSpec(argv=command, workers=workers, env=env)
    with tempfile.TemporaryDirectory(prefix="paceline-") as logs:
        with launch(spec, WorkerOutput.kept(Path(logs))) as job:
            code = job.wait(_LINK_TEST_S)
        if code == 0:
            lines = (Path(logs) / "worker-0.log").read_text().splitlines()
            result: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
            found = f"{workers} workers over gloo: {result['mbit_per_s']:.0f} Mbit/s, {result['latency_us']:.0f} µs"
            yield DoctorCheck("link", "ok", found)
            return
    if code is None:
        yield DoctorCheck("link", "bad", f"{workers} workers did not meet within {_LINK_TEST_S:.0f} s", "try again")
    else:
        cause = job.cause
        yield DoctorCheck("link", "bad", f"{cause.what}: {cause.why}" if cause else f"exit code {code}", "see above")
