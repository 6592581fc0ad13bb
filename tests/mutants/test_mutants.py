"""That the rows still fit the code they change, without running any. All of them: `make test-mutants`."""

from __future__ import annotations

import ast

import pytest

from mutants.__main__ import share
from mutants.mutant import SOURCES, TESTS, Mutant, StaleError, mutants
from mutants.run import Result


def test_the_text_of_every_row_stands_in_its_file_once():
    stale = []
    for row in mutants():
        try:
            ast.parse(row.applied((SOURCES / "paceline" / row.file).read_text(encoding="utf-8")))
        except (StaleError, SyntaxError) as error:
            stale.append(f"{row.name}: {error}")
    assert stale == []


def test_every_row_has_a_name_of_its_own_and_tests_or_a_reason():
    names = [row.name for row in mutants()]
    assert sorted(names) == sorted(set(names))
    assert [row.name for row in mutants() if bool(row.tests) == bool(row.equivalent)] == []


def test_the_tests_of_every_row_are_there():
    for row in mutants():
        for test in row.tests.split():
            file, _, function = test.partition("::")
            assert f"\ndef {function}" in (TESTS / file).read_text(encoding="utf-8"), f"{row.name}: {test}"


@pytest.mark.parametrize("text", ["x = 1\n", "x = 2\nx = 2\n"])
def test_a_row_whose_text_does_not_stand_there_once_is_stale(text):
    with pytest.raises(StaleError, match=r"a row: its text stands [02] times in core/x\.py"):
        Mutant("a row", "core/x.py", "x = 2\n", "x = 3\n", "unit/test_x.py").applied(text)


def test_what_no_test_can_notice_does_not_count():
    row = Mutant("a row", "core/x.py", "x = 2\n", "x = 3\n", "unit/test_x.py")
    assert share([Result(row, "killed"), Result(row, "survived"), Result(row, "equivalent")]) == 0.5
    assert share([Result(row, "killed"), Result(row, "broken")]) == 0.5
    assert share([Result(row, "equivalent")]) == 1.0
