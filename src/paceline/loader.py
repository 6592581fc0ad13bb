"""The loader `prepare` gives back: each worker's share of the user's batches, and what the engine must know.

What the user calls a batch is the global batch. A data set with indices is split without a word between the
workers: all derive the same order from (seed, epoch). Where a worker cannot know what the others hold
(streams, batches split by the user, weights counted by a function) the weights are gathered: 8 bytes a worker
and batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import DataError, PeerError, UsageError, nearest
from paceline.parts import Balance, Comm
from paceline.sources import Habit, Piece, Pieces, chosen
from paceline.telemetry import Recorder

# What a worker says in place of its weight. Weights are never negative.
_OUT, _NEVER, _FAILED = -1.0, -2.0, math.nan


@dataclass(frozen=True)
class Batch:
    """What the engine must know of the batch handed out."""

    weight: float  # of this worker: its samples, or what the user's weight function counted
    total: float  # the sum over all workers
    last: bool  # the last batch of the epoch, as far as known beforehand (False for streams)
    indices: list[int] | None  # of the samples in this worker's batch, a borrowed one too; None for streams


class Loader:
    """One `for` loop over it is one epoch, numbered from 0.

    Only the newest iterator lives: asking an older one for a batch is an error. A loop left early counts as
    an epoch; a state saved after it, before the next loop, still goes on in the middle of it.
    """

    def __init__(
        self,
        source: Any,
        *,
        comm: Comm,
        balance: Balance,
        recorder: Recorder,
        batch: Habit = "global",
        weight: Callable[[Any], float] | None = None,
        seed: int = 0,
        on_batch: Callable[[Batch], None] | None = None,
        gate: Callable[[], bool] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        if batch not in ("global", "per_worker"):
            raise UsageError(f"batch={batch!r} is not a choice", do=nearest(str(batch), ("global", "per_worker")))
        if isinstance(source, Loader):
            raise UsageError("the loader is prepared already", do="give prepare the DataLoader itself")
        self.source, self.comm, self.recorder = source, comm, recorder
        self.weight, self.on_batch, self.gate = weight, on_batch, gate
        self.meet = meet  # where workers keep their own pace: what brings them to a common stop
        self.current: Batch | None = None  # the batch handed out last
        self.epoch = 0
        seed %= 2**63
        self._from = chosen(source, comm, balance, batch, seed)
        self._handed = 0  # batches of this epoch
        self._begun = False  # this epoch, by an iterator of this loader
        self._allowed = self._stopped = False  # by the gate: the next batch; everything
        self._turn = 0  # which iterator is the newest
        self._pieces: Pieces | None = None
        self._asks = self._from.asks or weight is not None
        if self._asks and meet is not None and comm.world > 1:
            raise UsageError(
                "this loader asks all workers in every step, and this method lets them keep their own pace",
                why="a stream or weight= is shared out batch by batch, so the fast would wait for the slow",
                do="give a dataset with a length and no weight=, or a method whose workers step together",
            )
        if comm.world > 1:
            facts = {**self._from.facts(), "seed": seed, "weighted": weight is not None}
            comm.agree("data", "\n".join(f"{key} {value}" for key, value in facts.items()))
        self._from.check()

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    @property
    def batch_size(self) -> int | None:
        """As the user gave it."""
        size: int | None = self.source.batch_size
        return size

    def __len__(self) -> int:
        """Batches an epoch. On a resumed epoch too: learning-rate schedules count whole ones."""
        count = self._from.count()
        if count is None:
            raise TypeError(f"{type(self.source).__name__} does not say how many batches it has")
        return count

    def describe(self) -> str:
        by = "" if self.weight is None else f", weighted by {getattr(self.weight, '__name__', 'a function')}"
        return self._from.describe() + by

    def set_epoch(self, epoch: int) -> None:
        """Number the next loop, and tell a sampler that asks. Not needed: epochs count themselves."""
        if epoch != self.epoch or self._begun:  # a state just loaded for this epoch stays where it is
            self._restart(epoch, 0)
        if callable(tell := getattr(self._from.drawer, "set_epoch", None)):
            tell(epoch)

    # -------------------------------------------------------------------------------------------- the loop

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._restart(self.epoch + 1, 0)
        else:
            self._restart(self.epoch, self._handed)
        self._begun = True
        return self._run(self._turn)

    def _restart(self, epoch: int, handed: int) -> None:
        self._leave()
        self._turn += 1
        self._begun = False
        self.epoch, self._handed = epoch, handed

    def _run(self, turn: int) -> Generator[Any, None, None]:
        if self._stopped:
            return
        self._newest(turn)
        start = self._handed
        if self.meet is not None and self._from.drawer is not None:
            self.meet()  # worker 0 draws this epoch's order for all
        self._pieces, count = self._from.begin(self.epoch, start)
        try:
            while count is None or self._handed < count:
                if not self._may_go_on():
                    return
                began = time.perf_counter()
                piece, weight = self._next(self._pieces)
                data_s = time.perf_counter() - began
                batch = self._agreed(piece, weight)
                if batch is None:
                    break
                self._handed += 1
                self._allowed = False
                self.current = batch
                if self.on_batch is not None:
                    self.on_batch(batch)
                self.recorder.start_lap(piece.samples or 0, data_s)
                yield piece.data
                self._newest(turn)
                self.recorder.end_lap()
        finally:
            if turn == self._turn:
                self._leave()
        if self.meet is None:
            self._from.settle(self.epoch, start)
        self._restart(self.epoch + 1, 0)

    def _leave(self) -> None:
        self.recorder.end_lap()
        if self._pieces is not None:
            self._pieces.close()  # ends the loader's processes now, whoever still holds the iterator
            self._pieces = None

    def _may_go_on(self) -> bool:
        """The gate counts batches: a leave that the end of a stream did not use is good for the next."""
        if self.gate is not None and not self._allowed:
            self._allowed = self.gate()
            self._stopped = not self._allowed
        return not self._stopped

    def _newest(self, turn: int) -> None:
        if turn != self._turn:
            raise UsageError(
                "this iterator of the loader is no longer the newest",
                why="a later iter(loader), set_epoch or load_state_dict has begun another epoch",
                do="use one iterator at a time, or prepare a second DataLoader",
            )

    # -------------------------------------------------------------------------------------------- weights

    def _next(self, pieces: Iterator[Piece]) -> tuple[Piece, float]:
        """The next piece and its weight. Others who wait for the weight are told if there is none to come."""
        try:
            piece = next(pieces)
            return piece, self._weight_of(piece)
        except Exception as error:
            if self._asks:
                with contextlib.suppress(PeerError):  # the first error is the one to be seen
                    self._gathered(_FAILED)
            if isinstance(error, (ConnectionError, EOFError)) or "DataLoader worker (pid" in str(error):
                raise DataError(
                    f"a process of worker {self.comm.rank}'s data loader died",
                    why=f"{type(error).__name__}: {error}",
                    do="look for an out-of-memory kill, or run with num_workers=0 to see where it fails",
                ) from error
            raise

    def _weight_of(self, piece: Piece) -> float:
        if piece.out:
            return _NEVER if piece.samples is None else _OUT
        if self.weight is None or piece.samples == 0:
            if piece.samples is None:
                raise DataError(
                    f"a batch of type {type(piece.data).__name__} has no tensor to count samples by",
                    why="gradients are weighted by samples: the size of the first tensor in the batch",
                    do="give prepare weight=, a function from a batch to its weight",
                )
            return float(piece.samples)
        weight = float(self.weight(piece.data))
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"the weight function gave {weight}", do="give a finite number, 0 or more")
        return weight

    def _agreed(self, piece: Piece, weight: float) -> Batch | None:
        """The batch to hand out, or None where all workers have come to the end of their data."""
        if not self._asks:
            assert piece.total is not None
            return Batch(weight, float(piece.total), piece.last, piece.indices)
        weights = self._gathered(weight)
        if failed := [rank for rank, w in enumerate(weights) if math.isnan(w)]:
            raise DataError(
                f"no batch {self._handed} of epoch {self.epoch} from {_workers(failed)}",
                why="reading or weighing it failed; the error itself is in the output there",
            )
        if never := [rank for rank, w in enumerate(weights) if w == _NEVER]:
            raise DataError(
                f"no data for {_workers(never)} in epoch {self.epoch}",
                why="every worker needs a batch an epoch, and an iterator or generator can be read only once",
                do="give each worker some of the data, in an object that can be iterated anew each epoch",
            )
        if all(w == _OUT for w in weights):
            return None
        return Batch(max(weight, 0.0), sum(max(w, 0.0) for w in weights), piece.last, piece.indices)

    def _gathered(self, weight: float) -> list[float]:
        if self.comm.world == 1:
            return [weight]
        weights: list[float] = self.comm.gather(torch.tensor([weight], dtype=torch.float64)).wait().flatten().tolist()
        return weights

    # -------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch stands: batches handed out, not those read ahead by loader processes."""
        where = {"epoch": self.epoch, "batches": self._handed, "seed": self._from.seed}
        return {**where, **self._facts(self._handed), **self._from.save(self._handed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batches not yet handed out. On all workers, be they more or fewer than before."""
        for key in ("epoch", "batches", "seed"):
            if type(state.get(key)) is not int or state[key] < 0:
                raise DataError(f"the loader's state has {key}={state.get(key)!r}, not a whole number")
        epoch, handed, seed = state["epoch"], state["batches"], state["seed"]
        for key, here in self._facts(handed).items():
            if key not in state:
                raise DataError(f"the loader's state has no {key}", why=f"it must be {here!r}, as in this run")
            if state[key] != here:
                raise DataError(
                    f"the loader's state has {key}={state[key]!r}, this run has {here!r}",
                    why="the rest of its epoch would not be the samples that have not been seen",
                    do=f"resume with {key} as it was, or begin anew without the loader's state",
                )
        if self.comm.world > 1:
            self.comm.agree("position of the loader", f"epoch {epoch}, batch {handed}, seed {seed}")
        self._from.seed = seed
        self._from.load(state, epoch, handed)
        self._restart(epoch, handed)

    def _facts(self, handed: int) -> dict[str, Any]:
        """In mid-epoch, batches of a size for each worker can go on only with as many workers."""
        facts = self._from.facts()
        return {**facts, "workers": self.comm.world} if handed and self._from.batch == "per_worker" else facts


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
