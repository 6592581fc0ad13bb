"""A server of parameters: one range of all weights, its optimizer, and everybody's clock. No thread, no wire, no time.

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


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What of one parameter lies in a server's range."""

    name: str
    group: int  # of the optimizer
    start: int  # in the range
    stop: int


class Spec(msgspec.Struct, frozen=True):
    """All a server is told when it begins. As JSON: plain numbers and names."""

    world: int
    consistency: str
    delay: int
    scale: str
    optimizer: str
    groups: list[dict[str, Any]]
    pieces: list[Piece]


class Terms(msgspec.Struct, frozen=True):
    """What a worker says beside its gradient: the options of its optimizer's groups now, and what it has not used."""

    groups: list[dict[str, Any]]
    absent: list[int] = []


class Remembered(msgspec.Struct):
    """The optimizer's state as JSON: each piece's slots. A number stands for itself; a vector is at its place in the
    payload, in this order.
    """

    version: int
    slots: list[dict[str, float | None]]


class Reading(NamedTuple):
    """The answer to a pull."""

    version: int  # updates so far
    missed: int  # updates by others between this worker's last reading and its last push
    weights: Tensor


class Gone(NamedTuple):
    """Another answer: this worker would be waited for in vain."""

    worker: int
    what: str


class Server:
    """One range of the weights."""

    def __init__(self, spec: Spec, weights: Tensor) -> None:
        self.spec, self.weights, self.grad = spec, weights, torch.zeros_like(weights)
        self.slack = {"sequential": 0, "bounded": spec.delay}.get(spec.consistency, math.inf)
        self.params = [torch.nn.Parameter(weights[p.start : p.stop]) for p in spec.pieces]
        members: list[dict[str, Any]] = [{**group, "params": []} for group in spec.groups]
        for piece, param in zip(spec.pieces, self.params, strict=True):
            members[piece.group]["params"].append(param)
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[spec.optimizer](members)
        self.version = 0
        self.clocks = [0] * spec.world
        self.read = [0] * spec.world  # the version each worker has
        self.missed = [0] * spec.world
        self.settled = [False] * spec.world  # has read the last weights, and nothing is expected of it
        self.left: set[int] = set()
        self.lost: int | None = None
        self._round: dict[int, tuple[Tensor | None, Terms]] = {}

    def push(self, worker: int, grad: Tensor | None, terms: Terms) -> None:
        """A worker's gradient; none where it was not finite. Its clock goes on either way."""
        self.clocks[worker] += 1
        self.settled[worker] = False
        if self.spec.consistency != "sequential":
            self.missed[worker] = self.version - self.read[worker]
            if grad is not None:
                self._update([(grad, terms)], 1, self._share(self.missed[worker]))
            return
        self._round[worker] = (grad, terms)
        if len(self._round) == self.spec.world:
            there = [(g, t) for _, (g, t) in sorted(self._round.items()) if g is not None]
            self._round = {}
            self._update(there, self.spec.world, 1.0)

    def _share(self, missed: int) -> float:
        """[Note: a push's weight], and a worker that missed whole rounds of updates counts less."""
        rounds = missed // self.spec.world if self.spec.scale == "age" else 0
        return 1.0 / self.spec.world / (1 + rounds)

    @torch.no_grad()
    def _update(self, pushes: list[tuple[Tensor, Terms]], of: int, share: float) -> None:
        """A step by the sum of the gradients over `of`. A piece that nobody used has no gradient, as in one process."""
        self.version += 1
        if not pushes:
            return
        self.grad.copy_(pushes[0][0])
        for g, _ in pushes[1:]:
            self.grad.add_(g)
        self.grad.div_(of)
        absent = set.intersection(*(set(terms.absent) for _, terms in pushes))
        for i, (piece, param) in enumerate(zip(self.spec.pieces, self.params, strict=True)):
            param.grad = None if i in absent else self.grad[piece.start : piece.stop]
        for group, now in zip(self.optimizer.param_groups, pushes[0][1].groups, strict=True):
            group.update(now)
            group["lr"] *= share
        self.optimizer.step()

    def pull(self, worker: int, *, settles: bool = False) -> Reading | Gone | None:
        """The weights; None: not yet, [Note: consistency]."""
        if self.lost is not None:
            return Gone(self.lost, f"worker {self.lost} stopped answering at clock {self.clocks[self.lost]}")
        behind = [r for r, clock in enumerate(self.clocks) if clock < self.clocks[worker] - self.slack]
        for r in behind:
            if r in self.left:
                return Gone(r, f"worker {r} left after {self.clocks[r]} steps, but the others wait for it")
        if behind:
            return None
        self.read[worker] = self.version
        self.settled[worker] = settles
        return Reading(self.version, self.missed[worker], self.weights.clone())

    def leave(self, worker: int) -> None:
        """Its connection has closed: well, if it had settled."""
        self.left.add(worker)
        if not self.settled[worker] and self.lost is None:
            self.lost = worker

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save(self) -> tuple[Remembered, Tensor]:
        slots, vectors = [], [self.weights[:0]]
        for param in self.params:
            known = {k: v for k, v in self.optimizer.state.get(param, {}).items() if isinstance(v, Tensor)}
            slots.append({k: None if v.dim() else float(v) for k, v in known.items()})
            vectors += [v.detach() for v in known.values() if v.dim()]
        return Remembered(self.version, slots), torch.cat(vectors)

    def load(self, remembered: Remembered, vectors: Tensor) -> None:
        self.version = remembered.version
        self.read = [self.version] * self.spec.world
        place = 0
        for param, slots in zip(self.params, remembered.slots, strict=True):
            for slot, value in slots.items():
                if value is None:
                    self.optimizer.state[param][slot] = vectors[place : place + param.numel()].clone()
                    place += param.numel()
                else:
                    self.optimizer.state[param][slot] = torch.tensor(value)
