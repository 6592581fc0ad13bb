"""A worker of bench/outside.py: hivemind.Optimizer, with local updates and the mean of the weights now and then.

Everything listens on the address of this worker's host: no relays, no address translation, no public peers.
"""

from __future__ import annotations

import argparse

import hivemind

from outside_task import BATCH, Run, arguments, asked, loader, network, rank, sgd, tell, train, world_size


def join(args: argparse.Namespace) -> hivemind.DHT:
    """Worker 0 starts the table, the others find it by the address it has left."""
    place = args.meet / "swarm"
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{args.address}/tcp/0"],
        initial_peers=asked(place).split() if rank() else None,
        start=True,
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )
    if not rank():
        tell(place, "\n".join(map(str, dht.get_visible_maddrs())))
    return dht


def main() -> None:
    args = arguments(__doc__)
    setting = dict(args.setting)
    model = network(args.seed)
    dht = join(args)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="fashion",
        params=model.parameters(),
        optimizer=sgd,
        batch_size_per_step=BATCH // world_size(),
        target_batch_size=BATCH * setting.pop("every"),
        next_chunk_timeout=setting["averaging_timeout"],  # by default matchmaking_time, less than a slow link needs
        averager_opts={"target_group_size": world_size(), "request_timeout": setting.pop("request_timeout")},
        verbose=True,
        **setting,
    )
    run = Run(args, is_async=True)
    train(run, loader(args), model, optimizer, model.state_dict)
    run.report("hivemind")
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
