"""What compressing costs a CPU: encode and decode of 10 M elements, in memcpys of the same vector.

    python bench/reducers.py --out bench/results/reducers.json

Every code is timed beside a plain whole-vector torch formulation of the same (`plain`) and beside one memcpy, taking
turns; medians. One thread, as a worker of several on one machine has. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.comm.single import SingleComm
from paceline.core.bucket import Bucket
from paceline.core.pipeline import Pipeline
from paceline.kernels import BlockCode, add_blocks, add_bytes, encode_blocks, encode_bytes, key, largest
from paceline.reducers.powersgd import PowerSGD
from paceline.tools.race.result import commit, machine

N = 10_000_000 // 1024 * 1024
D = 1024
Work = Callable[[], Any]


def turns(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Median milliseconds of each; they take turns, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if i:
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(ms) for name, ms in times.items()}


# ------------------------------------------------------------------------------------------ plain formulations


def plain_uniform(x: Tensor, bits: int) -> Tensor:
    s = 2 ** (bits - 1) - 1
    v = x.view(-1, D)
    norm = v.abs().amax(1, keepdim=True)
    code = (torch.rand_like(v) + v * (s / norm)).floor_().clamp_(-s, s).add_(s).to(torch.uint8).view(-1)
    return _pack(code, bits)


def plain_powers(x: Tensor, bits: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    v = x.view(-1, D)
    r = (v / v.norm(dim=1, keepdim=True)).abs()
    _, exponent = torch.frexp(r)
    below = torch.ldexp(torch.ones_like(r), exponent - 1)
    under = r < 2.0 ** (1 - top)
    gap = torch.where(under, 2.0 ** (1 - top), below)
    up = torch.rand_like(r) * gap < r - below.masked_fill(under, 0.0)
    index = torch.where(under, 0, exponent - 1 + top) + up
    return _pack((index.clamp(0, top).to(torch.uint8) | ((v < 0).to(torch.uint8) << (bits - 1))).view(-1), bits)


def plain_sign(x: Tensor) -> Tensor:
    v = x.view(-1, D)
    v.abs().mean(1)
    return _pack((v >= 0).to(torch.uint8).view(-1), 1)


def _pack(code: Tensor, bits: int) -> Tensor:
    parts = code.view(8 // bits, -1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def plain_bytes(x: Tensor) -> Tensor:
    low, high = x.aminmax()
    return ((x - low) * (255 / (high - low))).round_().to(torch.uint8)


# ------------------------------------------------------------------------------------------------ the cases


def cases(x: Tensor, into: Tensor) -> dict[str, dict[str, Work]]:
    out: dict[str, dict[str, Work]] = {}
    for name, code, plain in (
        ("qsgd 4 bits", BlockCode("uniform", 4, D, "max"), lambda: plain_uniform(x, 4)),
        ("qsgd 8 bits", BlockCode("uniform", 8, D, "max"), lambda: plain_uniform(x, 8)),
        ("qsgd 2 bits", BlockCode("uniform", 2, D, "max"), lambda: plain_uniform(x, 2)),
        ("nuqsgd 4 bits", BlockCode("powers", 4, D, "l2"), lambda: plain_powers(x, 4)),
        ("sign", BlockCode("sign", 1, D, "mean"), lambda: plain_sign(x)),
    ):
        out[name] = _block_case(x, into, code, plain)
    coded = encode_bytes(x[None])
    out["int8"] = {
        "encode": lambda: encode_bytes(x[None]),
        "decode": lambda: add_bytes(into, coded, factor=1.0, keep=False),
        "plain": lambda: plain_bytes(x),
    }
    for ratio in (0.01, 0.001):
        k = math.ceil(ratio * N)
        out[f"topk {ratio:.1%}"] = _topk_case(x, into, k)
    return out


def _block_case(x: Tensor, into: Tensor, code: BlockCode, plain: Work) -> dict[str, Work]:
    coded = encode_blocks(x, code, key(1))[None]
    return {
        "encode": lambda: encode_blocks(x, code, key(1)),
        "decode": lambda: add_blocks(into, coded, code, factor=1.0, keep=False),
        "plain": plain,
    }


def _topk_case(x: Tensor, into: Tensor, k: int) -> dict[str, Work]:
    places = largest(x, k, sampled=False)
    found = x[places]

    def encode() -> None:
        x.index_select(0, largest(x, k, sampled=False))

    return {
        "encode": encode,
        "decode": lambda: into.zero_().index_add_(0, places, found),
        "plain": lambda: x.abs().topk(k, sorted=False),
    }


def powersgd(rounds: int) -> dict[str, float]:
    """A whole exchange of one matrix, leftover included, beside its four matrix products."""
    n, m, r = 2000, N // 2000, 4
    b = Bucket(0, [("w", torch.nn.Parameter(torch.zeros(n, m)))], 1)
    reducer, x = PowerSGD(rank=r), torch.randn(b.flat.numel())

    def exchange() -> None:
        async def run() -> None:
            reduced = await reducer.mean(b, x, SingleComm())
            reduced.left()

        pipeline = Pipeline()
        pipeline.start(run())
        pipeline.drain()
        reducer.state.commit()

    M, p, qt, out = torch.randn(n, m), torch.randn(n, r), torch.randn(r, m), torch.empty(n, m)

    def products() -> None:
        _ = M @ qt.T
        _ = p.T @ M
        torch.mm(p, qt, out=out)
        M.addmm_(p, qt, alpha=-1e-9)

    return turns({"exchange": exchange, "products": products}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, into = torch.randn(N), torch.empty(N)
    rows = []
    print(f"{'':14}{'encode':>16}{'decode':>16}{'plain encode':>16}   ms (memcpys)")
    for name, works in cases(x, into).items():
        ms = turns({"memcpy": lambda: into.copy_(x), **works}, args.rounds)
        rows.append({"code": name, **{f"{k}_ms": round(v, 2) for k, v in ms.items()}})
        rows[-1] |= {f"{k}_memcpys": round(ms[k] / ms["memcpy"], 1) for k in ("encode", "decode", "plain")}
        words = [f"{ms[k]:.1f} ({ms[k] / ms['memcpy']:.1f})" for k in ("encode", "decode", "plain")]
        print(f"{name:14}" + "".join(f"{word:>16}" for word in words))
    power = powersgd(args.rounds)
    print(f"powersgd rank 4: {power['exchange']:.1f} ms, its four matrix products {power['products']:.1f} ms")
    result = {
        "bench": "reducers",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": msgspec.to_builtins(machine()),
        "torch": str(torch.__version__),
        "elements": N,
        "rows": rows,
        "powersgd": {k: round(v, 2) for k, v in power.items()},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
