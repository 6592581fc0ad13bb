"""A worker of bench/outside.py: torchft, a replica group of one process on every host, the lighthouse on host 0.

As its train_diloco.py has it: gloo, a synchronous quorum, SGD with lr 0.7 and Nesterov momentum 0.9 outside.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from outside_task import Run, Weights, arguments, asked, loader, network, rank, sgd, tell, train, world_size

TIMEOUT = timedelta(seconds=120)  # an all-reduce of the whole model at 10 Mbit/s takes ten seconds


def lighthouse(args: argparse.Namespace) -> tuple[str, LighthouseServer | None]:
    """Its address; and itself, on the host it runs on."""
    place = args.meet / "lighthouse"
    if rank():
        return asked(place), None
    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=world_size(), join_timeout_ms=10_000)
    address = f"http://{args.address}:{server.address().rpartition(':')[2]}"
    tell(place, address)
    return address, server


def connect(manager: Manager) -> None:
    """An empty round: whoever else is measured has its connections before the clock starts."""
    manager.start_quorum()
    manager.allreduce(torch.zeros(1)).wait()
    if not manager.should_commit():
        raise ConnectionError(f"the first quorum did not commit: {manager.errored()}")


def choose(
    setting: dict[str, Any], manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[AbstractContextManager[Any], Callable[[], Weights]]:
    """The sync, and the weights it would be judged by: what all last agreed on, where it keeps that."""
    every = setting["every"]
    if setting["sync"] == "local_sgd":
        return LocalSGD(manager, model, optimizer, sync_every=every), model.state_dict
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = DiLoCo(manager, [model], optimizer, outer, sync_every=every)
    return diloco, lambda: diloco._fragments[0].original_parameters


def main() -> None:
    args = arguments(__doc__)
    model = network(args.seed)
    optimizer = sgd(model.parameters())
    address, server = lighthouse(args)
    store = TCPStore(args.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world_size(),
        use_async_quorum=False,
        init_sync=False,  # all start from the same seed
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=args.address,
        store_port=store.port,
        lighthouse_addr=address,
        hostname=args.address,
        replica_id=f"replica_{rank()}",
    )
    connect(manager)
    sync, weights = choose(args.setting, manager, model, optimizer)
    run = Run(args)
    with sync:
        train(run, loader(args), model, optimizer, weights)
    run.report("torchft")
    manager.shutdown(wait=False)
    if server is not None:
        server.shutdown()


if __name__ == "__main__":
    main()
