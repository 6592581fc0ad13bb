"""The mean of a vector in a block code, at bytes that do not grow with the world."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.kernels import Code, add_blocks, encode_blocks
from paceline.kernels.code import deal, join
from paceline.parts import Comm


async def mean_by_slices(x: Tensor, comm: Comm, code: Code, dice: Sequence[int]) -> tuple[Tensor, Callable[[], Tensor]]:
    """The mean, and (for who asks) what this worker added to it.

    Codes cannot be summed on the way, so everyone sends slice r to worker r, which sends their mean on. What that
    second rounding costs is its own to remember, for all: the mean of what workers add is the mean, exactly. dice: a
    key for each rounding.
    """
    world, n = comm.world, _length(len(x), comm.world, code)
    padded = torch.nn.functional.pad(x, (0, world * n - len(x)))

    def decoded(messages: Tensor) -> Tensor:
        return add_blocks(torch.empty_like(padded), join(messages, code)[None], code, factor=1.0, keep=False)

    coded = deal(encode_blocks(padded, code, dice[0]), world, code)
    own = add_blocks(x.new_empty(n), await comm.alltoall(coded), code, factor=1 / world, keep=False)
    mean = decoded(await comm.gather(encode_blocks(own, code, dice[1])))

    def added() -> Tensor:
        mine, sent = slice(comm.rank * n, (comm.rank + 1) * n), decoded(coded)
        sent[mine] += world * (mean[mine] - own)
        return sent[: len(x)]

    return mean[: len(x)], added


def sent_by_slices(n: int, world: int, code: Code) -> int:
    """Bytes, of n values."""
    return 2 * (world - 1) * code.bytes(_length(n, world, code))


def _length(n: int, world: int, code: Code) -> int:
    """Of a slice of n values: whole blocks."""
    return -(-n // (world * code.d)) * code.d
