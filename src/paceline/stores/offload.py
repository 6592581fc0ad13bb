"""All buckets of one optimizer that are away, and what they share: lanes, threads, a disk, and trust in a guess.

[Note: late] A step that is late begins when `step` is called and is waited for in the next one: the host steps while
the device computes with parameters that are one step old (the delayed parameter update of ZeRO-Offload). Nothing is
guessed then. Before an evaluation, a checkpoint and the end it is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from paceline.bucket import Bucket
from paceline.errors import MethodError
from paceline.kernels import adam
from paceline.stores.away import Away, AwayPiece, Groups
from paceline.stores.choosing import MOMENTS, turn
from paceline.stores.cpu import InMemory
from paceline.stores.crew import Crew, Line
from paceline.stores.disk import Disk
from paceline.stores.lanes import CLAIMED, Lanes, Ring
from paceline.stores.nvme import Pool
from paceline.stores.passing import Passing
from paceline.stores.vectors import Vectors

if TYPE_CHECKING:
    from paceline.exchange import Exchange


def check_steps(knob: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that must step by itself, where a knob wants it to be done here: on disk, or at once."""
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if any(how is None for how in _hows(optimizer)) or not all(map(stepped_in_fp32, dtypes)):
        raise MethodError(
            f"{knob} does not go together with this optimizer, {type(optimizer).__name__}",
            why="what is on disk, or stepped as gradients come, is stepped here: Adam and AdamW in fp32, no amsgrad",
            do="use one of these, or store=cpu and undo=True, where any elementwise optimizer may step",
        )


def stepped_in_fp32(dtype: torch.dtype) -> bool:
    return torch.promote_types(dtype.to_real() if dtype.is_complex else dtype, torch.float32) == torch.float32


def _hows(optimizer: Optimizer) -> list[adam.Adam | None]:
    """How each group is stepped, as of now."""
    known = type(optimizer) in (Adam, AdamW)
    return [
        adam.of(group, isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))) if known else None
        for group in optimizer.param_groups
    ]


class Offload:
    """[Note: away] in away.py."""

    def __init__(self, device: torch.device, *, guess: bool, undo: bool, late: bool, threads: int) -> None:
        self.lanes, crew = Lanes(device), Crew(threads)
        self.lanes.promised = self._promised
        self.ring = Ring(self.lanes)
        self.pool: Pool | None = None  # of those on disk
        self._lines = {on_disk: Line(crew) for on_disk in (False, True)}
        self.of: dict[int, Away] = {}  # by bucket
        self.staying: list[Bucket] = []  # those whose state is on the device
        self._began = False  # a first step was made
        self.new: dict[int, Tensor | None] = {}  # ... its parameters after a step, until `take_new`; None: not yet here
        self.late = late  # [Note: late]
        self.guess = self.trusts = guess and not late
        self.undo = undo  # else [Note: passing]
        self._yields = 0  # Away.yields, of those in memory
        self._seen: Any = None  # the optimizer's groups, and of which of them each parameter is
        self._group_of: dict[int, int] = {}

    def add(self, b: Bucket, *, on_disk: bool = False) -> Away:
        n = b.own.stop - b.own.start
        if on_disk:
            assert self.pool is not None
            vectors: Vectors = self.pool.add(n)
        else:
            vectors = InMemory(self.lanes, n, torch.promote_types(b.flat.dtype, torch.float32))
        kind = Away if self.undo else Passing
        away = self.of[b.index] = kind(b, vectors, self.lanes, self.ring, self._lines[on_disk])
        away.yields = 0 if on_disk else self._yields
        return away

    def claim(self, for_disk: int) -> None:
        """What lies where was chosen by the room there is: new parameters may use it, those from disk so many bytes
        before the others.
        """
        self.lanes.spare, self._yields = CLAIMED, for_disk

    def _promised(self) -> int:
        """Of the device, for what stays there: gradients that are not there yet, the moments that Adam makes in its
        first step, and a turn of the step. New parameters of others must leave room for them.
        """
        sizes = [b.own.stop - b.own.start for b in self.staying]
        if not sizes:
            return 0
        widths, n = [b.flat.element_size() for b in self.staying], sum(sizes)
        coming = sum(s * size for b, s, size in zip(self.staying, widths, sizes, strict=True) if b.kept.is_meta)
        return coming + (0 if self._began else MOMENTS * n) + turn(n, max(sizes), min(widths))

    def open_disk(self, folder: Path, size: float, rank: int) -> None:
        """For those that are not to be in memory: about `size` bytes, with the worker's number in the file's name."""
        self.pool = Pool(Disk(folder, int(size), name=f"paceline-{rank}"), self.lanes)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def hand(self, b: Bucket, ex: Exchange) -> None:
        """What is kept of a mean leaves the device, unless something is still to become of it there."""
        if self.pool is not None:
            self.pool.start()
        if not self.undo:
            self._look_ahead(b, ex)
        if b.index in self.of and b.aside is None and ex.loss_scale() is None:
            away = self.of[b.index]
            sure = all(piece.slot.arrived for piece in away.pieces)
            guess = away.wishes(ex.optimizer, self._groups(ex.optimizer)) if self.trusts and sure else None
            away.hand(b.kept, guess)

    def _look_ahead(self, b: Bucket, ex: Exchange) -> None:
        """What could be put right later, if gradients were kept, is looked for before the first of them goes."""
        if ex.loss_scale() is not None:
            raise MethodError(
                "undo=False does not go together with a GradScaler",
                why="gradients are stepped as they come, and a loss scale is known to be right only after the last",
                do="use undo=True, or train in bf16 without a scaler",
            )
        if b.index == min(self.of, default=None):
            for away in self.of.values():
                away.ready()
            self._follow()

    def bring(self, b: Bucket) -> None:
        """What a mean will be added to comes back: [Note: face]."""
        if b.index in self.of and b.aside is not None:
            b.aside = self.of[b.index].back(b.aside)

    def _groups(self, optimizer: Optimizer) -> Groups:
        """How each parameter is stepped, as of now."""
        groups = optimizer.param_groups
        if groups is not self._seen or sum(len(group["params"]) for group in groups) != len(self._group_of):
            self._seen = groups
            self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        hows = _hows(optimizer)
        return {p: hows[i] for p, i in self._group_of.items()}

    def begin(self, ex: Exchange) -> list[AwayPiece]:
        """The user's step, for what is stepped here. Gives the pieces that the optimizer must step itself."""
        if self.pool is not None or not self.undo:
            check_steps("store=nvme" if self.pool is not None else "undo=False", ex.optimizer)
        self.land(ex)
        self._follow()
        scales, skip = self._scales(), _found_inf(ex.optimizer)
        self.trusts = self.guess and (not self.undo or all(scale == 1.0 for scale in scales.values()))
        left: list[AwayPiece] = []
        groups = self._groups(ex.optimizer)
        for away in self.of.values():
            if not away.handed:
                away.hand(away.bucket.kept, None)
            own = [piece for piece in away.pieces if piece.slot.param.grad is not None and not skip]
            theirs = [piece for piece in own if piece.slot.param.grad is not piece.slot.shown]
            wishes = away.wishes(
                ex.optimizer, groups, scales | dict.fromkeys(theirs, 1.0), unscaling=_unscaling(ex.optimizer)
            )
            if theirs or wishes is None:
                away.take_back()
            if wishes is None:
                left += away.pieces
                for piece in away.pieces:
                    piece.scale(scales[piece])
            else:
                away.take_theirs(theirs)
                away.ask([wish for wish in wishes if wish.piece in own])
        return left

    def _follow(self) -> None:
        aways = list(self.of.values())
        if aways:
            changes = [away.changes() for away in aways]
            found = torch.cat(changes).cpu().split([len(x) for x in changes])  # the device is asked once
            for (index, away), mine in zip(self.of.items(), found, strict=True):
                if mine.any():
                    away.follow()
                    if index in self.new:  # late, and from before
                        self.new[index] = away.stepped()

    def _scales(self) -> dict[AwayPiece, float]:
        """By what each gradient is to be multiplied: the device is asked once."""
        pieces = [piece for away in self.of.values() for piece in away.pieces]
        tensors = {id(x): x for piece in pieces for x in piece.factors if isinstance(x, Tensor)}
        stacked = [x.detach().reshape(()).to(self.lanes.device, torch.float64) for x in tensors.values()]
        values = dict(zip(tensors, torch.stack(stacked).tolist(), strict=True)) if stacked else {}
        return {piece: piece.taken(values) for piece in pieces}

    def wait(self) -> None:
        """A disk may fail. What cannot be undone is done only when it has not."""
        if (self.pool is not None or any(away.home is not None for away in self.of.values())) and not self.late:
            for away in self.of.values():
                away.done()

    def end(self, ex: Exchange, left: list[AwayPiece]) -> None:
        """The optimizer has stepped what it was left with."""
        self._began = True
        by_itself = {id(piece.away) for piece in left}
        for index, away in reversed(self.of.items()):  # what the next forward begins with first
            if id(away) in by_itself:
                self._stepped(index, away, None)
            elif not self.late:
                self._stepped(index, away, away.finish(ex.optimizer))

    def _stepped(self, index: int, away: Away, there: Tensor | None) -> None:
        if away.home is not None:
            away.go_home(away.home)
        else:
            self.new[index] = there

    def land(self, ex: Exchange) -> None:
        """A step that is late has been made."""
        asked = {index: away for index, away in reversed(self.of.items()) if away.asked}
        for away in asked.values():
            away.done()
        for index, away in asked.items():
            there = away.finish(ex.optimizer)
            if there is None and away.home is None:
                there = away.stepped()  # the next step begins before it is taken
            self._stepped(index, away, there)

    def take_new(self, index: int) -> Tensor:
        """The new parameters of a bucket, on the device. Those that had no room there come now, one after the other."""
        there = self.new.pop(index)
        return self.of[index].stepped() if there is None else there

    def take_back(self) -> None:
        """Before somebody looks at the state."""
        for away in self.of.values():
            away.take_back()


def _found_inf(optimizer: Optimizer) -> bool:
    """A loss scaler leaves it to a fused optimizer to divide by the scale, and to skip a step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _unscaling(optimizer: Optimizer) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
