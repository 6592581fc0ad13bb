"""A perceptron on Fashion-MNIST: 60 000 images of clothes, three million weights, so the link matters."""

from __future__ import annotations

import gzip
import os
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

PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts the files


def read_idx(path: Path) -> Tensor:
    """Read a gzipped IDX file of unsigned bytes.

    It begins with 0, 0, the type, the number of dimensions, and each dimension as a big-endian 32-bit number.
    """
    try:
        with gzip.open(path) as file:
            raw = file.read()
        rank = raw[3]
        shape = np.frombuffer(raw, ">u4", rank, offset=4).astype(int)
        if raw[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {raw[:4].hex()}, not with 000008")
        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape).copy())
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(
            f"{path} is not a gzipped IDX file",
            why=str(error),
            do="get it again: the Debian package `dataset-fashion-mnist` has a good copy",
        ) from None


def images(folder: Path, part: str) -> TensorDataset:
    """The images of one part, train or t10k, with their labels. Pixels are scaled to mean zero and variance one."""
    pixels, labels = (folder / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    x, y = read_idx(pixels), read_idx(labels).long()
    if x.shape != (len(y), 28, 28):
        raise DataError(f"{pixels.name} has shape {tuple(x.shape)}, but there are {len(y)} labels")
    return TensorDataset((x.flatten(1) / 255 - 0.286) / 0.353, y)


def find_data(asked: str | None) -> Path:
    """The folder of the four files: the one asked for, else $PACELINE_DATA, else where Debian's package puts them."""
    folder = Path(asked or os.environ.get("PACELINE_DATA") or PACKAGED)
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        raise DataError(
            f"Fashion-MNIST is not in {folder}",
            why="there is no train-images-idx3-ubyte.gz, and nothing is downloaded at run time",
            do="install the Debian package `dataset-fashion-mnist`, or give --data FOLDER or $PACELINE_DATA",
        )
    return folder


def build_model() -> nn.Module:
    """A perceptron with three hidden layers, three million weights in all."""
    wide = 1024
    return nn.Sequential(
        nn.Linear(784, wide), nn.ReLU(),
        nn.Linear(wide, wide), nn.ReLU(),
        nn.Linear(wide, wide), nn.ReLU(),
        nn.Linear(wide, 10),
    )  # fmt: skip


def main() -> None:
    defaults = TaskDefaults(steps=500, batch=256, eval_every=20, momentum=0.9, has_data_folder=True)
    args = parse_arguments(__doc__, defaults)
    torch.manual_seed(args.seed)
    folder = find_data(args.data)
    train, test = images(folder, "train"), images(folder, "t10k")
    model = build_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=args.momentum)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, bucket_mb=args.bucket_mb)
    scheduler = lr_schedule(optimizer, args)
    evaluations = Evaluations(args, model, lambda: {"accuracy": accuracy(model, *test.tensors)})
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
