"""Several hosts with several workers each: what can be agreed on inside a host does not cross the network.

[Note: three legs] A mean of n bytes over H hosts of L workers: the workers of a host add up in shared memory, each one
shard of n/L; those with the same number on their hosts then all-reduce their shard over the network, L such teams at
once; and inside each host the shards go round. So every worker carries the same share of the network's bytes, 2n/L ·
(H-1)/H, and a host's link 2n(H-1)/H, where a ring over all W workers puts 2n(W-1)/W on each link that it crosses.

The legs are a pipeline: the first and the last have each a thread and outboxes of their own, so the next operation is
added up while this one is on the network. Each leg runs its operations in the order they were asked for, so every
worker of a team meets the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from paceline.comm import DistComm, Op, payload
from paceline.wire.moves import Moves, check_mean
from paceline.wire.outboxes import Outboxes
from paceline.wire.progress import Progress, Steps, giving_up

_NOTHING = Steps(0, lambda k: None, lambda k: None)


class HierarchicalComm(DistComm):
    """A lane of [Note: three legs]. What would save nothing (alltoall, swap, shift, broadcast) stays flat.

    `sent` is the formula of the flat operation, so that methods compare; `across.sent` is what this worker put on the
    network in its place. With `hierarchical` off, on all workers alike and with nothing under way, everything is flat.
    """

    hierarchical = True

    def __init__(self, flat: DistComm, hosts: Sequence[Sequence[int]], legs: Sequence[Outboxes], s: float) -> None:
        super().__init__(flat.group, name=flat.name, board=flat.board)
        self.local = len(hosts[0])
        self._teams = teams(hosts)
        self._first, self._last = (Progress(boxes, flat.name, s) for boxes in legs)
        self._in, self._out = (Moves(boxes) for boxes in legs)
        self.me = self._in.me
        self.across = DistComm.create(f"{flat.name} across", _Silent(self._last), s, self._teams)

    def mean(self, x: Tensor) -> Op:
        check_mean(x)
        return self._add_up("mean", x, self.world) if self.hierarchical else super().mean(x)

    def sum(self, x: Tensor) -> Op:
        return self._add_up("sum", x, 1) if self.hierarchical else super().sum(x)

    def _add_up(self, op: str, x: Tensor, over: int) -> Op:
        label = self._start(op, x, 2 * payload(x) * (self.world - 1) // self.world)
        each = math.ceil(x.numel() / self.local)
        shards = [x.detach().view(-1)[r * each : (r + 1) * each] for r in range(self.local)]
        mine, others = shards[self.me], {r: shard for r, shard in enumerate(shards) if r != self.me}
        inside = self._in.reduce_rows(shards, mine, over)
        back = self._out.hand_round(mine, others, each * x.element_size())
        return self._legs(label, x, inside, lambda: self.across.sum(mine), lambda _: None, back)

    def gather(self, x: Tensor) -> Op:
        if not self.hierarchical:
            return super().gather(x)
        label = self._start("gather", x, payload(x) * (self.world - 1))
        rows = x.new_empty((self.local, len(self._teams[0]), *x.shape))  # of each team, of each of its workers
        out = x.new_empty((self.world, *x.shape))
        others = {r: rows[r] for r in range(self.local) if r != self.me}
        back = self._out.hand_round(rows[self.me], others, payload(rows[0]))
        order = torch.tensor(self._teams).flatten()

        def put_in_order() -> None:
            out[order] = rows.flatten(0, 1)

        return self._legs(
            label,
            out,
            _NOTHING,
            lambda: self.across.gather(x.detach()),
            rows[self.me].copy_,
            back._replace(last=put_in_order),
        )

    def scatter_mean(self, x: Tensor) -> Op:
        check_mean(x)
        if not self.hierarchical:
            return super().scatter_mean(x)
        label = self._start("scatter_mean", x, payload(x) * (self.world - 1) // self.world)
        slices = x.reshape(self.world, -1)
        rows = [slices[list(team)].flatten() for team in self._teams]
        part, out = torch.empty_like(rows[0]), x.new_empty(x.numel() // self.world)
        inside = self._in.reduce_rows(rows, part, self.local)
        return self._legs(label, out, inside, lambda: self.across.scatter_mean(part), out.copy_, _NOTHING)

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
    """The workers with the same number on their hosts, in the order torch gives them in a group of their own."""
    return [sorted(team) for team in zip(*hosts, strict=True)]


class _Silent:
    """The board as a leg's thread sees it: who waits for the result speaks to the others, about the whole."""

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
