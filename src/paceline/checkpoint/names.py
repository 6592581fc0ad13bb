"""The keys of tensors and values in a checkpoint.

model/NAME                      a parameter or a buffer, as the unwrapped model calls it
optimizer/I/NAME/SLOT           what optimizer I remembers of a parameter
worker/R/...                    the same, where it was worker R's own
worker/R/part/I/PATH KEY        what a part of the method remembers
worker/R/random/KIND            where a stream of random numbers stood
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.core.parts import Part, Parts
from paceline.errors import CheckpointError

MODEL, RANDOM = "model/", "random/"

_KEY = re.compile(
    r"(worker/(?P<worker>\d{1,9})/)?"
    r"((?P<model>model/.*)|optimizer/(?P<optimizer>\d{1,9})/.*/[^/]+"
    r"|part/(?P<method>\d{1,9})/[^ /]+/\d{1,9}/[^ ]+ (?P<memory>.*)|random/.+)",
    re.DOTALL,
)


def own(rank: int) -> str:
    """Give the prefix of what is one worker's own."""
    return f"worker/{rank}/"


def slot(i: int, name: str, key: str) -> str:
    """Give the key of what optimizer i remembers of a parameter."""
    return f"optimizer/{i}/{name}/{key}"


def part(i: int, path: str) -> str:
    """Give the prefix of what a part of the method of optimizer i remembers."""
    return f"part/{i}/{path} "


def word(key: Any) -> str:
    """Write a key of a part's state as text."""
    return json.dumps(key)


def key(word: str) -> Any:
    """Give the key that `word` has written as text."""
    found = json.loads(word)
    return tuple(found) if isinstance(found, list) else found


def known(key: str, workers: int, optimizers: int, methods: int) -> bool:
    """Say whether a key is one that a run of so many workers, optimizers and methods can have saved."""
    found = _KEY.fullmatch(key)
    if found is None:
        return False
    worker, model, optimizer, method, memory = found.group("worker", "model", "optimizer", "method", "memory")
    if any(
        n is not None and int(n) >= most for n, most in ((worker, workers), (optimizer, optimizers), (method, methods))
    ):
        return False
    if model is None and optimizer is None and worker is None:
        return False  # what a part remembers, and streams of random numbers, are a worker's own
    return memory is None or _is_word(memory)


def _is_word(text: str) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    whole = found if isinstance(found, list) and found else [found]
    return all(isinstance(one, (str, int)) for one in whole)


def paths(method: Parts) -> Iterator[tuple[str, Part]]:
    """Give every part with its place in the method."""
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
    """Give parameters and the buffers that are saved. state_dict() itself would gather sharded parameters."""
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
