"""Hooks of layouts that share state out. Plain closures, as those in paceline/hooks.py, and for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.bucket import Slot

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.shards.pieces import Shards


def watch_arrivals(slots: list[Slot]) -> list[RemovableHandle]:
    """Before autograd adds to a p.grad that stands for a gradient which is kept elsewhere."""
    return [slot.param.register_hook(_make_room(slot)) for slot in slots]


def _make_room(slot: Slot) -> Callable[[Tensor], None]:
    def before(grad: Tensor) -> None:
        if slot.param.grad is slot.shown:
            slot.param.grad, slot.carried = None, True

    return before


def show_whole(layout: Shards, ex: Exchange) -> None:
    """The optimizer's state is saved whole and loaded whole, as if it were not shared out."""
    optimizer = ex.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: layout.saving(ex))
    optimizer.register_state_dict_post_hook(lambda *_: layout.saved(ex))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: layout.loading(saved))
    optimizer.register_load_state_dict_post_hook(lambda _: layout.loaded(ex))
