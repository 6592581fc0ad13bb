"""What a part remembers between steps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any


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
