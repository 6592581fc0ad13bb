"""What data parallelism costs on one GPU before any network: a GPT of 124 M parameters, three copies in one process.

    python bench/overhead_gpu.py --out bench/results/overhead_gpu.json

The plain loop, torch DDP over NCCL in a world of one, and the prepared loop take turns of ten steps; what counts is the
ratio of their median step times. --path full makes the prepared one do all that a worker of several does but for the
network, --path idle what it does in a world of one.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn

import paceline
from paceline.session.session import current
from paceline.tools.tasks.text import TransformerBlock


class GPT2Small(nn.Module):
    """GPT-2's smallest shape: 12 layers, 768 wide, 12 heads, 50 304 tokens, tied: 124 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
        self.blocks = nn.ModuleList(TransformerBlock(768, 12) for _ in range(12))
        self.norm = nn.LayerNorm(768)
        self.head = nn.Linear(768, 50304, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def contenders(args: argparse.Namespace, device: str) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    """The plain loop, torch DDP over a world of one, and ours on the path that a worker of several takes, or idle."""
    plain = (GPT2Small() if device == "cuda" else Tiny()).to(device)
    if args.params == "bf16":
        plain = plain.bfloat16()
    models = {"plain": plain, "ddp": copy.deepcopy(plain), "paceline": copy.deepcopy(plain)}
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for n, m in models.items()}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    models["ddp"] = nn.parallel.DistributedDataParallel(models["ddp"])
    paceline.prepare(models["paceline"], optimizers["paceline"], guard=args.guard)
    if args.path == "full":
        session = current()
        assert session is not None
        engine = session.by_optimizer[id(optimizers["paceline"])]
        engine.idle = False
        engine.refresh()
    return {name: (models[name], optimizers[name]) for name in models}


class Tiny(nn.Module):
    """Stands in for the GPT where there is no GPU: to see that the script runs, not to measure."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(50304, 8), nn.Linear(8, 50304)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.token(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--params", choices=["fp32", "bf16"], default="fp32", help="fp32: autocast; bf16: all of it")
    parser.add_argument("--path", choices=["idle", "full"], default="full")
    parser.add_argument("--guard", choices=["skip", "off"], default="skip")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    racing = contenders(args, device)
    x = torch.randint(0, 50304, (args.batch, args.length + 1), device=device)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=args.params == "fp32"):
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn(name: str) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(args.steps):
            step(*racing[name])
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / args.steps * 1e3

    for name in racing:
        turn(name)
    times: dict[str, list[float]] = {name: [] for name in racing}
    for i in range(args.rounds):
        for name in racing if i % 2 == 0 else reversed(racing):
            times[name].append(turn(name))
    medians = {name: statistics.median(took) for name, took in times.items()}
    result = {
        "bench": "overhead_gpu",
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu: a trial of the script, no figure",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in racing["plain"][0].parameters()),
        "precision": args.params,
        "path": args.path,
        "guard": args.guard,
        "batch": args.batch,
        "ms": {name: round(ms, 3) for name, ms in medians.items()},
        "over_plain": {name: round(medians[name] / medians["plain"], 4) for name in ("ddp", "paceline")},
        "over_plain_by_round": {
            name: [round(b / a, 4) for a, b in zip(times["plain"], times[name], strict=True)]
            for name in ("ddp", "paceline")
        },
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
