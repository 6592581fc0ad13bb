"""The step barrier, crossed: `optimizer.step()` returns at once, and each bucket is updated when it is needed.

[Note: crossing] Whether the step counts is known before the first update, while most of the means are still on their
way: it is whispered with the bucket that is needed first, or voted on at the end of backward, on a lane of its own.
Before a layer's forward begins, its bucket's means are waited for and the user's optimizer steps the parameters of that
bucket alone, with the learning rate of the moment it was asked to. Before a gradient of the next backward arrives all
have landed. Calling an elementwise optimizer bucket by bucket gives the same bits as calling it once.

`p.grad` is the user's all the while: set to None or to another tensor after `step`, it stays so. For the update itself
each bucket's means are put there, and what the user had there is put back.

Code that looks at parameters or gradients that have not landed has them land first: [Note: lookout]. If it does so
between `backward` and `step`, or has put other gradients there, that step has its barrier back. Where the barrier can
never be crossed, `off` says why, once.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.core.bucket import Bucket
from paceline.core.lookout import lookout
from paceline.core.vote import Verdict
from paceline.errors import UsageError
from paceline.telemetry.events import Note

if TYPE_CHECKING:
    from paceline.core.engine import Engine


class Overlap:
    """One engine's update under way: [Note: crossing]."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on = engine.method.order.crosses and not engine.idle
        self._step: Callable[[], Any] | None = None  # the optimizer's own: the user has called it
        self._zero: Callable[[], None] | None = None  # the optimizer's zero_grad, called after it
        self._groups: list[dict[str, Any]] = []  # as they were: a scheduler may have changed them by now
        self._due: dict[int, Bucket] = {}  # by index: not updated yet
        self.used: list[list[bool]] = []  # of each bucket, which parameters any worker has used
        self._decided = False  # it is known that the step counts
        self._called: set[int] = set()  # parameters (by id) whose module's forward has begun
        self._uncalled: set[int] = set()  # those used without it: they must be there when any forward begins
        self._late: set[int] = set()  # those that had not landed when the whole model's forward began
        self._landing = False  # what is done to parameters and gradients now is done here
        self._told: set[str] = set()  # why a barrier was kept

    def off(self, why: str) -> None:
        """Keep the barrier in every step from now on, and say why."""
        if self.on:
            self.on = False
            self.say(why)

    def say(self, why: str) -> None:
        """Tell once that a step has its barrier, and why."""
        if why not in self._told and self.engine.group.rank == 0:
            text = f"{self.engine.method.order.name}: a step waits for all its gradients: {why}"
            self.engine.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=2)
        self._told.add(why)

    @property
    def under_way(self) -> bool:
        """Is there an update that the user has asked for and that is not whole yet?"""
        return self._step is not None

    # ------------------------------------------------------------------------------------------------ the user's calls

    def can_wait(self) -> bool:
        """The user calls `optimizer.step()`: may it be made later? Not if the user has put other gradients there."""
        why = None
        if any(s.param.grad is not s.known for b in self.engine.buckets for s in b.slots):
            why = "gradients are replaced before it"
        elif _has_hooks(self.engine.optimizer):
            why = "the optimizer has hooks, which must run once a step"
        if why is not None:
            self.say(why)
        return why is None

    def defer(self, step: Callable[[], Any]) -> None:
        """Make the optimizer's step later, bucket by bucket."""
        self._step, self._decided = step, False
        self._called.clear()
        self.engine.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        self._groups = [dict(group) for group in self.engine.optimizer.param_groups]
        self._due = {b.index: b for b in self.engine.buckets}

    def zero_grad(self, do: Callable[[], None], *, in_place: bool) -> None:
        """The user called `optimizer.zero_grad()` after `step`. in_place: gradients stay and become zero, which must
        wait until they have been used.
        """
        if in_place:
            self._zero = do
        else:
            do()

    def forward(self, params: Iterable[Tensor], *, root: bool) -> None:
        """The forward of a module that uses these parameters begins. root: it is the whole model's."""
        own = [id(p) for p in params]
        self._called.update(own)
        if self._step is not None:
            own += self._uncalled if root else ()
            some = [b for b in self._due.values() if any(id(s.param) in own for s in b.slots)]
            if some or not self._decided:
                self._land(some)
        if root:
            self._late = {id(s.param) for b in self._due.values() for s in b.slots}

    def gradient(self, param: Tensor) -> None:
        """A gradient is about to be added to p.grad."""
        if id(param) not in self._called and id(param) not in self._uncalled:
            self._uncalled.add(id(param))
            if id(param) in self._late:
                self._refuse_stale(param)
        self.land()
        self.barrier()

    def _refuse_stale(self, param: Tensor) -> None:
        """A parameter was used before its update, because until now it was only used by its own module."""
        name = next(s.name for b in self.engine.buckets for s in b.slots if s.param is param)
        raise UsageError(
            f"{name} was used without calling the module it belongs to, for the first time",
            why=f"with {self.engine.method.order.name} its last update was still under way, and nothing waited for it",
            do="call its module, or use order=backward; from now on this forward waits for it",
        )

    def land(self) -> None:
        """Make all of the update under way."""
        if self._step is not None:
            self._land(list(self._due.values()))

    def settle(self) -> None:
        """Make all of the update under way, and look out no more until the next forward."""
        self.land()
        lookout().rest()

    @property
    def owes(self) -> bool:
        """Are there values that have not landed?"""
        waiting = self.on and self.engine.exchanged and not self.engine.landed
        return not self._landing and (self._step is not None or waiting)

    def owed(self) -> Iterator[Tensor]:
        """The tensors whose values they are: gradients, and after `step` parameters and the optimizer's state."""
        yield from (b.flat for b in self.engine.buckets)
        if self._step is not None:
            state = self.engine.optimizer.state
            for s in (s for b in self.engine.buckets for s in b.slots):
                yield s.param
                yield from (x for x in state.get(s.param, {}).values() if isinstance(x, Tensor))

    def looked_at(self) -> None:
        """An operation is about to use them."""
        self.land()
        if self.barrier():
            self.say("gradients are looked at before it")

    def barrier(self) -> bool:
        """Wait for the means of a step that was not called yet, if there is one. Gives whether there was."""
        waits = self.on and self.engine.exchanged and not self.engine.landed and self._step is None
        if waits:
            with self._at_work():
                self.engine.land_beside()
        return waits

    # ------------------------------------------------------------------------------------------------ the update

    def _land(self, some: Sequence[Bucket]) -> None:
        with self._at_work(), self.engine.recorder.timed():  # part of the step, whatever made it necessary now
            if not self._decided:
                self._decide()
            for b in some:
                if b.index in self._due:  # the step counts
                    with self.engine.waiting():
                        self.engine.pipeline.drain_until(b)
                    self._update(self._due.pop(b.index))
            if self._step is not None and not self._due:
                self.engine.commit()
                self.engine.over(made=True)
                self._close()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        before, self._landing = self._landing, True
        try:
            yield
        finally:
            self._landing = before

    def _decide(self) -> None:
        """Before the first update: does the step count? Then all it needs is bound; else it is over."""
        engine = self.engine
        self._decided = True
        with engine.waiting():
            if engine.vote.last is not None:
                engine.pipeline.drain_until(engine.vote.last)
            used, bad = engine.vote.used(engine.buckets), engine.vote.bad()
            for b in engine.buffer_buckets:
                engine.pipeline.drain_until(b)
        engine.method.order.hear(engine.vote.backlog())
        self.used = used
        if bad:  # nothing of this step is used, but it must have arrived before its memory is used again
            with engine.waiting():
                engine.pipeline.drain()
        verdict = None
        try:
            verdict = engine.decide()
        finally:
            if verdict is not Verdict.COMMIT:
                self._due.clear()
                self._close()

    def _update(self, b: Bucket) -> None:
        """The optimizer's step, for this bucket's parameters."""
        own = [s.param.grad for s in b.slots]
        zeroed = all(g is None for g, s in zip(own, b.slots, strict=True) if s.arrived)
        b.bind(self.used[b.index])
        try:
            self._step_on(b)
        finally:
            for s, g in zip(b.slots, own, strict=True):
                if s.arrived or zeroed or g is not None:
                    s.param.grad = g

    def _step_on(self, b: Bucket) -> None:
        here, optimizer = {id(s.param) for s in b.slots}, self.engine.optimizer
        groups = [{**group, "params": [p for p in group["params"] if id(p) in here]} for group in self._groups]
        whole, optimizer.param_groups = optimizer.param_groups, [group for group in groups if group["params"]]
        try:
            with torch.enable_grad():
                assert self._step is not None
                self._step()
        finally:
            optimizer.param_groups = whole

    def _close(self) -> None:
        self._step, zero_grad, self._zero = None, self._zero, None
        if zero_grad is not None:
            zero_grad()


def _has_hooks(optimizer: Any) -> bool:
    """Has the user registered hooks on the optimizer's step, or on that of all optimizers?"""
    known = (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(not hook.__module__.startswith("paceline") for hooks in known for hook in hooks.values())
