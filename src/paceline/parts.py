"""The contracts: six kinds of part, and what each may ask of the others.

A `Method` is one part for each question about a step: how is a mean estimated (Reducer), what is agreed on and when
(Sync), who owns which state (Layout), which bytes go first (Order), how many samples does each worker take
(Balance), who is in the group (Membership). What all of them have is in part.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.part import Part as Part

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


# ---------------------------------------------------------------------------------------------------- the wire


class Handle(Protocol):
    """Bytes on their way. `await` it inside a part; `wait` blocks (GPU: orders streams) and gives the result."""

    def wait(self) -> Tensor: ...
    def done(self) -> bool: ...  # a matter of the clock: only for what may differ between workers
    def __await__(self) -> Generator[Any, None, Tensor]: ...


class Comm(Protocol):
    """A worker's view of its group. Every operation starts at once and gives a Handle.

    The operand belongs to the operation until its handle has ended; after a failure it is abandoned, never reused.
    All workers must issue the same operations in the same order.
    """

    rank: int
    world: int
    sent: int  # payload bytes this worker put on the wire, counted here and nowhere else

    def mean(self, x: Tensor) -> Handle:
        """x becomes the mean over the workers, in place, bitwise equal everywhere."""

    def sum(self, x: Tensor) -> Handle:
        """x becomes the sum over the workers, in place. For counters and ballots."""

    def gather(self, x: Tensor) -> Handle:
        """Everyone's x, stacked: [world, *x.shape]."""

    def scatter_mean(self, x: Tensor) -> Handle:
        """x has world equal slices; the result is the mean of slice `rank`."""

    def alltoall(self, x: Tensor) -> Handle:
        """x is [world, n]; row r goes to worker r; the result's row r came from worker r."""

    def swap(self, x: Tensor, peer: int) -> Handle:
        """Exchange x with one peer, which calls swap with this rank; the result is the peer's x."""

    def shift(self, x: Tensor, by: int) -> Handle:
        """Everyone passes x on to worker rank + by, around the circle; the result is worker rank - by's x."""

    def broadcast(self, x: Tensor, root: int = 0) -> Handle:
        """x becomes the root's x, in place."""

    def agree(self, what: str, text: str) -> None:
        """Raise MismatchError on every worker unless all of them say the same text."""


# ---------------------------------------------------------------------------------------------------- the six axes


KEEPS = "keeps leftovers"  # the fact of a part that carries something of one step's gradients into the next


def nothing_left() -> Tensor | None:
    """The leftover of a reducer that sends everything."""
    return None


class Reduced(NamedTuple):
    """An estimate of the mean, and what this worker did not send.

    `left` is called only by those who keep leftovers (error feedback, the conservation law), at once, before x is
    written again; it may use x up. So a method that nobody asks for its leftover does not pay for it. The mean may be
    a vector that the next step's is written into."""

    mean: Tensor
    left: Callable[[], Tensor | None] = nothing_left


@dataclass(kw_only=True)
class Reducer(Part):
    """How is the mean of one vector over the workers estimated with few bytes?

    Laws: avg(x) == mean + avg(left); mean is bitwise equal on all workers; what is awaited depends only on values
    equal everywhere; finite in, finite out; NaN or infinity in is somebody else's business (the engine has
    checked).
    """

    axis: ClassVar[str] = "reducer"
    tolerance: ClassVar[float] = 1e-6  # relative rounding error of mean + avg(left) against avg(x)

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        """x may be overwritten. Pairs of rounds simply await twice."""
        raise NotImplementedError

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        """Only this worker's slice of the mean. Override where fewer bytes do."""
        whole = await self.mean(b, x, comm)
        return Reduced(whole.mean.view(comm.world, -1)[comm.rank], whole.left)

    def kind(self, name: str, p: Tensor) -> Hashable:
        """Parameters of different kinds never share a bucket. A wrapper's kinds are those of the reducers inside."""
        return tuple(r.kind(name, p) for r in vars(self).values() if isinstance(r, Reducer))

    def cuttable(self) -> bool:
        """May a bucket travel in pieces? Not if it is looked at as tensors, or something of it is remembered."""
        return "elementwise" in self.gives and len(list(self.parts())) == 1

    def sends(self, b: Bucket, world: int) -> int:
        """Payload bytes one worker sends for the mean of this bucket: the formula, as a number."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Sync(Part):
    """What is agreed on, when, with whom? It asks the exchange for means and does not know the reducer."""

    axis: ClassVar[str] = "sync"

    own_pace: ClassVar[bool] = False  # workers do not step together: nothing may wait for all of them in a step
    background: ClassVar[bool] = False  # it wants `ex.background`, a lane beside the gradients'
    limit: ClassVar[Mapping[str, Any] | None] = None  # knobs at which plain SGD goes as with every_step, to rounding

    def due(self, step: int) -> bool:
        """Do the workers exchange gradients in this step? A pure function of the agreed step number."""
        return True

    def lag(self) -> int:
        """Steps from a gradient to the one in which its mean is used, and what the workers said of it."""
        return 0

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        """A bucket of local gradients is full; in true units if the method keeps leftovers, whatever the loss scale."""

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        """Backward is over, the optimizer has not stepped yet, and the step will be made."""

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        """The optimizer's own step; a sync that updates by another rule overrides it."""
        return step()

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        """The optimizer has updated a bucket's parameters."""

    def agrees(self, step: int) -> bool:
        """Where gradients are not exchanged: is all agreed on after this step, the module's buffers too?"""
        return False

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        """The weights to evaluate and to save, where the workers' own differ."""
        return await ex.exact(b.weights())

    def latest(self, b: Bucket) -> Tensor | None:
        """Of a sync that keeps its own pace: the newest weights known to be all workers'. None: this worker's are."""
        return None

    def settle(self, ex: Exchange) -> None:
        """Before an evaluation, a checkpoint and the end: let what is under way arrive."""

    async def on_buffers(self, b: Bucket, ex: Exchange) -> None:
        """The module's floating-point buffers (BatchNorm's averages), at the end of a backward that exchanges."""
        b.flat.copy_(await ex.exact(b.flat))


@dataclass(kw_only=True)
class Layout(Part):
    """Who owns which state, and where does it live?"""

    axis: ClassVar[str] = "layout"
    background: ClassVar[bool] = False  # it wants `ex.background`, a lane beside the gradients'
    at_once: ClassVar[int] = sys.maxsize  # buckets under way together; fewer where the memory of more would count

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot be stepped as the state is shared out."""

    def rests(self, params: Sequence[Tensor]) -> bool:
        """Is there nothing for it to do in a world of one?"""
        return True

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        """Hooks of its own on the user's objects, before the first bucket is cut."""

    def own(self, b: Bucket, ex: Exchange) -> None:
        """A bucket was cut: take what of its parameters and of their state is this worker's."""

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        """Turn a bucket of local gradients into the agreed mean, or into this worker's slice of it."""
        raise NotImplementedError

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        """The optimizer's own step, for what this worker owns."""
        return step()

    async def publish(self, b: Bucket, ex: Exchange) -> None:
        """After the optimizer: give the others the parameters this worker updated for them."""

    def settle(self, ex: Exchange) -> None:
        """Before an evaluation, a checkpoint and the end: let what is under way arrive."""

    def collect(self, ex: Exchange) -> None:
        """Before buckets are cut anew: all is whole again, in the model and the optimizer of every worker."""


class Event(Enum):
    """What an Order is told of. Logical events, never times, so that every worker decides alike."""

    READY = "the next bucket is full"
    END = "backward has ended: what was not full counts as it is"


@dataclass(kw_only=True)
class Order(Part):
    """Which bytes go first?

    Buckets become ready by index, one event each, and at the end of backward all that are left: the same events in the
    same order on every worker, though their gradients may arrive in another.
    """

    axis: ClassVar[str] = "order"
    tunes: ClassVar[Mapping[str, tuple[float, float]]] = {}  # knobs worth trying while training, and between which ends
    crosses: ClassVar[bool] = False  # `step` does not wait for the means: each is applied when it has landed

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        """Which of those ready start now, in this order: a pure function of this and of what was told with `hear`."""
        raise NotImplementedError

    def urgency(self, b: Bucket) -> int:
        """After backward: of what is under way, which goes on first? The smallest, and of equals the oldest."""
        return 0

    def piece_bytes(self) -> int | None:
        """The most that may travel at once, where the reducer lets a bucket be cut."""
        return None

    def hear(self, backlog: float) -> None:
        """After a backward that crosses: the bytes that were sent and had not landed, the mean over the workers."""


@dataclass(kw_only=True)
class Balance(Part):
    """How many samples does each worker take?"""

    axis: ClassVar[str] = "balance"

    def shares(self, seconds: Sequence[float], batch: int) -> list[int]:
        """Split a batch; `seconds` is each worker's time per sample, equal on all workers (ones until measured)."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Membership(Part):
    """Who is in the group, and does this step count?"""

    axis: ClassVar[str] = "membership"

    def commit(self, ok: bool) -> bool:
        """Does the step count? `ok` is this worker's verdict, already agreed in the ballot."""
        raise NotImplementedError


AXES: dict[str, type[Part]] = {cls.axis: cls for cls in (Reducer, Sync, Layout, Order, Balance, Membership)}
