"""Hooks of layouts that share state out. Plain closures, as those in paceline/hooks.py, and for the same reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.bucket import Bucket, Slot
from paceline.errors import MethodError
from paceline.pack import weakly
from paceline.shards.grad import SlicedGrad
from paceline.shards.loans import Call, Loans

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.shards.pieces import Shards


def watch_arrivals(slots: list[Slot]) -> list[RemovableHandle]:
    """Before autograd adds to a p.grad that stands for a gradient which is kept elsewhere."""
    return [slot.param.register_hook(_make_room(slot)) for slot in slots]


def _make_room(slot: Slot) -> Callable[[Tensor], None]:
    def before(grad: Tensor) -> None:
        if isinstance(slot.shown, SlicedGrad) and slot.param.grad is slot.shown:
            slot.shown.arrive()
            slot.param.grad, slot.carried = None, True

    return before


def show_whole(layout: Shards, ex: Exchange) -> None:
    """The optimizer's state is saved whole and loaded whole, as if it were not shared out."""
    optimizer = ex.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: layout.saving(ex))
    optimizer.register_state_dict_post_hook(lambda *_: layout.saved(ex))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: layout.loading(saved, ex))
    optimizer.register_load_state_dict_post_hook(lambda _: layout.loaded(ex))


# ---------------------------------------------------------------------------------------------------- [Note: loans]


def lend(models: Sequence[nn.Module], loans: Loans) -> None:
    """Every module borrows its parameters for its forward, its backward, its state_dict."""
    for model in models:
        for module in model.modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise MethodError(
                    "parameters that come and go do not go together with torch.compile",
                    why="a compiled model is one piece, and needs all its parameters at once",
                    do="use the layout zero2, or do not compile",
                )
            if any(True for _ in _parameters(module)):
                _lend(module, loans)
        model.register_forward_hook(_leave(model, loans))


def _parameters(module: nn.Module) -> list[Tensor]:
    """Those that its forward uses itself. Attention uses its output layer's without calling it."""
    return list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))


def _tensors(output: Any) -> list[Tensor]:
    """Those of a module's output, in an object of the user's own too."""
    leaves = tree_leaves(output)
    inside = [x for leaf in leaves if not isinstance(leaf, Tensor) for x in getattr(leaf, "__dict__", {}).values()]
    return [x for x in (*leaves, *tree_leaves(inside)) if isinstance(x, Tensor)]


def _only_way(module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """What the module's backward ends with, if that is known: the only gradient it gives."""
    differentiable = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    alone = not any(True for _ in module.children()) and not any(p.requires_grad for p in module.parameters())
    return differentiable[0] if alone and len(differentiable) == 1 else None


def _lend(module: nn.Module, loans: Loans) -> None:
    calls: list[Call] = []  # under way

    def mine() -> list[int]:
        return loans.buckets(_parameters(module))

    def before(called: nn.Module, args: Any, kwargs: Any) -> None:
        if called is not module:  # a copy of it
            return
        calls.append(call := Call(loans, mine))
        if torch.is_grad_enabled() and (x := _only_way(module, args, kwargs)) is not None:
            x.register_hook(lambda _: call.over())
        loans.begin(mine(), backward=torch._C._current_graph_task_id() != -1)

    def after(called: nn.Module, args: Any, output: Any) -> None:
        if called is not module or not calls:
            return
        call = calls.pop()
        loans.end(mine())
        for x in _tensors(output):
            if x.requires_grad:
                x.register_hook(lambda _: call.backward())

    def showing(called: nn.Module, *_: Any) -> None:
        if called is module:
            loans.begin(mine(), route=False)

    def saved(called: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if called is not module:
            return
        for name, p in called.named_parameters(recurse=False):
            if id(p) in loans.home and prefix + name in state:
                state[prefix + name] = state[prefix + name].detach().clone()
        loans.end(mine())

    def loaded(called: nn.Module, keys: Any) -> None:
        if called is module:
            for i in mine():
                loans.of[i].take()
            loans.end(mine())

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
    module.register_state_dict_pre_hook(showing)
    module.register_state_dict_post_hook(saved)
    module.register_load_state_dict_pre_hook(showing)
    module.register_load_state_dict_post_hook(loaded)


def _leave(model: nn.Module, loans: Loans) -> Callable[[nn.Module, Any, Any], None]:
    """An evaluation ends: nothing will be asked for again soon."""

    def after(called: nn.Module, args: Any, output: Any) -> None:
        if called is model and not torch.is_grad_enabled():
            loans.route[False].over()

    return after


def watch_gradients(b: Bucket, loans: Loans) -> list[RemovableHandle]:
    """When the last of a bucket's gradients is there, its parameters are not needed any more."""

    def tell(s: Slot) -> Callable[[Tensor], None]:
        return weakly(s, lambda _: loans.gradient(b, s))

    return [s.param.register_post_accumulate_grad_hook(tell(s)) for s in b.slots]
