"""A worker of bench/outside.py: Paceline itself, with the same loop, clock and counter as the peers."""

from __future__ import annotations

from torch.utils.data import DataLoader

import paceline
from outside_task import BATCH, Run, Weights, arguments, images, network, sgd, train


def main() -> None:
    args = arguments(__doc__)
    knobs = dict(args.setting)
    model = network(args.seed)
    batches = DataLoader(images(args.data, "train"), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, batches = paceline.prepare(
        model, sgd(model.parameters()), batches, method=knobs.pop("method"), **knobs
    )

    def agreed() -> Weights:
        with paceline.consensus(wait=False):
            return {name: value.clone() for name, value in model.state_dict().items()}

    run = Run(args)
    train(run, batches, model, optimizer, agreed)
    run.report()


if __name__ == "__main__":
    main()
