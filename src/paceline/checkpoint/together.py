"""Something that every worker does for itself, and that fails on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.comm.messages import all_gather_json
from paceline.comm.protocol import Comm
from paceline.errors import CheckpointError

T = TypeVar("T")


def check_same(path: Path, sums: list[str]) -> None:
    """Refuse what lies under one path and is not the same for all workers. sums: what each of them found, by rank."""
    for rank, found in enumerate(sums):
        if found != sums[0]:
            raise CheckpointError(
                f"{path} is not the same for all workers",
                why=f"worker {rank} reads something else there than worker 0",
                do="give a path that all workers share, or copy what is there to every host",
            )


def together(comm: Comm, do: Callable[[], T], failure: type[CheckpointError] = CheckpointError) -> list[T]:
    """Give what every worker's `do` has given, by rank. It must be something that JSON can say.

    A `failure` of one worker is raised on all of them in the same words, because the others wait for what it says.
    """
    said: dict[str, Any]
    mine: CheckpointError | None = None
    try:
        said = {"result": do()}
    except failure as error:
        mine = error
        said = {"wrong": [error.what, error.why, error.do]}
    everyone = all_gather_json(comm, said)
    for rank, one in enumerate(everyone):
        if "wrong" in one:
            if rank == comm.rank and mine is not None:
                raise mine
            what, why, advice = one["wrong"]
            raise failure(what, why=why, do=advice)
    return [one["result"] for one in everyone]
