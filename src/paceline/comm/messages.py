"""What workers say to each other in words: JSON and trees of tensors over a lane, for set-up, saving and joining.

Never in a step.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paceline.comm.protocol import Comm

_CPU = torch.device("cpu")


def all_gather_json(comm: Comm, value: Any, device: torch.device = _CPU) -> list[Any]:
    """Every worker's value, by rank. It must be something that JSON can say."""
    mine = _bytes(value).to(device)
    sizes = comm.all_gather(torch.tensor([mine.numel()], device=device)).wait().flatten().tolist()
    rows = comm.all_gather(torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))).wait().cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_tree(comm: Comm, tree: Any, root: int) -> Any:
    """The root's tree of dictionaries, lists, tensors and plain values, on every worker; tensors arrive on the CPU.

    The other workers' trees are ignored.
    """
    tensors: list[Tensor] = []
    plan = _bytes(_planned(tree, tensors)) if comm.rank == root else torch.empty(0, dtype=torch.uint8)
    size = comm.broadcast(torch.tensor([plan.numel()]), root).wait()
    text = comm.broadcast(plan if comm.rank == root else torch.empty(int(size), dtype=torch.uint8), root).wait()
    plan_read = json.loads(text.numpy().tobytes())
    if comm.rank == root:
        for x in filter(Tensor.numel, tensors):
            comm.broadcast(x.detach().cpu().contiguous(), root).wait()
        return tree
    return _built(plan_read, comm, root)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _planned(tree: Any, tensors: list[Tensor]) -> Any:
    """A tree in JSON, with its tensors taken out in order. Keys may be tuples."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape)]}
    if isinstance(tree, dict):
        return {"dict": [[_planned(key, tensors), _planned(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [_planned(value, tensors) for value in tree]}
    return {"value": tree}


def _built(plan: Any, comm: Comm, root: int) -> Any:
    ((kind, inside),) = plan.items()
    if kind == "tensor":
        x = torch.empty(inside[1], dtype=getattr(torch, inside[0]))
        return comm.broadcast(x, root).wait() if x.numel() else x
    if kind == "dict":
        return {_built(key, comm, root): _built(value, comm, root) for key, value in inside}
    if kind in ("list", "tuple"):
        values = [_built(value, comm, root) for value in inside]
        return tuple(values) if kind == "tuple" else values
    return inside
