"""What the terminal shows while a race runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.tools.race import score
from paceline.tools.race.contenders import Contender
from paceline.tools.race.runner import RaceRules
from paceline.tools.race.table import first_line

_QUIET_S = 10.0  # without a terminal: how often a line says that the race is alive
_COLOURS = {"starting": "dim", "waiting": "", "running": "bold cyan", "finished": "green", "out": "red"}


class RaceProgress:
    """One line for each contender, kept up to date. Call it with a contender whenever something about it has changed.

    Without a terminal it prints a line now and then.
    """

    def __init__(self, console: Console, contenders: Sequence[Contender], rules: RaceRules) -> None:
        self.console, self.contenders, self.rules = console, contenders, rules
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._said = time.monotonic()
        self._seen: dict[str, tuple[str, ...]] = {}  # recomputed only for the contender that has changed

    def __enter__(self) -> RaceProgress:
        for contender in self.contenders:
            self._seen[contender.method] = self._columns(contender)
        if self._live is not None:
            self._live.__enter__()
            self._live.update(self._table())
        else:
            names = ", ".join(contender.method for contender in self.contenders)
            self.console.print(f"starting {names}", highlight=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, at)

    def __call__(self, contender: Contender) -> None:
        self._seen[contender.method] = columns = self._columns(contender)
        if self._live is not None:
            self._live.update(self._table())
            return
        over = contender.state in ("finished", "out")
        if over or (contender.state == "waiting" and time.monotonic() - self._said > _QUIET_S):
            self._said = time.monotonic()
            self.console.print(
                "  ".join(word for word in columns if word), highlight=False, markup=False, soft_wrap=True
            )

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for contender in self.contenders:
            table.add_row(*(Text(word) for word in self._seen[contender.method]), style=_COLOURS[contender.state])
        return table

    def _columns(self, contender: Contender) -> tuple[str, ...]:
        """The words of its line: method, steps, milliseconds, loss, state or reason."""
        events = contender.workers.events if contender.workers else []
        measured = score.measured_steps(events, self.rules.warmup)
        loss = score.progress(events, "loss")
        reason = first_line(contender.error or "")
        return (
            contender.method,
            f"{contender.counted}/{self.rules.steps} steps",
            f"{np.median([step.ms for step in measured]):.1f} ms" if measured else "",
            f"loss {loss[-1].value:.3f}" if loss else "",
            f"out: {reason}" if contender.state == "out" and reason else contender.state,
        )
