"""What a worker is told about itself and the others: the variables of its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from paceline.comm.environment import SERVED
from paceline.tools.launch.site import LaunchSite


def worker_env(
    rendezvous: LaunchSite,
    *,
    local_rank: int,
    workers: int,
    port: int,
    base: Mapping[str, str],
    store: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of one worker: `base`, and its place among the others.

    OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are only set where `base` does not: one worker's threads must not
    take another's cores, and gloo must listen nowhere but where the workers rendezvous. CUDA_VISIBLE_DEVICES is
    never touched: a worker chooses its GPU by LOCAL_RANK.

    port: for a process group that the script makes by itself. store: the variables by which the store is found.
    """
    env = dict(base)
    env.update(
        RANK=str(rendezvous.index * workers + local_rank),
        WORLD_SIZE=str(rendezvous.hosts * workers),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(workers),
        MASTER_ADDR=rendezvous.address,
        MASTER_PORT=str(port),
        PYTHONUNBUFFERED="1",
    )
    env.pop(SERVED, None)  # of a launcher around this one
    env.update(store or {})
    defaults = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), "GLOO_SOCKET_IFNAME": rendezvous.interface}
    for name, value in defaults.items():
        if value and not env.get(name):
            env[name] = value
    return env


def cores() -> int:
    """The number of cores this process may use. A container or a batch system may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
