"""All offloaded buckets of one optimizer, and what they share: copy streams, threads, a disk, and when to step.

[Note: late] A late step begins when `step` is called and is waited for in the next one: the host steps while the device
computes with parameters that are one step old (the delayed parameter update of ZeRO-Offload). No bucket is stepped
ahead then. Before an evaluation, a checkpoint and the end the late step is completed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from paceline.core.bucket import Bucket
from paceline.core.step_size import scaled_rate
from paceline.errors import MethodError
from paceline.kernels import adam
from paceline.offload.copies import CLAIMED, CopyStreams, Ring
from paceline.offload.cpu import InMemory
from paceline.offload.disk import Disk
from paceline.offload.host_threads import HostThreads, StepQueue
from paceline.offload.memory_model import MOMENTS, turn
from paceline.offload.nvme import Pool
from paceline.offload.offloaded import AdamOf, HostMeans, OffloadedBucket, OffloadedShard
from paceline.offload.streaming import StreamedBucket
from paceline.offload.vectors import Vectors

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange


def check_optimizer(knob: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that must step by itself, where a knob wants its step to be made here."""
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if any(how is None for how in _settings(optimizer)) or not all(map(stepped_in_fp32, dtypes)):
        raise MethodError(
            f"{knob} does not go together with this optimizer, {type(optimizer).__name__}",
            why="what is on disk, or stepped as gradients come, is stepped here: Adam and AdamW in fp32, no amsgrad",
            do="use one of these, or store=cpu with another step, where any elementwise optimizer may step",
        )


def stepped_in_fp32(dtype: torch.dtype) -> bool:
    """Say whether parameters of this type are stepped in fp32, and not in something wider."""
    return torch.promote_types(dtype.to_real() if dtype.is_complex else dtype, torch.float32) == torch.float32


def _settings(optimizer: Optimizer) -> list[adam.Adam | None]:
    """Give the present settings of each parameter group. None: it is not stepped here."""
    known = type(optimizer) in (Adam, AdamW)
    return [
        adam.of(group, isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))) if known else None
        for group in optimizer.param_groups
    ]


Timing = Literal["ahead", "stream", "late", "on_step"]  # when the host steps


class Offload:
    """The offloaded buckets of one optimizer: [Note: offloaded] in offloaded.py."""

    def __init__(self, device: torch.device, *, step: Timing, threads: int) -> None:
        self.streams, host_threads = CopyStreams(device), HostThreads(threads)
        self.streams.promised = self._promised
        self.ring = Ring(self.streams)
        self.pool: Pool | None = None  # of the buckets on disk
        self._queues = {on_disk: StepQueue(host_threads) for on_disk in (False, True)}
        self.buckets: dict[int, OffloadedBucket] = {}  # by index
        self.staying: list[Bucket] = []  # buckets whose state is on the device
        self._stepped_once = False
        self.new: dict[int, Tensor | None] = {}  # new parameters by bucket, until `take_new`; None: not sent yet
        self.step = step
        self.steps_ahead = step in ("ahead", "stream")  # the next buckets that come; with "ahead", while no clip binds
        self._leave_free = 0  # OffloadedBucket.leave_free, of those in memory
        self._seen_groups: Any = None  # the optimizer's groups for which _group_of holds
        self._group_of: dict[int, int] = {}  # the number of a parameter's group, by the parameter's id

    def add(self, b: Bucket, *, on_disk: bool = False) -> OffloadedBucket:
        """Take a bucket's state over."""
        n = b.own.stop - b.own.start
        if on_disk:
            assert self.pool is not None
            vectors: Vectors = self.pool.add(n)
        else:
            vectors = InMemory(self.streams, n, torch.promote_types(b.flat.dtype, torch.float32))
        kind = StreamedBucket if self.step == "stream" else OffloadedBucket
        means = HostMeans(self.streams, self.ring, self._queues[on_disk])
        offloaded = self.buckets[b.index] = kind(b, vectors, means)
        offloaded.leave_free = 0 if on_disk else self._leave_free
        return offloaded

    def claim(self, for_disk: int) -> None:
        """Let new parameters use more of the device, because what lies where was chosen by the memory there is.

        for_disk: bytes of it that are for buckets on disk before the others.
        """
        self.streams.spare, self._leave_free = CLAIMED, for_disk

    def _promised(self) -> int:
        """Give the bytes of the device that buckets whose state stays there have still to take.

        These are gradients that are not there yet, the moments that Adam makes in its first step, and a turn of the
        step. New parameters of other buckets must leave room for them.
        """
        sizes = [b.own.stop - b.own.start for b in self.staying]
        if not sizes:
            return 0
        widths, n = [b.flat.element_size() for b in self.staying], sum(sizes)
        coming = sum(s * size for b, s, size in zip(self.staying, widths, sizes, strict=True) if b.kept.is_meta)
        moments = 0 if self._stepped_once else MOMENTS * n
        return coming + moments + turn(n, max(sizes), min(widths))

    def open_disk(self, folder: Path, size: float, rank: int) -> None:
        """Open a file of about `size` bytes for the buckets that are not to be in memory."""
        self.pool = Pool(Disk(folder, int(size), name=f"paceline-{rank}"), self.streams)

    def close(self) -> None:
        """Give the disk's space back."""
        if self.pool is not None:
            self.pool.close()

    def offload_gradient(self, b: Bucket, ex: Exchange) -> None:
        """Copy what is kept of a mean to the host, unless it will be added to or unscaled on the device."""
        if self.pool is not None:
            self.pool.start()
        if self.step == "stream":
            self._check_streaming(b, ex)
        if b.index in self.buckets and b.aside is None and ex.loss_scale() is None:
            offloaded = self.buckets[b.index]
            ahead = None
            # A gradient that did not arrive here may not arrive on any worker: then its parameter is not stepped.
            if self.steps_ahead and all(shard.slot.arrived for shard in offloaded.shards):
                with scaled_rate(ex.optimizer, ex.rate):
                    ahead = offloaded.plan_steps(ex.optimizer, self._adam_of(ex.optimizer))
            offloaded.receive(b.kept, ahead)

    def _check_streaming(self, b: Bucket, ex: Exchange) -> None:
        """Look for what could not be undone before the first gradient of a backward is streamed."""
        if ex.loss_scale() is not None:
            raise MethodError(
                "step=stream does not go together with a GradScaler",
                why="gradients are stepped as they come, and a loss scale is known to be right only after the last",
                do="use step='ahead', or train in bf16 without a scaler",
            )
        if b.index == min(self.buckets, default=None):
            for offloaded in self.buckets.values():
                offloaded.make_ready()
            self._follow()

    def bring_back(self, b: Bucket) -> None:
        """Bring what a mean will be added to back to the device: [Note: placeholder]."""
        if b.index in self.buckets and b.aside is not None:
            b.aside = self.buckets[b.index].bring_back(b.aside)

    def _adam_of(self, optimizer: Optimizer) -> AdamOf:
        """Give the present settings each parameter is stepped with."""
        groups = optimizer.param_groups
        if groups is not self._seen_groups or sum(len(group["params"]) for group in groups) != len(self._group_of):
            self._seen_groups = groups
            self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        settings = _settings(optimizer)
        return {p: settings[i] for p, i in self._group_of.items()}

    def begin(self, ex: Exchange) -> list[OffloadedShard]:
        """Begin the user's step. Gives the shards that the optimizer must step itself."""
        if self.pool is not None or self.step == "stream":
            check_optimizer("store=nvme" if self.pool is not None else "step=stream", ex.optimizer)
        self.land(ex)
        self._follow()
        scales, skip = self._scales(), _found_inf(ex.optimizer)
        if self.step == "ahead":
            self.steps_ahead = all(scale == 1.0 for scale in scales.values())  # a clip that does not bind is a one
        left: list[OffloadedShard] = []
        adam_of = self._adam_of(ex.optimizer)
        for offloaded in self.buckets.values():
            if not offloaded.received:
                b = offloaded.bucket
                none = b.kept.is_meta  # its parameters had no part in this step's backwards
                offloaded.receive(torch.zeros_like(b.kept, device=b.device) if none else b.kept, None)
            own = [shard for shard in offloaded.shards if shard.slot.param.grad is not None and not skip]
            theirs = [shard for shard in own if shard.slot.param.grad is not shard.slot.shown]
            steps = offloaded.plan_steps(
                ex.optimizer, adam_of, scales | dict.fromkeys(theirs, 1.0), unscaling=_unscaling(ex.optimizer)
            )
            if theirs or steps is None:
                offloaded.undo()
            if steps is None:
                left += offloaded.shards
                for shard in offloaded.shards:
                    shard.scale(scales[shard])
            else:
                offloaded.replace_gradients(theirs)
                offloaded.request([step for step in steps if step.shard in own])
        return left

    def _follow(self) -> None:
        """Let masters follow parameters that the user has written into."""
        if not self.buckets:
            return
        changes = [offloaded.changes() for offloaded in self.buckets.values()]
        found = torch.cat(changes).cpu().split([len(x) for x in changes])  # the device is asked once
        for (index, offloaded), mine in zip(self.buckets.items(), found, strict=True):
            if mine.any():
                offloaded.follow()
                if index in self.new:  # a late step's, made from the parameters as they were
                    self.new[index] = offloaded.new_parameters()

    def _scales(self) -> dict[OffloadedShard, float]:
        """Give the factor by which each gradient is to be multiplied. The device is asked once."""
        shards = [shard for offloaded in self.buckets.values() for shard in offloaded.shards]
        tensors = {id(x): x for shard in shards for x in shard.factors if isinstance(x, Tensor)}
        stacked = [x.detach().reshape(()).to(self.streams.device, torch.float64) for x in tensors.values()]
        values = dict(zip(tensors, torch.stack(stacked).tolist(), strict=True)) if stacked else {}
        return {shard: shard.take_factors(values) for shard in shards}

    def wait(self) -> None:
        """Wait for all buckets where a disk may fail, before anything is done that cannot be undone."""
        may_fail = self.pool is not None or any(offloaded.store is not None for offloaded in self.buckets.values())
        if may_fail and self.step != "late":
            for offloaded in self.buckets.values():
                offloaded.wait_for_step()

    def end(self, ex: Exchange, left: list[OffloadedShard]) -> None:
        """End the user's step. left: the shards that the optimizer has stepped itself."""
        self._stepped_once = True
        by_itself = {id(shard.offloaded) for shard in left}
        for index, offloaded in reversed(self.buckets.items()):  # what the next forward begins with first
            if id(offloaded) in by_itself:
                self._set_new(index, offloaded, None)
            elif self.step != "late":
                self._set_new(index, offloaded, offloaded.finish(ex.optimizer))

    def _set_new(self, index: int, offloaded: OffloadedBucket, there: Tensor | None) -> None:
        if offloaded.store is not None:
            offloaded.update_store(offloaded.store)
        else:
            self.new[index] = there

    def land(self, ex: Exchange) -> None:
        """Complete a late step."""
        requested = {i: offloaded for i, offloaded in reversed(self.buckets.items()) if offloaded.requested}
        for offloaded in requested.values():
            offloaded.wait_for_step()
        for index, offloaded in requested.items():
            there = offloaded.finish(ex.optimizer)
            if there is None and offloaded.store is None:
                there = offloaded.new_parameters()  # the next step changes the masters before this one is taken
            self._set_new(index, offloaded, there)

    def take_new(self, index: int) -> Tensor:
        """Give the new parameters of a bucket, on the device. Those that had no room there are sent now."""
        there = self.new.pop(index)
        return self.buckets[index].new_parameters() if there is None else there

    def is_late(self, index: int) -> bool:
        """Say whether the new parameters of a bucket are still to come, with a late step."""
        return index in self.buckets and index not in self.new

    def undo_all(self) -> None:
        """Undo what was stepped ahead, because the state is going to be looked at."""
        for offloaded in self.buckets.values():
            offloaded.undo()


def _found_inf(optimizer: Optimizer) -> bool:
    """Say whether a loss scaler, which leaves that to a fused optimizer, wants the step to be skipped."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _unscaling(optimizer: Optimizer) -> float:
    """Give the factor by which a loss scaler wants a fused optimizer to multiply gradients."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
