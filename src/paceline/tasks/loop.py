"""What the jobs share besides their loop: options, the walk over the data, accuracy on held-out samples."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import paceline


def arguments(
    description: str | None,
    *,
    steps: int,
    batch: int,
    eval_every: int,
    momentum: float | None = None,
    data: bool = False,
) -> argparse.Namespace:
    """The command line of a job. `momentum` is for jobs whose optimizer has it, `data` for those with a folder."""
    text = (description or "").strip().partition("\n")[0]
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=steps, help="optimizer steps")
    parser.add_argument("--batch", type=_positive, default=batch, help="samples in a step, over all workers")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    parser.add_argument("--eval-every", type=_positive, default=eval_every, help="steps between evaluations")
    parser.add_argument("--bucket-mb", type=float, default=None, help="gradients to an exchange (default: by the link)")
    if momentum is not None:
        parser.add_argument("--momentum", type=float, default=momentum, help="of SGD")
    if data:
        parser.add_argument("--data", default=None, help="the folder the data files are in")
    return parser.parse_args()


def batches(loader: Iterable[Any], steps: int) -> Iterator[tuple[int, Any]]:
    """(step, batch) from step 1 on, over as many epochs as it takes.

    An epoch without a single batch ends it: in a race the loader runs dry once this contender has to stop.
    """
    step = 0
    while True:
        before = step
        for batch in loader:
            step += 1
            yield step, batch
            if step == steps:
                return
        if step == before:
            return


def mine(count: int) -> range:
    """The indices of `count` held-out samples that this worker evaluates: every sample has one worker.

    Where workers keep their own pace each evaluates them all: to share would mean to wait.
    """
    return range(count) if paceline.own_pace() else range(paceline.rank(), count, paceline.world())


def over_workers(*totals: float, count: int) -> list[float]:
    """Each total divided by the count, both summed over all workers: exact for unequal shares too."""
    sums = torch.tensor([*totals, count], dtype=torch.float64)
    means = (sums if paceline.own_pace() else paceline.mean(sums)).tolist()
    return [total / max(means[-1], 1e-9) for total in means[:-1]]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of the samples whose label the model names, each worker asking for its own."""
    own = torch.tensor(mine(len(y)))
    model.eval()
    # One call, however many samples: a sharded peer gathers its weights in each, on all workers alike.
    guesses = model(x[own]).argmax(1)
    model.train()
    return over_workers((guesses == y[own]).sum().item(), count=len(own))[0]


def show(step: int, **values: float) -> None:
    """One line, from one worker."""
    if paceline.rank() == 0:
        columns = itertools.chain([f"step {step:5d}"], (f"{name} {value:.4f}" for name, value in values.items()))
        print("  ".join(columns), flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value
