"""Adam on the CPU with bf16 gradients in and bf16 weights out: parameters a second, by threads.

    python bench/adam_cpu.py --threads 1,2 --out bench/results/adam_cpu.json

ours    one pass, several Python threads, each a piece at a time
plain   the same without numba
torch   torch's fused AdamW over the whole vector, the two conversions apart
pieces  torch's fused AdamW and conversions over pieces of the same size
memory  fp32 numbers read and written in place, which is all that 28 bytes a parameter can be measured against

They take turns; medians. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.kernels import adam
from paceline.tools.race.result import header

A = adam.Adam(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False)
BYTES = 28  # a parameter: p, m and v read and written in fp32, g read and the new p written in bf16


def contenders(n: int, piece: int, pool: ThreadPoolExecutor) -> dict[str, Callable[[], None]]:
    p, m, v = torch.randn(n), torch.zeros(n), torch.zeros(n)
    g = (torch.randn(n) * 1e-2).bfloat16()  # ours leaves weights in it, which are a gradient as good as any
    wide = torch.empty(n)
    t = torch.ones(())

    def in_threads(work: Callable[[slice], None]) -> None:
        list(pool.map(work, (slice(i, min(n, i + piece)) for i in range(0, n, piece))))

    def one(s: slice) -> None:
        adam.step(A, 100, p[s], m[s], v[s], g[s], g[s])

    def plain() -> None:
        with mock.patch.object(adam, "_compiled", return_value=None):
            in_threads(one)

    def fused(s: slice) -> None:
        x = wide[s].copy_(g[s])
        _fused(p[s], x, m[s], v[s], t)
        g[s].copy_(p[s])

    def pieces() -> None:
        for i in range(0, n, piece):
            fused(slice(i, min(n, i + piece)))

    def memory() -> None:
        in_threads(lambda s: [x[s].mul_(1.0) for x in (p, m, v)])

    works = {
        "ours": lambda: in_threads(one),
        "plain": plain,
        "torch": lambda: fused(slice(0, n)),
        "pieces": pieces,
        "memory": memory,
    }
    return works if adam.compiled() else {name: work for name, work in works.items() if name != "ours"}


def _fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor) -> None:
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [t],
        lr=A.lr, beta1=A.beta1, beta2=A.beta2, weight_decay=A.weight_decay, eps=A.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def seconds(works: dict[str, Callable[[], None]], threads: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, work in works.items():
            torch.set_num_threads(threads if name in ("torch", "pieces") else 1)  # the others bring their own
            began = time.perf_counter()
            work()
            if i:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(took) for name, took in times.items()}


def measure(threads: int, n: int, piece: int, rounds: int) -> dict[str, Any]:
    with ThreadPoolExecutor(threads) as pool:
        works = contenders(n, piece, pool)
        took = seconds(works, threads, rounds)
    stream = 24 * n / took.pop("memory")
    row: dict[str, Any] = {"threads": threads, "memory_gb_per_s": round(stream / 1e9, 1)}
    for name, s in took.items():
        row[name] = {"g_params_per_s": round(n / s / 1e9, 3), "share_of_memory": round(BYTES * n / s / stream, 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, cores}))), help="e.g. 1,2,4")
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--piece", type=int, default=1 << 20, help="elements a thread takes at a time")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for threads in map(int, args.threads.split(",")):
        rows.append(measure(threads, args.parameters, args.piece, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    result = header("adam_cpu") | {"parameters": args.parameters, "piece": args.piece, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
