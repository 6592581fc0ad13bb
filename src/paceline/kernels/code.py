"""How a block of values becomes bits: what both sides of the wire must know."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Code(NamedTuple):
    """Blocks of d values, each as its norm in fp32 and `bits` bits a value.

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
        return max(1, -(-n // self.d))  # none would be a message of no bytes, which not every backend carries

    def bytes(self, n: int) -> int:
        """What n values take."""
        return self.blocks(n) * (4 + self.d * self.bits // 8)


def split(coded: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Messages [W, bytes] as their norms [W, blocks] and packed codes [W, blocks, d·bits/8]: views, nothing moves."""
    blocks = coded.shape[1] // (4 + code.d * code.bits // 8)
    norms = coded[:, : 4 * blocks].view(torch.float32)
    return norms, coded[:, 4 * blocks :].unflatten(1, (blocks, code.d * code.bits // 8))


def deal(message: Tensor, world: int, code: Code) -> Tensor:
    """A message as one for each worker [W, bytes], with an equal share of its blocks."""
    norms, packed = split(message[None], code)
    return torch.cat([norms.view(torch.uint8).view(world, -1), packed.view(world, -1)], 1)


def join(messages: Tensor, code: Code) -> Tensor:
    """What `deal` has dealt out, or what workers made of it, as one message again."""
    norms, packed = split(messages, code)
    return torch.cat([norms.view(torch.uint8).flatten(), packed.flatten()])
