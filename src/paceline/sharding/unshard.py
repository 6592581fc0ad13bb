"""Parameters that are sharded over the workers, and whole only while a module computes with them.

[Note: unshard] The parameters of a bucket are views of one vector, `full`. Resharding frees its memory: the storage is
resized to nothing, and tensors that autograd has saved keep pointing to it. Unsharding takes the memory again and
fills it by an all-gather of the workers' shards, so autograd finds in backward what it saved in forward. What is
written into the parameters while they are whole is copied into the shards before the memory is freed. Other uses than
by their module gather parameters too: [Note: outside], sharded_parameter.py.

A module's forward unshards the buckets of its parameters. In forward a bucket is resharded when another one is needed
and no module that uses it is still running. The backward of a module's output unshards again, and a bucket is
resharded when its gradients have left.

[Note: prefetch] The next bucket is gathered ahead, in the order of the last step: while a layer computes, the shards
of the next one travel, and those of the first travel from the end of the last step on. A step that takes another order
discards the old one at the first difference, and its own order serves the next step. All workers must unshard in one
order; every shard carries a stamp that says of which bucket it is, so that a difference is found out.

[Note: frozen] Parameters that are not trained have no gradients and no place in the engine's buckets. They are sharded
like all others, in buckets of their own with negative numbers. When one of them is to be trained, its whole bucket is
unsharded for good before the engine takes the parameter up, and those that stay frozen are sharded anew. They have no
gradient that would tell when autograd has finished with them. The gradient of a module's input does, if it is the only
one that leaves the module: then they are resharded. All others stay unsharded until the step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from paceline.core.bucket import Bucket, Slot
from paceline.core.cutting import cut
from paceline.core.shard import Shard
from paceline.errors import DataError, UsageError
from paceline.sharding.sharded_bucket import FrozenShard, ShardedBucket, resharded

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.offload.params import ParameterStore

_LONGEST = 10_000  # buckets of one order: a loop of forwards without a step would let it grow for ever
_ANNOUNCED = 2  # buckets after the next one that are read from disk already
_FROZEN_BYTES = 4 << 20  # of frozen parameters to a bucket


class UnshardOrder:
    """The order in which buckets are unsharded in a step, and which one is therefore next: [Note: prefetch]."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self.now: list[int] = []
        self._path: list[int] = []  # of one micro-batch, its forward and its backward
        self._begun = 0  # how many there were when the micro-batch in hand began

    def next(self, index: int) -> int | None:
        """Note that this bucket is unsharded now, and give the one that came after it in the last step."""
        if len(self.now) == _LONGEST:
            self.over()
        self.now.append(index)
        k = len(self.now)
        if self.last[k - 1 : k] != [index]:
            self.last = []
        return self.last[k] if k < len(self.last) else None

    def after(self) -> list[int]:
        """Give the buckets that come after the next one."""
        k = len(self.now) + 1
        return self.last[k : k + _ANNOUNCED]

    def over(self) -> None:
        """End the step: its order is what the next step is held against."""
        self.begin_micro_batch()
        self.last, self.now, self._begun = self.now, [], 0

    def begin_micro_batch(self) -> None:
        """A micro-batch begins: the one before it has gone its way."""
        self._path = self.now[self._begun :] or self._path
        self._begun = len(self.now)

    def rest(self, left: int) -> list[int]:
        """What is still to be unsharded in this step: in this micro-batch and `left` more, if they go as the last."""
        if not self._path:
            raise DataError(
                "one sample does not fit into the memory of this worker",
                why="it ran out of memory in the first micro-batch of all, which was a single sample",
                do="use a smaller model or shorter samples, activation checkpointing, or params='cpu'",
            )
        return self._path[len(self.now) - self._begun :] + self._path * left

    def forget(self) -> None:
        """The step is given up: the next one is held against nothing."""
        self.last, self.now, self._begun = [], [], 0


class ModuleCall:
    """One forward of a module, and its backward."""

    def __init__(self, unsharding: Unsharding, buckets: Callable[[], list[int]]) -> None:
        self.unsharding, self.buckets = unsharding, buckets
        self._frozen: list[int] = []
        self._held: Counter[int] | None = None  # the counter of the step in which this call holds frozen buckets

    def backward(self) -> None:
        """Begin the backward: unshard the module's buckets, and hold the frozen ones."""
        indices = self.buckets()
        self.unsharding.unshard(indices, backward=True)
        if self._held is not self.unsharding.held:
            self._frozen, self._held = [i for i in indices if i < 0], self.unsharding.held
            self._held.update(self._frozen)

    def over(self) -> None:
        """End the backward: the frozen buckets are not needed for this call any more."""
        if self._held is self.unsharding.held:
            self._held = None
            self.unsharding.release(self._frozen)


class Unsharding:
    """All sharded buckets of one optimizer, and when each is unsharded: [Note: unshard]."""

    def __init__(self, ex: Exchange, store_of: Callable[[Bucket], ParameterStore | None] = lambda b: None) -> None:
        """Begin without buckets. `store_of` says where a bucket's shard lies, if not on the device."""
        self.ex, self._store_of = ex, store_of
        self.buckets: dict[int, ShardedBucket] = {}  # by the bucket's index
        self.bucket_of: dict[int, int] = {}  # the index of a parameter's bucket, by the parameter's id
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that have hooks
        self.order = {True: UnshardOrder(), False: UnshardOrder()}  # of training, and of evaluation
        self._used: Counter[int] = Counter()  # how many modules that use a bucket have their forward running
        self.held: Counter[int] = Counter()  # how many backwards of this step still need a frozen bucket
        self._to_gather: list[ShardedBucket] = []  # when shards have changed: somebody outside holds their memory
        self._in_graphs: set[int] = set()  # buckets that a graph of this step has seen outside of their modules

    def add(self, b: Bucket) -> ShardedBucket:
        """Shard a bucket's parameters."""
        self.buckets[b.index] = ShardedBucket(b, self.ex, self, self._store_of(b))
        self.bucket_of |= {id(s.param): b.index for s in b.slots}
        return self.buckets[b.index]

    def shard_frozen(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Shard those of these parameters that are not trained: [Note: frozen].

        A parameter that the layout of another optimizer has sharded already stays with that layout.
        """
        new = [(name, p) for name, p in named if not p.requires_grad and _shardable(p) and id(p) not in self.bucket_of]
        for b in cut(list({id(p): (name, p) for name, p in new}.values()), self.ex.world_size, _FROZEN_BYTES):
            length = b.flat.numel() // self.ex.world_size
            b.own = slice(self.ex.rank * length, (self.ex.rank + 1) * length)
            b.index = min([0, *self.buckets]) - 1
            self.add(b)
            b.free()

    def frozen_shards(self) -> list[Shard]:
        """Give this worker's shards of the parameters that are not trained."""
        shards: list[Shard] = []
        for index, sharded in self.buckets.items():
            own = sharded.bucket.own
            for s in sharded.bucket.slots if index < 0 else ():
                start, stop = max(s.start, own.start), min(s.stop, own.stop)
                if start < stop:
                    shards.append(FrozenShard(sharded, s, start, stop))
        return shards

    def thaw(self, b: Bucket) -> None:
        """Take those of a bucket's parameters that were sharded as frozen ones out of their buckets."""
        for i in self.buckets_of(s.param for s in b.slots):
            slots = self._make_whole(i)
            self.shard_frozen((s.name, s.param) for s in slots)

    def _make_whole(self, i: int) -> list[Slot]:
        """Unshard a bucket for good."""
        sharded = self.buckets.pop(i)
        sharded.unshard()
        sharded.wait_for_unshard()
        sharded.release()
        for s in sharded.bucket.slots:
            del self.bucket_of[id(s.param)]
        self.order = {True: UnshardOrder(), False: UnshardOrder()}
        return sharded.bucket.slots

    def make_trained_whole(self) -> None:
        """Unshard the trained parameters for good, before buckets are cut anew."""
        for i in [i for i in self.buckets if i >= 0]:
            self._make_whole(i)
        self._to_gather.clear()

    def buckets_of(self, params: Iterable[Tensor]) -> list[int]:
        """Give the indices of the buckets these parameters are in."""
        return list(dict.fromkeys(self.bucket_of[id(p)] for p in params if id(p) in self.bucket_of))

    def begin_forward(self, indices: list[int], *, backward: bool = False, ordered: bool = True) -> None:
        """A module's forward begins, or another use of its parameters.

        backward: the forward is computed again for a backward under way. ordered: it counts in the order of the step.
        """
        self._used.update(indices)
        self.unshard(indices, backward=backward, ordered=ordered)

    def end_forward(self, indices: list[int]) -> None:
        """A module's forward ends. Its buckets are resharded when another one is needed."""
        self._used.subtract(indices)

    def unshard(self, indices: list[int], *, backward: bool = False, ordered: bool = True) -> None:
        """Make the parameters of these buckets whole, and wait for them."""
        order = self.order[backward or torch.is_grad_enabled()] if ordered else UnshardOrder()
        with self.ex.recorder.waiting(), torch.no_grad(), temporarily_clear_interpreter_stack():
            for i in indices:
                if not self.buckets[i].unsharded:
                    if not backward:
                        self._reshard_unused(indices)
                    self._unshard(i, order)

    def _unshard(self, i: int, order: UnshardOrder) -> None:
        self.buckets[i].unshard()
        if (following := order.next(i)) is not None:
            self.buckets[following].prefetch()
        for later in order.after():
            self.buckets[later].announce()
        self.buckets[i].wait_for_unshard()

    def _reshard_unused(self, needed: list[int]) -> None:
        for i in self.buckets:
            if i not in needed and self._unused(i):
                self.buckets[i].reshard()

    def _unused(self, i: int) -> bool:
        """Say whether a bucket may be resharded in the middle of a step."""
        return self._used[i] <= 0 and i not in self._in_graphs

    def begin_use(self, params: Iterable[Tensor]) -> None:
        """These parameters are used outside of their modules, or by them: [Note: outside]."""
        indices = self.buckets_of(params)
        if not all(self.buckets[i].unsharded for i in indices):
            self.unshard(indices, backward=torch._C._current_graph_task_id() != -1, ordered=False)

    def end_use(self, params: Iterable[Tensor], results: list[Tensor], *, writes: bool) -> None:
        """A torch function has used these parameters. writes: it may have written into them."""
        params = list(params)
        results = [x for x in results if all(x is not p for p in params)]
        recorded = any(x.grad_fn is not None for x in results)
        for i in self.buckets_of(params):
            sharded = self.buckets[i]
            views = any(sharded.holds(x) for x in results)
            lends = views and not recorded
            sharded.viewed = sharded.viewed or views
            sharded.lent = sharded.lent or lends
            sharded.touched = sharded.touched or lends or writes
            if recorded and self._used[i] <= 0:
                self._in_graphs.add(i)

    def name_of(self, p: Tensor) -> str:
        """Give a parameter's name."""
        i = self.bucket_of[id(p)]
        return next(s.name for s in self.buckets[i].bucket.slots if s.param is p)

    def gradient_arrived(self, b: Bucket, slot: Slot) -> None:
        """Reshard a bucket when the last of its gradients has arrived.

        A bucket with frozen parameters is left: the backward of their layer may still be to come.
        """
        if not self.buckets[b.index].unsharded:
            raise UsageError(
                f"the parameter {slot.name} is used without calling the module it belongs to",
                why="with this layout a module's parameters are there only while it is called",
                do="call the module, give the one that uses it the same parameter, or use the layout zero2",
            )
        if b.full and b.index not in self._in_graphs and all(s.param.requires_grad for s in b.slots):
            self.buckets[b.index].reshard()

    def release(self, indices: list[int]) -> None:
        """A module's backward does not need these frozen buckets any more."""
        self.held.subtract(indices)
        for i in indices:
            if not self.held[i] and self._unused(i):
                self.buckets[i].reshard()

    def reshard(self) -> None:
        """Reshard all buckets, those that were gathered and not used too: their shards are going to change."""
        self.settle()
        for i, sharded in self.buckets.items():
            sharded.lent = sharded.lent or i in self._in_graphs
            sharded.reshard()
        self._to_gather += [sharded for sharded in self.buckets.values() if sharded.forget()]
        self._in_graphs.clear()
        self._used.clear()
        self.held = Counter()
        self.order[True].over()

    @contextlib.contextmanager
    def joining(self, left: int) -> Iterator[None]:
        """Inside, unshard what the others do, who need this worker's shards for it: its own step was given up.

        In a thread of its own: the others gather parameters and average gradients in turns that are not known here.
        """
        rest = self.order[True].rest(left)
        with ThreadPoolExecutor(1, thread_name_prefix="gather") as pool:
            followed = pool.submit(self._follow, rest)
            yield
            followed.result()

    def _follow(self, others: Sequence[int]) -> None:
        with torch.no_grad():
            for i in others:
                self.buckets[i].reshard()
                self._unshard(i, self.order[True])
                self.buckets[i].reshard()

    def give_up(self) -> None:
        """The step under way is given up on all workers."""
        self.reshard()
        self.order[True].forget()

    def changed(self) -> None:
        """The shards have changed: gather what somebody outside holds, and what the next step begins with.

        The latter if it goes as the last one did.
        """
        again, self._to_gather = self._to_gather, []
        for sharded in again:
            sharded.unshard()
            sharded.wait_for_unshard()
        for i in self.order[True].last[:1]:
            self.buckets[i].prefetch()
        for i in self.order[True].after():
            self.buckets[i].announce()

    def settle(self) -> None:
        """Wait for everything that is being gathered, and have in the shards what was written into parameters."""
        with torch.no_grad():
            for sharded in self.buckets.values():
                sharded.wait_for_unshard()
                if sharded.unsharded:
                    sharded.write_back()


def _shardable(p: Tensor) -> bool:
    return (p.is_floating_point() or p.is_complex()) and p.numel() > 1 and not resharded(p)
