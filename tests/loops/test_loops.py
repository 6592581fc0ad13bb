"""A part of the table in every run of the tests, and that a cell can fail. All of it: `make test-loops`."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest

from loops.job import Loop, loops
from loops.known import KNOWN, known
from loops.methods import columns
from loops.run import fill
from loops.verdict import BROKEN, DRIFTS, REFUSED, RIGHT, SILENT, judge
from loops.workers import Answer

FEW_METHODS = ("exact", "priority", "topk", "zero3", "local_sgd")
FEW_LOOPS = ("plain", "two_backwards", "accumulated_by_hand", "last_batch_small", "gan")


@pytest.mark.timeout(300)
def test_ordinary_loops_go_right_under_a_few_methods():
    cells = fill([loops()[name] for name in FEW_LOOPS], [columns()[name] for name in FEW_METHODS])
    assert [cell for cell in cells if cell.verdict != RIGHT and not known(cell.loop, cell.column)] == []


def test_every_known_failure_is_of_a_row_and_a_column():
    for rows, cols in KNOWN:
        assert any(fnmatchcase(name, rows) for name in loops()), rows
        assert any(fnmatchcase(name, cols) for name in columns()), cols


def test_every_row_says_what_it_is():
    assert [loop.name for loop in loops().values() if not loop.doc or "\n" in loop.doc] == []


# ------------------------------------------------------------------------------------------------ what a cell is called


def _answer(value: float = 1.0, **other: object) -> Answer:
    packed = {"w": np.full(3, value).tobytes()}
    return Answer(own=packed, agreed=packed, **other)  # type: ignore[arg-type]


def _error(error: str = "UsageError", *, ours: bool = True, **other: object) -> Answer:
    return Answer(error=error, ours=ours, **{"what": "it cannot be", "do": "do this"} | other)  # type: ignore[arg-type]


def _row(*, nonlinear: bool = False, apart: bool = False) -> Loop:
    return Loop("row", lambda job: None, "a row", nonlinear or apart, apart, False, 1.0)


def _verdict(*answers: Answer, column: str = "exact", row: Loop | None = None, plain: float = 1.0) -> str:
    return judge(row or _row(), columns()[column], list(answers), _answer(plain)).verdict


def test_a_cell_is_right_if_the_numbers_are():
    assert _verdict(_answer(), _answer()) == RIGHT
    assert _verdict(_answer(1.00001), _answer(1.00001)) == RIGHT


def test_a_cell_with_other_numbers_is_silent():
    assert _verdict(_answer(1.01), _answer(1.01)) == SILENT
    assert _verdict(_answer(1.0), _answer(1.0 + 1e-9)) == SILENT  # replicas differ
    assert _verdict(_answer(float("nan")), _answer(float("nan"))) == SILENT
    assert _verdict(_answer(1.01), _answer(1.01), column="local_sgd") == SILENT
    assert _verdict(Answer(own={}, agreed={}), Answer(own={}, agreed={})) == SILENT  # a tensor is missing


def test_a_large_number_hides_no_weight():
    def answer(weight: float) -> Answer:
        packed = {"0.w": np.full(3, weight).tobytes(), "1.0": np.full(1, 1024.0).tobytes()}
        return Answer(own=packed, agreed=packed)

    assert judge(_row(), columns()["exact"], [answer(1.01), answer(1.01)], answer(1.0)).verdict == SILENT
    assert judge(_row(), columns()["exact"], [answer(1.0), answer(1.0)], answer(1.0)).verdict == RIGHT


def test_numbers_may_drift_only_where_the_method_says_so():
    assert _verdict(_answer(1.01), _answer(1.01), column="local_sgd", row=_row(nonlinear=True)) == DRIFTS
    assert _verdict(_answer(1.01), _answer(1.01), column="sma") == DRIFTS
    assert _verdict(_answer(1.9), _answer(1.9), column="sma") == SILENT
    assert _verdict(_answer(1.01), _answer(1.01), row=_row(nonlinear=True)) == SILENT


def test_a_refusal_is_ours_on_both_workers_and_says_what_to_do():
    assert _verdict(_error(), _error("PeerError")) == REFUSED
    assert _verdict(_error(do=""), _error(do="")) == BROKEN
    assert _verdict(_error(), _error("RuntimeError", ours=False)) == BROKEN
    assert _verdict(_error(), _error("PeerTimeoutError", waited=True)) == BROKEN
    assert _verdict(_error(), _answer()) == BROKEN
    assert _verdict(_error(), _answer(), row=_row(apart=True)) == REFUSED
    assert _verdict(_answer(), _error("Died", ours=False)) == BROKEN
