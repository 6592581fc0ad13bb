"""What a script shows of an error that it does not catch, and with which code it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import errors
from paceline.comm.cause import Cause
from paceline.errors import DataError, MethodError, PeerError, plain, users_line

SRC = Path(next(iter(paceline.__path__))).parent


def script(tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(code)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return subprocess.run(
        [sys.executable, "train.py"],
        env={**clean, "PYTHONPATH": str(SRC), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("kind", "code"), [("MethodError", 2), ("CheckpointError", 3), ("MismatchError", 4)])
def test_the_exit_code_is_that_of_the_error(tmp_path, kind, code):
    raising = "import paceline.errors as e\nprint('begun')\n"
    raising += f"raise e.{kind}('no data', why='it is empty', do='give some')"
    done = script(tmp_path, raising)
    assert (done.returncode, done.stdout) == (code, "begun\n")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("paceline: no data\n  why: it is empty\n")
    assert done.stderr.endswith("  do:  give some\n"), "the advice is the last line"
    assert ("  at:  train.py:3: raise e." in done.stderr) is (code != 4)


def test_debug_shows_where(tmp_path):
    done = script(tmp_path, "import paceline\npaceline.errors.differ('x', ['a', 'b', 'b'])", PACELINE_DEBUG="1")
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert "in differ" in done.stderr


def test_other_errors_and_other_hooks_are_left_alone(tmp_path):
    done = script(tmp_path, "import paceline\nraise ValueError('x')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: x\n")
    hooked = "import sys, paceline\nbefore = sys.excepthook\nsys.excepthook = lambda *e: (before(*e), print('mine'))\n"
    done = script(tmp_path, hooked + "raise paceline.DataError('x')")
    assert (done.returncode, done.stdout) == (1, "mine\n"), "a hook around ours is not cut off"
    assert done.stderr.startswith("paceline: x\n")


def test_what_the_launcher_will_say_is_one_line(tmp_path):
    code = (
        "import paceline\nfrom paceline.comm.cause import Cause\nraise Cause(1, 'worker 1 has gone', 'x', 'y').error()"
    )
    assert script(tmp_path, code).stderr == "paceline: worker 1 has gone\n  why: x\n  do:  y\n"
    done = script(tmp_path, code, PACELINE_GUARD="x", RANK="0")
    assert done.stderr == "paceline: worker 0 ends, because of this: worker 1 has gone\n"


def test_the_line_of_the_user_is_the_last_before_ours():
    def user() -> str:
        return users_line([(sys._getframe(1), 7), (sys._getframe(), 9)])

    assert user().endswith("test_errors.py:9"), "and no line of its text, where there is none"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2J\x1b]0;t\x07b\x1b]0;u\x1b\\c", "abc"),
        ("\x1b]0;open\nnext", "0;open\nnext"),
        ("\u202eevil\u2066 \x9b2J \x00\x08", "evil 2J "),
        ("Zürich → ok\tx", "Zürich → ok\tx"),
    ],
)
def test_what_others_say_is_plain(text, shown):
    assert plain(text) == shown


def test_a_cause_says_each_thing_once():
    said = Cause.of(DataError("the file is empty", why="0 bytes", do="give another"), rank=1, step=None, batch="")
    assert (said.what, said.why, said.do) == ("worker 1: the file is empty", "0 bytes", "give another")
    own = Cause.of(MethodError("worker 1 has no GPU"), rank=1, step=0, batch="")
    assert own.what == "worker 1 has no GPU"
    own = Cause.of(DataError("a process of worker 1's data loader died"), rank=1, step=0, batch="")
    assert own.what == "a process of worker 1's data loader died"
    assert Cause.of(ValueError("x\ny"), rank=1, step=0, batch="").what == "worker 1 failed in step 0: ValueError: x"
    assert Cause.of(ValueError(), rank=1, step=None, batch="").what == "worker 1 failed: ValueError"


def test_a_cause_comes_back_as_it_was_and_plain():
    sent = Cause(1, "gone\x1b[2J", "why\x07", "do", 3, "MismatchError")
    back = Cause.decode(sent.encode())
    assert back == Cause(1, "gone", "why", "do", 3, "MismatchError")
    error = back.error()
    assert isinstance(error, errors.MismatchError)
    assert error.posted
    assert (back.exit_code, Cause(1, "x", kind="DataError").exit_code, Cause(1, "x", kind="ValueError").exit_code) == (
        4,
        3,
        4,
    )
    assert not PeerError("x").posted
