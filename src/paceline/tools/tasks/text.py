"""A byte-level GPT that learns Python's own standard library: megabytes of real text, on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.errors import DataError
from paceline.tools.tasks.loop import (
    Evaluations,
    TaskDefaults,
    batches,
    in_step,
    lr_schedule,
    mean_over_workers,
    own_samples,
    parse_arguments,
)

CONTEXT = 128
BYTES = 256
MOST = 8_000_000  # bytes of text: reading more takes time, and a short run would not get to it
HELD_OUT_EVERY = 20  # one file in twenty, 5 %
EVALUATED = 64  # held-out windows, always the same ones

# Folders that are not the library itself, or (its tests) not there on every system.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library() -> list[Path]:
    """The standard library's sources, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(inside, key=Path.as_posix) if _SKIPPED.isdisjoint(path.parts)]


def corpus(most: int = MOST) -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes), split by file, so that no held-out function is partly in the training set."""
    train, held_out = bytearray(), bytearray()
    for i, path in enumerate(library()):
        try:
            (held_out if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).extend(path.read_bytes())
        except OSError:
            continue  # a dangling link or another user's file: there is enough text without it
        if len(train) + len(held_out) >= most:
            break
    if min(len(train), len(held_out)) < EVALUATED * (CONTEXT + 1):
        raise DataError(
            f"the standard library has only {len(train) + len(held_out)} bytes of source",
            why="this Python came without its .py files (a frozen or stripped build)",
            do="use a full Python, or another task: `fashion` or `digits`",
        )
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into stretches of CONTEXT bytes. The target of a stretch is the same stretch, one byte later."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        stretch = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1].long()
        return stretch[:-1], stretch[1:]


class TransformerBlock(nn.Module):
    """A transformer layer: attention and a two-layer perceptron, each after a norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        onto: Tensor = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + onto


class ByteGPT(nn.Module):
    """A small GPT over bytes: 1.85 million parameters, a step in a tenth of a second, bytes enough to load a link."""

    def __init__(self, layers: int = 4, width: int = 192, heads: int = 6) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.byte.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The residual path adds 2·layers outputs: smaller weights keep its variance at one (as in GPT-2).
                onto_path = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if onto_path else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


@torch.no_grad()
def evaluate(model: nn.Module, windows: ByteWindows) -> dict[str, float]:
    """The loss, and the share of bytes predicted right, over the same held-out windows every time."""
    spread = len(windows) // EVALUATED  # from all over the held-out files, not from the first of them
    x, y = (torch.stack(part) for part in zip(*(windows[i * spread] for i in own_samples(EVALUATED)), strict=True))
    model.eval()
    logits = model(x)
    model.train()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    right = (logits.argmax(-1) == y).sum().item()
    mean_loss, accuracy = mean_over_workers(loss, right, count=y.numel())
    return {"eval_loss": mean_loss, "accuracy": accuracy}


def main() -> None:
    args = parse_arguments(__doc__, TaskDefaults(steps=200, batch=16, eval_every=50))
    torch.manual_seed(args.seed)
    text, held_out = corpus()
    windows = ByteWindows(held_out)
    model: nn.Module = ByteGPT()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(ByteWindows(text), batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, bucket_mb=args.bucket_mb)
    scheduler = lr_schedule(optimizer, args)
    evaluations = Evaluations(args, model, lambda: evaluate(model, windows))
    for step, (x, y) in batches(loader, args.steps, args.slow_worker):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if in_step(loader):
            continue
        scheduler.step()
        paceline.log(loss=loss.item())
        evaluations.after(step, loss.item())
    evaluations.end()


if __name__ == "__main__":
    main()
