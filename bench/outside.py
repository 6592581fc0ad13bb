"""torchft and hivemind beside our syncs: seconds, steps and bytes until a model is good enough.

    python bench/outside.py --venvs FOLDER --out bench/results/outside.json

Two workers train Fashion-MNIST to accuracy 0.85, each on a host of its own in the network lab, every package in a
virtual environment of its own that is made here (pip, pinned). All have the same network, first weights, optimizer,
global batches, loop, clock and counter (outside_task.py); ours run the same way in the same lab. Bytes are those of
worker 0's interface. The curve is worker 0's: what all last agreed on where that is kept, else its own weights.

Where workers wait for each other the steps to the target do not depend on the link, so on a slow one such a peer walks
no further than to the step where it reached the target on the free one, and not at all where it never did.

Every cell is written when it is known, and what is known is not measured again. What failed is tried again, and its
reason is in the file meanwhile. Wants root and iproute2; leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError, UsageError
from paceline.telemetry import files
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab, parse_link
from paceline.tools.race import result
from paceline.tools.race.network import clean_environment
from paceline.tools.tasks import fashion

HERE = Path(__file__).parent
WORKERS = 2
TARGET = 0.85
SLOW = "one slow worker"  # a condition in the place of a link: worker 1 of half the speed
CONDITIONS = ("unlimited", "100mbit", "10mbit", SLOW)
DEADLINE_S, INSTALL_S = 900.0, 1800.0  # of a run, of a pip
OWN_PACE_S = 300.0  # of training, where every worker can stop at any time
OURS = "ours"
# script -> what pip installs for it; nothing: it runs in this environment
PINNED = {OURS: (), "torchft": ("torchft==0.2.0",), "hivemind": ("hivemind==1.1.12",)}
Cell = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """Who trains, set to what."""

    package: str
    setting: dict[str, Any]
    conditions: tuple[str, ...] = CONDITIONS
    linked: bool = False  # what it learns depends on the link: by the pace, or by the size of our buckets
    there: dict[str, dict[str, Any]] = field(default_factory=dict)  # what is set otherwise under a condition

    def settings(self, condition: str) -> dict[str, Any]:
        return {**self.setting, **self.there.get(condition, {})}


def hivemind(every: int) -> Peer:
    """Its guide: an averaging_timeout of about twice an all-reduce. Found by trying: a short matchmaking_time, and that
    an agreement every 8 steps is more than it keeps up with.
    """
    waits = {"matchmaking_time": 1.0, "request_timeout": 0.5, "averaging_timeout": 5.0}
    slow = {"10mbit": {"averaging_timeout": 30.0}}
    return Peer("hivemind", {"use_local_updates": True, "every": every, **waits}, linked=True, there=slow)


PEERS = {
    "exact": Peer(OURS, {"method": "exact"}, ("unlimited", SLOW)),
    "local_sgd H=8": Peer(OURS, {"method": "local_sgd", "every": 8}),
    "diloco H=8": Peer(OURS, {"method": "diloco", "every": 8}),
    "diloco H=16": Peer(OURS, {"method": "diloco", "every": 16}),
    "local_sgd powersgd H=8": Peer(
        OURS, {"method": "local_sgd+powersgd", "every": 8, "rank": 8, "wire": "bf16", "delay": 3}, linked=True
    ),
    "torchft DiLoCo H=8": Peer("torchft", {"sync": "diloco", "every": 8}),
    "torchft DiLoCo H=16": Peer("torchft", {"sync": "diloco", "every": 16}),
    "torchft LocalSGD H=8": Peer("torchft", {"sync": "local_sgd", "every": 8}),
    "hivemind H=8": hivemind(8),
    "hivemind H=64": hivemind(64),
}


# ---------------------------------------------------------------------------------------------------- one run


def interpreter(package: str, folder: Path) -> str:
    """The Python that has the package; its environment is made when it is first asked for."""
    pins = PINNED[package]
    if not pins:
        return sys.executable
    home = folder / "-".join(pins)
    python, done = home / "bin" / "python", home / ".done"
    if not done.exists():
        venv.create(home, clear=True, with_pip=True)
        # The same torch as here, whatever its build: steps should differ by the sync and by nothing else.
        wanted = [*pins, f"torch=={torch.__version__.partition('+')[0]}"]
        install = [str(python), "-m", "pip", "install", "--quiet", *wanted]
        try:
            subprocess.run(install, check=True, stderr=subprocess.PIPE, text=True, timeout=INSTALL_S)
        except subprocess.CalledProcessError as error:
            raise PacelineError(f"pip cannot install {' '.join(wanted)}", why=error.stderr.strip()[-1500:]) from None
        except subprocess.TimeoutExpired:
            raise PacelineError(f"pip took more than {INSTALL_S:.0f} s for {' '.join(wanted)}") from None
        done.touch()
    return str(python)


def train(peer: Peer, condition: str, *, python: str, data: Path, steps: int, seed: int) -> Cell:
    """One run of all workers: what worker 0 wrote down, or why it could not."""
    link = parse_link("unlimited" if condition == SLOW else condition)
    with Lab(WORKERS, link) as lab, tempfile.TemporaryDirectory() as meet:
        folder = Path(meet)
        command = [python, HERE / f"outside_{peer.package}.py", "--setting", json.dumps(peer.settings(condition))]
        command += ["--steps", steps, "--seconds", OWN_PACE_S, "--seed", seed, "--data", data]
        command += ["--meet", meet, "--interface", lab.interface]
        command += ["--slow", 1] if condition == SLOW else []
        commands = [[*lab.exec_prefix(i), *command, "--address", lab.address(i)] for i in range(WORKERS)]
        error = run([[str(word) for word in words] for words in commands], lab, folder)
        known = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    return {**known, "error": error}


def run(commands: Sequence[Sequence[str]], lab: Lab, folder: Path) -> str | None:
    """Start the workers and wait for them. None, or what the first one to fail said last."""
    with contextlib.ExitStack() as stack:
        workers = []
        for i, words in enumerate(commands):
            log = stack.enter_context((folder / f"worker-{i}.log").open("wb"))
            env = {**clean_environment(), **environment(lab, i), "TMPDIR": str(folder)}
            worker = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(end, worker)
            workers.append(worker)
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            codes = [worker.poll() for worker in workers]
            for i, code in enumerate(codes):
                if code:
                    return f"worker {i} ended with {code}: {last_words(folder / f'worker-{i}.log')}"
            if codes.count(0) == len(codes):
                return None
            time.sleep(0.2)
        return f"not done after {DEADLINE_S:.0f} s; worker 0: {last_words(folder / 'worker-0.log')}"


def environment(lab: Lab, i: int) -> dict[str, str]:
    return {
        "RANK": str(i),
        "WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": lab.interface,
        "OMP_NUM_THREADS": "1",
    }


def end(worker: subprocess.Popen[bytes]) -> None:
    """With all that it started: a daemon that outlives its worker would hold the host."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def last_words(log: Path) -> str:
    """The last lines that name no file of this machine."""
    lines = log.read_text(errors="replace").splitlines()
    return "; ".join([line.strip() for line in lines if line.strip() and "/" not in line][-4:])[-500:]


# ---------------------------------------------------------------------------------------------------- the file


@dataclass
class Book:
    """All cells, in a file that is whole after every one of them."""

    path: Path
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.cells = json.loads(self.path.read_text())["cells"]

    def find(self, name: str, condition: str, seed: int) -> Cell | None:
        asked = (name, condition, seed)
        return next((c for c in self.cells if (c["peer"], c["condition"], c["seed"]) == asked), None)

    def add(self, cell: Cell) -> None:
        old = self.find(cell["peer"], cell["condition"], cell["seed"])
        self.cells = [c for c in self.cells if c is not old] + [cell]
        self.write()

    def write(self) -> None:
        whole = {
            **result.header("outside"),
            "target": f"accuracy >= {TARGET}",
            "workers": WORKERS,
            "pinned": {package: pins for package, pins in PINNED.items() if pins},
            "cells": self.cells,
        }
        files.write(self.path, json.dumps(whole, indent=1) + "\n")


def measured(cell: Cell) -> Cell:
    """With the first point of its curve that met the target."""
    curve = cell.get("curve", [])
    met = next((point for point in curve if point[2] >= TARGET), None)
    return {
        "steps": met[0] if met else None,
        "seconds": met[1] if met else None,
        "last_accuracy": curve[-1][2] if curve else None,
        **cell,
    }


def limit(book: Book, name: str, condition: str, seed: int, steps: int) -> int | None:
    """How far it walks there. None: it is known not to arrive."""
    free = book.find(name, CONDITIONS[0], seed)
    slow_link = condition not in (CONDITIONS[0], SLOW)
    if PEERS[name].linked or not slow_link or free is None or free["error"]:
        return steps
    reached: int | None = free["steps"]
    return reached


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Fits 80 columns."""
    yield f"{'peer':25s}{'condition':16s}{'seconds':>9s}{'steps':>6s}{'MB/step':>9s}{'last':>7s}"
    for cell in sorted(cells, key=lambda c: (CONDITIONS.index(c["condition"]), c["seconds"] or 1e9)):
        if cell["error"]:
            yield f"{cell['peer']:25s}{cell['condition']:16s} {cell['error'].splitlines()[-1][:38]}"
            continue
        seconds, steps = (f"{cell[key]}" if cell[key] else "–" for key in ("seconds", "steps"))
        megabytes = cell["wire_bytes_per_step"] / 1e6
        yield (
            f"{cell['peer']:25s}{cell['condition']:16s}{seconds:>9s}{steps:>6s}"
            f"{megabytes:9.2f}{cell['last_accuracy'] or 0:7.3f}"
        )


def listed(text: str, known: Sequence[str]) -> list[str]:
    asked = [word.strip() for word in text.split(",")]
    if wrong := next((word for word in asked if word not in known), None):
        raise UsageError(f"there is no {wrong!r}", do=f"choose from: {', '.join(known)}")
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, required=True, help="a folder for the environments of the packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default=None, help="the folder of Fashion-MNIST")
    args = parser.parse_args()
    names, conditions = listed(args.peers, tuple(PEERS)), listed(args.conditions, CONDITIONS)
    if why_not := namespaces.available():
        raise UsageError(f"the network lab cannot be made: {why_not}", do="run as root with iproute2")
    book, data = Book(args.out), fashion.find_data(args.data)
    for condition in conditions:
        for name in (n for n in names if condition in PEERS[n].conditions):
            known, steps = book.find(name, condition, args.seed), limit(book, name, condition, args.seed, args.steps)
            if (known and not known["error"]) or steps is None:
                continue
            try:
                python = interpreter(PEERS[name].package, args.venvs)
                cell = train(PEERS[name], condition, python=python, data=data, steps=steps, seed=args.seed)
            except PacelineError as error:
                cell = {"error": str(error)}
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            key = {"peer": name, "condition": condition, "seed": args.seed, "setting": PEERS[name].settings(condition)}
            book.add({**key, "date": now, "commit": result.commit(), **measured(cell)})
            print(list(table(book.cells[-1:]))[1], flush=True)
    book.write()
    print("\n".join(table(book.cells)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the workers and the lab go with it
    try:
        main()
    except PacelineError as error:
        sys.exit(str(error))
