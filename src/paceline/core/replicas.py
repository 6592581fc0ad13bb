"""Do all workers have the same weights? Nothing else would tell that they do not.

[Note: replicas] Where a method promises equal replicas, something beside it can still pull them apart: a checkpoint
that one worker alone has loaded, weights written on some workers, a damaged bit. So every K steps the workers compare
a fingerprint of every parameter. It leaves after one step and is read after the next, so nobody waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.by_hand import fingerprint
from paceline.core.facts import Fact
from paceline.errors import MismatchError

if TYPE_CHECKING:
    from paceline.comm.protocol import Handle
    from paceline.core.engine import Engine


class Replicas:
    """The replicas of one engine's parameters: [Note: replicas]. every: K; 0: never."""

    def __init__(self, engine: Engine, every: int) -> None:
        self.engine, self.every = engine, every
        self._asked: tuple[Handle, list[str], int] | None = None  # the answer is to come, to which step

    def step_made(self) -> None:
        """A step was made: read what was asked after the last one, and ask again if it is time."""
        self._read()
        if self.every and self.engine.ex.step % self.every == 0 and self._agree():
            self._ask()

    def check(self) -> None:
        """Compare here and now. Every worker must call it."""
        self._read()
        if self.every and self._agree():
            self._ask()
            self._read()

    def _agree(self) -> bool:
        """Does the method promise that the workers' parameters are equal now, and has each the whole of them?"""
        engine = self.engine
        method = engine.method
        together = Fact.REPLICAS_AGREE in engine.ex.facts and not method.sync.is_async
        promised = together and not method.layout.shards_parameters
        return promised and engine.group.world_size > 1 and not engine.idle and bool(engine.buckets)

    def _ask(self) -> None:
        engine = self.engine
        slots = [s for b in engine.buckets for s in b.slots]
        device = engine.buckets[0].device
        prints = torch.stack([fingerprint(s.param.detach()).to(device) for s in slots])
        self._asked = engine.ex.comm.all_gather(prints), [s.name for s in slots], engine.ex.step

    def _read(self) -> None:
        if self._asked is None:
            return
        (handle, names, step), self._asked = self._asked, None
        everyones: Tensor = handle.wait().cpu()
        differ = everyones != everyones.mode(0).values
        if not differ.any():
            return
        ranks = differ.any(1).nonzero().flatten().tolist()
        found = [name for name, odd in zip(names, differ.any(0).tolist(), strict=True) if odd]
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise MismatchError(
            f"after step {step} the weights of worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} are "
            f"not those of the others: {shown}",
            why="something changed them on some workers alone: weights loaded or written by one, random numbers of "
            "each worker's own, a damaged bit",
            do="load and write weights on all workers alike; check_replicas=0 turns this check off",
            worker=ranks[0],
        )
