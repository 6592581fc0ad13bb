"""Parameters that are whole only while somebody computes with them.

[Note: loans] A bucket's parameters are views of one vector whose memory is given back (the storage is resized to
nothing, and tensors that autograd has saved keep pointing to it) and taken again, to be filled by a gather of the
workers' slices. Autograd then finds in backward what it saved in forward. Who reads a parameter that is away reads
NaN: a parameter that is used without calling its module shows, by a loss that is NaN or in its first backward.

A module's forward borrows the buckets of its parameters. In forward a bucket goes back when another one is asked for
and no module that uses it is still running. The backward of a module's output borrows again, and a bucket goes back
when its gradients have left.

[Note: ahead] What is borrowed next is asked for ahead, by the order of the last step: while a layer computes, the next
one's bytes travel; those of the first travel from the end of the last step on. A step that borrows otherwise throws
that order away at the first difference, and what it does becomes the order of the next. Every worker must borrow in
one order; each slice says of which bucket it is, so that two that do not are found out.

[Note: frozen] Parameters that are not trained have no gradients and no place in the engine's buckets, but are lent like
all others, in buckets of their own with negative numbers. One that is thawed comes home with its whole bucket before
the engine takes it up; those that stay frozen are lent anew. No gradient of their own tells when autograd is through
with them. That of a module's input does, if it is the only one that leaves the module: then they go back. Others stay
until the step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.bucket import Bucket, Slot
from paceline.cutting import cut
from paceline.errors import MismatchError, UsageError
from paceline.pipeline import Task
from paceline.shards.piece import Piece

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.stores.params import Home

_STAMPS = 251  # whole numbers that are exact in any floating-point format
_LONGEST = 10_000
_NEAR = 2  # buckets that are read from disk before they are asked for
UNFILLED = "_unfilled"  # a mark on a parameter that has no values yet (meta.py), which looks as one that is lent
_FROZEN_BYTES = 4 << 20  # of frozen parameters to a bucket


class Loan:
    """One bucket's parameters: this worker's slice always, the whole now and then."""

    def __init__(self, b: Bucket, ex: Exchange, home: Home | None = None) -> None:
        """home: of this worker's slice, if not the device."""
        self.bucket, self.comm, self.home = b, ex.background, home
        if home is None:
            self._stamped = self._stamp()
            self.mine = self._stamped[:-1]
        self.whole = torch.zeros_like(b.flat)
        self._views = b.views(self.whole)
        self._away = [view.new_full((), torch.nan).expand(view.shape) for view in self._views]
        self._coming: Task[None] | None = None
        for s in b.slots:
            _check_here(s)
        torch._foreach_copy_(self._views, [s.param.detach() for s in b.slots])
        self.take()
        self.free()

    @property
    def here(self) -> bool:
        return bool(self.whole.untyped_storage().nbytes()) and not self.coming

    @property
    def coming(self) -> bool:
        return self._coming is not None

    def start(self) -> None:
        """Ask for it."""
        if not self.here and not self.coming:
            self._coming = Task(self._fetch())

    def ahead(self) -> None:
        """Ask for what will be needed, unless it would be there at once, and take memory before its time."""
        if self.comm.world > 1 or self.home is not None:
            self.start()

    def near(self) -> None:
        """It will be asked for."""
        if self.home is not None and not self.here and not self.coming:
            self.home.near()

    def wait(self) -> None:
        """What was asked for arrives."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.finish()

    async def _fetch(self) -> None:
        if self.home is not None and self.comm.world == 1:
            await self._bring(self.home)
        else:
            await self._gather()
        self._put(self._views)

    async def _bring(self, home: Home) -> None:
        self._lay()
        try:
            await home.bring(self.whole)
        except BaseException:
            self.free()  # or what nobody has written would look as if it were there
            raise

    async def _gather(self) -> None:
        rows = await self.comm.gather(self._row())
        stamps = [] if rows.is_cuda else rows[:, -1].tolist()  # reading would make a GPU's host wait
        if len(set(stamps)) > 1:
            raise MismatchError(
                f"workers compute with other parameters than worker {self.comm.rank}, which needs {self.bucket}",
                why="with this layout all workers must go through the model in the same order",
                do="do not let the path through the model depend on a worker's data, or use the layout zero2",
            )
        self._lay()
        self.whole.view(self.comm.world, -1).copy_(rows[:, :-1])

    def _lay(self) -> None:
        self.whole.untyped_storage().resize_(self.whole.nbytes)

    def _stamp(self) -> Tensor:
        n, b = self.bucket.own.stop - self.bucket.own.start, self.bucket
        return torch.full((n + 1,), float(b.index % _STAMPS), dtype=b.flat.dtype, device=b.device)

    def _row(self) -> Tensor:
        """This worker's slice on the device, and of which bucket it is."""
        if self.home is None:
            return self._stamped
        row = self._stamp()
        self.home.bring(row[:-1]).wait()
        return row

    def take(self) -> None:
        """The whole was written into: so is this worker's slice."""
        mine = self.whole[self.bucket.own]
        if self.home is None:
            self.mine.copy_(mine)
        else:
            self.home.put(mine)
            self.home.touched = True

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)
        self._put(self._away)

    def _put(self, tensors: list[Tensor]) -> None:
        for s, x in zip(self.bucket.slots, tensors, strict=True):
            s.param.data = x


class Frozen(Piece):
    """What this worker has of a parameter that is lent and not trained: to be saved and loaded."""

    def __init__(self, loan: Loan, slot: Slot, start: int, stop: int) -> None:
        self.loan, self.bucket, self.slot = loan, loan.bucket, slot
        self.place(start, stop)
        self.param = torch.empty(0, device=loan.bucket.device)  # nobody steps it

    def now(self) -> Tensor:
        return self.loan.mine[self.here] if self.loan.home is None else self.loan.home.read(self.here)

    def write(self, x: Tensor) -> None:
        if self.loan.home is None:
            self.now().copy_(x)
        else:
            with self.loan.home.at_hand(changed=True) as mine:
                mine[self.here].copy_(x)


class Route:
    """In which order buckets are borrowed, and which is next: [Note: ahead]."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self.now: list[int] = []

    def next(self, index: int) -> int | None:
        if len(self.now) == _LONGEST:  # nobody ends it
            self.over()
        self.now.append(index)
        k = len(self.now)
        if self.last[k - 1 : k] != [index]:
            self.last = []
        return self.last[k] if k < len(self.last) else None

    def after(self) -> list[int]:
        """Those that come after the next."""
        k = len(self.now) + 1
        return self.last[k : k + _NEAR]

    def over(self) -> None:
        self.last, self.now = self.now, []


class Call:
    """One forward of a module, and its backward."""

    def __init__(self, loans: Loans, buckets: Callable[[], list[int]]) -> None:
        self.loans, self.buckets = loans, buckets
        self._frozen: list[int] = []
        self._held: Counter[int] | None = None  # in which they are counted

    def backward(self) -> None:
        """It begins."""
        indices = self.buckets()
        self.loans.borrow(indices, backward=True)
        if self._held is not self.loans.held:
            self._frozen, self._held = [i for i in indices if i < 0], self.loans.held
            self._held.update(self._frozen)

    def over(self) -> None:
        if self._held is self.loans.held:
            self._held = None
            self.loans.let_go(self._frozen)


class Loans:
    """All buckets of one optimizer: [Note: loans]."""

    def __init__(self, ex: Exchange, home: Callable[[Bucket], Home | None] = lambda b: None) -> None:
        """home: where a bucket's slice lives, if not on the device."""
        self.ex, self._home = ex, home
        self.of: dict[int, Loan] = {}  # by bucket
        self.home: dict[int, int] = {}  # the bucket of a parameter, by its id
        self.route = {True: Route(), False: Route()}  # training or not
        self._used: Counter[int] = Counter()  # by modules whose forward is running
        self.held: Counter[int] = Counter()  # ... or, of the frozen ones, whose backward is, in this step

    def add(self, b: Bucket) -> Loan:
        self.of[b.index] = Loan(b, self.ex, self._home(b))
        self.home |= {id(s.param): b.index for s in b.slots}
        return self.of[b.index]

    def lend_frozen(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """[Note: frozen]. What another optimizer's layout has lent already stays with it."""
        new = [(name, p) for name, p in named if not p.requires_grad and _lendable(p) and id(p) not in self.home]
        for b in cut(list({id(p): (name, p) for name, p in new}.values()), self.ex.world, _FROZEN_BYTES):
            length = b.flat.numel() // self.ex.world
            b.own = slice(self.ex.rank * length, (self.ex.rank + 1) * length)
            b.index = min([0, *self.of]) - 1
            self.add(b)
            b.free()

    def frozen(self) -> list[Piece]:
        lent = [(loan, s) for i, loan in self.of.items() if i < 0 for s in loan.bucket.slots]
        ends = [(loan, s, max(s.start, loan.bucket.own.start), min(s.stop, loan.bucket.own.stop)) for loan, s in lent]
        return [Frozen(*end) for end in ends if end[2] < end[3]]

    def thaw(self, b: Bucket) -> None:
        """Before its parameters are taken up: those that were lent as frozen come home."""
        for i in self.buckets(s.param for s in b.slots):
            slots = self._end(i)
            self.lend_frozen((s.name, s.param) for s in slots)

    def _end(self, i: int) -> list[Slot]:
        """The parameters are whole, and stay so."""
        loan = self.of.pop(i)
        loan.start()
        loan.wait()
        for s in loan.bucket.slots:
            del self.home[id(s.param)]
        self.route = {True: Route(), False: Route()}
        return loan.bucket.slots

    def end_trained(self) -> None:
        for i in [i for i in self.of if i >= 0]:
            self._end(i)

    def buckets(self, params: Iterable[Tensor]) -> list[int]:
        return list(dict.fromkeys(self.home[id(p)] for p in params if id(p) in self.home))

    def begin(self, indices: list[int], *, backward: bool = False, route: bool = True) -> None:
        """A module's forward begins. backward: to compute it once more for one under way. route: it is on its way."""
        self._used.update(indices)
        self.borrow(indices, backward=backward, route=route)

    def end(self, indices: list[int]) -> None:
        self._used.subtract(indices)

    def borrow(self, indices: list[int], *, backward: bool = False, route: bool = True) -> None:
        way = self.route[backward or torch.is_grad_enabled()] if route else Route()
        began = time.perf_counter()
        with torch.no_grad():
            for i in indices:
                if not self.of[i].here:
                    if not backward:
                        self._give_back_unused(indices)
                    self._get(i, way)
        self.ex.recorder.wait_s += time.perf_counter() - began

    def _get(self, i: int, route: Route) -> None:
        self.of[i].start()
        if (ahead := route.next(i)) is not None:
            self.of[ahead].ahead()
        for later in route.after():
            self.of[later].near()
        self.of[i].wait()

    def _give_back_unused(self, but: list[int]) -> None:
        for i, loan in self.of.items():
            if i not in but and self._used[i] <= 0 and loan.here:
                loan.free()

    def gradient(self, b: Bucket, slot: Slot) -> None:
        """One has arrived. A frozen parameter's layer may still be to come when all gradients are there."""
        if not self.of[b.index].here:
            raise UsageError(
                f"the parameter {slot.name} is used without calling the module it belongs to",
                why="with this layout a module's parameters are there only while it is called",
                do="call the module, give the one that uses it the same parameter, or use the layout zero2",
            )
        if b.full and all(s.param.requires_grad for s in b.slots):
            self.of[b.index].free()

    def let_go(self, indices: list[int]) -> None:
        """A module's backward needs them no more."""
        self.held.subtract(indices)
        for i in indices:
            if not self.held[i] and self._used[i] <= 0 and self.of[i].here:
                self.of[i].free()

    def give_back(self) -> None:
        """All of them, and what was asked for and not used: a step changes them."""
        self.settle()
        for loan in self.of.values():
            loan.free()
        self._used.clear()
        self.held = Counter()
        self.route[True].over()

    def ask_first(self) -> None:
        """After a step: for what the next one begins with, if it goes as the last one did."""
        for i in self.route[True].last[:1]:
            self.of[i].ahead()
        for i in self.route[True].after():
            self.of[i].near()

    def settle(self) -> None:
        """What was asked for arrives."""
        with torch.no_grad():
            for loan in self.of.values():
                loan.wait()


def _lendable(p: Tensor) -> bool:
    return (p.is_floating_point() or p.is_complex()) and p.numel() > 1 and not _away(p)


def _away(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() < p.nbytes


def _check_here(slot: Slot) -> None:
    if _away(slot.param) and not hasattr(slot.param, UNFILLED):
        raise UsageError(
            f"the parameter {slot.name} was frozen when another optimizer was prepared, and has been shared out",
            why="that optimizer's layout lends it to the modules",
            do="let it be trained when paceline.prepare is called and freeze it after, or use one optimizer",
        )
