"""The kinds of data a loader reads: indices to split, a stream to split, or batches that the user has split."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.core.parts import Balance
from paceline.data.micro_batches import MicroBatchSize
from paceline.data.random_streams import SideStreams
from paceline.data.sampling import (
    Assignment,
    Drawer,
    Drawn,
    Epoch,
    Ledger,
    LongEpoch,
    ShareOfStream,
    Shares,
    folded,
    length,
    mark,
    mixed,
)
from paceline.errors import DataError, UsageError

Habit = Literal["global", "per_worker"]
_NOTHING = object()


class DealtBatch(NamedTuple):
    """One worker's share of a global batch."""

    data: Any
    samples: int | None  # how many count: 0 for a borrowed or repeated batch, None if they cannot be counted
    total: int | None = None  # samples of all workers, if this worker knows without communication
    last: bool = False
    left: int = 0  # micro-batches of this batch still to come
    largest: int = 0  # samples of its largest micro-batch, of any worker
    indices: list[int] | None = None
    out: bool = False  # this worker's data has ended, and this repeats its last batch
    number: int = 0  # of micro-batches that are dealt out: how many this worker has been handed in this epoch


DealtBatches = Generator[DealtBatch, None, None]


class BatchSource:
    """The interface between a Loader and the kind of data it reads."""

    asks = True  # a worker cannot know the others' weights: they are all-gathered for each batch
    batch: Habit
    seed = 0  # of the order; saved, so that a resumed run continues with the same order
    drawer: Any  # the object that decides the order; its set_epoch is called if it has one
    shares: Shares | None = None  # of its batches; None where the user has split them

    @property
    def size(self) -> int | None:
        """Samples of a global batch; None where they are not known beforehand."""
        return None

    def facts(self) -> dict[str, Any]:
        """The settings that all workers must share, and that a saved state must share with this run."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise if the data cannot be split. Called once the facts are known to be the same on all workers."""

    def count(self) -> int | None:
        """The number of batches in an epoch, or None if it is not known before the epoch is drawn."""
        raise NotImplementedError

    def begin(self, epoch: int, start: int) -> tuple[DealtBatches, int | None]:
        """This worker's shares of an epoch's batches from batch `start` on, and the number of batches if known."""
        raise NotImplementedError

    def again(self, epoch: int, start: int) -> DealtBatches:
        """The batches from `start` on once more, in the middle of an epoch: they were given up."""
        raise NotImplementedError

    def settle(self, epoch: int, start: int) -> None:
        """Check, after an epoch has run from `start` to its end, that each sample was handed out exactly once."""

    @property
    def in_step(self) -> bool:
        """Where micro-batches are dealt out: do others of the step follow the one handed out?"""
        return False

    def advance(self, taken: Sequence[int]) -> None:
        """Where micro-batches are dealt out: so many has every worker taken in this epoch."""

    def save(self, handed: int) -> dict[str, Any]:
        """What else a saved state must hold to resume after `handed` batches."""
        return {}

    def load(self, state: Mapping[str, Any], epoch: int, handed: int) -> None:
        """Restore what `save` returned."""

    def describe(self) -> str:
        raise NotImplementedError


# -------------------------------------------------------------------------------------- indices


class Indexed(BatchSource):
    """A map-style data set: each worker knows the whole order and reads, and counts, only its own samples."""

    asks = False
    shares: Shares

    @property
    def comm(self) -> Comm:
        """The lane on which loaders agree."""
        return self.group.lane("control")

    @property
    def together(self) -> int:
        """How many of the user's batches make one global batch."""
        return self.group.world_size if self.batch == "per_worker" else 1

    @property
    def size(self) -> int | None:
        """Samples of a global batch; None where the user's own batch sampler decides."""
        return None if self.source.batch_size is None else self.source.batch_size * self.together

    def __init__(
        self,
        source: DataLoader[Any],
        group: Group,
        balance: Balance,
        batch: Habit,
        seed: int,
        size: MicroBatchSize,
    ) -> None:
        self.source, self.group, self.batch, self.seed = source, group, batch, seed
        self.samples = length(source.dataset)
        sampler: Any = source.sampler if self.size else source.batch_sampler
        self.shuffled = type(sampler) is RandomSampler
        self.drawer = None if self.size and _takes_all(sampler, source.dataset) else sampler
        self.shares = Shares(group, balance)
        self.assignment = Assignment(self.shares, size)
        self.generator = torch.Generator()
        self.inner = rebuilt(source, self.generator, batch_sampler=self.assignment)
        self.order: Epoch | LongEpoch | None = None  # the epoch in progress
        self.resumed = 0  # the hash of what had been handed out of an epoch that is to be drawn again
        self.ledger = Ledger()
        self.entered = 0  # the batches before this one are in it, from the one at which the loop began
        self.handed_before = self.ledger.digest()  # what had been handed out when the loop began

    @property
    def sampling(self) -> str:
        if self.drawer is not None:
            return f"drawn by {type(self.drawer).__name__}"
        return "shuffled" if self.shuffled else "in order"

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "indexed",
            "samples": self.samples,
            "batch_size": self.source.batch_size,
            "batch": self.batch,
            "drop_last": self.source.drop_last,
            "sampling": self.sampling,
        }

    def check(self) -> None:
        if self.samples == 0:
            raise DataError("the data set is empty", why="its len() is 0", do="check where it reads from")
        self._check_size()
        if self.drawer is None:
            if self.samples is None:
                raise DataError(
                    f"{type(self.source.dataset).__name__} has no length",
                    why="the samples are split between the workers by their number",
                    do="give the data set a __len__, or make it an IterableDataset",
                )
            self._check_enough(self.samples)

    def _check_size(self) -> None:
        if self.size is not None:
            self.shares.check(self.size)

    def _check_enough(self, samples: int) -> None:
        world_size = self.comm.world_size
        if samples < world_size:
            raise DataError(
                f"{samples} samples for {world_size} workers",
                why="every worker needs at least one sample an epoch",
                do=f"use at most {samples} workers, or more data",
            )
        if self.size is not None and self.source.drop_last and samples < self.size:
            raise DataError(
                f"drop_last leaves no batch of {samples} samples",
                why=f"the only global batch, of {self.size}, would be incomplete",
                do="lower batch_size, or leave drop_last out",
            )

    def count(self) -> int | None:
        n = self.samples if self.drawer is None else length(self.drawer)
        if n is None:
            return self.order.total if self.order else None
        if self.size is None:
            return -(-n // self.together)
        return n // self.size if self.source.drop_last else -(-n // self.size)

    def begin(self, epoch: int, start: int) -> tuple[DealtBatches, int | None]:
        if not start or self.order is None:  # otherwise `load` restored it, and a sampler must not draw again
            self.order = self._ordered(epoch)
            self._pass_over(self.order, start)
        self.order.reach(start)
        self.assignment.epoch, self.assignment.start = self.order, start
        self.ledger, self.entered = Ledger(), start
        self.handed_before = self.order.before(start)
        return self._from(self.order, epoch, start), self.order.total

    def again(self, epoch: int, start: int) -> DealtBatches:
        assert self.order is not None
        self.assignment.start = start
        for k in range(start, self.entered):
            indices, own = self.shares.take(self.order.batch(k), k)
            if own:
                self.ledger.remove(indices)
        self.entered = min(self.entered, start)
        return self._from(self.order, epoch, start)

    def _from(self, order: Epoch | LongEpoch, epoch: int, start: int) -> DealtBatches:
        # Different on every worker: with one seed, their loader processes would augment different samples alike.
        self.generator.manual_seed(mixed(self.seed, epoch, start, self.comm.rank))
        return self._dealt(order, start)

    def _ordered(self, epoch: int) -> Epoch | LongEpoch:
        if self.drawer is not None:
            drawer = Drawer(self.drawer, self.comm, size=self.size, together=self.together, samples=self.samples or 0)
            drawn = drawer.draw()
            self._check_enough(len(drawn.indices))
            first = self._cut(drawn)
            return first if drawn.ended else LongEpoch(first, lambda: self._stretch(drawer.draw()))
        assert self.samples is not None
        if not self.shuffled:
            return self._cut(Drawn(torch.arange(self.samples), None, ended=True))
        own = torch.Generator().manual_seed(mixed(self.seed, epoch))
        return self._cut(Drawn(torch.randperm(self.samples, generator=own), None, ended=True))

    def _stretch(self, drawn: Drawn) -> Epoch | None:
        stretch = self._cut(drawn)
        return stretch if len(stretch) else None

    def _cut(self, drawn: Drawn, together: int | None = None) -> Epoch:
        if self.size is not None:
            return Epoch.even(drawn.indices, self.size, self.source.drop_last)
        sizes = torch.empty(0, dtype=torch.int64) if drawn.sizes is None else drawn.sizes
        return Epoch.ragged(drawn.indices, sizes, together or self.together)

    def _pass_over(self, order: Epoch | LongEpoch, start: int) -> None:
        """Draw a long epoch again up to where it was left."""
        k = 0
        while k < start and order.reach(k):
            k = min(start, order.drawn)
        if k < start:
            raise DataError(f"the loader's state has batches={start}, the epoch has {order.drawn}")
        if start and order.reach(start) and mark(order.before(start)) != self.resumed and self.comm.rank == 0:
            print(
                f"paceline: {type(self.drawer).__name__} does not draw the same order again: the rest of this epoch is "
                "another one",
                file=sys.stderr,
                flush=True,
            )

    def _dealt(self, order: Epoch | LongEpoch, start: int) -> DealtBatches:
        batches, k = iter(self.inner), start
        while order.reach(k):
            for part in self.assignment.take(k):
                data = next(batches, _NOTHING)
                if data is _NOTHING:
                    raise DataError(
                        f"the data set ended within {order.drawn} batches",
                        why="its __getitem__ raised StopIteration, which the other workers cannot see",
                        do="raise IndexError for an index that does not exist, and let __len__ tell the truth",
                    )
                if not part.left:
                    self._enter(k)
                last = k + 1 == order.total and not part.left
                yield DealtBatch(data, part.own, part.total, last, part.left, part.largest, part.samples.tolist())
            k += 1
        yield DealtBatch(None, 0, out=True)

    def _enter(self, k: int) -> None:
        """Note that this worker has been handed its share of batch k."""
        assert self.order is not None
        indices, own = self.shares.take(self.order.batch(k), k)
        if own:
            self.ledger.add(indices)
        self.entered = k + 1

    def settle(self, epoch: int, start: int) -> None:
        if self.comm.world_size == 1 or self.order is None:
            return
        seen = folded(self.comm.sum(self.ledger.digest()).wait()).tolist()
        due = folded(self.order.before(self.order.drawn) - self.handed_before).tolist()
        if seen != due:
            raise DataError(
                f"epoch {epoch}: {seen[0]} samples were handed out, not each of the {due[0]} exactly once",
                why="the workers do not split the same order alike: another sampler, balance or position",
                do="start all workers with the same arguments, and resume all from the same checkpoint",
            )

    def save(self, handed: int) -> dict[str, Any]:
        if not handed or self.order is None:
            return {}
        state: dict[str, Any] = {"seen": mark(self.order.before(handed))}
        if isinstance(self.order, LongEpoch):
            state["stretches"] = True
        elif self.drawer is not None:
            state["order"] = self.order.indices
            if self.size is None:
                state["sizes"] = self.order.sizes()
        return state

    def load(self, state: Mapping[str, Any], epoch: int, handed: int) -> None:
        order: Epoch | LongEpoch | None = None
        if handed and self.drawer is None:
            order = self._ordered(epoch)
        elif handed and state.get("stretches") is True and type(state.get("seen")) is int:
            self.resumed = state["seen"]  # it is drawn again when the loop begins, after a set_epoch
        elif handed:
            indices = whole_numbers(state, "order")
            sizes = whole_numbers(state, "sizes") if self.size is None else None
            if sizes is not None and (int(sizes.sum()) != len(indices) or int(sizes.min()) < 1):
                raise DataError(
                    f"the loader's state has sizes that do not make up its order of {len(indices)} samples",
                    why="the order a sampler drew is part of the state; here it is damaged",
                )
            order = self._cut(Drawn(indices, sizes, ended=True), together=1)
        if order is not None:
            if not order.reach(handed - 1):
                raise DataError(f"the loader's state has batches={handed}, the epoch has {order.drawn}")
            seen = mark(order.before(handed))
            if state.get("seen") != seen:
                raise DataError(
                    f"the loader's state has seen={state.get('seen')!r}, this run would have {seen} by then",
                    why="its epoch was begun in another order: samples would repeat or be left out",
                    do="resume with the version of torch that began it, or begin the epoch anew",
                )
        self.order = order

    def describe(self) -> str:
        n = self.count()
        batches = "" if n is None else f", {n} batches an epoch"
        if self.size is None:
            what = f"batches of {type(self.drawer).__name__}"
            return what + (f", each split over {self.comm.world_size} workers" * (self.comm.world_size > 1)) + batches
        rest = self.samples % self.size if self.samples and self.drawer is None else 0
        if rest:
            batches += f" ({rest} samples dropped)" if self.source.drop_last else f" (last {rest})"
        return f"{self.shares.describe(self.size)}{batches}, {self.sampling}"


# -------------------------------------------------------------------------------------- streams


class Stream(BatchSource):
    """An iterable data set: every worker reads all of it and keeps its share of each global batch.

    With num_workers > 0 each of the loader's processes cuts a stream of its own, as always in torch: the data set
    must divide the data between them (get_worker_info). Resuming reads and skips the batches already handed out.

    All read with the same random streams, in the loader's processes or with SideStreams, so that a stream which
    shuffles itself is the same on all. Only the collate function, which sees this worker's share, has streams of its
    own.
    """

    shares: Shares

    @property
    def size(self) -> int:
        assert self.source.batch_size is not None
        return self.source.batch_size * (self.shares.group.world_size if self.batch == "per_worker" else 1)

    def __init__(self, source: DataLoader[Any], group: Group, balance: Balance, batch: Habit, seed: int) -> None:
        self.source, self.batch, self.seed = source, batch, seed
        self.drawer = source.dataset
        self.shares = Shares(group, balance)
        self.generator = torch.Generator()
        self.keep = ShareOfStream(self.shares, source.collate_fn)
        self.inner = rebuilt(
            source, self.generator, batch_size=self.size, drop_last=source.drop_last, collate_fn=self.keep
        )

    def facts(self) -> dict[str, Any]:
        size, drop_last = self.source.batch_size, self.source.drop_last
        return {"kind": "stream", "batch_size": size, "batch": self.batch, "drop_last": drop_last}

    def check(self) -> None:
        self.shares.check(self.size)

    def count(self) -> int | None:
        n = length(self.source.dataset)
        return n if n is None else n // self.size if self.source.drop_last else -(-n // self.size)

    def begin(self, epoch: int, start: int) -> tuple[DealtBatches, int | None]:
        self.keep.read = 0
        # The same on every worker: all must read the same stream, also when it shuffles itself.
        self.generator.manual_seed(mixed(self.seed, epoch))
        batches: Iterable[tuple[int | None, Any]] = self.inner
        if self.shares.group.world_size > 1 and not self.source.num_workers:
            batches = _read_with(SideStreams(self.seed, epoch), batches)
        return _until_out(batches, start), None

    def describe(self) -> str:
        return f"{self.shares.describe(self.size)} of a stream, which every worker reads"


class Given(BatchSource):
    """Any other iterable, whose batches the user has already split between the workers."""

    batch: Habit = "per_worker"

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = self.drawer = source

    def facts(self) -> dict[str, Any]:
        return {"kind": "given", "batch": self.batch}

    def count(self) -> int | None:
        return length(self.source)

    def begin(self, epoch: int, start: int) -> tuple[DealtBatches, int | None]:
        return _until_out(((_first_size(data), data) for data in self.source), start), None

    def describe(self) -> str:
        name = type(self.source).__name__
        return f"batches of each worker's own {name}, taken as split by you (batch='per_worker')"


def _read_with(streams: SideStreams, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, read while the process draws from these random streams."""
    with streams.entered():
        inner = iter(batches)
    while True:
        with streams.entered():
            batch = next(inner, _NOTHING)
        if batch is _NOTHING:
            return
        yield batch


def _until_out(batches: Iterable[tuple[int | None, Any]], start: int) -> DealtBatches:
    """The batches from `start` on, then the last one again for ever, so that this worker can step with the others."""
    dealt = DealtBatch(None, None, out=True)
    for k, (samples, data) in enumerate(batches):
        dealt = DealtBatch(data, samples)
        if k >= start:
            yield dealt
    if not dealt.out:
        dealt = dealt._replace(samples=0, out=True)
    while True:
        yield dealt


def _first_size(data: Any) -> int | None:
    """The number of samples in a batch: the size of the first tensor found in it."""
    if isinstance(data, Tensor):
        return len(data) if data.dim() else None
    inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for size in map(_first_size, inside) if size is not None), None)


# -------------------------------------------------------------------------------------- the user's loader


def chosen(source: Any, group: Group, balance: Balance, batch: Habit, seed: int, size: MicroBatchSize) -> BatchSource:
    """The BatchSource for the user's loader; a UsageError if it cannot be split."""
    if size.cuts:
        check_cuttable(source)
    if not isinstance(source, DataLoader):
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise UsageError(f"{source!r} is not a loader", do="give a torch DataLoader or an iterable of batches")
        return Given(source)
    if type(source).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(source).__name__} has an __iter__ of its own",
            why="a DataLoader is split by building it anew with other batches, which would leave that out",
            do="use torch's DataLoader",
        )
    if isinstance(source.dataset, (torch_data.IterDataPipe, torch_data.MapDataPipe)):
        raise UsageError(
            "the data set is a DataPipe",
            why="torch splits DataPipes between processes itself, so samples would be split away twice",
            do="wrap it in an IterableDataset or a Dataset of your own",
        )
    for sampler in (source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None)):
        if isinstance(sampler, torch_data.DistributedSampler):
            raise UsageError(
                "the loader has a DistributedSampler",
                why="Paceline already splits every batch: a worker would get a part of its part",
                do="leave the sampler out and say shuffle=True; loader.set_epoch may stay",
            )
    if source.batch_sampler is None:
        raise UsageError(
            "the DataLoader has batch_size=None",
            why="without a batch size there is no global batch to split between the workers",
            do="give batch_size=, or an iterable of batches that you have split between the workers",
        )
    if isinstance(source.dataset, torch_data.IterableDataset):
        return Stream(source, group, balance, batch, seed)
    return Indexed(source, group, balance, batch, seed, size)


def check_cuttable(source: Any) -> None:
    """Raise unless the batches of this loader can be dealt in micro-batches."""
    if isinstance(source, DataLoader) and not isinstance(source.dataset, torch_data.IterableDataset):
        return
    streams = isinstance(source, DataLoader)
    raise UsageError(
        f"{'the stream ' if streams else ''}{type(source.dataset if streams else source).__name__} cannot be dealt in "
        "micro-batches",
        why="a batch is cut, and dealt again where it did not fit, by the indices of its samples",
        do="give a DataLoader over a data set with indices, or smaller batches and accumulate=N",
    )


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Whether the sampler gives each sample once, shuffled or not, so that every worker can derive its order."""
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != length(dataset)):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset


def rebuilt(source: DataLoader[Any], generator: torch.Generator, **batching: Any) -> DataLoader[Any]:
    """The user's DataLoader with other batches, always in order: batch k of all workers is one global batch."""
    return DataLoader(
        source.dataset,
        **{"collate_fn": source.collate_fn, **batching},
        num_workers=source.num_workers,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=generator,
        prefetch_factor=source.prefetch_factor,
        persistent_workers=source.persistent_workers,
        pin_memory_device=source.pin_memory_device,
    )


def whole_numbers(state: Mapping[str, Any], key: str) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1 or not len(value):
        raise DataError(
            f"the loader's state has {key}={value!r}, not a row of int64",
            why="the order a sampler drew is part of the state; here it is missing or damaged",
        )
    return value
