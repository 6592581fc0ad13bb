"""Hooks that only look: when a forward, a backward and an optimizer's step begin and end.

Those on modules are LeftBehind: a copy of the model does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from paceline.telemetry.left_behind import LeftBehind
from paceline.telemetry.tape import COMPUTE, WAITS, Span, Tape


def watch(models: Sequence[torch.nn.Module], tape: Tape, *, peer: bool) -> None:
    """Of a peer nobody tells what it waits for: where it does so at the end of a backward, this finds out."""
    backward = _Backward(tape, peer=peer)
    for model in models:
        _watch_model(model, tape, backward)


def watch_optimizers(tape: Tape) -> None:
    """Every optimizer of this process, a peer's that hides another one too. Once is enough."""
    began: list[float] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        began.append(time.monotonic())

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if began:
            _add(tape, COMPUTE, "optimizer", began.pop())

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_model(model: torch.nn.Module, tape: Tape, backward: _Backward) -> None:
    began: list[float] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        if module is model:
            began[:] = [time.monotonic()]

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module is not model or not began:
            return
        _add(tape, COMPUTE, "forward", began.pop())
        backward.forget()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: backward.begin())

    model.register_forward_pre_hook(LeftBehind(before))
    model.register_forward_hook(LeftBehind(after))


class _Backward:
    """The gradient of a model's output is there: backward goes into the model. Its end is a callback of autograd's.

    Whoever else waits in such a callback (DDP does, for its buckets) has asked for it by then. So one that is asked for
    in ours comes after theirs: what lies between the two was waiting.
    """

    def __init__(self, tape: Tape, *, peer: bool) -> None:
        self.tape, self.peer = tape, peer
        self._began = 0.0  # 0: none is under way

    def begin(self) -> None:
        if not self._began:
            self._began = time.monotonic()
            Variable._execution_engine.queue_callback(self._end)

    def forget(self) -> None:
        """One that failed has no end."""
        self._began = 0.0

    def _end(self) -> None:
        if not self._began:
            return
        _add(self.tape, COMPUTE, "backward", self._began)
        self._began = 0.0
        if self.peer:
            waiting = time.monotonic()
            Variable._execution_engine.queue_callback(lambda: _add(self.tape, WAITS, "wait", waiting))


def _add(tape: Tape, track: str, name: str, began: float) -> None:
    tape.add(Span(track, name, tape.step, began, time.monotonic()))
