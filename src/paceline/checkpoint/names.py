"""What the things of a run are called in a checkpoint.

model/NAME                      a parameter or a buffer, as the unwrapped model calls it
optimizer/I/NAME/SLOT           what optimizer I remembers of a parameter
worker/R/...                    the same, where it was worker R's own
worker/R/part/I/PATH KEY        what a part of the method remembers
worker/R/random/DEVICE          where a stream of random numbers stood
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.method import Method
from paceline.parts import Part

MODEL, RANDOM = "model/", "random/"


def own(rank: int) -> str:
    return f"worker/{rank}/"


def slot(i: int, name: str, key: str) -> str:
    return f"optimizer/{i}/{name}/{key}"


def part(i: int, path: str) -> str:
    return f"part/{i}/{path} "


def word(key: Any) -> str:
    """A key of a part's memory."""
    return json.dumps(key)


def key(word: str) -> Any:
    found = json.loads(word)
    return tuple(found) if isinstance(found, list) else found


def paths(method: Method) -> Iterator[tuple[str, Part]]:
    """Every part with its place in the method."""
    for axis, whole in method.axes().items():
        for k, one in enumerate(whole.parts()):
            yield f"{axis}/{k}/{one.name}", one


class Names:
    """The tensors of some models, as their state_dict would call them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ties: dict[str, str] = {}  # another name: the first one
        self.of: dict[int, str] = {}  # by id
        for i, model in enumerate(models):
            for name, x in _state(model):
                self._add(f"{i}.{name}" if len(models) > 1 else name, x)

    def _add(self, name: str, x: Tensor) -> None:
        if id(x) in self.of:
            self.ties[name] = self.of[id(x)]
        else:
            self.tensors[name], self.of[id(x)] = x, name


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved. state_dict() itself would make whole what is shared out."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{prefix or 'the model'} has an extra state of its own",
                why=f"{type(module).__name__}.get_extra_state may give anything, and a checkpoint holds numbers",
                do="keep it in buffers, or pass what it is through extra=",
            )
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, x in (*module._parameters.items(), *kept.items()):
            if x is not None:
                yield f"{prefix}.{name}".removeprefix(".").replace("_orig_mod.", ""), x
