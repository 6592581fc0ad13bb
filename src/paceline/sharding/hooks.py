"""Hooks of layouts that shard state. Those on modules are LeftBehind, as those in core/hooks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.core.bucket import Bucket, Slot
from paceline.core.engines import weakly
from paceline.errors import MethodError, PeerError, UsageError
from paceline.sharding.sharded_grad import ShardedGrad
from paceline.sharding.unshard import ModuleCall, Unsharding
from paceline.telemetry.left_behind import LeftBehind

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.sharding.sharded import ShardedLayout


def watch_arrivals(slots: list[Slot]) -> list[RemovableHandle]:
    """Take a sharded gradient out of p.grad before autograd adds the next one to it.

    The hook is on the node that adds, because torch.autograd.grad calls a tensor's hooks too and adds nothing.
    """
    handles: list[RemovableHandle] = []
    for slot in slots:
        with torch._C.DisableTorchFunctionSubclass():
            node = get_gradient_edge(slot.param).node
        slot.accumulator = node  # torch would forget it, and the hook with it
        handles.append(node.register_prehook(weakly(slot, _set_aside(slot))))
    return handles


def _set_aside(slot: Slot) -> Callable[[Any], None]:
    def before(grads: Any) -> None:
        if isinstance(slot.shown, ShardedGrad) and slot.param.grad is slot.shown:
            slot.shown.wait()
            slot.param.grad, slot.carried = None, True

    return before


def show_full_state(layout: ShardedLayout, ex: Exchange) -> None:
    """Let the optimizer's state_dict and load_state_dict show a full state, as if it were not sharded."""
    optimizer = ex.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: layout.saving(ex))
    optimizer.register_state_dict_post_hook(lambda *_: layout.saved(ex))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: layout.loading(saved, ex))
    optimizer.register_load_state_dict_post_hook(lambda _: layout.loaded(ex))


def check_loading(models: Sequence[nn.Module], ex: Exchange) -> None:
    """Let the workers agree on what a model has loaded.

    A step puts every worker's shard into the parameters of all. Had one worker alone loaded other weights, all would
    go on with a mixture of both.
    """
    for model in models:
        model.register_load_state_dict_post_hook(LeftBehind(_after_loading(model, ex)))


def _after_loading(model: nn.Module, ex: Exchange) -> Callable[[nn.Module, Any], None]:
    def after(called: nn.Module, keys: Any) -> None:
        if called is not model or ex.world_size == 1 or not ex.buckets:
            return
        do = "call it on every worker, with the same state"
        params = [p.detach() for p in model.parameters()]
        sums = [x.to(ex.buckets[0].device, torch.float64) for p in params for x in (p.real.sum(), p.abs().sum())]
        mine = torch.stack(sums)
        try:
            rows = ex.comm.all_gather(mine).wait()
        except PeerError as error:
            raise PeerError(
                "model.load_state_dict was called on this worker, not on all", why=error.what, do=do
            ) from error
        if not torch.equal(rows.nan_to_num(), rows[:1].expand_as(rows).nan_to_num()):
            raise UsageError(
                "the workers have loaded different weights by model.load_state_dict",
                why="with this layout each of them steps a shard of the parameters for all",
                do=do,
            )

    return after


# ---------------------------------------------------------------------------------------------- [Note: unshard]


def unshard_for_modules(models: Sequence[nn.Module], unsharding: Unsharding) -> None:
    """Unshard the parameters of every module for its forward, its backward and its state_dict.

    Called again, it takes up modules that the models have got since.
    """
    for model in models:
        new = [module for module in model.modules() if module not in unsharding.modules]
        for module in new:
            unsharding.modules.add(module)
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                _refuse_compiled()
            if any(True for _ in _parameters(module)):
                _unshard_for_module(module, unsharding)
        if any(module is model for module in new):
            model.register_forward_hook(LeftBehind(_end_evaluation(model, unsharding)))


@torch._disable_dynamo  # it breaks a graph under way, so that the error is raised where the model is called
def _refuse_compiled() -> NoReturn:
    raise MethodError(
        "parameters that come and go do not go together with torch.compile",
        why="a compiled model is one piece, and needs all its parameters at once",
        do="use the layout zero2, or do not compile",
    )


def _parameters(module: nn.Module) -> list[Tensor]:
    """Give the parameters that a module's forward uses itself.

    Attention uses the parameters of its output layer without calling that layer.
    """
    return list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))


def _tensors(output: Any) -> list[Tensor]:
    """Give the tensors of a module's output, also those in an object of the user's own class."""
    leaves = tree_leaves(output)
    inside = [x for leaf in leaves if not isinstance(leaf, Tensor) for x in getattr(leaf, "__dict__", {}).values()]
    return [x for x in (*leaves, *tree_leaves(inside)) if isinstance(x, Tensor)]


def _only_input(module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Give the one tensor whose gradient ends the module's backward, if it is known to be the only one."""
    differentiable = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    alone = not any(True for _ in module.children()) and not any(p.requires_grad for p in module.parameters())
    return differentiable[0] if alone and len(differentiable) == 1 else None


class _OfShards(LeftBehind):
    """A hook on a module whose parameters are sharded, which can be copied but not saved."""

    def __reduce__(self) -> NoReturn:
        raise MethodError(
            "a model whose parameters are sharded cannot be saved as an object",
            why="this worker holds only a share of them",
            do="save model.state_dict(), which every worker must call, or use paceline.save",
        )


def _unshard_for_module(module: nn.Module, unsharding: Unsharding) -> None:
    calls: list[ModuleCall] = []  # under way

    def buckets() -> list[int]:
        return unsharding.buckets_of(_parameters(module))

    def before(called: nn.Module, args: Any, kwargs: Any) -> None:
        if called is not module:  # a copy of it
            return
        if torch.compiler.is_compiling():  # it was compiled after prepare
            _refuse_compiled()
        calls.append(call := ModuleCall(unsharding, buckets))
        if torch.is_grad_enabled() and (x := _only_input(module, args, kwargs)) is not None:
            x.register_hook(lambda _: call.over())
        unsharding.begin_forward(buckets(), backward=torch._C._current_graph_task_id() != -1)

    def after(called: nn.Module, args: Any, output: Any) -> None:
        if called is not module or not calls:
            return
        call = calls.pop()
        unsharding.end_forward(buckets())
        for x in _tensors(output):
            if x.requires_grad:
                x.register_hook(lambda _: call.backward())

    def before_state_dict(called: nn.Module, *_: Any) -> None:
        if called is module:
            unsharding.begin_forward(buckets(), ordered=False)

    def after_state_dict(called: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if called is not module:
            return
        for name, p in called.named_parameters(recurse=False):
            if id(p) in unsharding.bucket_of and prefix + name in state:
                state[prefix + name] = state[prefix + name].detach().clone()
        unsharding.end_forward(buckets())

    def after_loading(called: nn.Module, keys: Any) -> None:
        if called is module:
            for i in buckets():
                unsharding.buckets[i].update_shard()
            unsharding.end_forward(buckets())

    module.register_forward_pre_hook(_OfShards(before), with_kwargs=True)
    module.register_forward_hook(_OfShards(after), always_call=True)
    module.register_state_dict_pre_hook(LeftBehind(before_state_dict))
    module.register_state_dict_post_hook(LeftBehind(after_state_dict))
    module.register_load_state_dict_pre_hook(LeftBehind(before_state_dict))
    module.register_load_state_dict_post_hook(LeftBehind(after_loading))


def _end_evaluation(model: nn.Module, unsharding: Unsharding) -> Callable[[nn.Module, Any, Any], None]:
    """Make a hook that ends the order of an evaluation with the model's forward."""

    def after(called: nn.Module, args: Any, output: Any) -> None:
        if called is model and not torch.is_grad_enabled():
            unsharding.order[False].over()

    return after


def watch_gradients(b: Bucket, unsharding: Unsharding) -> list[RemovableHandle]:
    """Reshard a bucket when the last of its gradients is there: its parameters are not needed any more."""

    def tell(s: Slot) -> Callable[[Tensor], None]:
        return weakly(s, lambda _: unsharding.gradient_arrived(b, s))

    return [s.param.register_post_accumulate_grad_hook(tell(s)) for s in b.slots]
