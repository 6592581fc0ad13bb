"""What a Sync and a Layout see: means, without knowing how they are made."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.core.bucket import Bucket
from paceline.core.by_hand import fingerprint
from paceline.core.carry import Carry
from paceline.core.facts import Fact
from paceline.core.parts import Parts
from paceline.telemetry.recorder import Recorder


def no_scale() -> Tensor | None:
    """The loss scale where there is no GradScaler."""
    return None


def no_trace(subject: object) -> None:
    """What is told of a bucket where nothing is traced."""


class Exchange:
    """This worker's side of the agreement: the method's reducer and layout over the lanes of a group.

    lane: the name of the lane for gradients; a second one is beside it, for whoever asks for `background`.
    loss_scale: the current scale of a GradScaler: [Note: loss scale], loss_scale.py.
    about: tells a trace which bucket the next operations are about, where one coroutine starts those of several.
    """

    def __init__(
        self,
        method: Parts,
        group: Group,
        optimizer: Optimizer,
        recorder: Recorder,
        *,
        lane: str = "gradients",
        loss_scale: Callable[[], Tensor | None] = no_scale,
        about: Callable[[object], None] = no_trace,
    ) -> None:
        self.group, self.optimizer, self.recorder = group, optimizer, recorder
        self.loss_scale, self.about = loss_scale, about
        self.buckets: list[Bucket] = []
        self.carry = Carry()
        self.step = 0  # agreed: the number of steps that have counted
        self.rate = 1.0  # agreed: what the learning rate is multiplied by in the step under way
        self._lane = lane
        self.use(method)

    def use(self, method: Parts) -> None:
        """Go by this method from now on."""
        self.method = method
        self.facts: frozenset[Fact] = frozenset().union(*(part.facts() for part in method.axes().values()))
        # Does the method carry something of one step's gradients into the next?
        self.keeps = Fact.KEEPS_LEFTOVERS in self.facts
        # Is every mean exact and whole on every worker, in the step of its gradients?
        self.exact_everywhere = self.facts >= {Fact.EXACT_MEAN, Fact.GRADIENTS_AGREE, Fact.WHOLE_GRADIENTS}
        if method.sync.background or method.layout.background or method.order.crosses:
            _ = self.background  # made now, where all workers are at the same point and nothing is under way

    # ------------------------------------------------------------------------------------------------ who we are

    @property
    def rank(self) -> int:
        """This worker's number in the group."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many workers the group has."""
        return self.group.world_size

    @property
    def comm(self) -> Comm:
        """The lane of the gradients."""
        return self.group.lane(self._lane)

    @property
    def background(self) -> Comm:
        """A lane beside the gradients', for a part that declares `background` and for votes that must not wait."""
        return self.group.lane(f"{self._lane} (background)")

    @property
    def sent(self) -> int:
        """Payload bytes sent on both lanes in this epoch."""
        names = (self._lane, f"{self._lane} (background)")
        return sum(lane.sent for name, lane in self.group.lanes.items() if name in names)

    # ------------------------------------------------------------------------------------------------ means

    async def grad(self, b: Bucket) -> None:
        """A bucket of local gradients is full: the sync's turn, in true units where they matter."""
        carried = self.carry.take(b)
        scale = self.loss_scale() if self.keeps or carried is not None else None
        g = b.flat[: b.n]
        if scale is not None:
            g.div_(scale)
        if carried is not None:
            g.add_(carried[: b.n])
        await self.method.sync.on_grad(b, self)
        if scale is not None:
            b.kept[: b.n].mul_(scale)
        b.add_aside()

    async def mean(self, b: Bucket, x: Tensor) -> Tensor:
        """The mean of x over the workers, as well as the reducer knows it.

        x may be overwritten, and so may the mean in the next step: copy what is to stay.
        """
        return (await self.method.reducer.mean(b, x, self.comm)).mean

    async def mine(self, b: Bucket, x: Tensor) -> Tensor:
        """This worker's shard of the mean."""
        return (await self.method.reducer.mine(b, x, self.comm)).mean

    async def exact(self, x: Tensor) -> Tensor:
        """The mean itself, for what must not be compressed (buffers, norms)."""
        return await self.comm.mean(x)

    async def start(self, b: Bucket) -> Tensor:
        """The weights from which all workers begin: mostly their own, which are equal. Worker 0's, if a loop has
        written other ones on each worker before the first step.
        """
        w = b.weights()
        prints = await self.comm.all_gather(fingerprint(w).reshape(1))
        return await self.comm.broadcast(w) if bool((prints != prints[0]).any()) else w

    async def keep(self, b: Bucket) -> None:
        """Turn the bucket's local gradients into the agreed ones, as the layout keeps them."""
        await self.method.layout.keep(b, self)

    async def before_step(self, b: Bucket) -> None:
        """What the sync does before the optimizer steps."""
        await self.method.sync.before_step(b, self)

    async def after_step(self, b: Bucket) -> None:
        """What the layout and the sync do after the optimizer has stepped."""
        await self.method.layout.publish(b, self)
        await self.method.sync.on_step(b, self)
