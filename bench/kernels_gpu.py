"""How near the kernels are to what memory allows: each one's time beside the time its bytes take in a copy.

    python bench/kernels_gpu.py --out bench/results/kernels_gpu.json
    python bench/kernels_gpu.py --sweep

Bytes are what has to move: every input once and every output once (min-max codes and powersgd read their input twice,
because what they do with it is known only after all of it was seen). --sweep tries tile sizes for encode_blocks and
add_blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from paceline import registry
from paceline.comm.threads import Room, ThreadComm
from paceline.core.bucket import Bucket
from paceline.core.pipeline import Pipeline
from paceline.kernels import gpu
from paceline.kernels.code import BlockCode

QSGD4, QSGD8 = BlockCode("uniform", 4, 1024, "max"), BlockCode("uniform", 8, 1024, "max")
NUQSGD, SIGN = BlockCode("powers", 4, 1024, "l2"), BlockCode("sign", 1, 1024, "mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--n", type=int, default=100_000_000, help="elements, in fp32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="tile sizes of encode_blocks and add_blocks")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.n, device="cuda")
    copy_ms = timed(lambda y: y.copy_(x), args.rounds, torch.empty_like(x))
    bandwidth = 2 * x.nbytes / copy_ms  # bytes a millisecond
    result: dict[str, Any] = {
        "bench": "kernels_gpu",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "elements": args.n,
        "copy_ms": round(copy_ms, 4),
        "copy_tb_s": round(bandwidth / 1e9, 3),
        "tiles": {name: getattr(gpu, name)._asdict() for name in ("ENCODE", "ADD", "BYTES", "SPAN", "SELECT")},
    }
    print(json.dumps(result), flush=True)
    rows = sweep(x, args.rounds, bandwidth) if args.sweep else kernels(x, args.rounds, bandwidth)
    result["sweep" if args.sweep else "kernels"] = rows
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def timed(work: Callable[..., Any], rounds: int, *args: Any) -> float:
    """Median milliseconds on the device, after three rounds that compile and warm up.

    The device has something long to do first, so that the host, who needs as long for some of these, is ahead of it.
    """
    for _ in range(3):
        work(*args)
    long = torch.ones(8192, 8192, device="cuda")
    torch.mm(long, long)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*args)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def row(name: str, bandwidth: float, rounds: int, moved: int, make: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """One kernel, or the error it gave: the others are measured all the same."""
    line: dict[str, Any] = {"kernel": name}
    try:
        ms, least = timed(make(), rounds), moved / bandwidth
        line |= {"ms": round(ms, 4), "bytes": moved, "bytes_ms": round(least, 4), "ratio": round(ms / least, 3)}
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(line), flush=True)
    return line


def encoding(x: Tensor, code: BlockCode) -> tuple[int, Callable[[], Callable[[], Any]]]:
    return x.nbytes + code.bytes(x.numel()), lambda: lambda: gpu.encode_blocks(x, code, 12345)


def adding(x: Tensor, code: BlockCode, world_size: int, keep: bool) -> tuple[int, Callable[[], Callable[[], Any]]]:
    """keep: error feedback's update, into a copy so that x stays what it is."""

    def make() -> Callable[[], Any]:
        coded = torch.stack([gpu.encode_blocks(x, code, key) for key in range(world_size)])
        into, factor = x.clone(), -1.0 if keep else 1 / world_size
        return lambda: gpu.add_blocks(into, coded, code, factor=factor, keep=keep)

    return (1 + keep) * x.nbytes + world_size * code.bytes(x.numel()), make


def kernels(x: Tensor, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    n, lines = x.numel(), []

    def measure(name: str, moved: int, make: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
        lines.append(row(name, bandwidth, rounds, moved, make))
        return lines[-1]

    codes = {"uniform 4": QSGD4, "uniform 8": QSGD8, "powers 4": NUQSGD, "sign": SIGN}
    for name, code in codes.items():
        measure(f"encode_blocks {name}", *encoding(x, code))
    half = x.bfloat16()
    measure("encode_blocks uniform 4, bf16", *encoding(half, QSGD4))
    for name, code in codes.items():
        measure(f"add_blocks {name}, W=1, keep", *adding(x, code, 1, True))
        measure(f"add_blocks {name}, W=2", *adding(x, code, 2, False))
    measure("add_blocks uniform 4, W=8", *adding(x, QSGD4, 8, False))

    def bytes_of(world_size: int, keep: bool) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            coded, into = gpu.encode_bytes(x[None]).expand(world_size, -1).contiguous(), x.clone()
            return lambda: gpu.add_bytes(into, coded, factor=-1.0 if keep else 1 / world_size, keep=keep)

        return make

    measure("encode_bytes", 2 * x.nbytes + n, lambda: lambda: gpu.encode_bytes(x[None]))
    measure("encode_bytes, 8 rows", 2 * x.nbytes + n, lambda: lambda: gpu.encode_bytes(x[: n // 32 * 32].view(8, -1)))
    measure("aminmax of torch", x.nbytes, lambda: lambda: x.aminmax())
    measure("add_bytes W=1, keep", 2 * x.nbytes + n, bytes_of(1, True))
    measure("add_bytes W=2", x.nbytes + 2 * n, bytes_of(2, False))
    for share in (0.01, 0.001):
        k = math.ceil(share * n)
        line = measure(f"largest {share:.1%}", x.nbytes + 8 * k, lambda k=k: lambda: gpu.largest(x, k))
        plain = measure(
            f"topk of torch {share:.1%}", x.nbytes + 8 * k, lambda k=k: lambda: x.abs().topk(k, sorted=False).indices
        )
        if "ms" in line and "ms" in plain:
            line["faster_than_topk"] = round(plain["ms"] / line["ms"], 2)
        measure(f"threshold of largest {share:.1%}", 4 << 16, lambda k=k: lambda: gpu.threshold(x, k, spare=-1.0))
        tau = gpu.threshold(x, k, spare=-1.0)
        moved = x.nbytes + 8 * k
        measure(f"those above it {share:.1%}", moved, lambda k=k, tau=tau: lambda: gpu.above(x, tau, k))
    side = 1 << (n // 6).bit_length() // 2
    moved = 3 * 6 * side * side * 4  # every matrix is read twice and its mean written once
    measure(f"powersgd rank 4, 6 matrices of {side}", moved, lambda: powersgd(side, bare=False))
    measure("its products alone", moved, lambda: powersgd(side, bare=True))
    return lines


def powersgd(side: int, *, bare: bool) -> Callable[[], Any]:
    """The mean of a world of one, or only the products in it."""
    named = [(f"p{i}", torch.nn.Parameter(torch.randn(side, side, device="cuda"))) for i in range(6)]
    b, reducer, pipeline = Bucket(0, named, 1), registry.find("powersgd")(rank=4), Pipeline()
    x = torch.randn(b.flat.numel(), device="cuda")
    x[b.n :] = 0.0
    M = [x[s.start : s.stop].view(side, side) for s in b.slots]
    P, Qt = torch.randn(side, 4, device="cuda"), torch.randn(4, side, device="cuda")
    out = torch.empty_like(x)
    means = [out[s.start : s.stop].view(side, side) for s in b.slots]

    def products() -> None:
        for m, mean in zip(M, means, strict=True):
            m @ Qt.T
            P.T @ m
            torch.mm(P, Qt, out=mean)

    async def whole() -> None:
        await reducer.mean(b, x, ThreadComm(Room(1), 0))

    def step() -> None:
        pipeline.start(whole())
        pipeline.drain()

    return products if bare else step


def sweep(x: Tensor, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    lines = []
    tried = [
        (gpu.ENCODE, "ENCODE", f"encode_blocks {c.levels} {c.bits}", encoding(x, c)) for c in (QSGD4, NUQSGD, SIGN)
    ]
    tried += [
        (gpu.ADD, "ADD", f"add_blocks uniform 4, W={world_size}, keep={keep}", adding(x, QSGD4, world_size, keep))
        for world_size, keep in ((1, True), (2, False))
    ]
    for before, which, name, (moved, make) in tried:
        mine = []
        for values in (1024, 2048, 4096, 8192, 16384):
            for each in (8, 16, 32, 64):
                tile = gpu.Tile(values, max(values, before.most), each)
                setattr(gpu, which, tile)
                try:
                    line = row(f"{name}: {which} = {tuple(tile)}", bandwidth, rounds, moved, make)
                finally:
                    setattr(gpu, which, before)
                mine.append(line)
        done = [line for line in mine if "ms" in line]
        if done:
            print("best:", json.dumps(min(done, key=lambda line: line["ms"])), flush=True)
        lines += mine
    return lines


if __name__ == "__main__":
    main()
