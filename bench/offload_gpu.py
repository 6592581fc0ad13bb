"""One GPU, a model whose optimizer state is in the host's memory: seconds a step, beside all of it on the GPU.

    python bench/offload_gpu.py --out bench/results/offload_gpu.json
    python bench/offload_gpu.py --out bench/results/offload_gpu.json --rows 20B,13B-auto --folder /scratch

A GPT in bf16 with activation checkpointing, sequences of 1024. Every case is a process of its own, with a time limit of
its own: some take most of the machine. Each is written as it ends, in the place of an earlier one of that name.
`device`, `cpu`, `nvme` and `auto` are zero2 with that store (zero3 where the knobs say `params`); `cpu` keeps none on
the GPU but `device_gb`, `auto` chooses, and `nvme` and `auto` may use the disk under --folder, where the knobs say
FOLDER. `plain` is a loop without Paceline, weights and moments in bf16 with no master; `fsdp2` is torch's FSDP2 with
its CPU offload. The losses of the first steps are kept: all start from the same weights and see the same data.

Where clipping is measured, a case goes on in phases, as `step_s_by_phase` has them: without, with a norm that is never
reached, with one that is always reached, and without again. --rows may name a row more than once, so that rows can
take turns.

A host is often shared, and its memory slower in one minute than in another, the first of a machine above all. So each
row says how many parameters torch's fused AdamW steps in a second there, alone, just before, and keeps in `earlier`
what was measured when it was run before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEQUENCE, VOCABULARY = 1024, 50304
SIZES = {
    "0.1B": (8, 768, 12),
    "1.4B": (24, 2048, 16),
    "6.9B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "20B": (44, 6144, 48),
}


@dataclass(frozen=True)
class Case:
    """One row: a size, a batch, and how its state is held."""

    size: str
    batch: int
    how: str
    knobs: str = "{}"
    steps: int = 12
    warmup: int = 3
    limit_s: float = 240.0
    clips: bool = False  # then with gradients clipped too: `PHASES`

    def name(self) -> str:
        return f"{self.size} batch {self.batch} {self.how} {self.knobs if self.knobs != '{}' else ''}".strip()


# The largest norm gradients are clipped to: not at all, to one they never have, to one they always have, not at all.
PHASES: dict[str, float | None] = {"free": None, "clip 1e9": 1e9, "clip 1e-3": 1e-3, "free again": None}

CASES = {  # by what --rows calls them
    "1.4B-device": Case("1.4B", 8, "device"),
    "1.4B-auto": Case("1.4B", 8, "auto"),
    "1.4B-cpu": Case("1.4B", 8, "cpu", clips=True),
    "1.4B-late": Case("1.4B", 8, "cpu", '{"step": "late"}', clips=True),
    "1.4B-stream": Case("1.4B", 8, "cpu", '{"step": "stream"}'),
    "1.4B-on_step": Case("1.4B", 8, "cpu", '{"step": "on_step"}', clips=True),
    "1.4B-nvme": Case("1.4B", 8, "nvme", '{"path": "FOLDER"}', steps=3),
    "1.4B-zero3": Case("1.4B", 8, "cpu", '{"params": "cpu"}'),
    "1.4B-part": Case("1.4B", 8, "cpu", '{"device_gb": 2.5}'),
    "1.4B-all": Case("1.4B", 8, "cpu", '{"device_gb": 40}'),
    "1.4B-plain": Case("1.4B", 8, "plain"),
    "1.4B-fsdp2": Case("1.4B", 8, "fsdp2"),
    "1.4B-32-device": Case("1.4B", 32, "device"),
    "1.4B-32-cpu": Case("1.4B", 32, "cpu", clips=True),
    "1.4B-32-late": Case("1.4B", 32, "cpu", '{"step": "late"}', clips=True),
    "1.4B-32-stream": Case("1.4B", 32, "cpu", '{"step": "stream"}'),
    "1.4B-32-on_step": Case("1.4B", 32, "cpu", '{"step": "on_step"}', clips=True),
    "1.4B-32-part": Case("1.4B", 32, "cpu", '{"device_gb": 2.5}'),
    "6.9B-cpu": Case("6.9B", 8, "cpu"),
    "6.9B-part": Case("6.9B", 8, "cpu", '{"device_gb": 60}'),
    "13B-part": Case("13B", 8, "cpu", '{"device_gb": 60}'),
    "13B-auto": Case("13B", 8, "auto", '{"path": "FOLDER"}'),
    "20B": Case("20B", 8, "auto", '{"path": "FOLDER", "step": "stream"}', steps=2, warmup=1, limit_s=480.0),
}


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(seen)
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The head is not tied to the embedding."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def build(size: str) -> GPT:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = GPT(*SIZES[size])
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
    torch.set_default_dtype(before)
    return model


def prepared(case: Case, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(case.size)
    if case.how == "fsdp2":
        return _fsdp2(model)
    if case.how == "plain":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    import paceline

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    knobs = {key: folder if value == "FOLDER" else value for key, value in json.loads(case.knobs).items()}
    stage = "zero3" if "params" in knobs else "zero2"
    model, optimizer = paceline.prepare(model, optimizer, method=stage, store=case.how, **knobs)
    return model, optimizer


def _fsdp2(model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch import distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl")
    model.float()
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def host_rate() -> float:
    """G parameters/s."""
    params = [torch.zeros(1 << 22, requires_grad=True) for _ in range(64)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer, took = torch.optim.AdamW(params, fused=True), []
    for _ in range(9):
        began = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - began)
    return round(sum(p.numel() for p in params) / statistics.median(took[2:]) / 1e9, 2)


def measure(case: Case, folder: str) -> dict[str, Any]:
    began = time.perf_counter()
    model, optimizer = prepared(case, folder)
    generator = torch.Generator("cuda").manual_seed(1)
    losses, took = [], []
    phases = list(PHASES) if case.clips else ["free"]
    for step in range(case.warmup + case.steps * len(phases)):
        phase = phases[max(step - case.warmup, 0) // case.steps]
        tokens = torch.randint(VOCABULARY // 64, (case.batch, SEQUENCE + 1), device="cuda", generator=generator)
        torch.cuda.synchronize()
        if step == 1:
            ready = time.perf_counter() - began
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if (largest := PHASES[phase]) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    ends = range(case.warmup, len(took) + 1, case.steps)
    medians = [round(statistics.median(took[a:b]), 4) for a, b in itertools.pairwise(ends)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": medians[0],
        "step_s_by_phase": dict(zip(phases, medians, strict=True)),
        "steps_s": [round(t, 4) for t in took],
        "first_step_after_s": round(ready, 1),
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "host_gib": round(_most_memory() / 2**30, 2),
        "losses": [round(x, 4) for x in losses],
        "state_gb": _where(optimizer),
    }


def _most_memory() -> int:
    """Bytes this process has had at once. What getrusage says begins with its parent's, which has stepped as well."""
    return next(
        1024 * int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def _where(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """GB of the optimizer's state in each place, where Paceline has it."""
    from paceline.offload.nvme import OnDisk
    from paceline.session.session import current

    engine = current().by_optimizer.get(id(optimizer)) if current() else None
    if engine is None or not hasattr(engine.method.layout, "offload"):
        return {}
    offload = engine.method.layout.offload
    places = {"device": 0, "host": 0, "disk": 0}
    for b in engine.buckets:
        offloaded = offload.buckets.get(b.index) if offload else None
        place = "device" if offloaded is None else "disk" if isinstance(offloaded.vectors, OnDisk) else "host"
        places[place] += 12 * b.n
    return {place: round(n / 1e9, 2) for place, n in places.items()}


def run(case: Case, folder: str, limit_s: float) -> dict[str, Any]:
    """In a process of its own. The end of what it said goes along: what lies where, or why it failed."""
    command = [sys.executable, __file__, "--one", json.dumps(vars(case)), "--folder", folder]
    env = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    }  # some fill the GPU, and gaps would not do
    row = {"case": case.name(), **vars(case), "host_gparams_s": host_rate()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace").strip()
        return row | {"error": f"more than {limit_s:.0f} s; {said[-1000:]}"}
    if done.returncode != 0:
        return row | {"error": done.stderr.strip()[-1500:]}
    said = [line for line in done.stderr.splitlines() if line.startswith("paceline: optimizer state")]
    return row | json.loads(done.stdout.strip().splitlines()[-1]) | ({"said": said[0]} if said else {})


def added(row: dict[str, Any], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, this one in the place of the one that was of its case."""
    old = [one for one in known if one["case"] == row["case"]]
    kept = ("step_s", "step_s_by_phase", "host_gparams_s", "date", "commit")
    earlier = [
        *(reading for one in old for reading in one.get("earlier", [])),
        *({key: one[key] for key in kept if key in one} for one in old),
    ]
    return [one for one in known if one["case"] != row["case"]] + [row | ({"earlier": earlier} if earlier else {})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument(
        "--case", action="append", default=[], help='another, as JSON: {"size": "1.4B", "batch": 8, "how": "cpu"}'
    )
    parser.add_argument("--folder", default=".", help="on a local disk, for state that is there")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all of them")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Case(**json.loads(args.one)), args.folder)))
        return
    from paceline.telemetry.files import write
    from paceline.tools.race import result

    names = [name for name in args.rows.split(",") if name] if not args.case else []
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--rows {unknown[0]}: known are {', '.join(CASES)}")
    cases = [CASES[name] for name in names] + [Case(**json.loads(text)) for text in args.case]
    began = time.monotonic()
    for case in cases:
        left = args.limit - (time.monotonic() - began)
        if left < 30:
            print(f"{case.name():44s} not begun: {args.limit:.0f} s are over", flush=True)
            continue
        header = result.header("offload_gpu")
        row = run(case, args.folder, min(case.limit_s, left)) | {"commit": header["commit"], "date": header["date"]}
        print(
            f"{row['case']:44s}",
            row.get("error")
            or f"{row['step_s_by_phase']} s  {row['gpu_gib']:6.1f} GiB on the GPU, {row['host_gib']:6.1f} on the host"
            f"  state in GB {row['state_gb']}; host {row['host_gparams_s']} G parameters/s",
            flush=True,
        )
        if args.out and "error" not in row:
            known = json.loads(args.out.read_text())["cases"] if args.out.exists() else []
            write(args.out, json.dumps({**header, "cases": added(row, known)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
