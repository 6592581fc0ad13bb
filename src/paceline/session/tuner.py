"""What nobody knows beforehand, found while training: how large a bucket, a piece, the credit; and between hosts of
several workers, whether these had better agree among themselves first.

[Note: tuning] All this changes how long a step takes, not what is learned. So training goes on while they are tried: a
window of steps with each candidate. Worker 0 asks optuna (a tree-structured Parzen estimator) for the next candidate
and tells it the median step of the window; the others hear the numbers. All change at the same step, between two
steps, with nothing under way: new buckets are cut, and what parts remember of the old ones moves along.

The first candidate is what runs without tuning. The fastest of several windows was fast by luck too, so in the end it
runs off against the first, twice each, and only these windows count. The result is written to a file, and a later run
of the same job starts from it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline._version import __version__
from paceline.core.facts import Fact
from paceline.errors import DataError, UsageError
from paceline.telemetry.files import check_writable, write

if TYPE_CHECKING:
    from paceline.core.engine import Engine

CANDIDATES = 8
RUN_OFF = 4  # windows: the best, the first, the first, the best; what drifts hits both alike
WINDOW = 8  # steps that are timed with each
_SETTLING = 2  # steps before them: fresh memory, a pace that is learned
_BUCKET = "bucket_mb"
_BUCKETS = (0.5, 64.0)
_HIERARCHY = "hierarchical"  # 1 or 0: wire/hierarchy.py

Values = dict[str, float]


class Tuner:
    """One engine's sizes: from the file if it exists, else [Note: tuning] and into the file."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        *,
        candidates: int = CANDIDATES,
        window: int = WINDOW,
        bucket_bytes: int | None = None,
    ) -> None:
        """bucket_bytes: of a bucket, where pieces may be smaller; if not what the engine has."""
        self.engine, self.path, self.window = engine, path, window
        self._bucket_bytes = bucket_bytes or engine.bucket_bytes
        if Fact.GRADIENTS_AGREE not in engine.method.sync.facts():
            raise UsageError(
                f"tuned={str(path)!r} does not go together with {engine.method.sync.name}",
                why="windows of a few steps are compared, and only with every_step are all steps alike",
                do="give bucket_mb= yourself",
            )
        self.space: dict[str, tuple[float, float]] = {**(engine.method.order.tunes or {_BUCKET: _BUCKETS})}
        if hasattr(engine.comm, _HIERARCHY):
            self.space[_HIERARCHY] = (0.0, 1.0)
        self.values = self._now()
        self._left = candidates + RUN_OFF
        self._took: list[float] = []
        self._last: tuple[int, float] | None = None  # step, moment
        self._search: _Search | None = None
        if (known := self._heard(self._read())) is not None:
            self._change(known)
            self._left = 0
        elif engine.comm.rank == 0:
            self._search = _Search(self.space, self.values, candidates)

    def forward(self) -> None:
        """A forward begins: look at the clock, and perhaps change the candidate."""
        if not self._left:
            return
        step = self.engine.ex.step + self.engine.overlap.under_way
        if self._last is not None and step == self._last[0]:
            return
        now = self._moment()
        if self._last is not None:
            self._took.append(now - self._last[1])
        self._last = (step, now)
        if len(self._took) == _SETTLING + self.window:
            self._next()
            self._last = (step, self._moment())

    def _moment(self) -> float:
        """In the job's own time, if there is a loader to tell it."""
        return self.engine.recorder.moment().busy_s or time.perf_counter()

    def _next(self) -> None:
        """A window is over."""
        self._left -= 1
        step_s, self._took = statistics.median(self._took[_SETTLING:]), []
        values: Values | None = None
        if self._search is not None:
            self._search.tell(step_s)
            values = self._search.ask() if self._left else self._search.best()
            if not self._left:
                self._write(self._search)
        heard = self._heard(values)
        assert heard is not None
        self._change(heard)

    def _heard(self, values: Values | None) -> Values | None:
        """Worker 0's numbers, on every worker; None if it has none."""
        own = torch.tensor([(values or {}).get(name, math.nan) for name in self.space], dtype=torch.float64)
        if self.engine.comm.world_size > 1:
            self.engine.settle()
            self.engine.comm.broadcast(own).wait()
        numbers = own.tolist()
        return None if any(map(math.isnan, numbers)) else dict(zip(self.space, numbers, strict=True))

    def _now(self) -> Values:
        order = self.engine.method.order
        ours = {_BUCKET: self.engine.bucket_bytes / 2**20, _HIERARCHY: getattr(self.engine.comm, _HIERARCHY, False)}
        return {name: float(ours[name] if name in ours else getattr(order, name)) for name in self.space}

    def _change(self, values: Values) -> None:
        if values == self.values:
            return
        self.values, order = values, self.engine.method.order
        for name in values.keys() - {_BUCKET, _HIERARCHY}:
            setattr(order, name, values[name])
        if _HIERARCHY in values:
            setattr(self.engine.comm, _HIERARCHY, bool(values[_HIERARCHY]))
        chunk = order.chunk_bytes()
        self.engine.recut(min(chunk, self._bucket_bytes) if chunk else int(values[_BUCKET] * 2**20))

    # ------------------------------------------------------------------------------------------------ the file

    def _job(self) -> dict[str, Any]:
        """What the numbers hold for."""
        return {
            "method": self.engine.method.order.name,
            "reducer": self.engine.method.reducer.name,
            "workers": self.engine.comm.world_size,
            "parameters": sum(b.n for b in self.engine.buckets),
            "tuned": sorted(self.space),
        }

    def _read(self) -> Values | None:
        if self.engine.comm.rank:
            return None
        if not self.path.exists():
            check_writable(self.path)  # now, not when the search is over
            return None
        try:
            known = json.loads(self.path.read_text())
            job, values = known["job"], {name: float(value) for name, value in known["values"].items()}
            if not all(0 < value < math.inf for name, value in values.items() if name != _HIERARCHY):
                raise ValueError(f"the values {values} are out of range")
            differ = [f"{key} {job[key]}, here {value}" for key, value in self._job().items() if job[key] != value]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self.path} is not what a tuning run has written",
                why=f"{type(error).__name__}: {error}",
                do="delete it, and the next run tunes anew",
            ) from None
        if differ:
            raise DataError(
                f"{self.path} was tuned for another job", why="; ".join(differ), do="give another file, or delete it"
            )
        return values

    def _write(self, search: _Search) -> None:
        tried, again = (
            [{"values": values, "step_ms": round(1e3 * step_s, 3)} for values, step_s in some]
            for some in (search.tried, search.again)
        )
        found = {"values": search.best(), "tried": tried, "again": again}
        write(self.path, json.dumps({"paceline": __version__, "job": self._job(), **found}, indent=1) + "\n")
        before, after = (search.seconds(values) for values in (search.first, search.best()))
        words = ", ".join(f"{name} {value:.3g}" for name, value in search.best().items())
        print(f"paceline: tuned: {words}: {1e3 * before:.1f} -> {1e3 * after:.1f} ms a step", file=sys.stderr)


class _Search:
    """optuna's side of it, on worker 0."""

    def __init__(self, space: Mapping[str, tuple[float, float]], first: Values, candidates: int) -> None:
        try:
            import optuna
        except ImportError:
            raise UsageError("tuned= needs optuna", do="pip install 'paceline[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.first, self._candidates = first, candidates
        self.tried: list[tuple[Values, float]] = []
        self.again: list[tuple[Values, float]] = []  # in the run-off
        self._space: Any = {
            name: optuna.distributions.CategoricalDistribution(ends[::-1])
            if name == _HIERARCHY
            else optuna.distributions.FloatDistribution(*ends, log=True)
            for name, ends in space.items()
        }
        sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=4)
        self._study: Any = optuna.create_study(sampler=sampler)
        self._study.enqueue_trial({name: min(max(first[name], low), high) for name, (low, high) in space.items()})
        self._trial: Any = self._study.ask(self._space)
        self._values = first

    def ask(self) -> Values:
        if len(self.tried) < self._candidates:
            self._trial = self._study.ask(self._space)
            self._values = dict(self._trial.params)
        else:
            best = self._fastest()
            self._values = (best, self.first, self.first, best)[len(self.again)]
        return self._values

    def tell(self, step_s: float) -> None:
        if len(self.tried) < self._candidates:
            self.tried.append((self._values, step_s))
            self._study.tell(self._trial, step_s)
        else:
            self.again.append((self._values, step_s))

    def best(self) -> Values:
        """Of the two that ran off."""
        return min((self.first, self._fastest()), key=self.seconds)

    def seconds(self, values: Values) -> float:
        """A step of one of them."""
        return statistics.mean(step_s for known, step_s in self.again if known == values)

    def _fastest(self) -> Values:
        return min(self.tried, key=lambda one: one[1])[0]
