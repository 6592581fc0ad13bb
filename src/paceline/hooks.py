"""The only place that touches autograd, module and optimizer hooks.

The user's objects stay what they are: same model, same optimizer, same state_dict. Parameters get a hook that runs
when their gradient is there, the optimizer's `step` and `zero_grad` go through the engine, the module tells when a
forward begins.

Hooks are plain closures, not bound methods: `copy.deepcopy(model)` copies functions by reference, so a copy (an EMA
model, say) does not drag a second engine behind it, and its calls are told from the original's by identity.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from paceline import loss_scale
from paceline.bucket import Bucket, Slot
from paceline.crossing import watch_clipping
from paceline.engine import Engine, Watch
from paceline.pack import Pack, weakly


def attach(
    engine: Engine,
    models: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    pack: Pack,
    scaler: Any = None,
) -> None:
    """Connect an engine to the user's objects. `pack` is all engines of this worker, in the order they were made."""
    pack.append(engine)
    engine.watch = lambda b: _watch(engine, b, pack)
    engine.weigh = lambda b: _weigh(engine, b)
    _wrap_optimizer(engine, optimizer)
    for model in models:
        _watch_forward(engine, model, scaler)
    if scaler is not None:
        loss_scale.wrap(engine, optimizer, scaler)
    if engine.crossing.on:
        _cross(engine, models, optimizer, scaler)
    engine.method.layout.attach(models, engine.ex)
    engine.refresh()


def _watch(engine: Engine, b: Bucket, pack: Pack) -> Watch:
    after = [s.param.register_post_accumulate_grad_hook(weakly(s, _arrival(engine, b, s, pack))) for s in b.slots]
    return after + [s.param.register_hook(_before(engine, s)) for s in b.slots if engine.crossing.on]


def _before(engine: Engine, slot: Slot) -> Callable[[Tensor], None]:
    """Runs before autograd adds to p.grad, which may still be on its way."""
    return lambda grad: engine.crossing.gradient(slot.param)


def _arrival(engine: Engine, b: Bucket, slot: Slot, pack: Pack) -> Callable[[Tensor], None]:
    """Runs when autograd has written the parameter's gradient."""

    def arrive(param: Tensor) -> None:
        if not engine.under_way:
            if not any(e.under_way for e in pack):
                # Runs when this backward is through, on the thread that called it; an error inside surfaces there.
                Variable._execution_engine.queue_callback(lambda: _end(pack))
            engine.begin()
        engine.arrive(b, slot)

    return arrive


def _weigh(engine: Engine, b: Bucket) -> Watch:
    """Before a gradient is accumulated: its share of the mean. Registered only once workers' batches have
    differed.
    """

    def share(grad: Tensor) -> Tensor | None:
        if engine.window.scale == 1.0:
            return None
        return grad * engine.window.scale if engine.window.scale else torch.zeros_like(grad)  # 0 · NaN must be 0

    return [slot.param.register_hook(share) for slot in b.slots]


def _end(pack: Pack) -> None:
    """One backward may have fed several optimizers. All bytes leave before any is waited for, so that no worker waits
    for one engine while another waits for the other."""
    ended = [e for e in pack if e.under_way]
    for engine in ended:
        engine.flush()
    for engine in ended:
        engine.finish()


def _wrap_optimizer(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def paced_step(self: Any, closure: Callable[[], float] | None = None) -> Any:
        engine.refresh()
        if closure is None:
            return engine.step(step)
        with torch.enable_grad():
            loss = closure()
        engine.step(step)
        return loss

    def paced_zero_grad(self: Any, set_to_none: bool = True) -> None:
        engine.zero_grad(lambda: zero_grad(set_to_none))

    # Bound methods, because LR schedulers wrap `step` again through its __get__. A scheduler made before us has left
    # its mark on `step`, and looks for it.
    if hasattr(step, "_wrapped_by_lr_sched"):
        paced_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(paced_step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(paced_zero_grad, optimizer)  # type: ignore[method-assign]


def _watch_forward(engine: Engine, model: torch.nn.Module, scaler: Any) -> None:
    def before(module: torch.nn.Module, args: Any) -> None:
        if module is not model or not torch.is_grad_enabled():
            return
        engine.refresh()
        engine.look()
        alone = not engine.method.sync.due(engine.ex.step)
        if scaler is None and (engine.window.accumulate > 1 or engine.ex.keeps or alone or engine.crossing.on):
            loss_scale.refuse_unknown("accumulate" if engine.window.accumulate > 1 else "this method")

    model.register_forward_pre_hook(before)


# ---------------------------------------------------------------------------------------------------- [Note: crossing]


def _cross(engine: Engine, models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Every layer waits for its own parameters, and whoever looks at them from outside for all."""
    crossing = engine.crossing
    if scaler is not None:
        return crossing.off("a loss scaler must have seen every gradient before the first update")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return crossing.off(f"{type(optimizer).__name__} is not torch's own, and may not like to step a part at a time")
    if any(_compiled(module) for model in models for module in model.modules()):
        return crossing.off("a compiled model is one piece")
    for model in models:
        for module in model.modules():
            if module is model or any(True for _ in (*module.parameters(False), *module.buffers(False))):
                module.register_forward_pre_hook(_layer(engine, module, root=module is model))
        model.register_state_dict_pre_hook(lambda *_: crossing.land())
        model.register_load_state_dict_pre_hook(lambda *_: crossing.land())
    optimizer.register_state_dict_pre_hook(lambda *_: crossing.land())
    optimizer.register_load_state_dict_pre_hook(lambda *_: crossing.land())
    watch_clipping(crossing)
    return None


def _compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _layer(engine: Engine, module: torch.nn.Module, *, root: bool) -> Callable[[torch.nn.Module, Any], None]:
    def before(called: torch.nn.Module, args: Any) -> None:
        if called is module:  # not a copy of it
            engine.crossing.forward(module.parameters(recurse=False), root=root)

    return before
