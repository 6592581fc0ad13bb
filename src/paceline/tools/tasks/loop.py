"""What the training loops of the built-in tasks share: options, the way through the data, evaluation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.data.loader import Loader


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """The values of a task's options that are not given on its command line."""

    steps: int
    batch: int
    eval_every: int
    momentum: float | None = None  # None: its optimizer has none, and there is no such option
    has_data_folder: bool = False  # True: there is an option --data


def parse_arguments(description: str | None, defaults: TaskDefaults) -> argparse.Namespace:
    """The options of a task, from its command line."""
    text = (description or "").strip().partition("\n")[0]
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=defaults.steps, help="optimizer steps")
    parser.add_argument("--batch", type=_positive, default=defaults.batch, help="samples in a step, over all workers")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    parser.add_argument("--eval-every", type=_positive, default=defaults.eval_every, help="steps between evaluations")
    parser.add_argument("--eval-later", action="store_true", help="keep copies of the weights, evaluate at the end")
    parser.add_argument("--slow-worker", type=int, metavar="RANK", help="a worker that takes twice as long")
    parser.add_argument("--lr-decay", action="store_true", help="let the learning rate fall to zero over the steps")
    parser.add_argument("--lr-warmup", type=_positive, default=1, help="the step with the full learning rate")
    parser.add_argument("--bucket-mb", type=float, default=None, help="gradients to an exchange (default: by the link)")
    if defaults.momentum is not None:
        parser.add_argument("--momentum", type=float, default=defaults.momentum, help="of SGD")
    if defaults.has_data_folder:
        parser.add_argument("--data", default=None, help="the folder the data files are in")
    return parser.parse_args()


def in_step(loader: Iterable[Any]) -> bool:
    """Will other micro-batches of the step follow this one? Schedules and evaluations go by steps."""
    return isinstance(loader, Loader) and loader.in_step


def batches(loader: Iterable[Any], steps: int, slow_worker: int | None = None) -> Iterator[tuple[int, Any]]:
    """(step, batch) from step 1 on, over as many epochs as it takes. A step may have several batches: `in_step`.

    An epoch without a single batch ends it: in a race the loader gives no more batches once this contender has
    to stop. The worker of rank `slow_worker` sleeps as long as it computes, like a machine of half the speed.
    """
    step, goes_on = 0, False
    while True:
        before = step
        for batch in loader:
            step += not goes_on
            began = time.thread_time()
            yield step, batch
            if slow_worker == paceline.rank():
                time.sleep(time.thread_time() - began)
            goes_on = in_step(loader)
            if step == steps and not goes_on:
                return
        if step == before:
            return


def lr_schedule(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule of the learning rate: constant, or with --lr-decay a straight line to zero.

    With --lr-warmup a straight line leads up to it first.
    """

    def factor(step: int) -> float:
        warmed_up: float = (step + 1) / args.lr_warmup
        decayed = max(0.0, 1 - step / args.steps) if args.lr_decay else 1.0
        return min(warmed_up, decayed)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Evaluations:
    """Evaluates the model every few steps, with the weights that all workers agree on.

    With --eval-later a copy of the weights is kept instead, and evaluated when training is over. Where workers
    do not wait for each other, a worker that stops to evaluate would give the others a head start.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, evaluate: Callable[[], dict[str, float]]) -> None:
        self.every, self.later = args.eval_every, args.eval_later
        self.model, self.evaluate = model, evaluate
        self._kept: list[tuple[int, Any, dict[str, Tensor]]] = []

    def after(self, step: int, loss: float) -> None:
        """Evaluate, or keep the weights for later, if it is time for that after this step."""
        if step % self.every:
            return
        with paceline.untimed(), paceline.consensus(wait=False):
            moment = paceline.moment()
            if self.later:
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self._kept.append((step, moment, weights))
            else:
                values = self.evaluate()
                print_values(step, loss=loss, **values)
                paceline.log(at=moment, **values)

    def end(self) -> None:
        """Evaluate the weights that were kept. Training is over on all workers by then, so no worker waits for it."""
        with paceline.consensus():
            for step, moment, weights in self._kept:
                self.model.load_state_dict(weights)
                values = self.evaluate()
                print_values(step, **values)
                paceline.log(at=moment, **values)


def own_samples(count: int) -> range:
    """The indices of the held-out samples, of `count`, that this worker evaluates: each sample has one worker.

    Where workers do not wait for each other, every worker evaluates all samples: sharing them would be a wait.
    """
    return range(count) if paceline.is_async() else range(paceline.rank(), count, paceline.world_size())


def mean_over_workers(*totals: float, count: int) -> list[float]:
    """Each total divided by the count, both summed over all workers. This is exact for unequal shares too."""
    sums = torch.tensor([*totals, count], dtype=torch.float64)
    means = (sums if paceline.is_async() else paceline.mean(sums)).tolist()
    return [total / max(means[-1], 1e-9) for total in means[:-1]]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of the samples whose label the model predicts. Each worker evaluates its own samples."""
    own = torch.tensor(own_samples(len(y)))
    model.eval()
    # One call for all samples: a sharded peer gathers its weights in every call, so all workers must make equally many.
    guesses = model(x[own]).argmax(1)
    model.train()
    return mean_over_workers((guesses == y[own]).sum().item(), count=len(own))[0]


def print_values(step: int, **values: float) -> None:
    """Print the values after a step as one line, on worker 0 only."""
    if paceline.rank() == 0:
        columns = [f"step {step:5d}", *(f"{name} {value:.4f}" for name, value in values.items())]
        print("  ".join(columns), flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value
