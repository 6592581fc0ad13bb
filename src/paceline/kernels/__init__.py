"""The inner loops of reducers: plain torch on a CPU, Triton on a GPU that has it. Both give the same bits.

`blocks.py`, `minmax.py` and `largest.py` are the plain formulations; `gpu.py` has a kernel for each. Reducers call the
functions in this file, which choose between the two by the device of the tensor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from torch import Tensor

from paceline.kernels import blocks, minmax
from paceline.kernels import largest as _largest
from paceline.kernels.code import BlockCode

__all__ = ["BlockCode", "add_blocks", "add_bytes", "encode_blocks", "encode_bytes", "key", "largest"]


def encode_blocks(x: Tensor, code: BlockCode, key: int) -> Tensor:
    """Encode x as one message: the norm of each block and the packed codes. `key` seeds the random rounding."""
    return gpu.encode_blocks(x, code, key) if (gpu := _gpu(x)) else blocks.encode(x, code, key)


def add_blocks(into: Tensor, coded: Tensor, code: BlockCode, *, factor: float, keep: bool) -> Tensor:
    """Set into = (into if keep else 0) + factor · the sum of the W decoded messages [W, bytes]."""
    add = gpu.add_blocks if (gpu := _gpu(into)) else blocks.accumulate
    add(into, coded, code, factor=factor, keep=keep)
    return into


def encode_bytes(rows: Tensor) -> Tensor:
    """Encode each row as one message: 256 levels from its smallest to its largest value."""
    return gpu.encode_bytes(rows) if (gpu := _gpu(rows)) else minmax.encode(rows)


def add_bytes(into: Tensor, coded: Tensor, *, factor: float, keep: bool) -> Tensor:
    """Set into = (into if keep else 0) + factor · the sum of the W decoded messages [W, bytes]."""
    add = gpu.add_bytes if (gpu := _gpu(into)) else minmax.accumulate
    add(into, coded, factor=factor, keep=keep)
    return into


def largest(x: Tensor, k: int, *, sampled: bool) -> Tensor:
    """The indices of the k entries of x with the largest magnitudes; sampled: nearly those, much faster on a GPU."""
    if not sampled:
        return _largest.exact(x, k)
    return gpu.largest(x, k) if (gpu := _gpu(x)) else _largest.sampled(x, k)


def key(*numbers: int) -> int:
    """A signed 32-bit key for random rounding, mixed from the numbers that make this rounding unique."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 1442695040888963407) * 6364136223846793005 % 2**64
        mixed ^= mixed >> 32
    return mixed % 2**32 - 2**31


def _gpu(x: Tensor) -> Any:
    return _triton() if x.is_cuda else None


@functools.cache
def _triton() -> Any:
    """The Triton kernels, or None without Triton: torch for CUDA brings it on Linux only."""
    return importlib.import_module("paceline.kernels.gpu") if importlib.util.find_spec("triton") else None
