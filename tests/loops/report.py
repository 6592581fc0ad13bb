"""The table as text."""

from __future__ import annotations

from collections import Counter

from loops.verdict import BROKEN, DRIFTS, REFUSED, RIGHT, SILENT, Cell

MARKS = {RIGHT: "·", DRIFTS: "~", REFUSED: "r", SILENT: "S", BROKEN: "B"}
_WIDTH = 96


def render(cells: list[Cell]) -> str:
    """Loops down, methods across under numbers, as narrow as a terminal."""
    rows = list(dict.fromkeys(cell.loop for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    found = {(cell.loop, cell.column): cell for cell in cells}
    name = max(len(row) for row in rows)
    lines = ["methods:"]
    listed = [f"{i + 1:>2} {column}" for i, column in enumerate(columns)]
    each = max(len(text) for text in listed) + 2
    a_line = max(1, _WIDTH // each)
    for i in range(0, len(listed), a_line):
        lines.append("  " + "".join(text.ljust(each) for text in listed[i : i + a_line]).rstrip())
    lines += ["", "  ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()), ""]
    numbers = [f"{i + 1:>2}" for i in range(len(columns))]
    for place in range(2):
        lines.append(" " * name + " " + "".join(f"{number[place]:>2}" for number in numbers))
    for row in rows:
        marks = "".join(f" {MARKS[found[row, c].verdict] if (row, c) in found else ' '}" for c in columns)
        lines.append(f"{row:<{name}} {marks}")
    return "\n".join(lines)


def tally(cells: list[Cell]) -> str:
    counts = Counter(cell.verdict for cell in cells)
    return f"{len(cells)} cells: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict])
