"""A worker's side of the exchange with all servers: push, pull, begin and save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.server.connections import connect
from paceline.server.messages import MessageCode, ServerMessage
from paceline.server.ranges import KeyRanges
from paceline.server.requests import BeginNote
from paceline.server.server import OptimizerSnapshot, PushTerms, ServerSpec

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.core.state import State

# Options that say how a worker computes, not what: a server makes its own choice.
_OWN = ("params", "foreach", "fused", "capturable", "differentiable")


class ServerClient:
    """The connections to all servers, each of which gets its own range of every vector."""

    def __init__(self, ex: Exchange, servers: int, *, ahead: int | None) -> None:
        """ahead: see `connect`."""
        self.ranges = KeyRanges(ex, servers)
        self._connections = connect(ex.comm, servers, ahead=ahead)
        self._optimizer = ex.optimizer
        self._said: dict[
            int, bytes
        ] = {}  # the terms each server was last sent: they are sent again only when they change

    def begin(self, state: State, world_size: int, **consistency: Any) -> None:
        """Start the servers from this worker's weights, and from the optimizer's state in a checkpoint if any."""
        ranges, groups = self.ranges, self._optimizer.param_groups
        weights, name = ranges.weights(state), type(self._optimizer).__name__
        for s, connection in enumerate(self._connections):
            spec = ServerSpec(
                world_size=world_size,
                optimizer=name,
                groups=options(self._optimizer),
                shards=ranges.shards(s, groups),
                **consistency,
            )
            old, x = ranges.recall(s, state) if "version" in state else (None, weights[:0])
            vector = torch.cat([ranges.part(s, weights), x])
            connection.ask(
                ServerMessage(MessageCode.BEGIN, x.numel(), note=msgspec.json.encode(BeginNote(spec, old)), x=vector)
            )

    def push(self) -> int:
        """Send every p.grad and the optimizer's options; return how many bytes of gradients that was."""
        absent = self.ranges.take_gradients()
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            self.ranges.grad.div_(scale.cpu())  # a GradScaler leaves unscaling to a fused optimizer
        self._push(absent, self.ranges.grad)
        return self.ranges.grad.nbytes

    def pass_over(self) -> None:
        """Push without a gradient, so that this worker's clock goes on."""
        self._push([], None)

    def _push(self, absent: list[int], grad: Tensor | None) -> None:
        groups = options(self._optimizer)
        for s, connection in enumerate(self._connections):
            terms = msgspec.json.encode(PushTerms(groups, self.ranges.absent(s, absent)))
            note = terms if terms != self._said.get(s) else b""
            self._said[s] = terms
            connection.ask(
                ServerMessage(MessageCode.PUSH, note=note, x=None if grad is None else self.ranges.part(s, grad))
            )

    def pull(self, what: str, *, settles: bool = False) -> tuple[Tensor, int]:
        """Read the servers' weights as one vector, and how many updates by others this worker's last push missed."""
        answers = self._all(MessageCode.SETTLE if settles else MessageCode.PULL, what)
        return torch.cat([_vector(m) for m in answers]), max(m.b for m in answers)

    def remembered(self, weights: Tensor) -> dict[Any, Any]:
        """Read the optimizer's state from all servers, by parameter name."""
        answers = self._all(MessageCode.SAVE, "the optimizer's state")
        saved = [(msgspec.json.decode(m.note, type=OptimizerSnapshot), _vector(m)) for m in answers]
        return self.ranges.remember(saved, weights)

    def _all(self, code: MessageCode, what: str) -> list[ServerMessage]:
        for connection in self._connections:
            connection.ask(ServerMessage(code))
        return [connection.answer(what) for connection in self._connections]


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of the optimizer's groups as plain numbers."""
    return [{k: _plain(v) for k, v in group.items() if k not in _OWN} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, Tensor) else value


def _vector(m: ServerMessage) -> Tensor:
    assert m.x is not None
    return m.x
