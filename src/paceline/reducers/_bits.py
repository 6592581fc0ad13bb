"""Small whole numbers packed into bytes, and random numbers of one's own."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2**bits into bits*n/8 bytes. Element i shares a byte with i + n/k, i + 2n/k, ...: every
    step is one pass over contiguous memory."""
    parts = codes.view(8 // bits, -1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The other way round."""
    codes = packed.new_empty((8 // bits, packed.numel()))
    for i, part in enumerate(codes):
        torch.bitwise_right_shift(packed, bits * i, out=part)
    return codes.bitwise_and_(2**bits - 1).view(-1)


def rows(x: Tensor, width: int) -> Tensor:
    """x as a matrix of that width, the last row filled up with zeros."""
    short = -x.numel() % width
    return (torch.nn.functional.pad(x, (0, short)) if short else x).view(-1, width)


def l2(v: Tensor) -> Tensor:
    """The Euclidean norm of each row, for values whose squares no longer fit as well."""
    largest = v.abs().amax(1, keepdim=True)
    relative: Tensor = torch.linalg.vector_norm(v / largest.clamp(min=torch.finfo(v.dtype).tiny), dim=1)
    return largest[:, 0] * relative


def uniform(like: Tensor, *numbers: int) -> Tensor:
    """Uniform in [0, 1), a function of the numbers alone: a step that is redone draws the same again."""
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
