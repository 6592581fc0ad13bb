"""What the Triton kernels are held against the plain formulations with: by the interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels import blocks, gpu, minmax
from paceline.kernels.code import BlockCode, split
from paceline.kernels.largest import sampled, threshold

KINDS = [
    *(("uniform", bits, norm) for bits in (2, 4, 8) for norm in ("max", "l2")),
    *(("powers", bits, "l2") for bits in (2, 4, 8)),
    ("sign", 1, "mean"),
]


def vector(n: int, kind: str = "normal", *, seed: int = 0) -> Tensor:
    """normal; zeros; wide: magnitudes from 1e-38 to 1e38; huge: just what fits."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    if kind == "wide":
        x = x.sign() * 10 ** (torch.rand(n, generator=g, dtype=torch.float64) * 76 - 38).float()
    if kind == "huge":
        x = x.clamp(-1, 1) * 3e38
    return torch.zeros(n) if kind == "zeros" else x


def encode_blocks(x: Tensor, code: BlockCode, key: int = -123456789) -> None:
    """The bytes of the plain formulation; where norms are sums, a code in ten thousand may be one level off."""
    want, got = blocks.encode(x.cpu(), code, key), gpu.encode_blocks(x, code, key).cpu()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    (norms, packed), (my_norms, my_packed) = split(want[None], code), split(got[None], code)
    if code.norm == "max":
        assert torch.equal(my_norms, norms)
    else:
        torch.testing.assert_close(my_norms, norms, rtol=2e-6, atol=0)
    if code.norm == "max" or code.levels == "sign":
        assert torch.equal(my_packed, packed)
        return
    off = (_codes(my_packed[0], code) - _codes(packed[0], code)).abs()
    assert off.max() <= 1
    assert off.sum() <= max(1, 1e-4 * x.numel())


def _codes(packed: Tensor, code: BlockCode) -> Tensor:
    """As numbers whose neighbours are neighbouring levels."""
    c = torch.empty(len(packed), code.d, dtype=torch.int32)
    blocks._unpack(c, packed, code)
    return c if code.levels == "uniform" else torch.where(c > code.top, code.top - c, c)


def add_blocks(into: Tensor, vectors: list[Tensor], code: BlockCode, *, factor: float, keep: bool) -> None:
    coded = torch.stack([blocks.encode(x, code, i) for i, x in enumerate(vectors)])
    _added(into, coded, keep, blocks.accumulate, gpu.add_blocks, code=code, factor=factor)


def encode_bytes(rows: Tensor) -> None:
    want, got = minmax.encode(rows.cpu().float()), gpu.encode_bytes(rows).cpu()
    assert torch.equal(got, want)


def add_bytes(into: Tensor, rows: Tensor, *, factor: float, keep: bool) -> None:
    size = rows.abs().amax().item()  # of the smallest value and of what is added to it
    _added(into, minmax.encode(rows), keep, minmax.accumulate, gpu.add_bytes, size=3 * size, factor=factor)


def _added(into: Tensor, coded: Tensor, keep: bool, plain, kernel, *, size: float = 0.0, **knobs) -> None:
    """Equal but for the last bits: of the terms, since they may cancel."""
    n = into.numel()
    if not keep:
        into = torch.full_like(into, float("nan"))  # what is not kept is not looked at
    want, got = into.cpu().clone(), into.clone()
    plain(want, coded, keep=keep, **knobs)
    kernel(got, coded.to(into.device), keep=keep, **knobs)
    terms = want.abs().double()
    for one in coded:
        term = torch.empty(n)
        plain(term, one[None], keep=False, **knobs)
        terms += term.abs() + size
    bits = 20 if into.element_size() > 2 else 7
    assert got.dtype == into.dtype
    assert ((got.cpu().double() - want.double()).abs() <= terms * 2.0**-bits).all()


def largest(x: Tensor, k: int) -> None:
    """The same places in the same order as the plain formulation, and what that must be in itself."""
    got = gpu.largest(x, k).cpu()
    x = x.cpu()
    assert got.dtype == torch.int64
    assert len(got.unique()) == k == len(got)
    if x.numel() <= 1 << 14 or 8 * k > x.numel():
        magnitudes = x.abs().float()
        assert torch.equal(magnitudes[got].sort().values, magnitudes.topk(k, sorted=True).values.flip(0))
        return
    above = (x.abs().float() > threshold(x, k, spare=-1.0)).nonzero().view(-1)
    assert torch.isin(above[:k], got).all()
    assert torch.equal(got, sampled(x, k))


def largest_stays_in_its_places(x: Tensor, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written behind the k places, of which there are too few for all that is above the threshold."""
    plain, made = torch.empty, []

    def empty(n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype is not torch.int64:
            return plain(n, dtype=dtype, device=device)
        made.append(torch.full((n + 64,), -7, dtype=dtype, device=device))
        return made[-1][:n]

    with monkeypatch.context() as patched:
        patched.setattr(gpu.torch, "empty", empty)
        places = gpu.above(x, torch.zeros((), device=x.device), k)
    assert (x != 0).sum() > k
    assert (places >= 0).all()
    assert (made[0][k:] == -7).all()


def unlike_its_sample(n: int) -> Tensor:
    """Of every two entries the sample sees the small one: far more are above its threshold than it says."""
    x = vector(n)
    x[1::2] *= 100
    return x
