"""The table, filled: every loop in every column."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from loops.job import Loop
from loops.methods import Column
from loops.verdict import SILENT, Cell, judge
from loops.workers import Answer, Pair


class Oracle:
    """The plain runs, each made once."""

    def __init__(self) -> None:
        self._plain, self._known, self._lock = Pair(None), {}, threading.Lock()

    def of(self, loop: Loop, own: str) -> Answer:
        """What the loop gives in one process on the whole batch. own: the optimizer where it names none."""
        with self._lock:
            if (loop.name, own) not in self._known:
                self._known[loop.name, own] = self._plain.run(loop.name, own=own)[0]
            return self._known[loop.name, own]

    def close(self) -> None:
        self._plain.close()


def fill(
    loops: Sequence[Loop], columns: Sequence[Column], tell: Callable[[Cell], None] = lambda cell: None, jobs: int = 1
) -> list[Cell]:
    """The cells of these loops and columns. tell: called with each as it is known. jobs: columns at a time."""
    oracle = Oracle()
    try:
        with ThreadPoolExecutor(jobs) as pool:
            filled = list(pool.map(lambda column: _column(column, loops, oracle, tell), columns))
    finally:
        oracle.close()
    return [cell for cells in filled for cell in cells]


def _column(column: Column, loops: Sequence[Loop], oracle: Oracle, tell: Callable[[Cell], None]) -> list[Cell]:
    pair, cells = Pair(column.name), []
    try:
        for loop in loops:
            cells.append(_cell(pair, loop, column, oracle.of(loop, column.own)))
            tell(cells[-1])
    finally:
        pair.close()
    return cells


def _cell(pair: Pair, loop: Loop, column: Column, plain: Answer) -> Cell:
    """A failure counts if it is one in fresh processes too, or if it is a wrong number behind other loops."""
    fresh = pair.fresh
    cell = judge(loop, column, pair.run(loop.name), plain)
    if not cell.fails or fresh:
        return cell
    pair.close()
    again = judge(loop, column, pair.run(loop.name), plain)
    if again.fails or cell.verdict != SILENT:
        return again
    return replace(cell, why=f"{cell.why}; {again.verdict} on its own")
