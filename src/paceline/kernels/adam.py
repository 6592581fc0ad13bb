"""Adam and AdamW on the CPU in one pass over memory, for workers whose optimizer state is on the host.

m ← β1·m + (1 − β1)·g        v ← β2·v + (1 − β2)·g²        p ← p·(1 − lr·λ) − lr/(1 − β1^t) · m / (√(v/(1 − β2^t)) + ε)

The weights p and the moments m, v are fp32; g may be the bf16 gradient that came from the device, and `out` gets the
new weights in the type in which they go back. That is 28 bytes a parameter, each moved once, by a loop that numba
compiles (`one_pass.py`), with the same bits as torch's fused Adam. Without numba torch's operations give the same up to
rounding, a chunk that fits the cache at a time.

Both release Python's global interpreter lock: several threads can step parts of one vector at the same time.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError

CHUNK = 1 << 17  # elements: few enough that all vectors of a chunk stay in the cache
Stretch = Callable[[int, int], None]  # does its work on the elements from start to stop
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The settings of one parameter group. decoupled: AdamW's weight decay; otherwise Adam's, which is added to g."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class Rates(NamedTuple):
    """The factors of the inner loop at step t."""

    scale: float  # of g; negative to maximize
    l2: float  # the weight decay that is part of g
    keep: float  # of p: 1 − lr·λ
    beta1: float
    rest1: float  # 1 − β1
    beta2: float
    rest2: float  # 1 − β2
    size: float  # −lr/(1 − β1^t)
    root: float  # √(1 − β2^t)
    eps: float


def of(group: Mapping[str, Any], decoupled: bool) -> Adam | None:
    """The settings in a param group of torch's Adam or AdamW; None if it uses an option that is not supported here."""
    if group.get("amsgrad") or "betas" not in group:
        return None
    beta1, beta2 = group["betas"]
    return Adam(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
        maximize=bool(group.get("maximize", False)),
    )


def step(
    a: Adam, t: int, p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor | None = None, *, scale: float = 1.0
) -> None:
    """Step t, counted from 1, of p, m and v with the gradient scale·g.

    The new p is also written into `out`, rounded to its type; `out` may be the same memory as g. The first call for a
    pair of types compiles the loop; a call with empty vectors does nothing else.
    """
    stepping(a, t, p, m, v, g, out, scale=scale)(0, p.numel())


def undo(a: Adam, t: int, p: Tensor, m: Tensor, v: Tensor, g: Tensor, *, scale: float = 1.0) -> None:
    """Restore p, m and v as they were before step t with this gradient, up to rounding.

    Elements whose g was not finite cannot be restored. If a β is 0, its moment becomes 0, which the next step ignores.
    """
    undoing(a, t, p, m, v, g, scale=scale)(0, p.numel())


def stepping(
    a: Adam, t: int, p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor | None = None, *, scale: float = 1.0
) -> Stretch:
    """`step` as a function of (start, stop), for threads that each step a part of the vectors.

    All preparation is done here, so that each thread holds Python's lock only briefly.
    """
    _check(t, p=p, m=m, v=v, g=g, **({} if out is None else {"out": out}))
    c = _rates(a, t, scale)
    if (loops := _compiled()) is None:
        return _by_stretches(_step, (p, m, v, g, p if out is None else out), c)
    if out is None:
        return _by_stretches(loops.step, map(_array, (p, m, v, g)), _single(c, loops))
    if out.data_ptr() == g.data_ptr() and out.dtype == g.dtype:
        return _by_stretches(loops.step_over, map(_array, (p, m, v, g)), _single(c, loops))
    return _by_stretches(loops.step_into, map(_array, (p, m, v, g, out)), _single(c, loops))


def undoing(a: Adam, t: int, p: Tensor, m: Tensor, v: Tensor, g: Tensor, *, scale: float = 1.0) -> Stretch:
    """`undo` as a function of (start, stop), for threads that each restore a part of the vectors."""
    _check(t, p=p, m=m, v=v, g=g)
    c = _rates(a, t, scale)
    if (loops := _compiled()) is None:
        return _by_stretches(_undo, (p, m, v, g), c)
    return _by_stretches(loops.undo, map(_array, (p, m, v, g)), _single(c, loops))


def rounding(p: Tensor, out: Tensor) -> Stretch:
    """A function of (start, stop) that copies that part of p into out, rounded to the type of out."""
    loops = _compiled()
    if loops is None or p.dtype is not torch.float32 or out.dtype not in _DTYPES:
        return lambda start, stop: _round(p[start:stop], out[start:stop])
    whole = _array(p), _array(out)
    return lambda start, stop: loops.round_into(*(x[start:stop] for x in whole))


def _by_stretches(loop: Callable[..., None], vectors: Iterable[Any], c: Rates) -> Stretch:
    whole = tuple(vectors)
    return lambda start, stop: loop(*(x[start:stop] for x in whole), c)


def compiled() -> bool:
    """Whether numba is installed, so that a step really is one pass over memory."""
    return _compiled() is not None


@functools.cache
def _compiled() -> Any:
    try:
        return importlib.import_module("paceline.kernels.one_pass")
    except ImportError:
        return None


def _check(t: int, **tensors: Tensor) -> None:
    if t < 1:
        raise UsageError(f"step {t} of Adam", why="steps are counted from 1: the bias corrections divide by 1 − β^t")
    n = tensors["p"].numel()
    for name, x in tensors.items():
        known = _DTYPES if name in ("g", "out") else _DTYPES[:1]
        if x.dtype not in known or x.device.type != "cpu" or x.shape != (n,) or not x.is_contiguous():
            raise UsageError(
                f"{name} is a {x.dtype} tensor {list(x.shape)} on {x.device}",
                why=f"Adam on the CPU steps flat contiguous CPU tensors of one length, here {n}",
                do=f"give {name} as {' or '.join(str(d).removeprefix('torch.') for d in known)} [{n}]",
            )


def _rates(a: Adam, t: int, scale: float) -> Rates:
    """The factors of step t, computed in float64 as torch does."""
    return Rates(
        scale=-scale if a.maximize else scale,
        l2=0.0 if a.decoupled else a.weight_decay,
        keep=1 - a.lr * a.weight_decay if a.decoupled else 1.0,
        beta1=a.beta1,
        rest1=1 - a.beta1,
        beta2=a.beta2,
        rest2=1 - a.beta2,
        size=-a.lr / (1 - a.beta1**t),
        root=math.sqrt(1 - a.beta2**t),
        eps=a.eps,
    )


def _single(c: Rates, loops: Any) -> Any:
    return loops.Single(**{name: np.float32(x) for name, x in c._asdict().items()})


def _array(x: Tensor) -> Any:
    """The same memory as a numpy array for numba. [Note: bits] in one_pass.py says how it tells bf16 from fp16."""
    x = x.detach()
    if x.dtype is torch.float32:
        return x.numpy()
    return x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.uint16).numpy()


# ----------------------------------------------------------------------------------------------- without numba


def _step(p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor, c: Rates) -> None:
    chunks = [x.detach().split(CHUNK) for x in (p, m, v, g, out)]
    for p, m, v, g, out in zip(*chunks, strict=True):
        x = _gradient(c, p, g)
        m.lerp_(x, c.rest1)
        v.mul_(c.beta2).addcmul_(x, x, value=c.rest2)
        p.mul_(c.keep).add_(_change(c, m, v))
        out.copy_(p)


def _undo(p: Tensor, m: Tensor, v: Tensor, g: Tensor, c: Rates) -> None:
    chunks = [x.detach().split(CHUNK) for x in (p, m, v, g)]
    for p, m, v, g in zip(*chunks, strict=True):
        p.sub_(_change(c, m, v)).div_(c.keep)
        x = _gradient(c, p, g)
        _ = m.sub_(x, alpha=c.rest1).div_(c.beta1) if c.beta1 else m.zero_()
        _ = v.addcmul_(x, x, value=-c.rest2).div_(c.beta2).clamp_(min=0) if c.beta2 else v.zero_()


def _round(p: Tensor, out: Tensor) -> None:
    out.copy_(p)


def _change(c: Rates, m: Tensor, v: Tensor) -> Tensor:
    """The change that a step adds to p, after weight decay."""
    return m.mul(c.size).div_(v.sqrt().div_(c.root).add_(c.eps))


def _gradient(c: Rates, p: Tensor, g: Tensor) -> Tensor:
    x = g.to(torch.float32, copy=True).mul_(c.scale)
    return x.add_(p, alpha=c.l2) if c.l2 else x
