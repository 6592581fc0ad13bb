"""Do all workers have the same weights? Nothing else would tell that they do not.

[Note: replicas] Where a method promises equal replicas, something beside it can still pull them apart: a checkpoint
that one worker alone has loaded, weights written on some workers, a damaged bit. So every K steps the workers compare
a fingerprint of every parameter. It leaves after one step and is read after the next, so nobody waits for it.

Buffers are compared too, under every method whose workers step together: beside BatchNorm's averages no buffer is
agreed on, so one that a module writes from its own share of the batch (the codebook of a VQ-VAE, the statistics of an
observation) is another on each worker. Only those that a state_dict has are looked at, and no integers: what is not
saved may differ, and so may a count.
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
        # The answer is to come: of which parameters and buffers, after which step.
        self._asked: tuple[Handle, list[str], list[str], int] | None = None

    def step_made(self) -> None:
        """A step was made: read what was asked after the last one, and ask again if it is time."""
        self._read()
        if self.every and self.engine.ex.step % self.every == 0:
            self._ask(*self._equal())

    def check(self) -> None:
        """Compare here and now. Every worker must call it."""
        self._read()
        if self.every:
            self._ask(*self._equal())
            self._read()

    def check_buffers(self) -> None:
        """Compare the buffers here and now, where workers do not step together. Every worker must call it."""
        if self.every:
            self._ask({}, self._own_buffers())
            self._read()

    def _own_buffers(self) -> dict[str, Tensor]:
        return self.engine.buffers.own() if self.engine.options.averages_buffers else {}

    def _equal(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parameters and the buffers that must be equal on all workers now, and that each has the whole of."""
        engine = self.engine
        method = engine.method
        if method.sync.is_async or engine.idle or engine.group.world_size == 1:
            return {}, {}
        # Where gradients are exchanged at first and weights later, as in post-local SGD, they are equal till then.
        equal = Fact.REPLICAS_AGREE in engine.ex.facts or method.sync.due(max(engine.ex.step - 1, 0))
        promised = equal and not method.layout.shards_parameters
        params = {s.name: s.param.detach() for b in engine.buckets for s in b.slots} if promised else {}
        return params, self._own_buffers()

    def _ask(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        engine = self.engine
        if not engine.buckets or not (params or buffers):
            return
        device = engine.buckets[0].device
        prints = torch.stack([fingerprint(x).to(device) for x in (*params.values(), *buffers.values())])
        self._asked = engine.ex.comm.all_gather(prints), [*params], [*buffers], engine.ex.step

    def _read(self) -> None:
        if self._asked is None:
            return
        (handle, params, buffers, step), self._asked = self._asked, None
        everyones: Tensor = handle.wait().cpu()
        differ = everyones != everyones.mode(0).values
        if not differ.any():
            return
        ranks = differ.any(1).nonzero().flatten().tolist()
        found = [name for name, odd in zip((*params, *buffers), differ.any(0).tolist(), strict=True) if odd]
        weights = any(name in params for name in found)
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        why, do = _WEIGHTS if weights else _BUFFERS
        raise MismatchError(
            f"after step {step} the {'weights' if weights else 'buffers'} of worker{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks))} are not those of the others: {shown}",
            why=why,
            do=f"{do}; check_replicas=0 turns this check off",
            worker=ranks[0],
        )


_WEIGHTS = (
    "something changed them on some workers alone: weights loaded or written by one, random numbers of each worker's "
    "own, a damaged bit",
    "load and write weights on all workers alike",
)
_BUFFERS = (
    "a module writes them in forward from its own share of the batch, and only BatchNorm's averages are agreed on",
    "write paceline.mean(x) there in place of x, or register a buffer that may differ with persistent=False",
)
