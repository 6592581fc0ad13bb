"""The mean of a vector in a block code, with bytes that do not grow with the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.kernels import BlockCode, add_blocks, encode_blocks
from paceline.kernels.code import deal, join


async def mean_by_slices(
    x: Tensor, comm: Comm, code: BlockCode, dice: Sequence[int]
) -> tuple[Tensor, Callable[[], Tensor]]:
    """The mean, and a function that computes what this worker contributed to it.

    Codes cannot be summed on the way, so every worker sends shard r to worker r (all_to_all), which averages what it
    gets and sends the mean to all (all_gather). Worker r counts the error of that second rounding, times W, in its own
    contribution, so that the mean of all contributions is exactly the mean returned. dice: a key for each of the two
    roundings.
    """
    world_size, n = comm.world_size, _length(len(x), comm.world_size, code)
    padded = torch.nn.functional.pad(x, (0, world_size * n - len(x)))

    def decoded(messages: Tensor) -> Tensor:
        return add_blocks(torch.empty_like(padded), join(messages, code)[None], code, factor=1.0, keep=False)

    coded = deal(encode_blocks(padded, code, dice[0]), world_size, code)
    own = add_blocks(x.new_empty(n), await comm.all_to_all(coded), code, factor=1 / world_size, keep=False)
    mean = decoded(await comm.all_gather(encode_blocks(own, code, dice[1])))

    def added() -> Tensor:
        mine, sent = slice(comm.rank * n, (comm.rank + 1) * n), decoded(coded)
        sent[mine] += world_size * (mean[mine] - own)
        return sent[: len(x)]

    return mean[: len(x)], added


def sent_by_slices(n: int, world_size: int, code: BlockCode) -> int:
    """The bytes that one worker sends in `mean_by_slices` of n values."""
    return 2 * (world_size - 1) * code.bytes(_length(n, world_size, code))


def _length(n: int, world_size: int, code: BlockCode) -> int:
    """The length of one worker's shard of n values, rounded up to whole blocks."""
    return -(-n // (world_size * code.d)) * code.d
