"""What a person sees: one line for each contender while the race runs, and the table at its end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.race import score
from paceline.race.course import Contender, Rules
from paceline.race.network import Network
from paceline.race.score import FLOOR, SINGLE, Row, Target, bytes_column

_QUIET_S = 10.0  # without a terminal: how often a line says that the race is alive
_PAGE_ONLY = "samples/s"  # speedup says the same in fewer characters, and a terminal has 80
_COLOURS = {"starting": "dim", "waiting": "", "running": "bold cyan", "finished": "green", "out": "red"}


class Progress:
    """Call it with a contender whenever something about it has changed."""

    def __init__(self, console: Console, contenders: Sequence[Contender], rules: Rules) -> None:
        self.console, self.contenders, self.rules = console, contenders, rules
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._said = time.monotonic()
        self._seen: dict[str, tuple[str, ...]] = {}  # recomputed only for the contender that has changed

    def __enter__(self) -> Progress:
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
        """method, steps, milliseconds, loss, state or reason."""
        events = contender.group.events if contender.group else []
        laps = score.laps(events, self.rules.warmup)
        loss = score.progress(events, "loss")
        reason = first_line(contender.error or "")
        return (
            contender.method,
            f"{contender.counted}/{self.rules.steps} steps",
            f"{np.median([lap.ms for lap in laps]):.1f} ms" if laps else "",
            f"loss {loss[-1].value:.3f}" if loss else "",
            f"out: {reason}" if contender.state == "out" and reason else contender.state,
        )


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The fastest first; what was not measured last."""
    return sorted(rows, key=lambda row: row.step_ms_median if row.step_ms_median is not None else float("inf"))


def cells(row: Row, column: str, target: Target | None) -> list[str]:
    """A row's values as the table and the page show them."""
    sent = getattr(row, column)
    quality = [
        f"{row.loss:.3f}" if row.loss is not None else "",
        f"{row.accuracy:.1%}" if row.accuracy is not None else "",
    ]
    words = [
        row.method,
        _number(row.step_ms_median, ".1f"),
        _number(row.samples_per_s, ".0f"),
        _number(row.speedup, ".2f"),
        _number(sent / 1e6 if sent is not None else None, ".3f"),
        _number(row.exposed_comm_ms, ".1f"),
        _speed(row.break_even_mbit),
        " / ".join(word for word in quality if word) or "–",
    ]
    return [*words, _number(row.target_s, ".1f")] if target else words


def headings(target: Target | None) -> list[str]:
    words = ["method", "step ms", "samples/s", "speedup", "MB/step", "exposed ms", "pays below", "loss / accuracy"]
    return [*words, "target s"] if target else words


def table(rows: Sequence[Row], target: Target | None) -> Table:
    """Fits 80 columns."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if target else 1, 0, 0), show_edge=False)
    shown = [word != _PAGE_ONLY for word in headings(target)]
    for word in itertools.compress(headings(target), shown):
        # Two-line headings keep the columns as narrow as their numbers.
        out.add_column(
            "loss /\naccuracy" if "/ " in word else word.replace(" ", "\n", 1),
            justify="left" if word == "method" else "right",
        )
    column = bytes_column(rows)
    for row in in_order(rows):
        style = "red" if row.error else "dim" if row.method in (SINGLE, FLOOR) else ""
        words = itertools.compress(cells(row, column, target), shown)
        out.add_row(*(Text(word) for word in words), style=style)
    return out


def notes(rows: Sequence[Row], network: Network, target: Target | None) -> list[str]:
    """What has to be known to read the table; each fits 80 columns, but for reasons of failure."""
    names = {row.method for row in rows}
    hosts = f"{network.hosts} host{'s' * (network.hosts > 1)}"
    where = {
        "lab": f"link: {network.label}, real TCP between {hosts} in the network lab",
        "emulated": f"link: {network.label} by pacing each connection: {network.why_emulated}",
        "none": "link: none, all workers on this machine",
    }
    lines = [where[network.kind]]
    if SINGLE in names:
        lines.append("single: one worker with the whole batch; speedup is over it")
    if FLOOR in names:
        lines.append("floor: no communication, so no common model either")
        lines.append("exposed: how much longer a worker waits in a step than in the floor's")
    if any(name.startswith("torch:") for name in names):
        lines.append("torch:...: peers, PyTorch's own")
    if bytes_column(rows) == "wire_bytes_per_step":
        by = "its network interface" if network.kind == "lab" else "the kernel, without headers"
        lines.append(f"MB/step: sent by a worker, counted by {by}")
    else:
        lines.append("MB/step: a worker's payload; not known for peers")
    lines.append("step ms: the median; speedup and exposed: means, so rare messages count")
    if (exact := score.baseline(rows)) and any(row.break_even_mbit is not None for row in rows):
        lines.append(f"pays below: on a slower link it beats {exact.method}, were nothing hidden on either")
    lines += [f"{name} saves bytes but no time on this link" for name in score.saves_no_time(rows)]
    if target:
        lines.append(f"target s: the job's own seconds until {target}")
    return lines + [f"{row.method} is out: {first_line(row.error)}" for row in rows if row.error]


def _speed(mbit: float | str | None) -> str:
    """A link speed to compare one's own with: two digits are more than it is known to."""
    if mbit is None or isinstance(mbit, str):
        return mbit or "–"
    if mbit < 0.05:
        return "never"
    value, unit = (mbit / 1000, "Gbit") if mbit >= 995 else (mbit, "Mbit")
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}" if value < 995 else "any"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
