"""What a world of one costs on a GPU: a 125 M-parameter GPT in bf16, the plain loop beside the prepared one.

    python bench/overhead_gpu.py --out bench/results/overhead_gpu.json

Two copies of one model, one plain and one prepared, take turns of ten steps; the ratio of their median step times is
the overhead. --path full makes the prepared one do all that a worker of several does, but for the network.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline import api
from paceline.tasks.text import Block


class GPT2Small(nn.Module):
    """GPT-2's smallest shape: 12 layers, 768 wide, 12 heads, 50 304 tokens, tied: 124 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
        self.blocks = nn.ModuleList(Block(768, 12) for _ in range(12))
        self.norm = nn.LayerNorm(768)
        self.head = nn.Linear(768, 50304, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--params", choices=["fp32", "bf16"], default="fp32", help="fp32: autocast; bf16: all of it")
    parser.add_argument("--path", choices=["alone", "full"], default="alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    plain = GPT2Small().cuda()
    if args.params == "bf16":
        plain = plain.bfloat16()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (plain, ours)]
    ours, optimizers[1] = paceline.prepare(ours, optimizers[1])
    if args.path == "full":
        engine = api._session.engines[id(optimizers[1])]
        engine.idle = False
        engine.refresh()
    x = torch.randint(0, 50304, (args.batch, 1025), device="cuda")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=args.params == "fp32"):
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn(which: int, steps: int = 10) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step((plain, ours)[which], optimizers[which])
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps * 1e3

    for which in (0, 1):
        turn(which)
    times: list[list[float]] = [[], []]
    for i in range(args.rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            times[which].append(turn(which))
    medians = [statistics.median(t) for t in times]
    result = {
        "bench": "overhead_gpu",
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in plain.parameters()),
        "precision": args.params,
        "path": args.path,
        "batch": args.batch,
        "plain_ms": round(medians[0], 3),
        "paceline_ms": round(medians[1], 3),
        "ratio": round(medians[1] / medians[0], 4),
        "ratios_by_round": [round(b / a, 4) for a, b in zip(*times, strict=True)],
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
