"""The job of bench/adapt.py: a small real network whose samples each take a calibrated wait, on workers whose speed
changes while it runs.

On two cores a worker that is slowed by burning CPU would slow the others too. A wait does not: a worker of half the
speed waits twice as long for each sample, half of it in forward and half in backward.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.tools.tasks.fashion import find_data, images

PIECE_S = 0.05  # how long a random speed lasts


class Speed:
    """How much longer than a fast worker this one takes, by the time since training began."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.slow = args.factor if rank == args.slow else 1.0
        self.recovers_s = args.seconds
        self.draw = random.Random(1000 * args.seed + rank) if args.random else None
        self.drawn: list[float] = []
        self.began = 0.0

    def factor(self) -> float:
        passed = time.monotonic() - self.began
        if self.draw is None:
            return self.slow if passed < self.recovers_s else 1.0
        while len(self.drawn) <= passed / PIECE_S:  # Anytime Minibatch's model of a straggler: 1 + Exp(1)
            self.drawn.append(1.0 + self.draw.expovariate(1.0))
        return self.drawn[int(passed / PIECE_S)]

    def wait(self, work_s: float) -> None:
        """Take as long as a fast worker needs for `work_s` of work."""
        left, now = work_s, time.monotonic()
        while left > 0:
            factor = self.factor()
            ends = self.began + PIECE_S * (int((now - self.began) / PIECE_S) + 1)
            stretch = min(left * factor, max(ends - now, 1e-4))
            time.sleep(max(0.0, now + stretch - time.monotonic()))
            left -= stretch / factor
            now += stretch


class Waits(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, speed: Speed, sample_s: float) -> Tensor:
        ctx.speed, ctx.work_s = speed, sample_s * len(x) / 2
        speed.wait(ctx.work_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.speed.wait(ctx.work_s)
        return grads[0], None, None


class Net(nn.Module):
    """A perceptron, or with no width a logistic regression."""

    def __init__(self, inputs: int, width: int, speed: Speed, sample_s: float) -> None:
        super().__init__()
        layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 10)] if width else [nn.Linear(inputs, 10)]
        self.layers = nn.Sequential(*layers)
        self.speed, self.sample_s = speed, sample_s

    def forward(self, x: Tensor) -> Tensor:
        return Waits.apply(self.layers(x), self.speed, self.sample_s)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("made-up", "logistic", "fashion"), default="made-up")
    parser.add_argument("--ddp", action="store_true", help="torch's DDP with join in place of ours")
    parser.add_argument("--counts", type=float, default=1.0, help="share of a batch that an update is made of")
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--sample-ms", type=float, default=0.5, help="wait of a fast worker for one sample")
    parser.add_argument("--slow", type=int, default=-1, help="the rank of the slow worker")
    parser.add_argument("--factor", type=float, default=2.0, help="how much longer it takes")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each half; the slow worker recovers in between")
    parser.add_argument("--random", action="store_true", help="every worker's speed is drawn anew all the time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    speed = Speed(args, rank)
    if args.task == "made-up":
        train = TensorDataset(torch.randn(64 * args.batch, 64), torch.randint(0, 10, (64 * args.batch,)))
        test = train
    else:
        train, test = (images(find_data(None), part) for part in ("train", "t10k"))
    width = {"made-up": 128, "logistic": 0, "fashion": 64}[args.task]
    model: Any = Net(train.tensors[0].shape[1], width, speed, args.sample_ms / 1e3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    if args.ddp:
        dist.init_process_group("gloo")
        sampler: Any = DistributedSampler(train, seed=args.seed, drop_last=True)
        loader: Any = DataLoader(train, args.batch // world_size, sampler=sampler, drop_last=True)
        model = DistributedDataParallel(model)
        with model.join():
            run(args, model, optimizer, loader, speed, test, rank)
        dist.barrier()
        return
    loader = DataLoader(train, args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    run(args, model, optimizer, loader, speed, test, rank)


def run(args: argparse.Namespace, model: Any, optimizer: Any, loader: Any, speed: Speed, test: Any, rank: int) -> None:
    """Train for a set time. Worker 0 notes when samples had counted, and weights to be looked at afterwards."""
    marks: list[tuple[float, float]] = []  # seconds, samples that have counted
    kept: list[tuple[float, dict[str, Tensor]]] = []
    counted, stop = 0.0, 2 * args.seconds
    flag = torch.zeros(1)
    while True:
        for x, y in loader:
            if not speed.began:
                (dist.barrier if args.ddp else paceline.barrier)()
                speed.began = time.monotonic()
            cross_entropy(model(x), y).backward()
            steps = args.ddp or paceline.will_step(optimizer)  # where rounds have a deadline, known by now
            optimizer.step()
            optimizer.zero_grad()
            passed = time.monotonic() - speed.began
            counted += args.batch * args.counts if steps else 0
            if rank == 0 and steps:
                marks.append((passed, counted))
                if args.task != "made-up" and passed >= 0.25 * len(kept):
                    kept.append((passed, {k: v.clone() for k, v in model.state_dict().items()}))
            if args.ddp or not paceline.is_async():
                flag[0] = float(passed > stop)
                ends = dist.broadcast(flag, 0) or flag if args.ddp else paceline.broadcast(flag) if steps else flag * 0
                if bool(ends):
                    return report(args, model, marks, kept, test, rank)
            elif passed > stop:
                return report(args, model, marks, kept, test, rank)


@torch.no_grad()
def report(args: argparse.Namespace, model: Any, marks: Any, kept: Any, test: Any, rank: int) -> None:
    """Print what worker 0 has noted."""
    if rank:
        return
    x, y = test.tensors
    layers = model.module.layers if args.ddp else model.layers
    curve = []
    for passed, weights in kept:
        state = {k.removeprefix("module.").removeprefix("layers."): v for k, v in weights.items()}
        guesses = torch.func.functional_call(layers, state, (x,)).argmax(1)
        curve.append((round(passed, 2), round(float((guesses != y).float().mean()), 4)))
    half = args.seconds
    at = [max((c for t, c in marks if t <= until), default=0.0) for until in (half, 2 * half)]
    print(json.dumps({"per_s": [at[0] / half, (at[1] - at[0]) / half], "curve": curve}), flush=True)


if __name__ == "__main__":
    main()
