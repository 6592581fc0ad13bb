"""The only place that touches autograd, module and optimizer hooks.

The user's objects stay what they are: same model, same optimizer, same state_dict. Parameters get a hook that runs
when their gradient is there, the optimizer's `step` and `zero_grad` go through the engine, the module tells when a
forward begins.

Hooks on modules are LeftBehind: a copy of the model (for an average of its weights, say) and a saved one are plain
models, without an engine.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from paceline.core import clipping, loss_scale
from paceline.core.bucket import Bucket, Slot
from paceline.core.engine import Engine, Watch
from paceline.core.engines import Engines, weakly
from paceline.core.lookout import lookout
from paceline.errors import UsageError, out_of_memory
from paceline.telemetry.left_behind import LeftBehind


class Hooks:
    """The connection between an engine and the user's objects.

    engines: all engines of this worker, because one backward may feed several of them.
    """

    def __init__(self, models: Sequence[torch.nn.Module], *, engines: Engines, scaler: Any = None) -> None:
        self.models, self.engines, self.scaler = models, engines, scaler
        self._crossed = False

    def attach(self, engine: Engine) -> None:
        """Connect the engine to the models and the optimizer."""
        self.engines.append(engine)
        _wrap_optimizer(engine, self.engines)
        clipping.watch(engine)
        for model in self.models:
            _watch_forward(engine, model, self.scaler, self.engines)
        if self.scaler is not None:
            loss_scale.wrap(engine, self.scaler)
        else:
            loss_scale.watch_unknown(engine)
        if engine.overlap.on:
            self.cross(engine)
        engine.method.layout.attach(self.models, engine.ex)
        engine.refresh()

    def arrivals(self, engine: Engine, b: Bucket) -> Watch:
        """Call `engine.arrive` when a gradient of this bucket is there."""
        after = [
            s.param.register_post_accumulate_grad_hook(weakly(s, _arrival(engine, b, s, self.engines))) for s in b.slots
        ]
        return after + [_accumulator(s).register_prehook(_before_arrival(engine)) for s in b.slots if engine.overlap.on]

    def weights(self, engine: Engine, b: Bucket) -> Watch:
        """Multiply this bucket's gradients by `window.scale` before they are accumulated.

        Registered only once workers' batches have differed.
        """

        def share(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            scale = engine.window.scale
            if scale == 1.0:
                return None
            return tuple(g * scale if scale else torch.zeros_like(g) for g in grads)  # 0 · NaN must be 0

        return [_accumulator(slot).register_prehook(share) for slot in b.slots]

    def cross(self, engine: Engine) -> None:
        """Every layer waits for its own parameters, and whatever looks at them from outside for all: overlap.py."""
        if engine.redeal.on:
            return engine.overlap.off("whether memory sufficed must be known before the next batch is dealt")
        if self.scaler is not None:
            return engine.overlap.off("a loss scaler must have seen every gradient before the first update")
        if engine.method.balance.adapts:
            return engine.overlap.off("the size of the next step follows from this one")
        kind = type(engine.optimizer)
        if not kind.__module__.startswith("torch.optim"):
            return engine.overlap.off(f"{kind.__name__} is not torch's own, and may not like to step a part at a time")
        if any(_compiled(module) for model in self.models for module in model.modules()):
            return engine.overlap.off("a compiled model is one piece")
        if self._crossed:  # the layers tell already
            return None
        self._crossed = True
        for model in self.models:
            # Before the user's own hooks, which may compute with parameters: the old `weight_norm` does.
            model.register_forward_hook(LeftBehind(lambda *_: lookout().end_forward()), always_call=True)
            for module in model.modules():
                if module is model or any(True for _ in (*module.parameters(False), *module.buffers(False))):
                    module.register_forward_pre_hook(LeftBehind(_layer(engine, module)), prepend=True)
            model.register_forward_pre_hook(
                LeftBehind(lambda *_: lookout().begin_forward(engine.overlap)), prepend=True
            )
            model.register_state_dict_pre_hook(LeftBehind(lambda *_: engine.overlap.land()))
            model.register_load_state_dict_pre_hook(LeftBehind(lambda *_: engine.overlap.land()))
        engine.optimizer.register_state_dict_pre_hook(lambda *_: engine.overlap.land())
        engine.optimizer.register_load_state_dict_pre_hook(lambda *_: engine.overlap.land())
        return None


def _accumulator(slot: Slot) -> Any:
    """The node of the graph that adds to p.grad. `torch.autograd.grad`, which does not, runs the hooks of parameters,
    but not those of this node.
    """
    if slot.accumulator is None:
        frozen = not slot.param.requires_grad  # at the moment: it has none then, and keeps this one when it is thawed
        slot.param.requires_grad_(True)
        with torch.enable_grad():
            leaf: Any = slot.param.view_as(slot.param).grad_fn
        slot.accumulator = leaf.next_functions[0][0]
        if frozen:
            slot.param.requires_grad_(False)
    return slot.accumulator


def _before_arrival(engine: Engine) -> Callable[[tuple[Tensor, ...]], None]:
    """Runs before autograd adds to p.grad, which may still be on its way."""
    return lambda grads: engine.overlap.gradient()


def _arrival(engine: Engine, b: Bucket, slot: Slot, engines: Engines) -> Callable[[Tensor], None]:
    """Runs when autograd has written the parameter's gradient."""

    def arrive(param: Tensor) -> None:
        if not engines.in_backward:
            engines.give_up_raised()
            # Runs when this backward is through, on the thread that called it; an error inside surfaces there.
            Variable._execution_engine.queue_callback(partial(_end, engines, engines.begin_backward()))
        if not engine.under_way:
            engine.begin()
        engine.arrive(b, slot)

    return arrive


def _end(engines: Engines, backward: object) -> None:
    """One backward may have fed several optimizers. All bytes leave before any is waited for, so that no worker waits
    for one engine while another waits for the other. backward: what autograd kept alive, [Note: raised] in engines.py.
    """
    engines.end_backward()
    ended = [e for e in engines if e.under_way]
    for engine in ended:
        engine.recorder.backward_ended()
    for engine in ended:
        engine.flush()
    for engine in ended:
        engine.finish()
        if not engine.window.summed:
            engine.guard.look_at_loss()
    for engine in engines:
        engine.window.use()


def _wrap_optimizer(engine: Engine, engines: Engines) -> None:
    optimizer = engine.optimizer
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def paced_step(self: Any, closure: Callable[[], float] | None = None) -> Any:
        _refuse_in_backward("optimizer.step()")
        engines.give_up_raised()
        engine.refresh()
        if closure is None:
            return engine.step(step)
        if not type(optimizer).__module__.startswith("torch.optim"):
            # It may call the closure when and as often as it likes: sharpness-aware ones do so at other weights.
            return engine.step(lambda: step(closure), brings_gradients=True)
        with torch.enable_grad():
            loss = closure()
        engine.step(step)
        return loss

    def paced_zero_grad(self: Any, set_to_none: bool = True) -> None:
        _refuse_in_backward("optimizer.zero_grad()")
        engines.give_up_raised()
        engine.zero_grad(lambda: zero_grad(set_to_none), in_place=not set_to_none)

    # Bound methods, because LR schedulers wrap `step` again through its __get__. A scheduler made before us has left
    # its mark on `step`, and looks for it.
    if hasattr(step, "_wrapped_by_lr_sched"):
        paced_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(paced_step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(paced_zero_grad, optimizer)  # type: ignore[method-assign]


def _refuse_in_backward(what: str) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise UsageError(
            f"{what} was called inside a backward",
            why="a gradient has not been agreed on when a hook of the backward sees it",
            do="call it when backward has returned; a sharded layout frees each gradient as soon as it has left",
        )


def _watch_forward(engine: Engine, model: torch.nn.Module, scaler: Any, engines: Engines) -> None:
    def before(module: torch.nn.Module, args: Any) -> None:
        if module is not model or not torch.is_grad_enabled():
            return
        engines.give_up_raised()
        engine.forward()
        if scaler is None and (what := loss_scale.needs_scaler(engine)):
            loss_scale.refuse_unknown(what)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        error = sys.exception()
        if module is model and torch.is_grad_enabled() and out_of_memory(error):
            engine.redeal.ran_out(error)

    model.register_forward_pre_hook(LeftBehind(before))
    if engine.redeal.on:
        model.register_forward_hook(LeftBehind(after), always_call=True)


def _compiled(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _layer(engine: Engine, module: torch.nn.Module) -> Callable[[torch.nn.Module, Any], None]:
    """Runs before a layer's forward: see overlap.py."""

    def before(called: torch.nn.Module, args: Any) -> None:
        if called is module:  # not a copy of it
            engine.overlap.forward(module.parameters(recurse=False))

    return before
