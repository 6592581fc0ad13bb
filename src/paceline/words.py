"""What workers say to each other in words: JSON over a lane, for set-up, saving and loading. Never in a step."""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.parts import Comm

_CPU = torch.device("cpu")


def tell(comm: Comm, words: Any, device: torch.device = _CPU) -> list[Any]:
    """Everyone's words, by worker."""
    mine = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8).to(device)
    sizes = comm.gather(torch.tensor([mine.numel()], device=device)).wait().flatten().tolist()
    rows = comm.gather(torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))).wait().cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
