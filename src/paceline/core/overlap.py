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
import copy
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.core.bucket import Bucket
from paceline.core.lookout import lookout, memory
from paceline.core.vote import Verdict
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
        self._state: _WatchedState | None = None  # stands in the place of the optimizer's, while an update is under way
        self._memory: dict[int, set[int]] = {}  # what an update under way will write, and the indices of its buckets
        self._due: dict[int, Bucket] = {}  # by index: not updated yet
        self.used: list[list[bool]] = []  # of each bucket, which parameters any worker has used
        self._decided = False  # it is known that the step counts
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
        optimizer: Any = self.engine.optimizer
        optimizer._opt_called = True  # what a scheduler looks for
        with self._at_work():
            self._groups = [
                {key: x.clone() if isinstance(x, Tensor) else x for key, x in group.items()}
                for group in optimizer.param_groups
            ]
            self._memory.clear()
            for b in self.engine.buckets:
                for x in memory(self._written(b)):
                    self._memory.setdefault(x, set()).add(b.index)
        self._due = {b.index: b for b in self.engine.buckets}
        self._state = optimizer.state = _WatchedState(optimizer.state, self.land)
        self._step, self._decided = step, False

    def _written(self, b: Bucket) -> Iterator[Tensor]:
        """What this bucket's update will write."""
        yield b.flat
        for s in b.slots:
            yield s.param
            yield from (x for x in self.engine.optimizer.state.get(s.param, {}).values() if isinstance(x, Tensor))

    def zero_grad(self, do: Callable[[], None], *, in_place: bool) -> None:
        """The user called `optimizer.zero_grad()` after `step`. in_place: gradients stay and become zero, which must
        wait until they have been used.
        """
        if in_place:
            self._zero = do
        else:
            do()

    def forward(self, params: Iterable[Tensor]) -> None:
        """The forward of a module that uses these parameters begins."""
        if self._step is not None:
            own = [id(p) for p in params]
            some = [b for b in self._due.values() if any(id(s.param) in own for s in b.slots)]
            if some or not self._decided:
                self._land(some)
            lookout().rest_in_forward()

    def gradient(self) -> None:
        """A gradient is about to be added to a p.grad."""
        self.land()
        self.barrier()

    def land(self) -> None:
        """Make all of the update under way."""
        if self._step is not None:
            self._land(list(self._due.values()))

    def settle(self) -> None:
        """Make all of the update under way, and look out no more until the next forward."""
        self.land()
        lookout().rest()

    def watched(self) -> bool:
        """May the barrier be crossed? Only where it is seen who looks at what is owed then: [Note: lookout]."""
        if not self.on:
            return False
        seen = lookout().watches(self)
        if not seen:
            self.say("the model itself is never called, or in another thread")
        return seen

    @property
    def owes(self) -> bool:
        """Are there values that have not landed?"""
        waiting = self.on and self.engine.exchanged and not self.engine.landed
        return not self._landing and (self._step is not None or waiting)

    def owed(self) -> Container[int]:
        """The memory of these values: of gradients, and after `step` of parameters and the optimizer's state."""
        return self._memory if self._step is not None else set(memory(b.flat for b in self.engine.buckets))

    def looked_at(self, touched: Iterable[int], *, in_forward: bool) -> None:
        """An operation is about to use this memory. In a forward the other buckets may land later."""
        if in_forward and self._step is not None:
            theirs = {i for x in touched for i in self._memory[x]}
            if some := [b for i, b in self._due.items() if i in theirs]:
                self._land(some)
            return
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
        assert self._state is not None
        assert self._step is not None
        users, optimizer.state = optimizer.state, self._state.true
        try:
            with torch.enable_grad():
                self._step()
        finally:
            optimizer.param_groups, optimizer.state = whole, users

    def _close(self) -> None:
        optimizer: Any = self.engine.optimizer
        if self._state is not None and optimizer.state is self._state:  # else the user has put another one there
            optimizer.state = self._state.true
        self._state = None
        self._memory.clear()
        self._step, zero_grad, self._zero = None, self._zero, None
        if zero_grad is not None:
            zero_grad()


class _WatchedState:
    """Stands in the place of the optimizer's state while an update is under way: whoever asks for it has that land."""

    def __init__(self, true: Any, land: Callable[[], None]) -> None:
        self.true, self._land = true, land

    def _now(self) -> Any:
        self._land()
        return self.true

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._now()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._now()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._now()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._now(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._now().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


def _has_hooks(optimizer: Any) -> bool:
    """Has the user registered hooks on the optimizer's step, or on that of all optimizers?"""
    known = (
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(not hook.__module__.startswith("paceline") for hooks in known for hook in hooks.values())
