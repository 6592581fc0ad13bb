"""What a part remembers between steps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import MismatchError

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

_PIECE = "piece of a bucket's vector"


class State(MutableMapping[Any, Any]):
    """A part's memory. What a step writes is staged; `commit` makes it real, `rollback` forgets it.

    Keys: a string for a scalar of the whole part, (parameter name, slot) for what belongs to one parameter, and
    (bucket index, slot) for a flat vector over a bucket, which saving splits by parameter name. Values are replaced,
    never changed in place: otherwise there is nothing to roll back to.
    """

    def __init__(self) -> None:
        self.real: dict[Any, Any] = {}
        self.staged: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self.staged[key] if key in self.staged else self.real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.staged[key] = value

    def __delitem__(self, key: Any) -> None:
        self.staged.pop(key, None)
        self.real.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        return iter({**self.real, **self.staged})

    def __len__(self) -> int:
        return len({**self.real, **self.staged})

    def commit(self) -> None:
        self.real.update(self.staged)
        self.staged.clear()

    def rollback(self) -> None:
        self.staged.clear()

    def save(self, buckets: Sequence[Bucket]) -> dict[Any, Any]:
        """What is real, with vectors over buckets split by parameter name: it can be loaded into any other cut."""
        saved: dict[Any, Any] = {}
        for key, value in self.real.items():
            if isinstance(key, tuple) and isinstance(key[0], int):
                saved |= {(name, key[1], _PIECE): part.clone() for name, part in buckets[key[0]].split(value)}
            else:
                saved[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return saved

    def load(self, saved: dict[Any, Any], buckets: Sequence[Bucket]) -> None:
        """The other way round. A vector slot that only some parameters of a bucket have is zero for the others."""
        self.real.clear()
        self.staged.clear()
        places = {s.name: (b, s) for b in buckets for s in b.slots}
        for key, value in saved.items():
            if isinstance(key, tuple) and key[-1] == _PIECE:
                b, slot = places[key[0]]
                empty = torch.zeros_like(b.flat, dtype=value.dtype, device=b.device)  # flat's own memory may be away
                whole = self.real.setdefault((b.index, key[1]), empty)
                whole[slot.start : slot.stop] = value
            elif isinstance(value, torch.Tensor):
                home = places[key[0]][0] if isinstance(key, tuple) and key[0] in places else value
                self.real[key] = value.to(home.device, copy=True)
            else:
                self.real[key] = value

    @staticmethod
    def merge(saves: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
        """From what all workers saved, what each worker of a group of another size loads.

        Everyone gets the mean: so the mean over the workers stays what it was, and what was equal everywhere stays
        equal. A vector over a bucket that a worker does not have counts as zero, as in `load`. Whole numbers, and what
        is no tensor, must be equal.
        """
        keys = {key: None for saved in saves for key in saved}  # a set would lose their order
        return {key: _merged(key, [saved[key] for saved in saves if key in saved], len(saves)) for key in keys}


def _merged(key: Any, values: list[Any], world_size: int) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        whole = isinstance(key, tuple) and key[-1] == _PIECE
        total = sum(value.to(first.device, torch.float64) for value in values)  # fp64: equal ones give themselves
        return (total / (world_size if whole else len(values))).to(first.dtype)
    if any(not _equal(first, value) for value in values[1:]):
        raise MismatchError(
            f"workers saved different values of {key!r}",
            why="only vectors of real numbers can be averaged",
            do="save on all workers after the same step",
        )
    return first


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b.to(a.device)) if isinstance(a, torch.Tensor) else bool(a == b)
