"""The contracts: six kinds of part, and what each may ask of the others.

A `Method` is one part for each question about a step: how is a mean estimated (Reducer), what is agreed on and when
(Sync), who owns which state (Layout), which bytes go first (Order), how many samples does each worker take (Balance),
who is in the group (Membership). A part is a keyword-only dataclass: its fields are its knobs. What it remembers between
steps is in `self.state` and nowhere else, so saving, moving, staging and resetting work for every part alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, get_args, get_origin

import torch
from torch import Tensor

from paceline.errors import MethodError, nearest

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


# ---------------------------------------------------------------------------------------------------- the wire


class Handle(Protocol):
    """Bytes on their way. `await` it inside a part; `wait` blocks (GPU: orders streams) and gives the result."""

    def wait(self) -> Tensor: ...
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

    def broadcast(self, x: Tensor, root: int = 0) -> Handle:
        """x becomes the root's x, in place."""

    def agree(self, what: str, text: str) -> None:
        """Raise MismatchError on every worker unless all of them say the same text."""


# ---------------------------------------------------------------------------------------------------- knobs


def knob(
    default: Any,
    effect: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A part's field: its default, what it does, its unit, and the range it must lie in (above: exclusive)."""
    meta = {"effect": effect, "unit": unit, "low": low, "high": high, "above": above}
    if isinstance(default, Part):
        return field(default_factory=lambda: dataclasses.replace(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Knob:
    """One knob as documentation and the command line show it."""

    name: str
    kind: str
    default: Any
    effect: str
    unit: str
    range: str


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _range(f: dataclasses.Field[Any], kind: Any) -> str:
    low, high, above = (f.metadata.get(k) for k in ("low", "high", "above"))
    if _choices(kind):
        return " | ".join(str(c) for c in _choices(kind))
    sides = [f"> {above:g}" if above is not None else "", f">= {low:g}" if low is not None else ""]
    return ", ".join(s for s in [*sides, f"<= {high:g}" if high is not None else ""] if s)


# ---------------------------------------------------------------------------------------------------- state


class State(MutableMapping[Any, Any]):
    """A part's memory. What a step writes is staged; `commit` makes it real, `rollback` forgets it.

    Keys: a string for a scalar of the whole part, (parameter name, slot) for what belongs to one parameter, and
    (bucket index, slot) for a flat vector over a bucket, which saving splits by parameter name. Values are replaced,
    never changed in place: otherwise there is nothing to roll back to.
    """

    def __init__(self) -> None:
        self.real: dict[Any, Any] = {}
        self.staged: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self.staged[key] if key in self.staged else self.real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.staged[key] = value

    def __delitem__(self, key: Any) -> None:
        self.staged.pop(key, None)
        self.real.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        return iter({**self.real, **self.staged})

    def __len__(self) -> int:
        return len({**self.real, **self.staged})

    def commit(self) -> None:
        self.real.update(self.staged)
        self.staged.clear()

    def rollback(self) -> None:
        self.staged.clear()


@dataclass(kw_only=True)
class Part:
    """What every part has: knobs (its fields), facts, and state."""

    name: ClassVar[str] = ""
    axis: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # author, title, venue; empty for plumbing
    formula: ClassVar[str] = ""  # payload bytes one worker sends a step for n elements of s bytes, W workers
    gives: ClassVar[frozenset[str]] = frozenset()  # facts others may need or refuse
    needs: ClassVar[Mapping[str, str]] = {}  # fact -> why it is needed and what to do
    refuses: ClassVar[Mapping[str, str]] = {}  # fact -> why it cannot be and what to do

    def __post_init__(self) -> None:
        self.state = State()
        for f in dataclasses.fields(self):
            self._check(f, self.kinds()[f.name], getattr(self, f.name))

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """Each knob's resolved type."""
        import typing

        return {k: v for k, v in typing.get_type_hints(cls).items() if get_origin(v) is not ClassVar}

    @classmethod
    def knobs(cls) -> list[Knob]:
        kinds = cls.kinds()
        return [
            Knob(
                name=f.name,
                kind=getattr(kinds[f.name], "__name__", str(kinds[f.name])),
                default=f.default if f.default is not dataclasses.MISSING else f.default_factory(),  # type: ignore[misc]
                effect=f.metadata.get("effect", ""),
                unit=f.metadata.get("unit", ""),
                range=_range(f, kinds[f.name]),
            )
            for f in dataclasses.fields(cls)
        ]

    def _check(self, f: dataclasses.Field[Any], kind: Any, value: Any) -> None:
        where = f"{self.name}: {f.name}={value!r}"
        allowed = _range(f, kind)
        if choices := _choices(kind):
            if value not in choices:
                raise MethodError(f"{where} is not a choice", do=nearest(str(value), map(str, choices)))
            return
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            setattr(self, f.name, value := float(value))
        if kind in (int, float, bool, str) and type(value) is not kind:
            raise MethodError(
                f"{where} has the wrong type", why=f"{f.name} is a {kind.__name__}, not {type(value).__name__}"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low, high, above = (f.metadata.get(k) for k in ("low", "high", "above"))
            inside = (low is None or value >= low) and (high is None or value <= high)
            if not (inside and (above is None or value > above)):
                raise MethodError(f"{where} is out of range", do=f"choose {f.name} {allowed}")

    def recipe(self) -> dict[str, Part]:
        """How the paper combines it, axis -> part. A part that wants company overrides this."""
        return {self.axis: self}

    def parts(self) -> Iterator[Part]:
        """Itself and the parts inside it."""
        yield self
        for f in dataclasses.fields(self):
            if isinstance(inner := getattr(self, f.name), Part):
                yield from inner.parts()

    def config(self) -> dict[str, Any]:
        """Name and knobs, as canonical data: compared between workers, written to checkpoints."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"name": self.name, **{k: v.config() if isinstance(v, Part) else v for k, v in values.items()}}


# ---------------------------------------------------------------------------------------------------- the six axes


def nothing_left() -> Tensor | None:
    """The leftover of a reducer that sends everything."""
    return None


class Reduced(NamedTuple):
    """An estimate of the mean, and what this worker did not send.

    `left` is called only by those who keep leftovers (error feedback, the conservation law), at once, before x is
    written again; it may use x up. So a method that nobody asks for its leftover does not pay for it.
    """

    mean: Tensor
    left: Callable[[], Tensor | None] = nothing_left


@dataclass(kw_only=True)
class Reducer(Part):
    """How is the mean of one vector over the workers estimated with few bytes?

    Laws: avg(x) == mean + avg(left); mean is bitwise equal on all workers; what is awaited depends only on values equal
    everywhere; finite in, finite out; NaN or infinity in is somebody else's business (the engine has checked).
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

    def sends(self, n: int, itemsize: int, world: int) -> int:
        """Payload bytes one worker sends for n elements: the formula, as a number."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Sync(Part):
    """What is agreed on, when, with whom? It asks the exchange for means and does not know the reducer."""

    axis: ClassVar[str] = "sync"

    def due(self, step: int) -> bool:
        """Do the workers exchange gradients in this step? A pure function of the agreed step number."""
        return True

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        """A bucket of local gradients is full."""

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        """The optimizer has updated a bucket's parameters."""

    async def on_buffers(self, b: Bucket, ex: Exchange) -> None:
        """The module's floating-point buffers (BatchNorm's averages), at the end of a backward that exchanges."""
        b.flat.copy_(await ex.exact(b.flat))


@dataclass(kw_only=True)
class Layout(Part):
    """Who owns which state, and where does it live?"""

    axis: ClassVar[str] = "layout"

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        """Turn a bucket of local gradients into the agreed mean, or into this worker's slice of it."""
        raise NotImplementedError

    async def publish(self, b: Bucket, ex: Exchange) -> None:
        """After the optimizer: give the others the parameters this worker updated for them."""


class Event(Enum):
    """What an Order is told of. Logical events, never times, so that every worker decides alike."""

    READY = "a bucket is full"
    END = "backward has ended: what is not full by now stays empty"


@dataclass(kw_only=True)
class Order(Part):
    """Which bytes go first?"""

    axis: ClassVar[str] = "order"

    def next(self, waiting: Sequence[Bucket], event: Event) -> Sequence[Bucket]:
        """Which of the buckets not yet sent (by index) start now. A pure function of its arguments."""
        raise NotImplementedError


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


AXES: dict[str, type[Part]] = {
    cls.axis: cls for cls in (Reducer, Sync, Layout, Order, Balance, Membership)
}


def generator(seed: int, rank: int, device: torch.device) -> torch.Generator:
    """A random stream of one's own: never the global one, different on every worker."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + rank) % 2**63)
