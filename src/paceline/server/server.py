"""A server of parameters: one range of all weights, its optimizer, and the clock of every worker.

Nothing here knows of threads, connections or time, so that every interleaving of workers can be tested.

[Note: consistency] Worker i's clock cᵢ counts its pushes. A worker that has pushed c times may read once
min(cᵢ) >= c − τ: then it sees every update older than its own last τ. Sequential is τ = 0 with one update for a whole
round, by the mean of its gradients in the order of the workers; bounded is the τ asked for, eventual τ = ∞, and both
take each push as an update of its own.

[Note: a push's weight] Where each push is an update, its learning rate is divided by W, not its gradient: W pushes then
go as far as one step by their mean, weight decay included, and Adam, which forgets how large gradients are, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

OPTIMIZERS = {cls.__name__: cls for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)}


class ParameterShard(msgspec.Struct, frozen=True, array_like=True):
    """The part of one parameter that lies in a server's range."""

    name: str
    group: int  # index of the optimizer's parameter group
    start: int  # in the server's range, as is stop
    stop: int


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server is told when it begins. It travels as JSON."""

    world_size: int
    consistency: str
    delay: int
    scale: str
    optimizer: str
    groups: list[dict[str, Any]]
    shards: list[ParameterShard]


class PushTerms(msgspec.Struct, frozen=True):
    """What a worker says with its gradient: its optimizer's options now, and the shards that have no gradient."""

    groups: list[dict[str, Any]]
    absent: list[int] = []


class OptimizerSnapshot(msgspec.Struct):
    """The optimizer's state, as JSON: for each shard, its slots by name. A slot that is a number has it here; None
    stands for a vector, and all vectors lie one after the other, in this order, in the message's own vector.
    """

    version: int
    slots: list[dict[str, float | None]]


class PullResult(NamedTuple):
    """The answer to a pull that may be answered."""

    version: int  # updates so far
    missed: int  # updates by others between this worker's last reading and its last push
    weights: Tensor


class WorkerGone(NamedTuple):
    """The answer to a pull that can never be answered, because the worker it waits for is gone."""

    worker: int
    what: str


class Server:
    """One range of the weights, and the optimizer that steps it."""

    def __init__(self, spec: ServerSpec, weights: Tensor) -> None:
        self.spec, self.weights, self.grad = spec, weights, torch.zeros_like(weights)
        self.slack = {"sequential": 0, "bounded": spec.delay}.get(spec.consistency, math.inf)
        self.params = [torch.nn.Parameter(weights[p.start : p.stop]) for p in spec.shards]
        members: list[dict[str, Any]] = [{**group, "params": []} for group in spec.groups]
        for shard, param in zip(spec.shards, self.params, strict=True):
            members[shard.group]["params"].append(param)
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[spec.optimizer](members)
        self.version = 0
        self.clocks = [0] * spec.world_size
        self.read = [0] * spec.world_size  # the version that each worker has read last
        self.missed = [0] * spec.world_size
        self.settled = [False] * spec.world_size  # it has read the last weights and owes no push, so it may leave
        self.left: set[int] = set()
        self.lost: int | None = None
        self._round: dict[int, tuple[Tensor | None, PushTerms]] = {}

    def push(self, worker: int, grad: Tensor | None, terms: PushTerms) -> None:
        """Take a worker's gradient, or None where it was not finite. The worker's clock goes on either way."""
        self.clocks[worker] += 1
        self.settled[worker] = False
        if self.spec.consistency != "sequential":
            self.missed[worker] = self.version - self.read[worker]
            if grad is not None:
                self._update([(grad, terms)], 1, self._share(self.missed[worker]))
            return
        self._round[worker] = (grad, terms)
        if len(self._round) == self.spec.world_size:
            there = [(g, t) for _, (g, t) in sorted(self._round.items()) if g is not None]
            self._round = {}
            self._update(there, self.spec.world_size, 1.0)

    def _share(self, missed: int) -> float:
        """The factor of the learning rate: [Note: a push's weight]; less for a worker that missed rounds of updates."""
        rounds = missed // self.spec.world_size if self.spec.scale == "age" else 0
        return 1.0 / self.spec.world_size / (1 + rounds)

    @torch.no_grad()
    def _update(self, pushes: list[tuple[Tensor, PushTerms]], of: int, share: float) -> None:
        """Step by the sum of the gradients over `of`. A shard that no worker used gets no gradient and no step."""
        self.version += 1
        if not pushes:
            return
        self.grad.copy_(pushes[0][0])
        for g, _ in pushes[1:]:
            self.grad.add_(g)
        self.grad.div_(of)
        absent = set.intersection(*(set(terms.absent) for _, terms in pushes))
        for i, (shard, param) in enumerate(zip(self.spec.shards, self.params, strict=True)):
            param.grad = None if i in absent else self.grad[shard.start : shard.stop]
        for group, now in zip(self.optimizer.param_groups, pushes[0][1].groups, strict=True):
            group.update(now)
            group["lr"] *= share
        self.optimizer.step()

    def pull(self, worker: int, *, settles: bool = False) -> PullResult | WorkerGone | None:
        """The weights, or None if the worker must wait for others: [Note: consistency]."""
        if self.lost is not None:
            return WorkerGone(self.lost, f"worker {self.lost} stopped answering at clock {self.clocks[self.lost]}")
        behind = [r for r, clock in enumerate(self.clocks) if clock < self.clocks[worker] - self.slack]
        for r in behind:
            if r in self.left:
                return WorkerGone(r, f"worker {r} left after {self.clocks[r]} steps, but the others wait for it")
        if behind:
            return None
        self.read[worker] = self.version
        self.settled[worker] = settles
        return PullResult(self.version, self.missed[worker], self.weights.clone())

    def leave(self, worker: int) -> None:
        """A worker's connection has closed. It is lost unless it had settled before."""
        self.left.add(worker)
        if not self.settled[worker] and self.lost is None:
            self.lost = worker

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save(self) -> tuple[OptimizerSnapshot, Tensor]:
        """The optimizer's state, for a checkpoint."""
        slots, vectors = [], [self.weights[:0]]
        for param in self.params:
            known = {k: v for k, v in self.optimizer.state.get(param, {}).items() if isinstance(v, Tensor)}
            slots.append({k: None if v.dim() else float(v) for k, v in known.items()})
            vectors += [v.detach() for v in known.values() if v.dim()]
        return OptimizerSnapshot(self.version, slots), torch.cat(vectors)

    def load(self, remembered: OptimizerSnapshot, vectors: Tensor) -> None:
        """Go on from what `save` gave."""
        self.version = remembered.version
        self.read = [self.version] * self.spec.world_size
        place = 0
        for param, slots in zip(self.params, remembered.slots, strict=True):
            for slot, value in slots.items():
                if value is None:
                    self.optimizer.state[param][slot] = vectors[place : place + param.numel()].clone()
                    place += param.numel()
                else:
                    self.optimizer.state[param][slot] = torch.tensor(value)
