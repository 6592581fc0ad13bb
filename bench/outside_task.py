"""What the workers of bench/outside.py share: the task fashion of Paceline, a clock, a counter.

Same network, first weights, optimizer, global batches and shares as there. It imports torch and nothing of Paceline,
because it also runs in the environments of other packages. The seconds are those of training alone: they begin when
all workers are connected, and stand still while weights are kept, which are evaluated when training is over.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 256  # of all workers together
KEEP_EVERY = 20  # steps
PATIENCE_S = 180.0  # for the others, at the start
Weights = dict[str, Tensor]


# ---------------------------------------------------------------------------------------------------- the task


def images(folder: Path, part: str) -> TensorDataset:
    """`part` is train or t10k; pixels with mean zero and variance one."""

    def read(kind: str, header: int) -> Tensor:
        with gzip.open(folder / f"{part}-{kind}-ubyte.gz") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=header)

    pixels = read("images-idx3", 16).view(-1, 784)
    return TensorDataset((pixels / 255 - 0.286) / 0.353, read("labels-idx1", 8).long())


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(),
        nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip


def sgd(params: Iterable[Any]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Share:
    """A batch sampler: this worker's part of every global batch, in the order Paceline's loader has for this seed."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0
        self.size = BATCH // world_size()

    def __iter__(self) -> Iterator[list[int]]:
        own = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        order = torch.randperm(self.samples, generator=own)
        for start in range(rank() * self.size, self.samples - self.samples % BATCH, BATCH):
            yield order[start : start + self.size].tolist()


def loader(args: argparse.Namespace) -> DataLoader[tuple[Tensor, ...]]:
    data = images(args.data, "train")
    return DataLoader(data, batch_sampler=Share(len(data), args.seed))


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    x, y = test.tensors
    return float((model(x).argmax(1) == y).double().mean())


# ---------------------------------------------------------------------------------------------------- the workers


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--setting", type=json.loads, required=True, help="what this peer is set to, as JSON")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of each worker")
    parser.add_argument("--seconds", type=float, required=True, help="at most, where workers keep their own pace")
    parser.add_argument("--seed", type=int, required=True, help="of the first weights and the order of the data")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the four files")
    parser.add_argument("--meet", type=Path, required=True, help="a folder all workers see; worker 0 leaves run.json")
    parser.add_argument("--address", required=True, help="of this worker's host")
    parser.add_argument("--interface", required=True, help="whose bytes are counted")
    parser.add_argument("--slow", type=int, default=None, metavar="RANK", help="a worker that takes twice as long")
    torch.set_num_threads(1)
    return parser.parse_args()


def tell(place: Path, what: str) -> None:
    """Whole at once: who finds it can read it."""
    draft = place.with_suffix(".draft")
    draft.write_text(what)
    draft.rename(place)


def asked(place: Path) -> str:
    """What another worker has told there, or will tell soon."""
    until = time.monotonic() + PATIENCE_S
    while not place.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"nobody told {place.name} within {PATIENCE_S:.0f} s: another worker is late or gone")
        time.sleep(0.01)
    return place.read_text()


def sent_bytes(interface: str) -> int:
    """By the kernel's counter, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise OSError(f"this host has no interface {interface}")


class Run:
    """One worker's training: its steps, its seconds and bytes, and the weights it keeps for later."""

    def __init__(self, args: argparse.Namespace, *, is_async: bool = False) -> None:
        self.args, self.is_async = args, is_async
        self.seconds, self.sent, self.taken = 0.0, 0, 0
        self._kept: list[tuple[int, float, Weights]] = []

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches, over as many epochs as it takes. Where workers keep their own pace it is worker 0 who ends it."""
        over = self.args.meet / "over"
        self._meet("ready")
        before = sent_bytes(self.args.interface)
        self._began = time.perf_counter()
        for batch in self._endless(batches):
            cpu = time.thread_time()
            yield batch
            if self.args.slow == rank():
                time.sleep(time.thread_time() - cpu)
            if self._done(over):
                break
        self.seconds = self._now()
        self.sent = sent_bytes(self.args.interface) - before
        self._all_took = self._meet("trained")

    def took_step(self, weights: Callable[[], Weights]) -> None:
        """Call it after every step; `weights` are those that somebody would use now."""
        self.taken += 1
        if self.taken % KEEP_EVERY == 0:
            stopped = time.perf_counter()
            kept = {name: value.detach().clone() for name, value in weights().items()}
            if not rank():  # the others take as long, and need not hold it
                self._kept.append((self.taken, stopped - self._began, kept))
            self._began += time.perf_counter() - stopped

    def report(self, *packages: str) -> None:
        """Worker 0 evaluates what it kept, and writes it down."""
        if rank():
            return
        torch.set_num_threads(world_size())  # the others have nothing left to do
        model, test = network(self.args.seed), images(self.args.data, "t10k")
        curve = []
        for step, seconds, weights in self._kept:
            model.load_state_dict(weights)
            curve.append((step, round(seconds, 3), round(accuracy(model, test), 4)))
        known = {
            "ran": self._all_took,
            "ran_seconds": round(self.seconds, 3),
            "wire_bytes_per_step": round(self.sent / max(1, self.taken)),
            "versions": {name: metadata.version(name) for name in ("torch", *packages)},
            "curve": curve,
        }
        (self.args.meet / "run.json").write_text(json.dumps(known))

    def _done(self, over: Path) -> bool:
        if not self.is_async:
            return bool(self.taken == self.args.steps)
        if not rank() and (self.taken == self.args.steps or self._now() > self.args.seconds):
            over.touch()
        return over.exists()

    def _endless(self, batches: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from batches

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _meet(self, where: str) -> list[int]:
        """Wait for the others; how many steps each has taken."""
        tell(self.args.meet / f"{where}-{rank()}", str(self.taken))
        places = [self.args.meet / f"{where}-{other}" for other in range(world_size())]
        return [int(asked(place)) for place in places]


def train(run: Run, batches: Iterable[Any], model: nn.Module, optimizer: Any, weights: Callable[[], Weights]) -> None:
    """The loop, which is the same for everybody."""
    for x, y in run.steps(batches):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.took_step(weights)
