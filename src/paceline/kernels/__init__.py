"""The inner loops of reducers: plain torch on a CPU, Triton on a GPU that has it. Both give the same bits.

`blocks.py`, `minmax.py` and `largest.py` are the plain formulations; `gpu.py` has a kernel for each. What a reducer
calls is here, and it does not know which of them runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from torch import Tensor

from paceline.kernels import blocks, minmax
from paceline.kernels import largest as _largest
from paceline.kernels.code import Code

__all__ = ["Code", "add_blocks", "add_bytes", "encode_blocks", "encode_bytes", "key", "largest"]


def encode_blocks(x: Tensor, code: Code, key: int) -> Tensor:
    """x as one message: the norm of each block and the packed codes. `key` decides how the dice fall."""
    return gpu.encode_blocks(x, code, key) if (gpu := _gpu(x)) else blocks.encode(x, code, key)


def add_blocks(into: Tensor, coded: Tensor, code: Code, *, factor: float, keep: bool) -> Tensor:
    """into = (into if keep) + factor · the sum of what the messages [W, bytes] say."""
    add = gpu.add_blocks if (gpu := _gpu(into)) else blocks.accumulate
    add(into, coded, code, factor=factor, keep=keep)
    return into


def encode_bytes(rows: Tensor) -> Tensor:
    """Each row as a message: 256 levels from its smallest to its largest value."""
    return gpu.encode_bytes(rows) if (gpu := _gpu(rows)) else minmax.encode(rows)


def add_bytes(into: Tensor, coded: Tensor, *, factor: float, keep: bool) -> Tensor:
    """into = (into if keep) + factor · the sum of what the messages [W, bytes] say."""
    add = gpu.add_bytes if (gpu := _gpu(into)) else minmax.accumulate
    add(into, coded, factor=factor, keep=keep)
    return into


def largest(x: Tensor, k: int, *, sampled: bool) -> Tensor:
    """k different places of x with the largest magnitudes, or, much faster on a GPU, nearly those."""
    if not sampled:
        return _largest.exact(x, k)
    return gpu.largest(x, k) if (gpu := _gpu(x)) else _largest.sampled(x, k)


def key(*numbers: int) -> int:
    """A 32-bit key for the dice, from what makes this throw different from all others."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 1442695040888963407) * 6364136223846793005 % 2**64
        mixed ^= mixed >> 32
    return mixed % 2**32 - 2**31


def _gpu(x: Tensor) -> Any:
    return _triton() if x.is_cuda else None


@functools.cache
def _triton() -> Any:
    """The Triton kernels, or None: torch for CUDA brings Triton on Linux, and not elsewhere."""
    return importlib.import_module("paceline.kernels.gpu") if importlib.util.find_spec("triton") else None
