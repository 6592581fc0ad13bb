"""A small training job on thread-workers, for engine tests: the same loop on any world, with any method."""

from __future__ import annotations

import contextlib
import copy
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threads
from paceline.comm.group import Group
from paceline.comm.threads import ThreadComm
from paceline.core.engine import Engine, EngineOptions
from paceline.core.engines import Engines
from paceline.core.parts import Speed
from paceline.method import Method, method
from paceline.session.assemble import assemble
from paceline.session.objects import Objects
from paceline.session.settings import Settings
from paceline.telemetry.recorder import Recorder


@dataclass
class Share:
    """A batch as the loader would describe it."""

    weight: float
    total: float
    last: bool = False
    indices: list[int] | None = None
    left: int = 0
    number: int = 0


def group_of(comm: Any) -> Group:
    """The group of a thread-worker: `comm` is the lane of its gradients, and there is one beside it."""
    lanes = vars(comm).setdefault("lanes", {})  # those of a second rig over the same comm are the same

    def make(name: str) -> Any:
        if "background" not in name:
            return comm
        return lanes.setdefault(name, ThreadComm(comm.room, comm.rank, f"background of {comm.name}"))

    return Group(comm.rank, comm.world_size, make)


class Rig:
    """One worker: a model, an optimizer and an engine over a ThreadComm."""

    def __init__(
        self,
        comm: ThreadComm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        spec: str | Method = "exact",
        scaler: Any = None,
        knobs: dict[str, Any] | None = None,
        engines: Engines | None = None,
        options: EngineOptions | None = None,
        group: Group | None = None,
        **settings: Any,
    ) -> None:
        self.comm, self.model, self.optimizer = comm, model, optimizer
        objects = Objects.sort([model, optimizer, *([scaler] if scaler else [])])
        self.recorder = Recorder(None, comm.rank)
        settings.setdefault("bucket_mb", 0.0005)  # several buckets even in a tiny model
        self.engine: Engine = assemble(
            objects,
            optimizer,
            method(spec, **(knobs or {})).copy(),  # thread-workers may be given one object
            group or group_of(comm),
            recorder=self.recorder,
            settings=Settings(**settings),
            engines=Engines(alone=True) if engines is None else engines,
            options=options,
        )

    def shares(self, size: int) -> list[int]:
        return self.engine.method.balance.shares([Speed()] * self.comm.world_size, size)

    def take(self, *tensors: Tensor, last: bool = False) -> list[Tensor]:
        """This worker's slice of a global batch; the engine is told, as the loader does."""
        sizes = self.shares(len(tensors[0]))
        start = sum(sizes[: self.comm.rank])
        mine = slice(start, start + sizes[self.comm.rank])
        self.engine.take_batch(Share(sizes[self.comm.rank], len(tensors[0]), last))
        if not sizes[self.comm.rank]:
            return [t[:1] for t in tensors]
        return [t[mine] for t in tensors]


def built(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """Models with equal weights on every call. Threads share the global random stream, so they copy one template."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        template = make()
    return lambda: copy.deepcopy(template)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


_mlps = [built(_mlp, seed) for seed in (0, 1)]


def mlp(seed: int = 0) -> nn.Module:
    return _mlps[seed]()


def data(steps: int, size: int = 12, seed: int = 7) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(steps)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Complex(nn.Module):
    """Complex weights, real outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.w).abs() + self.b


class NoRate(torch.optim.Optimizer):
    """An optimizer without a learning rate, which does nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(
    batches: list[tuple[Tensor, Tensor]], optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> Tensor:
    """The oracle: plain PyTorch, one process, the whole batch."""
    model = mlp()
    return loop(batches, model, optimizer(model))


def train(
    world_size: int,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **rig: Any,
) -> list[Tensor]:
    """The same loop on `world` thread-workers; the weights each ends with."""

    def work(comm: ThreadComm) -> Tensor:
        model = mlp()
        opt = optimizer(model)
        return loop(batches, model, opt, Rig(comm, model, opt, **rig).take)

    return threads.run(world_size, work)


def close(a: Tensor, b: Tensor, tol: float = 2e-6) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def same(results: list[Tensor]) -> Tensor:
    """The workers' common result: synchronous replicas are bitwise equal."""
    assert all(torch.equal(r, results[0]) for r in results), "replicas differ"
    return results[0]


def loop(
    batches: list[tuple[Tensor, Tensor]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[..., Any] = lambda *tensors: tensors,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """The plain loop; `take` is a rig's, or nothing for one process with the whole batch."""
    for x, y in batches:
        x, y = take(x, y)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Inside, the folder is on a file system of this size. Wants root."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
