"""The loader `prepare` gives back: each worker's share of the user's batches, and what the engine must know.

The user's batch is the global batch. A data set with indices is split without communication: all workers derive the
same order from (seed, epoch). Where a worker cannot know what the others hold (streams, batches split by the user,
weights counted by a function) the weights are all-gathered: 8 bytes per worker and batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils.data import RandomSampler, Sampler

from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.core.parts import Balance
from paceline.data.balancing import Balancing, check, read_ahead
from paceline.data.dealing import MicroBatchRule, dealt_out
from paceline.data.micro_batches import MicroBatchSize
from paceline.data.redeals import Redeals
from paceline.data.sampling import SAVED
from paceline.data.sources import BatchSource, DealtBatch, DealtBatches, Habit, chosen
from paceline.errors import DataError, PeerError, UsageError, nearest
from paceline.telemetry.pace import Clock
from paceline.telemetry.recorder import Recorder

T = TypeVar("T")  # the type of a batch

if TYPE_CHECKING:  # a variable that held a DataLoader may hold what `prepare` made of it
    from torch.utils.data import DataLoader as _LoaderBase
else:
    _LoaderBase = Generic

# A worker sends one of these in place of its weight when it has no batch. Real weights are never negative.
_OUT, _NEVER, _FAILED = -1.0, -2.0, math.nan


@dataclass(frozen=True)
class Batch:
    """What the engine must know of the batch handed out."""

    weight: float  # this worker's samples, or what the user's weight function counted
    total: float  # the sum over all workers
    last: bool  # the last batch of the epoch, as far as known beforehand (False for streams)
    indices: list[int] | None  # this worker's samples, including a borrowed one; None for streams
    left: int = 0  # micro-batches of the same batch still to come
    number: int = 0  # where micro-batches are dealt out: how many this worker has been handed in this epoch


class Loader(_LoaderBase[T]):
    """A DataLoader split between the workers. One `for` loop over it is one epoch, numbered from 0.

    Only the newest iterator is valid: asking an older one for a batch is an error. A loop left early counts as an
    epoch; a state saved after it and before the next loop still resumes in the middle of that epoch.
    """

    def __init__(
        self,
        source: Any,
        *,
        group: Group,
        balance: Balance,
        recorder: Recorder,
        batch: Habit = "global",
        weight: Callable[[Any], float] | None = None,
        seed: int = 0,
        on_batch: Callable[[Batch], None] | None = None,
        on_end: Callable[[], None] | None = None,
        gate: Callable[[], bool] | None = None,
        meet: Callable[[], None] | None = None,
        clock: Clock | None = None,
        size: MicroBatchSize | None = None,
        redeals: Redeals | None = None,
        rule: MicroBatchRule | None = None,
    ) -> None:
        if batch not in ("global", "per_worker"):
            raise UsageError(f"batch={batch!r} is not a choice", do=nearest(str(batch), ("global", "per_worker")))
        if isinstance(source, Loader):
            raise UsageError("the loader is prepared already", do="give prepare the DataLoader itself")
        self.source, self.group, self.recorder = source, group, recorder
        self.weight, self.on_batch, self.on_end, self.gate = weight, on_batch, on_end, gate
        self.meet = meet  # brings asynchronous workers to a common stop; None where workers step together
        self.current: Batch | None = None  # the batch handed out last
        self.epoch = 0
        seed %= SAVED
        check([source], balance, batch, group.world_size)
        self.size = size or MicroBatchSize()
        self.redeals = redeals  # goes back to a batch that did not fit; None where that ends the loop
        self._from: BatchSource
        if rule is None:
            self._from = chosen(source, group, balance, batch, seed, self.size)
        else:
            self._from = dealt_out(source, group, balance, batch, seed, rule)
        self._handed = 0  # batches handed out in this epoch, to the last micro-batch
        self._ever = 0  # ... and in all of them
        self._goes_on = False  # the next one handed out belongs to the same step as the last
        self._total = 0  # samples of the last one, where they are known
        self._balancing: Balancing | None = None
        if balance.measures_speed() and group.world_size > 1 and self._from.shares is not None:
            self._balancing = Balancing(self._from.shares, recorder, reads_ahead=read_ahead(source), clock=clock)
        self._begun = False  # an iterator of this loader has begun this epoch
        self._allowed = False  # the gate has let the next batch through
        self._stopped = False  # the gate has ended training
        self._turn = 0  # the number of the newest iterator
        self._dealt: DealtBatches | None = None
        self._asks = self._from.asks or weight is not None
        if self._asks and meet is not None and group.world_size > 1:
            raise UsageError(
                "this loader asks all workers in every step, and this method lets them keep their own pace",
                why="a stream or weight= is shared out batch by batch, so the fast would wait for the slow",
                do="give a dataset with a length and no weight=, or a method whose workers step together",
            )
        generator = _generator(source)
        if group.world_size > 1:
            facts = {**self._from.facts(), "seed": seed, "weighted": weight is not None, "generator": bool(generator)}
            self.comm.agree("data", "\n".join(f"{key} {value}" for key, value in facts.items()))
        if generator is not None:
            own = torch.tensor([generator.initial_seed() % SAVED])
            self._from.seed = int(self.comm.broadcast(own).wait())
        self._from.check()
        self._listen_for_epochs()
        self._ready = True

    @property
    def comm(self) -> Comm:
        """The lane on which loaders agree."""
        return self.group.lane("control")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What else a script reads of a DataLoader (sampler, num_workers, ...) is as the user gave it."""
            if name.startswith("__") or "source" not in self.__dict__:
                raise AttributeError(name)
            try:
                return getattr(self.source, name)
            except AttributeError:
                kind = type(self.source).__name__
                raise AttributeError(f"the prepared loader of a {kind} has no attribute {name!r}") from None

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse to change the user's DataLoader, of which another one has been built."""
            if "_ready" in self.__dict__ and name not in self.__dict__ and hasattr(self.source, name):
                raise UsageError(
                    f"{name} of a prepared loader cannot be changed",
                    why="prepare has built another loader from the one it was given",
                    do=f"set {name} before prepare",
                )
            super().__setattr__(name, value)

    def _listen_for_epochs(self) -> None:
        """Give samplers a set_epoch, as scripts written for a DistributedSampler call it: it is the loader's own."""
        for sampler in (getattr(self.source, name, None) for name in ("sampler", "batch_sampler")):
            if isinstance(sampler, Sampler) and (not hasattr(sampler, "set_epoch") or _is_ours(sampler.set_epoch)):
                sampler.__dict__["set_epoch"] = self.set_epoch

    def __len__(self) -> int:
        """Batches in a whole epoch, also while a resumed one runs: learning-rate schedules count whole epochs."""
        count = self._from.count()
        if count is None:
            raise TypeError(f"{type(self.source).__name__} does not say how many batches it has")
        return count

    @property
    def in_step(self) -> bool:
        """Will other micro-batches of the step follow the one handed out? Under any method that deals out such."""
        return self._goes_on or self._from.in_step

    def round_ended(self, handed: Sequence[int]) -> None:
        """Where micro-batches are dealt out: so many has every worker been handed in this epoch."""
        self._from.advance(handed)

    def describe(self) -> str:
        by = "" if self.weight is None else f", weighted by {getattr(self.weight, '__name__', 'a function')}"
        cut = "" if self.size.most is None else f", in micro-batches of at most {self.size.most}"
        adjusted = "" if self._balancing is None else "; shares are going to follow the workers' speeds"
        return self._from.describe() + by + cut + adjusted

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, and pass it to a sampler with a set_epoch of its own.

        It is optional: epochs are counted without it.
        """
        if epoch != self.epoch or self._begun:  # otherwise a state just loaded for this epoch would be lost
            self._restart(epoch, 0)
        if callable(tell := getattr(self._from.drawer, "set_epoch", None)) and not _is_ours(tell):
            tell(epoch)

    # -------------------------------------------------------------------------------------------- the loop

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch's own says nothing of its batches
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
        if self._balancing is not None:
            self._balancing.begin(self._ever, start)
        self.size.begin(start)
        if self.redeals is not None:
            self.redeals.begin()
        self._dealt, count = self._from.begin(self.epoch, start)
        if count is None and self.meet is not None and self.group.world_size > 1:
            raise UsageError(
                f"{type(self._from.drawer).__name__} has no end, or a very distant one",
                why="worker 0 draws its order for all in stretches, and this method lets workers keep their own pace",
                do="give the sampler an end, or use a method whose workers step together",
            )
        try:
            while count is None or self._handed < count:
                goes_on = self.in_step
                if not goes_on and not self._may_go_on():
                    return
                if self.redeals is not None and self.redeals.before(self._handed):
                    self._deal_again()
                if self._balancing is not None and not goes_on:
                    self._balancing.before_batch(self._ever, self._from.size or self._total)
                began = time.perf_counter()
                dealt, weight = self._next(self._dealt)
                data_s = time.perf_counter() - began
                batch = self._agreed(dealt, weight)
                if batch is None:
                    break
                self._handed += not dealt.left
                self._ever += not dealt.left
                self._total, self._goes_on = (self._total if goes_on else 0) + (dealt.total or 0), dealt.left > 0
                self._allowed = False
                self.current = batch
                if self.redeals is not None:
                    self.redeals.handed_out(dealt.left, dealt.largest)
                if self.on_batch is not None:
                    self.on_batch(batch)
                lap = self.recorder.go_on if goes_on else self.recorder.start_lap
                lap(dealt.samples or 0, data_s)
                if self._balancing is not None and not goes_on:
                    self.recorder.follow(self._balancing.pace)
                yield dealt.data
                self._newest(turn)
                if self.redeals is not None and (first := self.redeals.after()) is not None:
                    self._handed, self._goes_on = first, True
                    self._deal_again()
                if not self.in_step:
                    self.recorder.end_lap()
        finally:
            if turn == self._turn:
                self._leave()
        if self.on_end is not None:
            self.on_end()
        if self.meet is None:
            self._from.settle(self.epoch, start)
        self._restart(self.epoch + 1, 0)

    def _deal_again(self) -> None:
        """Go on with the batch after those that are handed out, cut anew."""
        assert self._dealt is not None
        self._dealt.close()
        self._dealt = self._from.again(self.epoch, self._handed)

    def _leave(self) -> None:
        self.recorder.end_lap()
        if self._dealt is not None:
            self._dealt.close()  # ends the loader's processes now, even if the user still holds the iterator
            self._dealt = None

    def _may_go_on(self) -> bool:
        """Ask the gate, once for each batch: a permission that the end of a stream left unused is kept."""
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

    def _next(self, batches: Iterator[DealtBatch]) -> tuple[DealtBatch, float]:
        """The next batch and its weight; on an error, the workers that wait for the weight are told first."""
        try:
            dealt = next(batches)
            return dealt, self._weight_of(dealt)
        except Exception as error:
            if self._asks:
                with contextlib.suppress(PeerError):  # the user must see the first error, not this one
                    self._gathered(_FAILED)
            if isinstance(error, (ConnectionError, EOFError)) or "DataLoader worker (pid" in str(error):
                raise DataError(
                    f"a process of worker {self.comm.rank}'s data loader died",
                    why=f"{type(error).__name__}: {error}",
                    do="look for an out-of-memory kill, or run with num_workers=0 to see where it fails",
                ) from error
            raise

    def _weight_of(self, dealt: DealtBatch) -> float:
        if dealt.out:
            return _NEVER if dealt.samples is None else _OUT
        if self.weight is None or dealt.samples == 0:
            if dealt.samples is None:
                raise DataError(
                    f"a batch of type {type(dealt.data).__name__} has no tensor to count samples by",
                    why="gradients are weighted by samples: the size of the first tensor in the batch",
                    do="give prepare weight=, a function from a batch to its weight",
                )
            return float(dealt.samples)
        weight = float(self.weight(dealt.data))
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"the weight function gave {weight}", do="give a finite number, 0 or more")
        return weight

    def _agreed(self, dealt: DealtBatch, weight: float) -> Batch | None:
        """The batch to hand out, or None once all workers have come to the end of their data."""
        if not self._asks:
            if dealt.out:
                return None
            assert dealt.total is not None
            return Batch(weight, float(dealt.total), dealt.last, dealt.indices, dealt.left, dealt.number)
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
        total = sum(max(w, 0.0) for w in weights)
        return Batch(max(weight, 0.0), total, dealt.last, dealt.indices, dealt.left)

    def _gathered(self, weight: float) -> list[float]:
        if self.comm.world_size == 1:
            return [weight]
        weights: list[float] = (
            self.comm.all_gather(torch.tensor([weight], dtype=torch.float64)).wait().flatten().tolist()
        )
        return weights

    # -------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, Any]:
        """The position in this epoch: batches handed out, not counting those that loader processes read ahead."""
        where = {"epoch": self.epoch, "batches": self._handed, "seed": self._from.seed}
        balance = {} if self._balancing is None else {"balance": self._balancing.save(self._ever)}
        return {**where, **self._facts(self._handed), **self._from.save(self._handed), **balance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the batches not yet handed out. All workers call it; there may be more or fewer than before."""
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
        if self.comm.world_size > 1:
            shares = "" if self._balancing is None else f", shares {state.get('balance')}"
            self.comm.agree("position of the loader", f"epoch {epoch}, batch {handed}, seed {seed}{shares}")
        self._from.seed = seed
        self._from.load(state, epoch, handed)
        if self._balancing is not None and "balance" in state:
            self._balancing.load(state["balance"], self._ever)
        self._restart(epoch, handed)

    def _facts(self, handed: int) -> dict[str, Any]:
        """The source's facts; with batch='per_worker', an epoch in progress also needs the same number of workers."""
        facts = self._from.facts()
        return {**facts, "workers": self.comm.world_size} if handed and self._from.batch == "per_worker" else facts


def _generator(source: Any) -> torch.Generator | None:
    """The user's generator, whose seed is that of the loader's order and of its processes."""
    shuffling = getattr(source, "sampler", None)
    found = getattr(shuffling, "generator", None) if type(shuffling) is RandomSampler else None
    found = found if found is not None else getattr(source, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _is_ours(set_epoch: Any) -> bool:
    return isinstance(getattr(set_epoch, "__self__", None), Loader)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
