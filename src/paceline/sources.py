"""Where a loader's batches come from: indices to split, a stream to split, or batches the user has split."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.errors import DataError, UsageError
from paceline.parts import Balance, Comm
from paceline.sampling import (
    Assignment,
    Epoch,
    Ledger,
    ShareOfStream,
    Shares,
    digest,
    draw,
    folded,
    length,
    mixed,
)

Habit = Literal["global", "per_worker"]


class Piece(NamedTuple):
    """One worker's part of a global batch."""

    data: Any
    samples: int | None  # that count: 0 for what is borrowed or repeated, None where it cannot be told
    total: int | None = None  # over all workers, where that needs no asking
    last: bool = False
    indices: list[int] | None = None
    out: bool = False  # this worker's data has ended, and this repeats its last batch


Pieces = Generator[Piece, None, None]


class Source:
    """What a Loader asks of the place its batches come from."""

    asks = True  # a worker cannot know the others' weights: they are gathered each batch
    batch: Habit
    seed = 0  # of the order; saved, so that a resumed run goes on as it would have without the break
    drawer: Any  # what decides the order, and may want to know the epoch

    def facts(self) -> dict[str, Any]:
        """What all workers must have in common, and a saved state with this run."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what cannot be split. Called when the facts are known to be the same everywhere."""

    def count(self) -> int | None:
        """Batches an epoch, as far as can be said without drawing it."""
        raise NotImplementedError

    def begin(self, epoch: int, start: int) -> tuple[Pieces, int | None]:
        """The pieces of an epoch from batch `start` on, and how many batches it has where that is known."""
        raise NotImplementedError

    def settle(self, epoch: int, start: int) -> None:
        """The epoch was run from `start` to its end: was it all that it should have been?"""

    def save(self, handed: int) -> dict[str, Any]:
        """What else a state must hold to go on after `handed` batches."""
        return {}

    def load(self, state: Mapping[str, Any], epoch: int, handed: int) -> None:
        """Take over what `save` gave."""

    def describe(self) -> str:
        raise NotImplementedError


# -------------------------------------------------------------------------------------- indices


class Indexed(Source):
    """A map-style data set: each worker knows the whole order, reads its own samples, accounts for each."""

    asks = False

    def __init__(self, source: DataLoader[Any], comm: Comm, balance: Balance, batch: Habit, seed: int) -> None:
        self.source, self.comm, self.batch, self.seed = source, comm, batch, seed
        self.samples = length(source.dataset)
        self.together = comm.world if batch == "per_worker" else 1
        self.size = source.batch_size * self.together if source.batch_size is not None else None
        sampler: Any = source.sampler if self.size else source.batch_sampler
        self.shuffled = type(sampler) is RandomSampler
        self.drawer = None if self.size and _takes_all(sampler, source.dataset) else sampler
        self.shares = Shares(comm, balance)
        self.assignment = Assignment(self.shares)
        self.generator = torch.Generator()
        self.inner = _rebuilt(source, self.generator, batch_sampler=self.assignment)
        self.order: Epoch | None = None  # of the epoch in progress
        self.ledger = Ledger()

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
        if self.size is not None:
            self.shares.check(self.size)
        if self.drawer is None:
            if self.samples is None:
                raise DataError(
                    f"{type(self.source.dataset).__name__} has no length",
                    why="the samples are split between the workers by their number",
                    do="give the data set a __len__, or make it an IterableDataset",
                )
            self._check_enough(self.samples)

    def _check_enough(self, samples: int) -> None:
        world = self.comm.world
        if samples < world:
            raise DataError(
                f"{samples} samples for {world} workers",
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
            return len(self.order) if self.order else None
        if self.size is None:
            return -(-n // self.together)
        return n // self.size if self.source.drop_last else -(-n // self.size)

    def begin(self, epoch: int, start: int) -> tuple[Pieces, int | None]:
        if not start or self.order is None:  # otherwise `load` has it, and a sampler must not be asked again
            self.order = self._ordered(epoch)
        self.assignment.epoch, self.assignment.start = self.order, start
        self.ledger = Ledger()
        # Not the same on every worker: their loader processes would augment different samples alike.
        self.generator.manual_seed(mixed(self.seed, epoch, start, self.comm.rank))
        return self._pieces(self.order, start), len(self.order)

    def _ordered(self, epoch: int) -> Epoch:
        if self.drawer is not None:
            ragged, samples = self.size is None, self.samples or 0
            indices, sizes = draw(self.drawer, ragged=ragged, samples=samples, comm=self.comm)
            self._check_enough(len(indices))
            return self._cut(indices, sizes, self.together)
        assert self.samples is not None
        if not self.shuffled:
            return self._cut(torch.arange(self.samples))
        own = torch.Generator().manual_seed(mixed(self.seed, epoch))
        return self._cut(torch.randperm(self.samples, generator=own))

    def _cut(self, indices: Tensor, sizes: Tensor | None = None, together: int = 1) -> Epoch:
        if sizes is not None:
            return Epoch.ragged(indices, sizes, together)
        assert self.size is not None
        return Epoch.even(indices, self.size, self.source.drop_last)

    def _pieces(self, order: Epoch, start: int) -> Pieces:
        for k, data in enumerate(self.inner, start):
            indices, own = self.assignment.take(k)
            if own:
                self.ledger.add(indices)
            yield Piece(data, own, len(order.batch(k)), k + 1 == len(order), indices.tolist())
        raise DataError(
            f"the data set ended within {len(order)} batches",
            why="its __getitem__ raised StopIteration, which the other workers cannot see",
            do="raise IndexError for an index that does not exist, and let __len__ tell the truth",
        )

    def settle(self, epoch: int, start: int) -> None:
        if self.comm.world == 1 or self.order is None:
            return
        seen = folded(self.comm.sum(self.ledger.digest()).wait()).tolist()
        due = digest(self.order.split(start)[1]).tolist()
        if seen != due:
            raise DataError(
                f"epoch {epoch}: {seen[0]} samples were handed out, not each of the {due[0]} exactly once",
                why="the workers do not split the same order alike: another sampler, balance or position",
                do="start all workers with the same arguments, and resume all from the same checkpoint",
            )

    def save(self, handed: int) -> dict[str, Any]:
        if not handed or self.order is None:
            return {}
        state: dict[str, Any] = {"seen": int(digest(self.order.split(handed)[0])[1])}
        if self.drawer is not None:
            state["order"] = self.order.indices
            if self.size is None:
                state["sizes"] = self.order.sizes()
        return state

    def load(self, state: Mapping[str, Any], epoch: int, handed: int) -> None:
        order = None
        if handed and self.drawer is None:
            order = self._ordered(epoch)
        elif handed:
            indices = _whole_numbers(state, "order")
            sizes = _whole_numbers(state, "sizes") if self.size is None else None
            if sizes is not None and (int(sizes.sum()) != len(indices) or int(sizes.min()) < 1):
                raise DataError(
                    f"the loader's state has sizes that do not make up its order of {len(indices)} samples",
                    why="the order a sampler drew is part of the state; here it is damaged",
                )
            order = self._cut(indices, sizes)
        if order is not None:
            if handed > len(order):
                raise DataError(f"the loader's state has batches={handed}, the epoch has {len(order)}")
            seen = int(digest(order.split(handed)[0])[1])
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
            return what + (f", each split over {self.comm.world} workers" * (self.comm.world > 1)) + batches
        rest = self.samples % self.size if self.samples and self.drawer is None else 0
        if rest:
            batches += f" ({rest} samples dropped)" if self.source.drop_last else f" (last {rest})"
        return f"{self.shares.describe(self.size)}{batches}, {self.sampling}"


# -------------------------------------------------------------------------------------- streams


class Stream(Source):
    """An iterable data set: every worker reads all of it and keeps its share of each global batch.

    With num_workers > 0 each of the loader's processes cuts a stream of its own, as always in torch: dividing
    the data between them (get_worker_info) is the data set's business. Resuming reads and passes over.
    """

    def __init__(self, source: DataLoader[Any], comm: Comm, balance: Balance, batch: Habit, seed: int) -> None:
        self.source, self.batch, self.seed = source, batch, seed
        self.drawer = source.dataset
        assert source.batch_size is not None
        self.size = source.batch_size * (comm.world if batch == "per_worker" else 1)
        self.shares = Shares(comm, balance)
        self.generator = torch.Generator()
        keep = ShareOfStream(self.shares, source.collate_fn)
        self.inner = _rebuilt(source, self.generator, batch_size=self.size, drop_last=source.drop_last, collate_fn=keep)

    def facts(self) -> dict[str, Any]:
        size, drop_last = self.source.batch_size, self.source.drop_last
        return {"kind": "stream", "batch_size": size, "batch": self.batch, "drop_last": drop_last}

    def check(self) -> None:
        self.shares.check(self.size)

    def count(self) -> int | None:
        n = length(self.source.dataset)
        return n if n is None else n // self.size if self.source.drop_last else -(-n // self.size)

    def begin(self, epoch: int, start: int) -> tuple[Pieces, int | None]:
        # The same on every worker: a stream that shuffles itself must be the same stream for all of them.
        self.generator.manual_seed(mixed(self.seed, epoch))
        return _until_out(self.inner, start), None

    def describe(self) -> str:
        return f"{self.shares.describe(self.size)} of a stream, which every worker reads"


class Given(Source):
    """Any other iterable: its batches are taken as they come, split between the workers by the user."""

    batch: Habit = "per_worker"

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = self.drawer = source

    def facts(self) -> dict[str, Any]:
        return {"kind": "given", "batch": self.batch}

    def count(self) -> int | None:
        return length(self.source)

    def begin(self, epoch: int, start: int) -> tuple[Pieces, int | None]:
        return _until_out(((_first_size(data), data) for data in self.source), start), None

    def describe(self) -> str:
        name = type(self.source).__name__
        return f"batches of each worker's own {name}, taken as split by you (batch='per_worker')"


def _until_out(batches: Iterable[tuple[int | None, Any]], start: int) -> Pieces:
    """From batch `start` on; then the last one for ever, so that this worker can keep the others company."""
    piece = Piece(None, None, out=True)
    for k, (samples, data) in enumerate(batches):
        piece = Piece(data, samples)
        if k >= start:
            yield piece
    if not piece.out:
        piece = piece._replace(samples=0, out=True)
    while True:
        yield piece


def _first_size(data: Any) -> int | None:
    """The number of samples in a batch: the size of the first tensor found in it."""
    if isinstance(data, Tensor):
        return len(data) if data.dim() else None
    inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for size in map(_first_size, inside) if size is not None), None)


# -------------------------------------------------------------------------------------- the user's loader


def chosen(source: Any, comm: Comm, balance: Balance, batch: Habit, seed: int) -> Source:
    """The kind of source this is, or the reason why it cannot be one."""
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
    kind = Stream if isinstance(source.dataset, torch_data.IterableDataset) else Indexed
    return kind(source, comm, balance, batch, seed)


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Is it `each sample once, shuffled or not`? Then every worker can derive the order by itself."""
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != length(dataset)):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset


def _rebuilt(source: DataLoader[Any], generator: torch.Generator, **batching: Any) -> DataLoader[Any]:
    """The user's DataLoader with other batches. Always in order: batch k of all workers belongs together."""
    return DataLoader(
        source.dataset,
        **{"collate_fn": source.collate_fn, **batching},
        num_workers=source.num_workers,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=source.generator or generator,
        prefetch_factor=source.prefetch_factor,
        persistent_workers=source.persistent_workers,
        pin_memory_device=source.pin_memory_device,
    )


def _whole_numbers(state: Mapping[str, Any], key: str) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 1 or not len(value):
        raise DataError(
            f"the loader's state has {key}={value!r}, not a row of int64",
            why="the order a sampler drew is part of the state; here it is missing or damaged",
        )
    return value
