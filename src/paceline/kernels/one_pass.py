"""Adam's loop compiled by numba: every number is read once and written once, conversions included.

[Note: bits] numpy has no bf16. A bf16 array comes here as int16 and an fp16 array as uint16, so the type of an array
says what its 16 bits mean, and the compiler makes one loop for each pair of types.

[Note: rounding] The operations and their order are those of torch's fused Adam, and `fma` rounds once where torch does.
So the bits are the same on a processor with an fma instruction. No fastmath: NaN must stay NaN.

[Note: cache] Compiled loops are kept in __pycache__ beside this file. If that is not writable they are kept in numba's
folder in the user's home (or NUMBA_CACHE_DIR); if that is not writable either, each process compiles them anew.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_QUIET_NAN = 0x7FC0  # as bf16


class Single(NamedTuple):
    """The fields of `adam.Rates` in fp32.

    They are repeated here because numba recompiles cached loops only when this very file changes.
    """

    scale: np.float32
    l2: np.float32
    keep: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    size: np.float32
    root: np.float32
    eps: np.float32


@intrinsic
def wide(typing: Any, x: Any) -> Any:
    """Convert fp32, bf16 or fp16 to fp32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (bits,) = values
        if x == types.int16:
            return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)
        if x == types.uint16:
            return builder.fpext(builder.bitcast(bits, _F16), _F32)
        return bits

    return types.float32(x), generate


@intrinsic
def narrow(typing: Any, x: Any, like: Any) -> Any:
    """Convert fp32 to the type of `like`, rounded to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if like == types.int16:
            return _bf16(builder, values[0])
        if like == types.uint16:
            return builder.bitcast(builder.fptrunc(values[0], _F16), _I16)
        return values[0]

    return like(types.float32, like), generate


def _bf16(builder: Any, x: Any) -> Any:
    # Not the processor's own conversion, which turns subnormal numbers into zero.
    bits = builder.bitcast(x, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), _I32(_QUIET_NAN), rounded), _I16)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a · b + c, rounded once if the processor can."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fmuladd", [_F32], kind), values)

    return types.float32(types.float32, types.float32, types.float32), generate


def _compiled(loop: Any) -> Any:
    # numpy's error model: a division by zero gives infinity; Python's would branch to an exception for each element.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(loop, cache=True, **options)
    except RuntimeError:  # no folder for the cache is writable
        return numba.njit(loop, **options)


@_compiled
def _gradient(p, g, c):
    x = wide(g) * c.scale
    return fma(p, c.l2, x) if c.l2 != 0 else x


@_compiled
def _change(m, v, c):
    """The change that a step adds to p, after weight decay."""
    return c.size * m / (math.sqrt(v) / c.root + c.eps)


@_compiled
def _stepped(p, m, v, g, c):
    """The new p, m and v of one element after the step."""
    x = _gradient(p, g, c)
    # Interpolate from the nearer end, as torch's lerp does, so that β1 = 0 gives x itself.
    m = fma(c.rest1, x - m, m) if c.rest1 < 0.5 else fma(c.rest1 - 1, x - m, x)
    v = fma(c.rest2 * x, x, c.beta2 * v)
    return c.keep * p + _change(m, v, c), m, v


@_compiled
def step(p, m, v, g, c):
    for i in range(p.size):
        p[i], m[i], v[i] = _stepped(p[i], m[i], v[i], g[i], c)


@_compiled
def step_over(p, m, v, g, c):
    """Step, and overwrite g by the new p.

    It is a loop of its own because the compiler does not vectorize over two arrays that may be the same memory.
    """
    for i in range(p.size):
        p[i], m[i], v[i] = _stepped(p[i], m[i], v[i], g[i], c)
        g[i] = narrow(p[i], g[i])


@_compiled
def step_into(p, m, v, g, out, c):
    """Step, and write the new p into out, which must not overlap the other arrays."""
    for i in range(p.size):
        p[i], m[i], v[i] = _stepped(p[i], m[i], v[i], g[i], c)
        out[i] = narrow(p[i], out[i])


@_compiled
def round_into(p, out):
    for i in range(p.size):
        out[i] = narrow(p[i], out[i])


@_compiled
def undo(p, m, v, g, c):
    for i in range(p.size):
        before = (p[i] - _change(m[i], v[i], c)) / c.keep
        x = _gradient(before, g[i], c)
        p[i] = before
        m[i] = (m[i] - c.rest1 * x) / c.beta1 if c.beta1 != 0 else 0
        v[i] = max((v[i] - c.rest2 * x * x) / c.beta2, 0) if c.beta2 != 0 else 0
