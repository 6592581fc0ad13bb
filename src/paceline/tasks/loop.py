"""What the jobs share besides their loop: options, the walk over the data, accuracy on held-out samples."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
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
    parser.add_argument("--eval-later", action="store_true", help="keep copies of the weights, evaluate at the end")
    parser.add_argument("--slow", type=int, default=None, metavar="RANK", help="a worker that takes twice as long")
    parser.add_argument("--falling", action="store_true", help="let the learning rate fall to zero over the steps")
    parser.add_argument("--rising", type=_positive, default=1, help="the step with the full learning rate")
    parser.add_argument("--bucket-mb", type=float, default=None, help="gradients to an exchange (default: by the link)")
    if momentum is not None:
        parser.add_argument("--momentum", type=float, default=momentum, help="of SGD")
    if data:
        parser.add_argument("--data", default=None, help="the folder the data files are in")
    return parser.parse_args()


def batches(loader: Iterable[Any], steps: int, slow: int | None = None) -> Iterator[tuple[int, Any]]:
    """(step, batch) from step 1 on, over as many epochs as it takes.

    An epoch without a single batch ends it: in a race the loader runs dry once this contender has to stop. The worker
    `slow` sleeps as long as it computes: a machine of half the speed.
    """
    step = 0
    while True:
        before = step
        for batch in loader:
            step += 1
            began = time.thread_time()
            yield step, batch
            if slow == paceline.rank():
                time.sleep(time.thread_time() - began)
            if step == steps:
                return
        if step == before:
            return


def schedule(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> torch.optim.lr_scheduler.LRScheduler:
    """Of the learning rate: constant, or a straight line to zero; before it, if asked, one up to there."""

    def share(step: int) -> float:
        risen: float = (step + 1) / args.rising
        return min(risen, max(0.0, 1 - step / args.steps) if args.falling else 1.0)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class Evaluations:
    """A look at the model now and then, at the weights all workers agree on.

    Later, if asked: where workers keep their own pace, one that stops to look gives the others time for nothing. Then
    a copy of the weights is kept, and looked at when training is over.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, evaluate: Callable[[], dict[str, float]]) -> None:
        self.every, self.later = args.eval_every, args.eval_later
        self.model, self.evaluate = model, evaluate
        self._kept: list[tuple[int, Any, dict[str, Tensor]]] = []

    def after(self, step: int, loss: float) -> None:
        if step % self.every:
            return
        with paceline.untimed(), paceline.agreed(wait=False):
            moment = paceline.moment()
            if self.later:
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self._kept.append((step, moment, weights))
            else:
                values = self.evaluate()
                show(step, loss=loss, **values)
                paceline.log(at=moment, **values)

    def end(self) -> None:
        """Training is over: of all workers, so that nobody waits for one that only looks."""
        with paceline.agreed():
            for step, moment, weights in self._kept:
                self.model.load_state_dict(weights)
                values = self.evaluate()
                show(step, **values)
                paceline.log(at=moment, **values)


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
