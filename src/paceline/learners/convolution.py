"""Convolutions as products of matrices.

The convolutions of many replicas at once are, to torch.vmap, one grouped convolution, which GPU libraries are slow at.
As a copy of the patches and a product they are one batch of products, which they are fast at; the patches cost memory,
i·j times that of the input for an i×j kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode


class Products(TorchFunctionMode):
    """Inside, a convolution is a product of matrices: under vmap, one batch of products for all replicas."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d:
            return _convolve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolve(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    stride, dilation = _pair(stride), _pair(dilation)
    if groups != 1 or isinstance(padding, str) or dilation != (1, 1) or x.dim() != 4:
        with torch._C.DisableTorchFunction():
            return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    padding, size = _pair(padding), tuple(weight.shape[2:])
    height, width = ((x.shape[2 + i] + 2 * padding[i] - size[i]) // stride[i] + 1 for i in (0, 1))
    seen: Tensor = _Patches.apply(x, size, stride, padding)  # type: ignore[no-untyped-call]
    out = weight.flatten(1) @ seen
    if bias is not None:
        out = out + bias[:, None]
    whole: Tensor = out.unflatten(2, (height, width))
    return whole


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _Patches(torch.autograd.Function):
    """x [b, c, h, w] -> [b, c·i·j, places]: what each place of an i×j kernel sees. One copy, where F.unfold launches a
    kernel for each sample; back, F.fold adds them up in one.
    """

    @staticmethod
    def forward(x: Tensor, size: Any, stride: Any, padding: Any) -> Tensor:
        if size == stride == (1, 1) and padding == (0, 0):
            return x.flatten(2).clone()
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        seen = x.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])  # [b, c, h', w', i, j]
        return seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, seen.shape[2] * seen.shape[3])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.size, ctx.stride, ctx.padding = inputs
        ctx.extent = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return F.fold(grad, ctx.extent, ctx.size, padding=ctx.padding, stride=ctx.stride), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *shape: Any) -> tuple[Tensor, int]:
        stack = x.movedim(in_dims[0], 0)
        seen = _Patches.apply(stack.flatten(0, 1), *shape)  # type: ignore[no-untyped-call]
        return seen.unflatten(0, stack.shape[:2]), 0
