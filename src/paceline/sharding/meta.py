"""Models built on the meta device: shapes without memory, filled module by module.

[Note: meta] Such a model may be larger than the memory of any one host. Its parameters first become ones without
memory, of the right shape and on the right device. Where the layout shards parameters, buckets are cut from these and
each worker has memory for its shards alone. Then module after module gets memory, its own `reset_parameters()` fills
it, the workers keep their shards, and the memory goes to the next. With other layouts parameters keep that memory.

Every worker draws the same numbers, from worker 0's seed. They are those of building the model on that device right
after `torch.manual_seed`, where building it means that each module fills its own parameters when it is made, after
the modules inside it. What a model does to its parameters after that in its constructor (`self.apply(...)`) is not
repeated. Of two modules that share a parameter the first gives it its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.bucket import memory
from paceline.core.shard import Owned
from paceline.errors import UsageError
from paceline.sharding import sharded_parameter
from paceline.sharding.sharded_bucket import UNFILLED

_MOST = 10  # names that are listed


@dataclass(frozen=True)
class Unit:
    """Modules that are filled together: one, or attention with its output layer, whose bias attention fills again."""

    name: str
    modules: list[nn.Module]  # in the order in which they are filled

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Give the parameters and buffers with their names."""
        for module in self.modules:
            yield from module.named_parameters(self.name, recurse=False)
            yield from module.named_buffers(self.name, recurse=False)

    def blank(self, *, kept: bool = True) -> list[str]:
        """Give the names of what is on the meta device. kept: also what a state_dict holds."""
        not_saved = {id(b) for m in self.modules for k, b in m._buffers.items() if k in m._non_persistent_buffers_set}
        return [name for name, x in self.tensors() if x.is_meta and (kept or id(x) in not_saved)]

    def resets(self) -> list[Callable[[], Any]]:
        """Give the functions by which the modules fill themselves."""
        own = [getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None) for m in self.modules]
        return [reset for reset in own if reset is not None]


def _units(module: nn.Module, name: str = "") -> Iterator[Unit]:
    """Give the units of a module, inner modules first, as they are filled when a model is built."""
    inside = [(child, f"{name}.{key}".removeprefix(".")) for key, child in module.named_children()]
    if isinstance(module, nn.MultiheadAttention):
        yield Unit(name, [*(child for child, _ in inside), module])
        return
    for child, at in inside:
        yield from _units(child, at)
    yield Unit(name, [module])


def check(models: Sequence[nn.Module], *, weights: bool) -> None:
    """Refuse, before anything is started, a model that cannot be filled. weights: a file fills what it holds."""
    units = [unit for model in models for unit in _units(model)]
    lost = [name for unit in units if not unit.resets() for name in unit.blank(kept=not weights)]
    if lost:
        more = f" and {len(lost) - _MOST} more" if len(lost) > _MOST else ""
        raise UsageError(
            f"{lost[0]} is on the meta device, and its module cannot fill it",
            why=f"no reset_parameters() in the modules of {', '.join(lost[:_MOST])}{more}",
            do="give these modules one, or start from a file with prepare(..., weights=...)"
            if not weights
            else "give these modules a reset_parameters(): these buffers are in no file",
        )


class Blank:
    """The parameters and buffers of some models that are on the meta device: [Note: meta]."""

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        self.units = [unit for model in models for unit in _units(model) if unit.blank()]
        self.with_unsaved = [unit for unit in self.units if unit.blank(kept=False)]
        self.ids: set[int] = set()
        for unit in self.units:
            for module in unit.modules:
                self._lay(module, device)

    def _lay(self, module: nn.Module, device: torch.device) -> None:
        for p in module.parameters(recurse=False):
            if p.is_meta:
                new = nn.Parameter(_unknown(p, (), device).expand(p.shape), requires_grad=p.requires_grad)
                vars(new).update(vars(p))
                torch.utils.swap_tensors(p, new)  # p stays the object that optimizers and other modules know
                setattr(p, UNFILLED, True)
                self.ids.add(id(p))
        for name, b in module.named_buffers(recurse=False):
            if b.is_meta:
                module._buffers[name] = _unknown(b, b.shape, device)

    @torch.no_grad()
    def fill(self, seed: int, owned: Owned, *, only_unsaved: bool = False) -> None:
        """Let the modules fill themselves. only_unsaved: those alone with buffers that no file has."""
        filled: set[int] = set()
        cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(cuda):
            torch.manual_seed(seed)
            for unit in self.with_unsaved if only_unsaved else self.units:
                self._fill(unit, owned, filled)
        for shard in owned.shards.values():
            shard.published()

    def _fill(self, unit: Unit, owned: Owned, filled: set[int]) -> None:
        mine = {id(p): p for m in unit.modules for p in m.parameters(recurse=False) if id(p) in self.ids}
        owners = {key: sharded_parameter.unshard(p) for key, p in mine.items()}
        before = {key: p.data for key, p in mine.items()}
        for p in mine.values():
            p.data = _unknown(p, p.shape, p.device)
        for reset in unit.resets():
            reset()
        for name, x in unit.tensors():
            if x.is_floating_point() and bool(x.isnan().any()):
                raise UsageError(
                    f"{name} was on the meta device, and reset_parameters() of its module did not fill it",
                    do="let it write all of the module's own parameters and buffers",
                )
        for key, p in mine.items():
            vars(p).pop(UNFILLED, None)
            if key in filled:
                p.data = before[key]
            elif key in owned.gathered:
                if (shard := owned.shards.get(key)) is not None:
                    shard.write(memory(p)[shard.inside])
                p.data = before[key]
        for key, owner in owners.items():
            if owner is not None:
                sharded_parameter.shard(mine[key], owner)
        filled |= set(mine)

    def make_room(self, owned: Owned) -> None:
        """Take memory for parameters that stay whole. A file has their values."""
        for p in (p for unit in self.units for m in unit.modules for p in m.parameters(recurse=False)):
            vars(p).pop(UNFILLED, None)
            if id(p) in self.ids and id(p) not in owned.gathered:
                p.data = _unknown(p, p.shape, p.device)


def _unknown(like: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Make a tensor of NaN, so that an element that is never written is noticed."""
    value = torch.nan if like.is_floating_point() or like.is_complex() else 0
    return torch.full(tuple(shape), value, dtype=like.dtype, device=device)
