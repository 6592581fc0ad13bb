"""What a loop is written against: the same code is a plain PyTorch script and one worker of a prepared job."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH, INPUTS, CLASSES = 6, 8, 6, 3
TIMEOUT_S = 30.0  # of one wait for the other worker: machines that run this are busy


@dataclass(frozen=True)
class Loop:
    """One row of the table."""

    name: str
    run: Callable[[Job], Any]
    doc: str
    # What is done to gradients is not linear (clipping, Adam), or one worker alone has trouble: methods whose workers
    # step by their own gradients then go another way by definition, and are held to the law instead of the oracle.
    nonlinear: bool
    apart: bool  # the workers' scripts do different things: what such methods then average is near to nothing
    compiles: bool  # takes seconds, because torch.compile does
    tolerance: float  # of the error, where rounding weighs more than usual: a factor


LOOPS: dict[str, Loop] = {}


def loop(
    run: Callable[[Job], Any] | None = None,
    *,
    nonlinear: bool = False,
    apart: bool = False,
    compiles: bool = False,
    tolerance: float = 1.0,
) -> Any:
    """Decorator: the function is a row of the table. It gives what is compared: models, tensors, numbers."""

    def register(run: Callable[[Job], Any]) -> Callable[[Job], Any]:
        name = run.__name__
        if name in LOOPS:
            raise ValueError(f"two loops are called {name}")
        doc = (run.__doc__ or "").strip()
        LOOPS[name] = Loop(name, run, doc, nonlinear or apart, apart, compiles, tolerance)
        return run

    return register(run) if run is not None else register


def loops() -> dict[str, Loop]:
    """All rows, by name, in the order of the files."""
    table = importlib.import_module("loops.table")
    for module in sorted(m.name for m in pkgutil.iter_modules(table.__path__)):
        importlib.import_module(f"loops.table.{module}")
    return LOOPS


@dataclass
class Job:
    """One run of a loop. plain: without Paceline, in one process that sees the whole batch.

    own: the optimizer that the method is made for (`sgd`, `adam`), for loops that do not name one.
    """

    plain: bool
    own: str = "sgd"
    method: Any = None
    rank: int = 0
    world_size: int = 1
    stage: str = "loop"  # where it is, for messages

    def prepare(self, *objects: Any, **arguments: Any) -> Any:
        """paceline.prepare with this column's method; in a plain job the objects as they are."""
        if self.plain:
            return objects if len(objects) > 1 else objects[0]
        import paceline

        arguments.setdefault("bucket_mb", 0.0003)  # several buckets even in a tiny model
        arguments.setdefault("check_replicas", 2)
        self.stage = "prepare"
        prepared = paceline.prepare(*objects, method=self.method, timeout=TIMEOUT_S, **arguments)
        self.stage = "loop"
        return prepared

    def start(
        self, model: nn.Module | None = None, optimizer: Any = None, *, steps: int = STEPS, **arguments: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer, Iterable[tuple[Tensor, Tensor]]]:
        """The usual beginning: a small net, the column's own optimizer, a loader of `steps` batches; prepared."""
        model = net() if model is None else model
        optimizer = self.optimizer(model.parameters()) if optimizer is None else optimizer
        return self.prepare(model, optimizer, batches(steps), **arguments)

    def optimizer(self, params: Any, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
        """The column's own optimizer."""
        if self.own == "adam":
            return torch.optim.Adam(params, lr=lr / 10, **options)
        return torch.optim.SGD(params, lr=lr, **options)

    def mean(self, value: Tensor | float) -> float:
        """A metric: its mean over the workers."""
        if self.plain:
            return float(value)
        import paceline

        return float(paceline.mean(value))

    def mine(self, x: Tensor) -> Tensor:
        """This worker's share of a batch that no loader has dealt."""
        return x.chunk(self.world_size)[self.rank] if self.world_size > 1 else x

    def has(self, worker: int) -> slice:
        """Which samples of the batch at hand are those that `worker` has: empty on the other one."""
        if self.plain:
            half = BATCH // 2
            return slice(worker * half, (worker + 1) * half)
        return slice(None) if self.rank == worker else slice(0, 0)


def net(*, hidden: int = 8, seed: int = 0) -> nn.Module:
    """Three layers: enough for several buckets, and for layers that are first, in between and last."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)
    )


def samples(count: int, *, seed: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, INPUTS, generator=g), torch.randint(0, CLASSES, (count,), generator=g)


def batches(steps: int = STEPS, *, seed: int = 7, size: int = BATCH, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(steps * size, seed=seed)), batch_size=size, **options)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, y)


LAW = "law"  # a key in what a loop gives: what is below it must be finite and alike on the workers, no more


def collect(result: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a loop gave, by name: a model's are those of its state_dict."""
    if isinstance(result, nn.Module):
        result = dict(result.state_dict())
    if isinstance(result, Tensor):
        real = torch.view_as_real(result.detach()) if result.is_complex() else result.detach()
        yield path, real.to("cpu", torch.float64, copy=True)
    elif isinstance(result, (int, float)):
        yield path, torch.tensor(float(result), dtype=torch.float64)
    elif isinstance(result, dict):
        for key, value in result.items():
            yield from collect(value, f"{path}.{key}" if path else str(key))
    elif isinstance(result, (list, tuple)):
        for i, value in enumerate(result):
            yield from collect(value, f"{path}.{i}" if path else str(i))
