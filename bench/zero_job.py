"""The job of bench/zero.py: a GPT on made-up text, for ever; or a few steps whose memory is counted."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.tools.lab.live_tensors import LiveTensors
from paceline.tools.tasks.text import BYTES, CONTEXT, ByteGPT

COUNTED = 3  # steps; the first ones make the optimizer's state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="windows for each worker")
    parser.add_argument("--memory", type=Path, help="count, and write what was found into this folder")
    args = parser.parse_args()
    torch.manual_seed(0)
    before = psutil.Process().memory_info().rss
    model: nn.Module = ByteGPT(args.layers, args.width, heads=8)
    count = sum(p.numel() for p in model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(0, BYTES, (64 * args.batch, CONTEXT + 1))
    loader = DataLoader(TensorDataset(text[:, :-1].clone(), text[:, 1:].clone()), batch_size=args.batch)
    live = LiveTensors(model.parameters())
    with live if args.memory else contextlib.nullcontext():
        model, optimizer, loader = paceline.prepare(model, optimizer, loader, batch="per_worker")
        for step in range(10**6):
            live.peak = live.peak if step < COUNTED else 0
            for x, y in loader:
                nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if args.memory:
                    break
            if args.memory and step == COUNTED:
                break
    if args.memory:
        found = {
            "parameters": count,
            "between_steps": live.bytes(),
            "peak": live.peak,
            "rss": psutil.Process().memory_info().rss - before,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        }
        (args.memory / f"{paceline.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
