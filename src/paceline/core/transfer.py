"""What moves along when the group changes: from the members of one epoch to those of the next.

Before the old group is left, its members agree on one state that any number of workers can go on from: of what each
part remembers, the mean over the workers (`State.merge`), so that the mean over the workers stays what it was; of the
optimizer's state likewise, where the workers' replicas differ. In the new group, joiners get that state and the weights
from a member.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.comm.messages import all_gather_json, broadcast_tree
from paceline.core.state import State

if TYPE_CHECKING:
    from paceline.comm.protocol import Comm
    from paceline.core.engine import Engine


@dataclass
class Luggage:
    """One engine's state between two groups, the same on every worker."""

    step: int
    parts: list[dict[Any, Any]] = field(default_factory=list)  # what each part remembers, by parameter name
    carry: dict[Any, Any] = field(default_factory=dict)


def pack(engine: Engine) -> Luggage:
    """Agree with the old group's members on what to go on from."""
    if engine.idle:  # alone: what it came with waits for the next group
        return replace(engine.stored, step=engine.ex.step) if engine.stored else Luggage(engine.ex.step)
    comm, device = engine.ex.comm, _device(engine)
    saves = [part.state.save(engine.buckets) for part in engine.parts]
    carry = engine.ex.carry.save(engine.buckets)
    if engine.group.world_size > 1:
        saves = [_merged(saved, comm, device) for saved in saves]
        carry = _merged(carry, comm, device)
    return Luggage(engine.ex.step, saves, carry)


def share(engine: Engine, luggage: Luggage) -> Luggage:
    """In the new group: joiners get the luggage, the weights, the buffers and the optimizer's state from a member."""
    group = engine.group
    if not group.joined:
        return luggage
    joins = group.rank in group.joined
    params = [p for _, p in engine.named()]
    tensors = [*params, *engine.buffers.all()]
    tree: Any = None
    if not joins:
        tree = {
            "step": luggage.step,
            "parts": luggage.parts,
            "carry": luggage.carry,
            "tensors": [x.detach() for x in tensors],
            "optimizer": [dict(engine.optimizer.state.get(p, {})) for p in params],
        }
    tree = broadcast_tree(engine.ex.comm, tree, group.source)
    if not joins:
        return luggage
    with torch.no_grad():
        for x, theirs in zip(tensors, tree["tensors"], strict=True):
            x.copy_(theirs)
    engine.buffers.keep()
    engine.optimizer.state.clear()
    for p, known in zip(params, tree["optimizer"], strict=True):
        if known:
            engine.optimizer.state[p] = {key: _beside(p, key, value) for key, value in known.items()}
    return Luggage(tree["step"], tree["parts"], tree["carry"])


def unpack(engine: Engine, luggage: Luggage) -> None:
    """Go on from it with the buckets of the new group."""
    engine.ex.step = luggage.step
    engine.stored = luggage if engine.idle else None
    parts = engine.parts
    for part, memory in zip(parts, luggage.parts or [{}] * len(parts), strict=True):
        part.state.load({} if engine.idle else memory, engine.buckets)
    if engine.idle:
        return
    engine.ex.carry.load(luggage.carry, engine.buckets)


def _merged(saved: dict[Any, Any], comm: Comm, device: torch.device) -> dict[Any, Any]:
    """What all workers saved, merged: the same on every worker."""
    plain = [[list(key) if isinstance(key, tuple) else key, _about(value)] for key, value in saved.items()]
    everyones = [{_key(key): about for key, about in said} for said in all_gather_json(comm, plain, device)]
    saves: list[dict[Any, Any]] = [{} for _ in everyones]
    for key in {key: None for said in everyones for key in said}:
        about = next(said[key] for said in everyones if key in said)
        rows: list[Any] = [said.get(key, {"value": None}).get("value") for said in everyones]
        if "dtype" in about:
            like = torch.zeros(about["shape"], dtype=getattr(torch, about["dtype"]), device=device)
            rows = list(comm.all_gather(saved[key].to(device) if key in saved else like).wait())
        for mine, said, row in zip(saves, everyones, rows, strict=True):
            if key in said:
                mine[key] = row
    return State.merge(saves)


def _device(engine: Engine) -> torch.device:
    return engine.buckets[0].device if engine.buckets else torch.device("cpu")


def _about(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return {"value": value}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def average_optimizer(engine: Engine) -> None:
    """Workers that trained alone have moments of their own: all go on from their mean."""
    comm, device = engine.ex.comm, _device(engine)
    for name, p in engine.named():
        known = engine.optimizer.state.get(p, {})
        merged = _merged({(name, key): value for key, value in known.items()}, comm, device)
        for (_, key), value in merged.items():
            known[key] = _beside(p, key, value)
        if merged:
            engine.optimizer.state[p] = known


def _beside(p: Tensor, key: str, value: Any) -> Any:
    """As the optimizer would have made it: elements beside the parameter, a count where it looks for it."""
    if isinstance(value, Tensor) and value.dim() and key != "step":
        return value.to(p.device, copy=True)
    return value.cpu().clone() if isinstance(value, Tensor) else value
