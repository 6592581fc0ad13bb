"""Which way a lane takes: decided once, from where the workers are, alike on all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline import sharing
from paceline.comm import DistComm
from paceline.environment import COLLECTIVES, FLAT, HIERARCHICAL, HOST
from paceline.errors import UsageError, differ
from paceline.membership.board import StoreBoard
from paceline.race.gate import pace_mbit
from paceline.wire.hierarchy import HierarchicalComm
from paceline.wire.host import HostComm
from paceline.wire.outboxes import Outboxes, open_outboxes

_LEGS = {FLAT: 0, HOST: 1, HIERARCHICAL: 2}  # in shared memory


class Route:
    """`way` is flat (gloo or NCCL between all workers), host (shared memory) or hierarchical (both); `hosts` are the
    workers of each host.
    """

    def __init__(self, way: str = FLAT, hosts: Sequence[Sequence[int]] = ((0,),), *, asked: bool = False) -> None:
        self.way, self.hosts, self._asked = way, hosts, asked

    @classmethod
    def find(cls, board: StoreBoard, asked: str | None) -> Route:
        """Every worker says where it is; `asked` is what the environment does."""
        here: dict[str, Any] = {
            "place": sharing.place(),
            "asked": asked or "",
            "gpu": torch.cuda.is_available(),
            "paced": pace_mbit() < math.inf,  # a slow link is emulated, and nothing may go around it
        }
        board.write(f"place/{board.rank}", here)
        others = board.wait_for_all("place", "where it is")
        all_ = [here if r == board.rank else others[r] for r in range(board.world)]
        differ(COLLECTIVES, [one["asked"] for one in all_])
        why_flat = ""
        if any(one["gpu"] for one in all_):
            why_flat = "a worker has a GPU, whose tensors go by NCCL"
        elif any(one["paced"] for one in all_):
            why_flat = "a slow link is emulated, which shared memory would go around"
        hosts = grouped([one["place"] for one in all_])
        return cls(choose(hosts, asked, why_flat), hosts, asked=asked is not None)

    def says(self) -> str:
        """As in `4 workers over ...`; nothing where that is for the backend to say."""
        several = f"gloo, {len(self.hosts)} hosts × {len(self.hosts[0])},"
        return {FLAT: "", HOST: "shared memory", HIERARCHICAL: several}[self.way]

    def lane(self, name: str, board: StoreBoard, deadline_s: float) -> DistComm | HostComm:
        """A lane that goes this way. All workers ask for the same lanes in the same order."""
        legs = self._legs(name, board)
        if self.way == HOST:
            return HostComm(legs[0], name=name, board=board, deadline_s=deadline_s)
        flat = DistComm.create(name, board, deadline_s)
        return HierarchicalComm(flat, self.hosts, legs, deadline_s) if self.way == HIERARCHICAL else flat

    def _legs(self, name: str, board: StoreBoard) -> list[Outboxes]:
        """Where memory cannot be shared after all, this and all further lanes are flat."""
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
    """The workers of each place, in the order of their first ones."""
    hosts: dict[int, list[int]] = {}
    for worker, place in enumerate(places):
        hosts.setdefault(place, []).append(worker)
    return list(hosts.values())


def choose(hosts: Sequence[Sequence[int]], asked: str | None, why_flat: str = "") -> str:
    """The best way there is, or the one asked for if it is one."""
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
