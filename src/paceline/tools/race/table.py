"""The result of a race as a table, and the notes below it: what the terminal and the page have in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.tools.race import score
from paceline.tools.race.network import RaceNetwork
from paceline.tools.race.score import FLOOR, SINGLE, RaceRow, Target, bytes_column

_PAGE_ONLY = "samples/s"  # speedup says the same in fewer characters, and a terminal has 80


def first_line(text: str) -> str:
    """The text up to its first line break."""
    return text.partition("\n")[0]


def in_order(rows: Sequence[RaceRow]) -> list[RaceRow]:
    """The rows, the fastest first; those that were not measured come last."""
    return sorted(rows, key=lambda row: row.step_ms_median if row.step_ms_median is not None else float("inf"))


def cells(row: RaceRow, column: str, target: Target | None) -> list[str]:
    """The values of a row as the terminal and the page show them."""
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
    """The headings of the columns that `cells` fills."""
    words = ["method", "step ms", "samples/s", "speedup", "MB/step", "exposed ms", "pays below", "loss / accuracy"]
    return [*words, "target s"] if target else words


def table(rows: Sequence[RaceRow], target: Target | None) -> Table:
    """The table for the terminal. It fits 80 columns."""
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
        reference = "dim" if row.method in (SINGLE, FLOOR) else ""
        style = "red" if row.error else reference
        words = itertools.compress(cells(row, column, target), shown)
        out.add_row(*(Text(word) for word in words), style=style)
    return out


def notes(rows: Sequence[RaceRow], network: RaceNetwork, target: Target | None) -> list[str]:
    """What has to be known to read the table. Each line fits 80 columns, except for reasons of failure."""
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
    """A link speed in two digits: it is not known more precisely."""
    if mbit is None or isinstance(mbit, str):
        return mbit or "–"
    if mbit < 0.05:
        return "never"
    value, unit = (mbit / 1000, "Gbit") if mbit >= 995 else (mbit, "Mbit")
    if value >= 995:
        return "any"
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
