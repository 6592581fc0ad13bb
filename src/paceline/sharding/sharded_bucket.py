"""One bucket of parameters that are sharded over the workers: [Note: unshard], unshard.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.blank import blank
from paceline.core.bucket import Bucket, Slot
from paceline.core.pipeline import Task
from paceline.core.shard import Shard
from paceline.errors import MismatchError, UsageError
from paceline.sharding import sharded_parameter

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.offload.params import ParameterStore
    from paceline.sharding.unshard import Unsharding

_STAMPS = 251  # whole numbers that are exact in any floating-point format
UNFILLED = "_unfilled"  # an attribute of a parameter that has no values yet (meta.py) and looks like a sharded one


class ShardedBucket:
    """The parameters of one bucket: this worker's shard at all times, the full vector only while it is unsharded."""

    def __init__(self, b: Bucket, ex: Exchange, owner: Unsharding, store: ParameterStore | None = None) -> None:
        """Shard the parameters of a bucket. The shard lies in `store`, or on the device where there is none."""
        self.bucket, self.comm, self.store = b, ex.background, store
        if store is None:
            self._stamped = self._stamp()
            self.shard = self._stamped[:-1]
        self.full = torch.zeros_like(b.flat)
        self._views = b.views(self.full)
        self._nans = [view.new_full((), torch.nan).expand(view.shape) for view in self._views]
        self._gathering: Task[None] | None = None
        self.touched = False  # the parameters may have been written into since they were gathered
        self.viewed = False  # a graph has a view of them
        self.lent = False  # somebody outside was given a view of the full vector
        self._kept = False  # resharded, and its memory is still somebody's
        self._stale = False  # ... and the shards have changed since
        self._references = _references(self.full)  # our own
        for s in b.slots:
            _check_whole(s)
        torch._foreach_copy_(self._views, [s.param.detach() for s in b.slots])
        self.update_shard()
        for s in b.slots:
            sharded_parameter.shard(s.param, owner)
        self._set_parameters(self._nans)
        self._free()

    @property
    def unsharded(self) -> bool:
        """Whether the parameters are whole now."""
        return bool(self.full.untyped_storage().nbytes()) and not self.gathering and not self._kept

    @property
    def gathering(self) -> bool:
        """Whether the parameters are on their way."""
        return self._gathering is not None

    def unshard(self) -> None:
        """Start to gather the parameters, unless they are whole or on their way."""
        if not self.unsharded and not self.gathering:
            self._gathering = Task(self._gather())

    def prefetch(self) -> None:
        """Start to gather early, unless it takes no time: then it would only take memory before its time."""
        if self.comm.world_size > 1 or self.store is not None:
            self.unshard()

    def announce(self) -> None:
        """Let a shard on disk be read, because it will be needed soon."""
        if self.store is not None and not self.unsharded and not self.gathering:
            self.store.announce()

    def wait_for_unshard(self) -> None:
        """Wait until what `unshard` has started is done."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.finish()

    async def _gather(self) -> None:
        if self._kept and not self._stale:
            self.write_back()
        if self.store is not None and self.comm.world_size == 1:
            await self._load(self.store)
        else:
            await self._all_gather()
        self._kept = self._stale = self.touched = self.viewed = False
        self._set_parameters(self._views)

    async def _load(self, store: ParameterStore) -> None:
        self._allocate()
        try:
            await store.copy_to(self.full)
        except BaseException:
            self._free()  # memory without values must not look like parameters
            raise

    async def _all_gather(self) -> None:
        rows = await self.comm.all_gather(self._row())
        stamps = [] if rows.is_cuda else rows[:, -1].tolist()  # reading would make a GPU's host wait
        if len(set(stamps)) > 1:
            raise MismatchError(
                f"workers compute with other parameters than worker {self.comm.rank}, which needs {self.bucket}",
                why="with this layout all workers must go through the model in the same order",
                do="do not let the path through the model depend on a worker's data, or use the layout zero2",
            )
        self._allocate()
        self.full.view(self.comm.world_size, -1).copy_(rows[:, :-1])

    def _allocate(self) -> None:
        if not self._kept:
            self.full.untyped_storage().resize_(self.full.nbytes)
            blank(self.full)

    def _free(self) -> None:
        if self.full.untyped_storage().nbytes():
            blank(self.full)
        if not self.full.untyped_storage().resizable():  # numpy has seen it
            self.full = torch.zeros_like(self.bucket.flat, device=self.bucket.device)
            self._views = self.bucket.views(self.full)
        self.full.untyped_storage().resize_(0)
        self.lent = self._kept = self._stale = False

    def holds(self, x: Tensor) -> bool:
        """Is this tensor in the memory of the full vector?"""
        start = self.full.data_ptr()
        return start <= x.data_ptr() < start + max(self.full.nbytes, 1)

    def held(self) -> bool:
        """Does somebody outside hold memory of the full vector? Asked while the parameters are not in it."""
        return self.lent and _references(self.full) > self._references

    def _stamp(self) -> Tensor:
        n, b = self.bucket.own.stop - self.bucket.own.start, self.bucket
        return torch.full((n + 1,), float(b.index % _STAMPS), dtype=b.flat.dtype, device=b.device)

    def _row(self) -> Tensor:
        """Give this worker's shard on the device, with the stamp of its bucket behind it."""
        if self.store is None:
            return self._stamped
        row = self._stamp()
        self.store.copy_to(row[:-1]).wait()
        return row

    def update_shard(self) -> None:
        """Copy this worker's part of the full vector, which was written into, to its shard."""
        mine = self.full[self.bucket.own]
        if self.store is None:
            self.shard.copy_(mine)
        else:
            self.store.write(mine)
            self.store.touched = True

    def write_back(self) -> None:
        """Copy what was written into the whole parameters to the shard."""
        mine = self.full[self.bucket.own]
        if self.touched or self.lent:
            now = self.shard if self.store is None else self.store.read(slice(0, len(mine)))
            if not torch.equal(mine.to(now.device), now):
                self.update_shard()
        elif self.viewed and self.store is None:
            self.shard.data.copy_(mine)  # no change that the shard's version would tell of, as far as is known

    def reshard(self) -> None:
        """Free the full vector, unless somebody outside holds memory of it."""
        if not self.unsharded:
            return
        self.write_back()
        self._set_parameters(self._nans)
        if self.held():
            self._kept = True
        else:
            self._free()

    def forget(self) -> bool:
        """The shards are going to change: what is kept for somebody outside is not the parameters' any more.

        Gives whether there is such a one, for whom the parameters must be gathered again.
        """
        if not self._kept:
            return False
        if not self._stale:
            self.write_back()
        self._stale = self.held()
        if not self._stale:
            self._free()
        return self._stale

    def release(self) -> None:
        """Let the parameters, which are whole, stay so for good."""
        for s in self.bucket.slots:
            sharded_parameter.unshard(s.param)

    def _set_parameters(self, tensors: list[Tensor]) -> None:
        for s, x in zip(self.bucket.slots, tensors, strict=True):
            sharded_parameter.set_memory(s.param, x)


class FrozenShard(Shard):
    """This worker's shard of a parameter that is not trained. It is only saved and loaded, never stepped."""

    def __init__(self, sharded: ShardedBucket, slot: Slot, start: int, stop: int) -> None:
        self.sharded, self.bucket, self.slot = sharded, sharded.bucket, slot
        self.place(start, stop)
        self.param = torch.empty(0, device=sharded.bucket.device)

    def now(self) -> Tensor:
        if self.sharded.store is None:
            return self.sharded.shard[self.here]
        return self.sharded.store.read(self.here)

    def write(self, x: Tensor) -> None:
        if self.sharded.store is None:
            self.now().copy_(x)
        else:
            with self.sharded.store.at_hand(changed=True) as mine:
                mine[self.here].copy_(x)


def _references(x: Tensor) -> int:
    """Give the number of tensors that share this one's memory."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def resharded(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() < p.nbytes


def _check_whole(slot: Slot) -> None:
    if resharded(slot.param) and not hasattr(slot.param, UNFILLED):
        raise UsageError(
            f"the parameter {slot.name} was frozen when another optimizer was prepared, and has been shared out",
            why="that optimizer's layout lends it to the modules",
            do="let it be trained when paceline.prepare is called and freeze it after, or use one optimizer",
        )
