"""Collectives over several hosts with several workers each: shared memory inside a host, the network between hosts.

[Note: three legs] A mean of n bytes over H hosts of L workers has three legs. The workers of a host add up in shared
memory, each one shard of n/L. The workers with the same local rank, a team, then all-reduce their shard over the
network, all L teams at once. Inside each host the shards are then all-gathered. So every worker sends the same share of
the network's bytes, 2n/L · (H-1)/H, and a host's link carries 2n(H-1)/H, where a ring over all W workers puts 2n(W-1)/W
on each link that it crosses.

The legs are a pipeline: the first and the last each have a thread and outboxes of their own, so the next operation is
added up while this one is on the network. Each leg runs its operations in the order in which they were started, so all
workers of a team are in the same operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from paceline.comm.dist import DistComm, Transport
from paceline.comm.lane import Op, payload
from paceline.comm.moves import Moves, check_mean
from paceline.comm.outboxes import Outboxes
from paceline.comm.progress import Progress, Steps, giving_up

_NOTHING = Steps(0, lambda k: None, lambda k: None)


class HierarchicalComm(DistComm):
    """A lane whose mean, sum, all_gather and reduce_scatter_mean have [Note: three legs].

    The other operations (all_to_all, swap, shift, broadcast) would gain nothing and stay flat. `sent` counts by the
    formula of the flat operation, so that methods can be compared; `across.sent` is what this worker really put on the
    network. With `hierarchical` off every operation is flat; change it on all workers alike, while no operation runs.
    """

    hierarchical = True

    def __init__(
        self, flat: DistComm, transport: Transport, hosts: Sequence[Sequence[int]], legs: Sequence[Outboxes]
    ) -> None:
        super().__init__(flat.backends, flat.rank, flat.world_size, name=flat.name, board=flat.board)
        self.local = len(hosts[0])
        self._teams = teams(hosts)
        self._first, self._last = (Progress(boxes, flat.name, transport.timeout_s) for boxes in legs)
        self._in, self._out = (Moves(boxes) for boxes in legs)
        self.me = self._in.me
        self.across = transport.team_lane(f"{flat.name} across", _Silent(self._last), self.rank, self._teams)

    def mean(self, x: Tensor) -> Op:
        check_mean(x)
        return self._add_up("mean", x, self.world_size) if self.hierarchical else super().mean(x)

    def sum(self, x: Tensor) -> Op:
        return self._add_up("sum", x, 1) if self.hierarchical else super().sum(x)

    def _add_up(self, op: str, x: Tensor, over: int) -> Op:
        label = self._start(op, x, 2 * payload(x) * (self.world_size - 1) // self.world_size)
        each = math.ceil(x.numel() / self.local)
        shards = [x.detach().view(-1)[r * each : (r + 1) * each] for r in range(self.local)]
        mine, others = shards[self.me], {r: shard for r, shard in enumerate(shards) if r != self.me}
        inside = self._in.reduce_rows(shards, mine, over)
        back = self._out.hand_round(mine, others, each * x.element_size())
        return self._legs(label, x, inside, lambda: self.across.sum(mine), lambda _: None, back)

    def all_gather(self, x: Tensor) -> Op:
        if not self.hierarchical:
            return super().all_gather(x)
        label = self._start("all_gather", x, payload(x) * (self.world_size - 1))
        rows = x.new_empty((self.local, len(self._teams[0]), *x.shape))  # one x for each team and each of its workers
        out = x.new_empty((self.world_size, *x.shape))
        others = {r: rows[r] for r in range(self.local) if r != self.me}
        back = self._out.hand_round(rows[self.me], others, payload(rows[0]))
        order = torch.tensor(self._teams).flatten()

        def put_in_order() -> None:
            out[order] = rows.flatten(0, 1)

        return self._legs(
            label,
            out,
            _NOTHING,
            lambda: self.across.all_gather(x.detach()),
            rows[self.me].copy_,
            back._replace(last=put_in_order),
        )

    def reduce_scatter_mean(self, x: Tensor) -> Op:
        check_mean(x)
        if not self.hierarchical:
            return super().reduce_scatter_mean(x)
        label = self._start("reduce_scatter_mean", x, payload(x) * (self.world_size - 1) // self.world_size)
        shards = x.reshape(self.world_size, -1)
        rows = [shards[list(team)].flatten() for team in self._teams]
        part, out = torch.empty_like(rows[0]), x.new_empty(x.numel() // self.world_size)
        inside = self._in.reduce_rows(rows, part, self.local)
        return self._legs(label, out, inside, lambda: self.across.reduce_scatter_mean(part), out.copy_, _NOTHING)

    def _legs(
        self,
        label: str,
        out: Tensor,
        inside: Steps,
        across: Callable[[], Op],
        arrived: Callable[[Tensor], object],
        back: Steps,
    ) -> Op:
        under_way: list[Op] = []
        first = self._first.start(label, inside._replace(last=lambda: under_way.append(across())))

        def cross() -> None:
            first.wait()
            arrived(under_way.pop().wait())

        work = self._last.start(label, back._replace(first=cross))
        return giving_up(self._op(label, out, work), self._first, self._last)


def teams(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The workers with the same local rank, for each local rank, in the order they have in a process group of torch."""
    return [sorted(team) for team in zip(*hosts, strict=True)]


class _Silent:
    """A board that posts nothing, for the thread of a leg: the worker that waits for the whole operation posts."""

    def __init__(self, leg: Progress) -> None:
        self._leg = leg

    def agree(self, key: str, what: str, text: str) -> None:
        pass

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        self._leg.check()

    def clear(self) -> None:
        pass

    def lost(self, label: str, error: Exception) -> NoReturn:
        raise error
