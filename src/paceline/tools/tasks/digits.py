"""A small perceptron on scikit-learn's 1 797 handwritten digits: a whole run in seconds, for quick tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import DataError
from paceline.tools.tasks.loop import (
    Evaluations,
    TaskDefaults,
    accuracy,
    batches,
    in_step,
    lr_schedule,
    parse_arguments,
)


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """(training set, test images, test labels). Every fifth digit is for testing."""
    # Only the file is read: importing scikit-learn takes longer than training.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else None
    if file is None or not file.is_file():
        raise DataError(
            "the task `digits` needs scikit-learn, which is not installed",
            why="the images come with that package",
            do="pip install 'paceline[tasks]'",
        )
    rows = np.loadtxt(file, delimiter=",")
    x, y = torch.tensor(rows[:, :-1], dtype=torch.float32) / 16, torch.tensor(rows[:, -1], dtype=torch.long)
    test = torch.arange(len(y)) % 5 == 4
    return TensorDataset(x[~test], y[~test]), x[test], y[test]


def main() -> None:
    args = parse_arguments(__doc__, TaskDefaults(steps=200, batch=64, eval_every=20, momentum=0.9))
    torch.manual_seed(args.seed)
    train, x_test, y_test = digits()
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=args.momentum)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, bucket_mb=args.bucket_mb)
    scheduler = lr_schedule(optimizer, args)
    evaluations = Evaluations(args, model, lambda: {"accuracy": accuracy(model, x_test, y_test)})
    for step, (x, y) in batches(loader, args.steps, args.slow_worker):
        loss = nn.functional.cross_entropy(model(x), y)
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
