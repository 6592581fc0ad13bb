"""The format of a block code: how blocks of values become bytes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class BlockCode(NamedTuple):
    """A code that stores each block of d values as its norm in fp32 and `bits` bits a value.

    uniform: 2·top + 1 levels from -norm to norm.  powers: a sign and 0, 2^(1-top), ..., 1/4, 1/2, 1 times the norm.
    sign: plus or minus the norm.
    """

    levels: Literal["uniform", "powers", "sign"]
    bits: int
    d: int  # a power of two, 16 at least
    norm: Literal["max", "l2", "mean"]

    @property
    def top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def blocks(self, n: int) -> int:
        return max(1, -(-n // self.d))  # at least one: not every backend can send a message of no bytes

    def bytes(self, n: int) -> int:
        """The bytes of a message with n values."""
        return self.blocks(n) * (4 + self.d * self.bits // 8)


def split(coded: Tensor, code: BlockCode) -> tuple[Tensor, Tensor]:
    """The norms [W, blocks] and packed codes [W, blocks, d·bits/8] of messages [W, bytes], as views."""
    blocks = coded.shape[1] // (4 + code.d * code.bits // 8)
    norms = coded[:, : 4 * blocks].view(torch.float32)
    return norms, coded[:, 4 * blocks :].unflatten(1, (blocks, code.d * code.bits // 8))


def deal(message: Tensor, world_size: int, code: BlockCode) -> Tensor:
    """Split a message into one for each worker [W, bytes], each with an equal share of its blocks."""
    norms, packed = split(message[None], code)
    return torch.cat([norms.view(torch.uint8).view(world_size, -1), packed.view(world_size, -1)], 1)


def join(messages: Tensor, code: BlockCode) -> Tensor:
    """Join one message from each worker [W, bytes] into one: the inverse of `deal`."""
    norms, packed = split(messages, code)
    return torch.cat([norms.view(torch.uint8).flatten(), packed.flatten()])
