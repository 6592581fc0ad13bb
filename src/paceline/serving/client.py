"""A worker's side: what it tells all servers, and what they tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.serving.comm import connect
from paceline.serving.desk import Beginning, Code, Message
from paceline.serving.ranges import Ranges
from paceline.serving.server import Remembered, Spec, Terms

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.state import State

_HERE = ("params", "foreach", "fused", "capturable", "differentiable")  # how to compute, not what


class Client:
    """The lines to the servers and what goes over them: each server's range of it."""

    def __init__(self, ex: Exchange, servers: int) -> None:
        self.ranges = Ranges(ex, servers)
        self._lines = connect(ex.comm, servers)
        self._optimizer = ex.optimizer
        self._said: dict[int, bytes] = {}  # each server's last terms: they are sent when they change

    def begin(self, state: State, world: int, **consistency: Any) -> None:
        """Tell the servers where to begin: from this worker's weights, and from what is remembered if there is any."""
        ranges, groups = self.ranges, self._optimizer.param_groups
        weights, name = ranges.weights(state), type(self._optimizer).__name__
        for s, line in enumerate(self._lines):
            spec = Spec(
                world=world,
                optimizer=name,
                groups=options(self._optimizer),
                pieces=ranges.pieces(s, groups),
                **consistency,
            )
            old, x = ranges.recall(s, state) if "version" in state else (None, weights[:0])
            vector = torch.cat([ranges.part(s, weights), x])
            line.ask(Message(Code.BEGIN, x.numel(), note=msgspec.json.encode(Beginning(spec, old)), x=vector))

    def push(self) -> int:
        """Every p.grad, and the optimizer's options; how many bytes of gradients that was."""
        absent = self.ranges.take_gradients()
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            self.ranges.grad.div_(scale.cpu())  # a GradScaler leaves it to a fused optimizer
        self._push(absent, self.ranges.grad)
        return self.ranges.grad.nbytes

    def pass_over(self) -> None:
        """A push without a gradient."""
        self._push([], None)

    def _push(self, absent: list[int], grad: Tensor | None) -> None:
        groups = options(self._optimizer)
        for s, line in enumerate(self._lines):
            terms = msgspec.json.encode(Terms(groups, self.ranges.absent(s, absent)))
            note = terms if terms != self._said.get(s) else b""
            self._said[s] = terms
            line.ask(Message(Code.PUSH, note=note, x=None if grad is None else self.ranges.part(s, grad)))

    def pull(self, what: str, *, settles: bool = False) -> tuple[Tensor, int]:
        """The servers' weights, in one vector, and how many updates of others this worker's last push had missed."""
        answers = self._all(Code.SETTLE if settles else Code.PULL, what)
        return torch.cat([_vector(m) for m in answers]), max(m.b for m in answers)

    def remembered(self, weights: Tensor) -> dict[Any, Any]:
        """What the servers remember, by parameter name."""
        answers = self._all(Code.SAVE, "the optimizer's state")
        saved = [(msgspec.json.decode(m.note, type=Remembered), _vector(m)) for m in answers]
        return self.ranges.remember(saved, weights)

    def _all(self, code: Code, what: str) -> list[Message]:
        for line in self._lines:
            line.ask(Message(code))
        return [line.answer(what) for line in self._lines]


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' options as plain numbers."""
    return [{k: _plain(v) for k, v in group.items() if k not in _HERE} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, Tensor) else value


def _vector(m: Message) -> Tensor:
    assert m.x is not None
    return m.x
