"""What a script needs beside the loop: who am I, a barrier, values of all workers, output once."""

from __future__ import annotations

import builtins
import zlib
from typing import Any

import torch
from torch import Tensor

from paceline.comm.environment import Environment
from paceline.comm.messages import all_gather_json, broadcast_tree
from paceline.comm.protocol import Comm
from paceline.errors import UsageError, differ
from paceline.session.session import barrier as wait_for_all
from paceline.session.session import close_session, current


def rank() -> int:
    """This worker's number, from 0."""
    return here.group.rank if (here := current()) else Environment.read().rank


def world_size() -> int:
    """How many workers there are."""
    return here.group.world_size if (here := current()) else Environment.read().world_size


def is_main() -> bool:
    """Is this worker 0, the one that prints, logs and writes?"""
    return rank() == 0


def print(*values: Any, **options: Any) -> None:
    """Print on worker 0 only; arguments as those of Python's own print."""
    if is_main():
        builtins.print(*values, **options)


def device() -> torch.device:
    """Where this worker should put its model and data: the GPU that LOCAL_RANK picks, or the CPU.

    It becomes torch's current device, so that a plain `.to("cuda")` means the same one.
    """
    env = Environment.read()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    found = torch.device("cuda", env.local_rank % count)
    torch.cuda.set_device(found)
    return found


def barrier() -> None:
    """Wait until every worker is here."""
    if (comm := _lane("barrier", "")) is not None:
        wait_for_all(comm)


def broadcast(value: Any, root: int = 0) -> Any:
    """The root's value on every worker: a tensor, a number, a string, or lists and dictionaries of them."""
    size = world_size()
    if type(root) is not int or not 0 <= root < size:
        raise UsageError(f"root={root!r} is not a worker", do=f"choose one of 0 to {size - 1}")
    comm = _lane("broadcast", f"from worker {root}")
    return value if comm is None else broadcast_tree(comm, value, root)


def all_gather(value: Any) -> Any:
    """Every worker's value, by rank: tensors of one shape stacked, or a list of anything that JSON can say."""
    if not isinstance(value, Tensor):
        comm = _lane("all_gather", "")
        return [value] if comm is None else all_gather_json(comm, value)
    comm = _lane("all_gather", _described(value))
    return value.detach()[None] if comm is None else comm.all_gather(value.detach().contiguous()).wait()


def mean(value: Tensor | float) -> Tensor:
    """The mean of a value over the workers, for metrics. Every worker must call it."""
    x = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    if not x.is_floating_point():
        raise UsageError(
            f"paceline.mean of {_described(x)}: a mean needs floating-point values", do="convert it with .float()"
        )
    comm = _lane("mean", _described(x))
    if comm is None:
        return x
    session = current()
    assert session is not None
    with session.recorder.untimed():
        return comm.mean(x).wait()


def shutdown() -> None:
    """Leave the other workers: settle what is under way and say good-bye. Otherwise this happens at exit.

    Every worker must call it. Afterwards `prepare` starts anew.
    """
    close_session()


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _lane(what: str, of: str) -> Comm | None:
    """The user's lane, where all workers are about to do the same; None in a world of one without a session.

    Operations that differ must be found out before they meet on the wire: this lane is used in any order.
    """
    session = current()
    if session is None:
        if Environment.read().world_size > 1:
            raise UsageError(
                f"paceline.{what} was called before paceline.prepare", do="prepare first: it joins the workers"
            )
        return None
    comm, text = session.user, f"paceline.{what} of {of}" if of else f"paceline.{what}"
    with session.recorder.untimed():
        sums = comm.all_gather(torch.tensor([zlib.crc32(text.encode())])).wait().flatten().tolist()
        if len(set(sums)) > 1:
            comm.agree("an operation", text)
            differ("an operation", [str(s) for s in sums])
    return comm
