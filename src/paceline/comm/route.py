"""Which way a lane's operations take: decided once, from the workers' hosts, alike on all workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm import host_memory as sharing
from paceline.comm.board import StoreBoard
from paceline.comm.dist import DistComm, Transport
from paceline.comm.environment import COLLECTIVES, FLAT, HIERARCHICAL, HOST, pace_mbit
from paceline.comm.hierarchy import HierarchicalComm
from paceline.comm.outboxes import Outboxes, open_outboxes
from paceline.comm.shared_memory import SharedMemoryComm
from paceline.errors import UsageError, differ

_LEGS = {FLAT: 0, HOST: 1, HIERARCHICAL: 2}  # how many legs of an operation are in shared memory


class Route:
    """The way that all lanes of a group take, and the workers of each host.

    `way` is flat (gloo or NCCL between all workers), host (shared memory) or hierarchical (both).
    """

    def __init__(self, way: str = FLAT, hosts: Sequence[Sequence[int]] = ((0,),), *, asked: bool = False) -> None:
        self.way, self.hosts, self._asked = way, hosts, asked

    @classmethod
    def find(cls, board: StoreBoard, asked: str | None) -> Route:
        """Choose the way from the hosts of all workers; `asked` is the way that the environment demands, if any."""
        here: dict[str, Any] = {
            "place": sharing.place(),
            "asked": asked or "",
            "gpu": torch.cuda.is_available(),
            "paced": pace_mbit() < math.inf,  # a slow link is emulated, which shared memory must not bypass
        }
        board.write(f"place/{board.rank}", here)
        others = board.wait_for_all("place", "where it is")
        all_ = [here if r == board.rank else others[r] for r in range(board.world_size)]
        differ(COLLECTIVES, [one["asked"] for one in all_])
        why_flat = ""
        if any(one["gpu"] for one in all_):
            why_flat = "a worker has a GPU, whose tensors go by NCCL"
        elif any(one["paced"] for one in all_):
            why_flat = "a slow link is emulated, which shared memory would go around"
        hosts = grouped([one["place"] for one in all_])
        return cls(choose(hosts, asked, why_flat), hosts, asked=asked is not None)

    def says(self) -> str:
        """The end of a text such as `4 workers over ...`; empty for flat, where the backend's name stands."""
        several = f"gloo, {len(self.hosts)} hosts × {len(self.hosts[0])},"
        return {FLAT: "", HOST: "shared memory", HIERARCHICAL: several}[self.way]

    def lane(self, name: str, board: StoreBoard, transport: Transport) -> DistComm | SharedMemoryComm:
        """A new lane that takes this way. All workers make the same lanes in the same order."""
        legs = self._legs(name, board)
        if self.way == HOST:
            return SharedMemoryComm(legs[0], name=name, board=board, timeout_s=transport.timeout_s)
        flat = transport.lane(name, board, board.rank, board.world_size)
        return HierarchicalComm(flat, transport, self.hosts, legs) if self.way == HIERARCHICAL else flat

    def _legs(self, name: str, board: StoreBoard) -> list[Outboxes]:
        """The outboxes of a new lane; if memory cannot be shared, this lane and all later ones are flat."""
        legs = []
        here = next(host for host in self.hosts if board.rank in host)
        for leg in range(_LEGS[self.way]):
            boxes = open_outboxes(board, f"lane/{name}/{leg}", here)
            if isinstance(boxes, str):
                if self._asked:
                    do = f"run them as one user, or set {COLLECTIVES}={FLAT}"
                    raise UsageError("the workers cannot share memory", why=boxes, do=do)
                self.way = FLAT
                break
            legs.append(boxes)
        return legs


def grouped(places: Sequence[int]) -> list[list[int]]:
    """The workers of each place, ordered by the lowest rank in it."""
    hosts: dict[int, list[int]] = {}
    for worker, place in enumerate(places):
        hosts.setdefault(place, []).append(worker)
    return list(hosts.values())


def choose(hosts: Sequence[Sequence[int]], asked: str | None, why_flat: str = "") -> str:
    """The way asked for, or the best one; an error if the way asked for is not possible."""
    sizes = [len(host) for host in hosts]
    if not why_flat and len(hosts) == 1:
        best = HOST
    elif not why_flat and set(sizes) == {sizes[0]} and sizes[0] > 1:
        best = HIERARCHICAL
    else:
        best = FLAT
    if asked in (None, FLAT, best):
        return asked or best
    raise UsageError(
        f"{COLLECTIVES}={asked} cannot be done here",
        why=why_flat
        or f"{HOST} takes one host, {HIERARCHICAL} several with the same number of workers: here are {sizes}",
        do=f"unset it for {best}, or set it to {FLAT}",
    )
