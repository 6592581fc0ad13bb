"""The contracts: six kinds of part, and what each may ask of the others.

A `Method` is one part for each question about a step: how is a mean estimated (Reducer), what is agreed on and when
(Sync), who owns which state (Layout), which bytes go first (Order), how many samples does each worker take
(Balance), who is in the group (Membership). What all of them have in common is in part.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.noise import Noise, NoiseSample
from paceline.core.part import Part as Part

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange
    from paceline.core.open_window import Finished
    from paceline.core.shard import Shard


def nothing_left() -> Tensor | None:
    """The leftover of a reducer that sends everything."""
    return None


class Reduced(NamedTuple):
    """An estimate of the mean, and what this worker did not send.

    `left` is a function, called only by those who keep leftovers (error feedback, the conservation law), at once and
    before x is written again; it may use x up. So a leftover that is not asked for costs nothing. The mean may be a
    vector that the next step's mean is written into.
    """

    mean: Tensor
    left: Callable[[], Tensor | None] = nothing_left


@dataclass(kw_only=True)
class Reducer(Part):
    """How is the mean of one vector over the workers estimated with few bytes?

    Laws: avg(x) == mean + avg(left); the mean is bitwise equal on all workers; what is awaited depends only on values
    that are equal everywhere; finite in, finite out. Values that are not finite have been found by the engine before.
    """

    axis: ClassVar[str] = "reducer"
    tolerance: ClassVar[float] = 1e-6  # relative rounding error of mean + avg(left) against avg(x)

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        """The mean of x over the workers. x may be overwritten. A method of two rounds awaits twice."""
        raise NotImplementedError

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        """This worker's shard of the mean. Override it where fewer bytes do."""
        whole = await self.mean(b, x, comm)
        return Reduced(whole.mean.view(comm.world_size, -1)[comm.rank], whole.left)

    def kind(self, name: str, p: Tensor) -> Hashable:
        """Parameters of different kinds never share a bucket. A wrapper's kinds are those of the reducers inside."""
        return tuple(r.kind(name, p) for r in vars(self).values() if isinstance(r, Reducer))

    def cuttable(self) -> bool:
        """May a bucket travel in chunks? Not if it is looked at as matrices, or something of it is remembered."""
        return Fact.ELEMENTWISE in self.gives and len(list(self.parts())) == 1

    def sends(self, b: Bucket, world_size: int) -> int:
        """The formula as a number: payload bytes one worker sends for the mean of this bucket."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Sync(Part):
    """What is agreed on, when, with whom? It asks the exchange for means and does not know the reducer."""

    axis: ClassVar[str] = "sync"

    is_async: ClassVar[bool] = False  # workers do not step together: nothing may wait for all of them in a step
    background: ClassVar[bool] = False  # it wants `ex.background`, a lane beside the gradients'
    acts_before_step: ClassVar[bool] = False  # it overrides `before_step`
    acts_after_step: ClassVar[bool] = False  # it overrides `on_step`
    open_ended: ClassVar[bool] = False  # each worker's micro-batches of a step end when it `closes`: open_window.py
    # The knobs at which plain SGD goes as if every gradient were agreed on in every step, to rounding.
    limit: ClassVar[Mapping[str, Any] | None] = None

    def due(self, step: int) -> bool:
        """Do the workers exchange gradients in this step? A pure function of the agreed step number."""
        return True

    def lag(self) -> int:
        """How many steps after its gradients a mean is used, and with it what the workers said of them."""
        return 0

    def micro_batch(self, batch: int, world_size: int) -> int:
        """Where it is open-ended: the samples of a micro-batch, where the user's batch has so many."""
        raise NotImplementedError

    def closes(self, elapsed: float, usual: float) -> bool:
        """Where it is open-ended: does this worker's round end now, after so many seconds? usual: those of one of its
        micro-batches. Each worker decides by itself.
        """
        raise NotImplementedError

    def learn(self, everyone: Sequence[Finished], asked_for: float, ex: Exchange) -> None:
        """Where it is open-ended: every worker hears what all have finished in the round that ends. asked_for: the
        samples that the user wants in a step.
        """

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        """A bucket of local gradients is full; in true units if the method keeps leftovers, whatever the loss scale."""

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        """Backward is over, the optimizer has not stepped yet, and the step will be made."""

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        """Make the optimizer's own step. A sync that updates by another rule overrides this."""
        return step()

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        """The optimizer has updated a bucket's parameters."""

    def agrees(self, step: int) -> bool:
        """Where gradients are not exchanged: is everything agreed on after this step, the module's buffers too?"""
        return False

    def meets(self, step: int) -> bool:
        """Where gradients are not exchanged: does every worker wait for others in this step anyway, so that all can
        agree on a number in it?
        """
        return self.agrees(step)

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        """The weights to evaluate and to save, where the workers' own differ."""
        return await ex.exact(b.weights())

    def latest(self, b: Bucket) -> Tensor | None:
        """For an asynchronous sync: the newest weights known to be all workers'. None: this worker's own are."""
        return None

    def settle(self, ex: Exchange) -> None:
        """Let what is under way arrive: before an evaluation, a checkpoint, a change of the group and the end."""

    async def on_buffers(self, b: Bucket, ex: Exchange) -> None:
        """Average the module's floating-point buffers (BatchNorm's), at the end of a backward that exchanges."""
        b.flat.copy_(await ex.exact(b.flat))


@dataclass(kw_only=True)
class Layout(Part):
    """Who owns which state, and where does it live?"""

    axis: ClassVar[str] = "layout"
    background: ClassVar[bool] = False  # it wants `ex.background`, a lane beside the gradients'
    at_once: ClassVar[int] = sys.maxsize  # buckets under way together; fewer where the memory of more would count
    publishes: ClassVar[bool] = False  # it overrides `publish`
    follows_casts: ClassVar[bool] = True  # parameters may be cast or moved between two steps
    shards_parameters: ClassVar[bool] = False  # parameters are whole only while a module computes with them

    def rests(self, params: Sequence[Tensor]) -> bool:
        """Is there nothing for it to do in a world of one?"""
        return True

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        """Put hooks of its own on the user's objects, before the first bucket is cut."""

    def own(self, b: Bucket, ex: Exchange) -> None:
        """A bucket was cut: take this worker's share of its parameters and of their state."""

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        """Turn a bucket of local gradients into the agreed mean, or into this worker's shard of it."""
        raise NotImplementedError

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        """Make the optimizer's own step, for what this worker owns."""
        return step()

    async def publish(self, b: Bucket, ex: Exchange) -> None:
        """After the optimizer's step: give the others the parameters that this worker updated for them."""

    def settle(self, ex: Exchange) -> None:
        """Let what is under way arrive: before an evaluation, a checkpoint, a change of the group and the end."""

    def collect(self, ex: Exchange) -> None:
        """Before buckets are cut anew: make model and optimizer state whole again on every worker."""

    # Where a worker's memory may not suffice: redeal.py.

    def begin_micro_batch(self) -> None:
        """A micro-batch has been handed out."""

    def joining(self, ex: Exchange, left: int) -> AbstractContextManager[None]:
        """Inside, this worker takes part in what the forwards and backwards of the others exchange beside gradients.

        Its own forward or backward was given up. left: how many micro-batches come after that one, on the others.
        """
        return nullcontext()

    def give_up(self, ex: Exchange) -> None:
        """The step under way is given up on all workers, wherever each is in its forwards and backwards."""

    # What checkpoints and the filling of models ask, where state is sharded.

    def shards(self) -> Iterable[Shard]:
        """This worker's shards of the trained parameters; none where every worker holds them whole."""
        return ()

    def frozen_shards(self) -> Iterable[Shard]:
        """This worker's shards of parameters that are not trained."""
        return ()

    def sharded_parameters(self) -> set[int]:
        """The ids of the parameters that are whole only while a module computes with them."""
        return set()

    def reshard(self) -> None:
        """Free the parameters that were gathered: their shards are going to be written from outside."""


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
    tunes: ClassVar[Mapping[str, tuple[float, float]]] = {}  # knobs worth trying while training, and their bounds
    crosses: ClassVar[bool] = False  # `step` does not wait for the means: each is applied when it has landed

    def next(self, ready: Sequence[Bucket], sent: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        """Which of those ready start now, in this order: a pure function of its arguments and of what `hear` said."""
        raise NotImplementedError

    def urgency(self, b: Bucket) -> int:
        """After backward: what is under way goes on in this order, smallest first, and of equals the oldest."""
        return 0

    def chunk_bytes(self) -> int | None:
        """The most that may travel at once, where the reducer lets a bucket be cut into chunks. None: any size."""
        return None

    def hear(self, backlog: float) -> None:
        """After a backward that crosses: the bytes that were sent and had not landed, the mean over the workers."""


class StepSize(NamedTuple):
    """How large one step is."""

    multiple: float  # its batches, over those of a step as `accumulate` has it
    samples: float  # of all workers
    units: int  # of all workers: the micro-batches it is made of
    rate: float  # the sum of the groups' learning rates, as the user's scheduler has set them


class Speed(NamedTuple):
    """How fast a worker computes: a backward over b samples ends per_step + per_sample · b seconds after it got them.

    Until speeds are known all workers have this one, with which they are alike.
    """

    per_sample: float = 1.0  # seconds for one more sample
    per_step: float = 0.0  # seconds that a step takes however few the samples
    most: int = sys.maxsize  # samples that fit in this worker's memory

    def seconds(self, samples: int) -> float:
        """The time to the end of backward over so many samples."""
        return self.per_step + self.per_sample * samples


@dataclass(kw_only=True)
class Balance(Part):
    """How many samples does each worker take?"""

    axis: ClassVar[str] = "balance"
    adapts: ClassVar[bool] = False  # it overrides `multiple`, `rate` or `made`, or is asked after measurements

    def shares(self, speeds: Sequence[Speed], batch: int) -> list[int]:
        """Split a batch, alike on all workers: a pure function of the speeds, which they have agreed on."""
        raise NotImplementedError

    # How fast the workers are: data/balancing.py.

    def measures_speed(self) -> bool:
        """Does it want the workers' speeds? Nothing is measured, and nothing sent, for one that does not."""
        return False

    def due(self, batch: int) -> bool:
        """Do the workers tell each other their speeds before this batch of an epoch? `batch` counts from 0."""
        return False

    def worth(self, before_s: float, after_s: float) -> bool:
        """Are other shares worth it, with which a step is predicted to take after_s in place of before_s?"""
        return False

    def check_batch(self, batch: int, world_size: int) -> None:
        """Refuse a global batch that cannot be split, before anything is started."""

    def check_world(self, world_size: int, accumulate: int) -> None:
        """Refuse a job of so many workers and micro-batches, before anything is started."""

    # How large a step is: step_size.py. What these say must be equal on all workers.

    def multiple(self) -> int:
        """How many times `accumulate` of the loader's batches make a step. It changes in `made` alone."""
        return 1

    def rate(self, size: StepSize) -> float:
        """What the learning rate of a step of this size is multiplied by."""
        return 1.0

    def counts(self, size: StepSize) -> float:
        """How many steps of the user's schedule a step of this size is."""
        return 1.0

    def made(self, size: StepSize) -> None:
        """A step of this size counts. What it writes into its state is real at once."""

    # How noisy gradients are: [Note: noise scale], noise.py.

    def measures_noise(self) -> int:
        """How many steps lie between two measurements of the gradients' noise. 0: it does not ask for any."""
        return 0

    def hear(self, sample: NoiseSample) -> None:
        """What a step has shown of the gradients' noise, the same on all workers."""
        self.state["noise square"], self.state["noise trace"], self.state["noise seen"] = self.noise.after(sample)

    @property
    def noise(self) -> Noise:
        """The moving averages of what was heard."""
        return Noise(*(self.state.get(f"noise {name}", 0) for name in Noise._fields))


@dataclass(kw_only=True)
class Membership(Part):
    """Who is in the group, and does this step count?"""

    axis: ClassVar[str] = "membership"

    def commit(self, ok: bool) -> bool:
        """Does the step count? `ok` is the verdict of the vote, the same on every worker."""
        raise NotImplementedError


AXES: dict[str, type[Part]] = {cls.axis: cls for cls in (Reducer, Sync, Layout, Order, Balance, Membership)}


class Parts(Protocol):
    """One part for each axis: what the engine is handed. `paceline.Method` is one."""

    reducer: Reducer
    sync: Sync
    layout: Layout
    order: Order
    balance: Balance
    membership: Membership

    def axes(self) -> dict[str, Part]: ...
    def parts(self) -> Iterator[Part]: ...
    def config(self) -> dict[str, Any]: ...
