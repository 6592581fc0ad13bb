"""What the stages of ZeRO share: who owns what of a bucket, and an optimizer that steps only that.

[Note: shards] A bucket's flat vector is cut into as many equal slices as there are workers, and worker r owns slice r:
of the parameters, of the mean gradient, of the optimizer's state. A slice begins and ends anywhere, so it holds pieces
of parameters, and a piece belongs to its parameter's group: weight decay and rates are the group's. While the user's
optimizer steps, its groups hold this worker's pieces in place of the parameters; at any other time they are as the
user knows them, so a scheduler that changes a rate there changes it here. The optimizer makes moments for what it is
given, so its state is a slice without knowing.

A piece of a 16-bit parameter is stepped in fp32, on a master copy that only its owner has. A parameter that somebody
has written into since the last step is noticed, and the master follows.

Who owns a slice and where its state lives are two questions. `store` answers the second: stores/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.bucket import Bucket
from paceline.comm import NARROW
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.parts import Layout
from paceline.pipeline import Task
from paceline.shards import elementwise, hooks, whole
from paceline.shards.grad import SlicedGrad
from paceline.shards.piece import Piece, take_all
from paceline.shards.turns import in_turns
from paceline.stores import placing
from paceline.stores.away import AwayPiece
from paceline.stores.choosing import STATE, Chosen, Room
from paceline.stores.offload import Offload, check_steps, stepped_in_fp32

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.stores.away import Away


@dataclass(kw_only=True)
class Shards(Layout):
    """[Note: shards]. A stage says what becomes of the gradients and of the parameters."""

    lends: ClassVar[bool] = False  # parameters are whole only while a module computes with them
    at_once: ClassVar[int] = 4  # enough for the wire to be busy while the next is made

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
    guess: bool = knob(True, "not on the device: step a bucket as soon as its gradients are there; undone if need be")
    undo: bool = knob(True, "not on the device: gradients are kept until the step, so that a guess can be undone")
    late: bool = knob(False, "not on the device: a step is used one step later, and the device never waits for it")
    threads: int = knob(0, "not on the device: threads that step; 0: three quarters of the cores", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.on_disk() and not self.path) or (self.path and not self.on_disk() and self.store != "auto"):
            raise MethodError(
                f"{self.name}: store={self.store} with path={self.path!r}",
                why="state that is on disk, and no other, needs a folder there",
                do="give store='nvme' and path, a folder on a local disk, or none of them",
            )
        if not self.undo and (self.late or not self.guess):
            raise MethodError(
                f"{self.name}: undo=False with {'late=True' if self.late else 'guess=False'}",
                why="what is not stepped as its gradients come needs them later, and undo=False does not keep them",
                do="leave undo=False out, or step on a guess: guess=True, late=False",
            )
        self.pieces: dict[int, list[Piece]] = {}  # by bucket
        self.masters: dict[int, Tensor] = {}  # by bucket of 16-bit parameters: the fp32 masters of its pieces
        self.offload: Offload | None = None  # of buckets whose state is not on the device
        self._places: Chosen | None = None  # how much of it lies where
        self._room: Room | None = None  # ... chosen by what there was
        self._hooks: list[RemovableHandle] = []
        self._shared: Any = None  # the optimizer's state, while it shows a whole one
        self._told = False  # what lies where
        self._coming: dict[int, Any] = {}  # a state that is being loaded, by the parameter's number

    def on_disk(self) -> bool:
        """Is anything meant to be there?"""
        return self.store == "nvme"

    def check(self, optimizer: Optimizer) -> None:
        elementwise.check(self.name, optimizer)
        if self.store == "nvme":
            check_steps("store=nvme", optimizer)
        if self.store != "device" and not self.undo:
            check_steps("undo=False", optimizer)

    def rests(self, params: Sequence[Tensor]) -> bool:
        return self.store == "device" and not any(p.dtype in NARROW for p in params)

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        hooks.show_whole(self, ex)

    def own(self, b: Bucket, ex: Exchange) -> None:
        length = b.flat.numel() // ex.world
        b.own = slice(ex.rank * length, (ex.rank + 1) * length)
        b.kept = b.flat[b.own]
        self.pieces[b.index] = self._cut(b, ex)
        for s in b.slots:
            mine = [piece for piece in self.pieces[b.index] if piece.slot is s]
            s.shown = SlicedGrad(s.view, mine, ex.comm)
        self._hooks += hooks.watch_arrivals(b.slots)
        whole.take(b, self.pieces[b.index], ex.optimizer)

    def _cut(self, b: Bucket, ex: Exchange) -> list[Piece]:
        away, source = self._away(b, ex), self.source(b, ex)
        ends = [(s, max(s.start, b.own.start), min(s.stop, b.own.stop)) for s in b.slots]
        ends = [(s, start, stop) for s, start, stop in ends if start < stop]
        if away is None:
            if b.flat.dtype in NARROW:
                self.masters[b.index] = torch.zeros_like(b.flat[b.own], dtype=torch.float32)
            return [Piece(b, *end, source, home=self.masters.get(b.index)) for end in ends]
        with away.at_hand(changed=True) as now:
            away.pieces = [AwayPiece(b, *end, source, now.p, away=away) for end in ends]
        away.published()
        return [*away.pieces]

    def _away(self, b: Bucket, ex: Exchange) -> Away | None:
        """Its state is not to be on the device. What the next forward needs first stays longest: it is stepped last.
        What is stepped first has the longest time, and goes farthest.
        """
        if self.store == "device":
            return None
        params = [p for group in ex.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self._places is None:
            self._places, self._room = placing.choose(self, params, b, ex.world)
        places = self._places
        beyond = (
            sum(p.numel() for p in params) - sum(known.n for known in ex.buckets if known.index < b.index)
        ) / ex.world - places.device
        if beyond <= 0:
            if self.offload is not None:
                self.offload.staying.append(b)
            return None
        if self.offload is None:
            how = {"guess": self.guess, "undo": self.undo, "late": self.late}
            self.offload = Offload(b.device, **how, threads=self.threads)
            if self._room is not None:
                self.offload.claim(0 if places.room else places.disk * b.flat.element_size())
        beyond -= places.host
        largest = max(s.stop - s.start for s in b.slots) / ex.world
        on_disk = beyond > 0 and largest <= places.largest and stepped_in_fp32(b.flat.dtype)
        if on_disk and self.offload.pool is None:
            check_steps(f"store={self.store}", ex.optimizer)
            self.offload.open_disk(Path(self.path), min(beyond, places.disk) * STATE, ex.rank)
        return self.offload.add(b, on_disk=on_disk)

    def source(self, b: Bucket, ex: Exchange) -> Tensor | None:
        """A vector of its own for this worker's slice of the parameters, where they are not whole on every worker."""
        return None

    def lent(self) -> set[int]:
        """The ids of parameters that are whole only while a module computes with them."""
        return set()

    def frozen(self) -> list[Piece]:
        """What this worker has of those of them that are not trained."""
        return []

    def put_away(self) -> None:
        """Slices are going to be written from outside: what was made whole out of them goes."""

    async def keep_slice(self, b: Bucket, ex: Exchange) -> None:
        """Of the mean this worker's slice stays, and the bucket's memory is given back."""
        b.kept = mine = await ex.mine(b, b.flat)
        self.hand(b, ex)
        if b.kept is mine:  # it has not left
            b.kept = mine.clone()
        b.free()

    def hand(self, b: Bucket, ex: Exchange) -> None:
        """What is kept goes to where it will be stepped."""
        if self.store != "device" and ex.rank == 0 and not self._told:  # all buckets are cut by now
            placing.tell(ex, self.offload.of if self.offload else {}, self.path, self._room)
            self._told = True
        if self.offload is not None:
            self.offload.bring(b)
            self.offload.hand(b, ex)

    def published(self, b: Bucket) -> None:
        """Its parameters are what was stepped."""
        if self.offload and b.index in self.offload.of:
            self.offload.of[b.index].published()

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        left: list[AwayPiece] = []
        if self.offload:
            with torch.no_grad():
                left = self.offload.begin(ex)
            self.offload.wait()
        theirs = {piece.bucket.index for piece in left}
        buckets = [x for i, x in self.pieces.items() if self.offload is None or i not in self.offload.of or i in theirs]
        result = in_turns(step, ex.optimizer, buckets, self._take)
        if self.offload:
            self.offload.end(ex, left)
        return result

    def _take(self, pieces: Sequence[Piece]) -> None:
        """What the parameters and gradients of a bucket are now."""
        if pieces and pieces[0].bucket.index in self.masters:
            take_all(pieces, self.masters[pieces[0].bucket.index])
        else:
            for piece in pieces:
                piece.take()

    # ------------------------------------------------------------------------------------------------ whole

    def collect(self, ex: Exchange) -> None:
        self.settle(ex)
        ex.optimizer.state = whole.state(self.pieces, ex)
        for b in ex.buckets:
            for s in b.slots:
                s.param.grad = None if s.param.grad is s.shown else s.param.grad
        for hook in self._hooks:
            hook.remove()
        self.pieces.clear()
        self._hooks.clear()
        self.masters.clear()
        if self.offload is not None:
            self.offload.close()
        self.offload = self._places = None

    def settle(self, ex: Exchange) -> None:
        """Somebody looks at the state: what was stepped ahead of the user's word was not, and what is late is made."""
        if self.offload is not None:
            self.offload.take_back()
            self.offload.land(ex)
            with torch.no_grad():
                self.put_new(ex)

    def put_new(self, ex: Exchange) -> None:
        """What was stepped elsewhere becomes the parameters."""
        for b in ex.buckets:
            if self.offload and b.index in self.offload.new:
                Task(self.publish(b, ex)).finish()

    def saving(self, ex: Exchange) -> None:
        if self.pieces:
            self.settle(ex)
            self._shared, ex.optimizer.state = ex.optimizer.state, whole.state(self.pieces, ex)

    def saved(self, ex: Exchange) -> None:
        if self.pieces:
            ex.optimizer.state, self._shared = self._shared, None

    def loading(self, saved: dict[str, Any], ex: Exchange) -> dict[str, Any]:
        if not self.pieces:
            return saved
        self.settle(ex)
        self._coming = saved["state"]
        return {**saved, "state": {}}  # the optimizer would make it whole on every worker first

    def loaded(self, ex: Exchange) -> None:
        if not self.pieces:
            return
        params = [p for group in ex.optimizer.param_groups for p in group["params"]]
        for i, state in self._coming.items():
            ex.optimizer.state[params[i]] = dict(state)
        self._coming = {}
        for b in ex.buckets:
            whole.take(b, self.pieces[b.index], ex.optimizer)
