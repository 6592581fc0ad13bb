"""The job of bench/order.py: a stack of equal layers."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="samples for each worker")
    parser.add_argument("--bucket-mb", type=float, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [m for _ in range(args.layers) for m in (nn.Linear(args.width, args.width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = TensorDataset(torch.randn(8 * args.batch, args.width), torch.randn(8 * args.batch, args.width))
    loader = DataLoader(data, batch_size=args.batch)
    prepared = paceline.prepare(model, optimizer, loader, batch="per_worker", bucket_mb=args.bucket_mb)
    model, optimizer, loader = prepared
    for _ in range(10**6):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
