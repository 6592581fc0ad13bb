"""The modules' buffers: BatchNorm's averages are agreed on, and what a step did to any buffer can be taken back.

[Note: buffers] A forward in training writes into buffers before anybody knows whether its step will count: one batch
with a NaN would leave NaN in BatchNorm's averages for ever. So what the buffers were when a step last counted is kept,
and a step that does not count gives it back. Only buffers that were written since are copied, by torch's version
counters.

The agreed averages are written through `.data`, which leaves the version counters alone: a graph that was made before,
and whose backward is still to come, may have saved these buffers. In training BatchNorm's backward does not look at
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.bucket import Bucket
from paceline.core.cutting import cut


class BufferSlot(NamedTuple):
    """Where a module keeps a buffer: casting a model puts other tensors there."""

    home: dict[str, Tensor | None]  # the module's own dictionary
    key: str
    name: str
    saved: bool = True  # a state_dict has it

    def tensor(self) -> Tensor | None:
        """The buffer that is there now."""
        return self.home.get(self.key)


def places(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[BufferSlot]:
    """Every buffer of these modules, which are given with their names."""
    for prefix, module in modules:
        for key in module._buffers:
            saved = key not in module._non_persistent_buffers_set
            yield BufferSlot(module._buffers, key, f"{prefix}.{key}", saved)


class Buffers:
    """The buffers of some models, shared by the engines that train them: [Note: buffers].

    averaged: the floating-point ones that the workers agree on.
    """

    def __init__(self, everything: Sequence[BufferSlot] = (), averaged: Sequence[BufferSlot] = ()) -> None:
        self.everything, self.averaged = everything, averaged
        self._unversioned = {place[1:] for place in averaged}  # BatchNorm writes them behind the version counters
        self.buckets: list[Bucket] = []
        self._cut_of: list[Tensor] = []  # the tensors that the buckets were cut for
        self._size = (1, 1)
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by number: the tensor, and its version as it was kept
        self._kept: dict[int, Tensor] = {}  # by number: what it was when a step last counted
        self._agreed: dict[int, Tensor] = {}  # by bucket: the averages of the last step that counted

    def cut(self, world_size: int, bucket_bytes: int) -> None:
        """Cut buckets for the averaged ones."""
        self._size = (world_size, bucket_bytes)
        self._cut_of = [x for place in self.averaged if (x := place.tensor()) is not None]
        named = [(place.name, x) for place in self.averaged if (x := place.tensor()) is not None]
        self.buckets = list(cut(named, world_size, bucket_bytes))
        self._agreed.clear()

    def all(self) -> list[Tensor]:
        """All of them as they are now."""
        return [x for place in self.everything if (x := place.tensor()) is not None]

    def tensors(self) -> list[Tensor]:
        """The averaged ones as they are now."""
        return [x for place in self.averaged if (x := place.tensor()) is not None]

    def own(self) -> dict[str, Tensor]:
        """Those that are saved and that the workers do not agree on: the modules' own matter, and counts left out."""
        agreed = {place[1:] for place in self.averaged}
        return {
            place.name: x.detach()
            for place in self.everything
            if place.saved and place[1:] not in agreed and (x := place.tensor()) is not None
            if (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided and x.numel()
        }

    def follow(self) -> None:
        """Cut anew if a module has other buffers than before: it was cast, or moved."""
        now = self.tensors()
        if len(now) != len(self._cut_of) or any(a is not b for a, b in zip(now, self._cut_of, strict=True)):
            self.cut(*self._size)

    async def agree(self, b: Bucket, average: Callable[[Bucket], Any]) -> None:
        """Average one bucket over the workers, and give the averages to the modules."""
        views = [s.view for s in b.slots]
        torch._foreach_copy_(views, [s.param for s in b.slots])
        await average(b)
        torch._foreach_copy_([s.param.data for s in b.slots], views)

    # ------------------------------------------------------------------------------------------------ does it count?

    def keep(self) -> None:
        """The step counts: remember the buffers as they are."""
        old, new = [], []
        for i, x in self._changed():
            if (kept := self._kept.get(i)) is None or kept.shape != x.shape or kept.dtype != x.dtype:
                self._kept[i] = x.detach().clone()
            else:
                old.append(kept)
                new.append(x.detach())
            self._seen[i] = (x, x._version)
        if old:
            torch._foreach_copy_(old, new)

    def give_back(self) -> None:
        """The step does not count: the buffers become what they were when one last did."""
        for i, x in self._changed():
            kept = self._kept.get(i)
            if kept is not None and kept.shape == x.shape:
                x.data.copy_(kept)
            self._seen[i] = (x, x._version)

    def give_back_where(self, bad: Tensor) -> None:
        """The same for the averaged ones, decided on the device by `bad`, which the host has not read."""
        for b in self.buckets:
            agreed = self._agreed.get(b.index)
            now = b.flat.clone() if agreed is None else torch.where(bad, agreed, b.flat)
            self._agreed[b.index] = now
            torch._foreach_copy_([s.param.data for s in b.slots], b.views(now))

    def _changed(self) -> Iterator[tuple[int, Tensor]]:
        """Buffers that may have been written, or are others, since they were last kept."""
        for i, place in enumerate(self.everything):
            if (x := place.tensor()) is not None:
                seen = self._seen.get(i)
                if place[1:] in self._unversioned or seen is None or seen[0] is not x or seen[1] != x._version:
                    yield i, x
