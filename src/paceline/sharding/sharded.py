"""What the stages of ZeRO share: who owns what of a bucket, and an optimizer that steps only that.

[Note: shards] A bucket's flat vector is cut into as many equal parts as there are workers, and worker r owns the r-th
(`Bucket.own`): of the parameters, of the mean gradient, of the optimizer's state. It begins and ends anywhere, so it
consists of shards of parameters. A shard belongs to its parameter's group: weight decay and rates are the group's.
While the user's optimizer steps, its groups hold this worker's shards in place of the parameters. At any other time
they are as the user knows them, so a scheduler that changes a rate there changes it here. The optimizer makes moments
for what it is given, so its state is sharded without its knowing.

A shard of a 16-bit parameter is stepped in fp32, on a master copy that only its owner has. A parameter that the user
has written into since the last step is noticed, and the master follows.

Who owns a shard and where its state lies are two questions. The knob `store` answers the second: offload/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.comm.lane import NARROW
from paceline.core.bucket import Bucket
from paceline.core.parts import Layout
from paceline.core.pipeline import Task
from paceline.core.shard import Shard, ShardCut
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.offload import placement
from paceline.offload.memory_model import STATE, FreeMemory, Placement
from paceline.offload.offload import Offload, Timing, check_optimizer, stepped_in_fp32
from paceline.offload.offloaded import OffloadedShard
from paceline.sharding import elementwise, full_state, hooks
from paceline.sharding.sharded_grad import ShardedGrad
from paceline.sharding.turns import in_turns, take_all

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange
    from paceline.offload.offloaded import OffloadedBucket


@dataclass(kw_only=True)
class ShardedLayout(Layout):
    """A layout that shards the optimizer: [Note: shards]. A stage says what becomes of gradients and parameters."""

    follows_casts: ClassVar[bool] = False
    at_once: ClassVar[int] = 4  # enough to keep the wire busy while the next is filled

    store: Literal["device", "cpu", "nvme", "auto"] = knob(
        "device", "where the optimizer's state lives: auto fills one after the other"
    )
    device_gb: float | None = knob(
        None, "with another store: what of it stays on the device; none, with store=auto what fits", unit="GB", low=0.0
    )
    host_gb: float | None = knob(
        None, "with a path: what of it stays in the host's memory; none, with store=auto what fits", unit="GB", low=0.0
    )
    path: str = knob("", "with store=nvme or auto: a folder on a local disk")
    reserve_gb: float | None = knob(
        None, "with store=auto: of the device, for activations; a tenth of it", unit="GB", low=0.0
    )
    step: Timing = knob(
        "ahead",
        "not on the device: when the host steps. ahead: when a bucket's gradients are there, undone if need be; "
        "stream: then too, but gradients are not kept; late: the result is used one step later; on_step: in step()",
    )
    threads: int = knob(0, "not on the device: threads that step; 0: three quarters of the cores", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.on_disk() and not self.path) or (self.path and not self.on_disk() and self.store != "auto"):
            raise MethodError(
                f"{self.name}: store={self.store} with path={self.path!r}",
                why="state that is on disk, and no other, needs a folder there",
                do="give store='nvme' and path, a folder on a local disk, or none of them",
            )
        self.bucket_shards: dict[int, list[Shard]] = {}  # this worker's shards, by bucket
        self.masters: dict[int, Tensor] = {}  # the fp32 masters of 16-bit shards on the device, by bucket
        self.offload: Offload | None = None  # the buckets whose state is not on the device
        self._placement: Placement | None = None  # how much of the state lies where
        self._free: FreeMemory | None = None  # the free memory by which that was chosen, if it was
        self._hooks: list[RemovableHandle] = []
        self._sharded_state: Any = None  # the optimizer's state, while it shows the full one
        self._told = False  # the user was told what lies where
        self._loading: dict[int, Any] = {}  # a state that is being loaded, by the parameter's number

    def on_disk(self) -> bool:
        """Say whether anything of this layout is to lie on disk."""
        return self.store == "nvme"

    def check(self, optimizer: Optimizer) -> None:
        elementwise.check(self.name, optimizer)
        if self.store == "nvme":
            check_optimizer("store=nvme", optimizer)
        if self.store != "device" and self.step == "stream":
            check_optimizer("step=stream", optimizer)

    def rests(self, params: Sequence[Tensor]) -> bool:
        return self.store == "device" and not any(p.dtype in NARROW for p in params)

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        hooks.show_full_state(self, ex)
        if not self.shards_parameters:
            hooks.check_loading(models, ex)

    def own(self, b: Bucket, ex: Exchange) -> None:
        length = b.flat.numel() // ex.world_size
        b.own = slice(ex.rank * length, (ex.rank + 1) * length)
        b.keep(b.flat[b.own])
        self.bucket_shards[b.index] = self._cut(b, ex)
        for s in b.slots:
            mine = [shard for shard in self.bucket_shards[b.index] if shard.slot is s]
            ShardedGrad.show(s, mine, ex.comm)
        self._hooks += hooks.watch_arrivals(b.slots)
        full_state.take(b, self.bucket_shards[b.index], ex.optimizer)
        self._guard_state(ex)

    def _guard_state(self, ex: Exchange) -> None:
        if not isinstance(ex.optimizer.state, full_state.ShardedState):
            ex.optimizer.state = full_state.ShardedState(ex.optimizer.state, ex.buckets)

    def _cut(self, b: Bucket, ex: Exchange) -> list[Shard]:
        offloaded, source = self._offloaded(b, ex), self.source(b, ex)
        ends = [(s, max(s.start, b.own.start), min(s.stop, b.own.stop)) for s in b.slots]
        ends = [(s, start, stop) for s, start, stop in ends if start < stop]
        if offloaded is None:
            if b.flat.dtype in NARROW:
                self.masters[b.index] = torch.zeros_like(b.flat[b.own], dtype=torch.float32)
            return [Shard(ShardCut(b, *end, source, self.masters.get(b.index))) for end in ends]
        with offloaded.at_hand(changed=True) as now:
            offloaded.shards = [OffloadedShard(ShardCut(b, *end, source, now.p), offloaded=offloaded) for end in ends]
        offloaded.published()
        return [*offloaded.shards]

    def _offloaded(self, b: Bucket, ex: Exchange) -> OffloadedBucket | None:
        """Offload a bucket's state, unless it stays on the device.

        What the next forward needs first is stepped last, and stays on the device. What is stepped first has the
        longest time, and goes to disk.
        """
        if self.store == "device":
            return None
        params = [p for group in ex.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self._placement is None:
            self._placement, self._free = placement.choose(self, params, b, ex.world_size)
        places = self._placement
        earlier = sum(known.n for known in ex.buckets if known.index < b.index)
        to_come = sum(p.numel() for p in params) - earlier  # numbers of this bucket and of those stepped after it
        beyond = to_come / ex.world_size - places.device  # numbers that do not stay on the device
        if beyond <= 0:
            if self.offload is not None:
                self.offload.staying.append(b)
            return None
        if self.offload is None:
            self.offload = Offload(b.device, step=self.step, threads=self.threads)
            if self._free is not None:
                self.offload.claim(0 if places.room else places.disk * b.flat.element_size())
        beyond -= places.host  # numbers that do not stay on the host either
        largest = max(s.stop - s.start for s in b.slots) / ex.world_size
        on_disk = beyond > 0 and largest <= places.largest and stepped_in_fp32(b.flat.dtype)
        if on_disk and self.offload.pool is None:
            check_optimizer(f"store={self.store}", ex.optimizer)
            self.offload.open_disk(Path(self.path), min(beyond, places.disk) * STATE, ex.rank)
        return self.offload.add(b, on_disk=on_disk)

    def source(self, b: Bucket, ex: Exchange) -> Tensor | None:
        """Give the vector of this worker's shard of the parameters, where these are not whole on every worker."""
        return None

    def shards(self) -> Iterator[Shard]:
        for some in self.bucket_shards.values():
            yield from some

    async def keep_shard(self, b: Bucket, ex: Exchange) -> None:
        """Keep this worker's shard of the mean, and free the bucket's memory."""
        mine = await ex.mine(b, b.flat)
        b.keep(mine)
        self.offload_gradient(b, ex)
        if b.kept is mine:  # it has not left for the host
            b.keep(mine.clone())
        b.free()

    def offload_gradient(self, b: Bucket, ex: Exchange) -> None:
        """Send what is kept of a mean to the host, where it is stepped there."""
        if self.store != "device" and ex.rank == 0 and not self._told:  # all buckets are cut by now
            placement.tell(ex, self.offload.buckets if self.offload else {}, self.path, self._free)
            self._told = True
        if self.offload is not None:
            self.offload.bring_back(b)
            self.offload.offload_gradient(b, ex)

    def published(self, b: Bucket) -> None:
        """Note that a bucket's parameters are what was stepped."""
        if self.offload and b.index in self.offload.buckets:
            self.offload.buckets[b.index].published()

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        left: list[OffloadedShard] = []
        if self.offload:
            with torch.no_grad():
                left = self.offload.begin(ex)
            self.offload.wait()
        theirs = {shard.bucket.index for shard in left}
        elsewhere = {*self.offload.buckets} - theirs if self.offload else set()
        buckets = [shards for index, shards in self.bucket_shards.items() if index not in elsewhere]
        result = in_turns(step, ex.optimizer, buckets, self._take)
        if self.offload:
            self.offload.end(ex, left)
        return result

    def _take(self, shards: Sequence[Shard]) -> None:
        """Take the values of a bucket's parameters and gradients as they are now, before a step."""
        if shards and shards[0].bucket.index in self.masters:
            take_all(shards, self.masters[shards[0].bucket.index])
        else:
            for shard in shards:
                shard.take()

    # ------------------------------------------------------------------------------------------------ the full state

    def collect(self, ex: Exchange) -> None:
        self.settle(ex)
        ex.optimizer.state = full_state.state(self.bucket_shards, ex)
        for b in ex.buckets:
            for s in b.slots:
                s.param.grad = None if s.param.grad is s.shown else s.param.grad
        for hook in self._hooks:
            hook.remove()
        self.bucket_shards.clear()
        self._hooks.clear()
        self.masters.clear()
        if self.offload is not None:
            self.offload.close()
        self.offload = self._placement = None

    def settle(self, ex: Exchange) -> None:
        """Undo what was stepped ahead and complete what is late, because the state is going to be looked at."""
        if self.offload is not None:
            self.offload.undo_all()
            self.offload.land(ex)
            with torch.no_grad():
                self.put_new(ex)

    def put_new(self, ex: Exchange) -> None:
        """Make the new parameters that came from the host the model's."""
        for b in ex.buckets:
            if self.offload and b.index in self.offload.new:
                Task(self.publish(b, ex)).finish()

    def saving(self, ex: Exchange) -> None:
        """Before the optimizer's state_dict: show the full state."""
        if self.bucket_shards:
            self.settle(ex)
            self._sharded_state, ex.optimizer.state = ex.optimizer.state, full_state.state(self.bucket_shards, ex)

    def saved(self, ex: Exchange) -> None:
        """After the optimizer's state_dict: go back to the sharded state."""
        if self.bucket_shards:
            ex.optimizer.state, self._sharded_state = self._sharded_state, None

    def loading(self, saved: dict[str, Any], ex: Exchange) -> dict[str, Any]:
        """Before the optimizer loads a state: keep the state from it, and give it the settings alone."""
        if not self.bucket_shards:
            return saved
        self.settle(ex)
        self._loading = saved["state"]
        return {**saved, "state": {}}  # the optimizer would first copy all of it to every worker's device

    def loaded(self, ex: Exchange) -> None:
        """After the optimizer has loaded a state: let every shard take its part."""
        if not self.bucket_shards:
            return
        params = [p for group in ex.optimizer.param_groups for p in group["params"]]
        for i, state in self._loading.items():
            ex.optimizer.state[params[i]] = dict(state)
        self._loading = {}
        for b in ex.buckets:
            full_state.take(b, self.bucket_shards[b.index], ex.optimizer)
        self._guard_state(ex)
