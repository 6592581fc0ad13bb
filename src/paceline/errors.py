"""What can go wrong, said so that the reader knows what to do next.

Every error has three sentences: what happened, why, and what to do. The class decides the exit code of the
command line (2 usage, 3 data or checkpoint, 4 peers) and nothing else.
"""

from __future__ import annotations

import contextlib
import difflib
import linecache
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

DEBUG = "PACELINE_DEBUG"  # set by --debug: tracebacks of our own errors are shown
LAUNCHED = "PACELINE_GUARD"  # set where `paceline` has started this process: tools/launch/guardian.py


class PacelineError(Exception):
    """The base of every error Paceline raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what, why, do)
        self.what, self.why, self.do = what, why, do

    def __str__(self) -> str:
        return self.said()

    def said(self, at: str = "") -> str:
        """What happened, why, where in the user's program if that is given, and what to do: the last line."""
        lines = {"why": self.why, "at": at, "do": self.do}
        return "\n  ".join([self.what, *(f"{word + ':':<4} {text}" for word, text in lines.items() if text)])


class UsageError(PacelineError, ValueError):
    """An argument, a setting or an environment variable is wrong; nothing was started."""

    exit_code = 2


class MethodError(UsageError):
    """A method does not exist, or its parts do not go together."""


class DataError(PacelineError):
    """The data set, the loader or a batch is not what training needs."""

    exit_code = 3


class StoreError(PacelineError):
    """State kept outside the device has no room, cannot be reached, or is not what was written."""

    exit_code = 3


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, is not whole, or is of something else."""

    exit_code = 3


class PeerError(PacelineError):
    """Another worker failed, left or cannot be reached. `worker` is its rank where it is known."""

    exit_code = 4

    def __init__(self, what: str, *, why: str = "", do: str = "", worker: int | None = None) -> None:
        super().__init__(what, why=why, do=do)
        self.worker = worker
        self.posted = False  # the launcher knows it as the cause, and will say it


class PeerTimeoutError(PeerError):
    """A wait for other workers ran past its time-out."""


class MismatchError(PeerError):
    """Workers do not do the same thing: another model, method, operation or step."""


class NonFiniteError(PacelineError):
    """Gradients stayed NaN or infinite for too many steps in a row."""


_NO_MEMORY = re.compile(r"can(no|')t allocate memory|not enough memory|out of memory", re.IGNORECASE)


def out_of_memory(error: BaseException | None) -> bool:
    """Does this error say that there was not enough memory, on a GPU or on the host?"""
    if isinstance(error, MemoryError) or any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? known: a, b, c` for the error about an unknown word."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def differ(what: str, texts: Sequence[str], workers: Sequence[int] = ()) -> None:
    """Raise the same MismatchError on every worker unless all texts are equal; the fewest are named as the odd
    ones. `workers`: whose the texts are, where they are not everybody's.
    """
    if len(set(texts)) == 1:
        return
    said = dict(zip(workers or range(len(texts)), texts, strict=True))
    usual = max(texts, key=texts.count)
    odd = [rank for rank, text in said.items() if text != usual]
    first = odd[0]
    raise MismatchError(
        f"{what}: worker {first} differs from the others",
        why=f"worker {first} has {_around(said[first], usual)}; worker {list(said)[texts.index(usual)]} has "
        f"{_around(usual, said[first])}" + (f" (workers {odd} differ)" if len(odd) > 1 else ""),
        do="start every worker with the same script, arguments, data and library versions",
        worker=first,
    )


def _around(text: str, other: str) -> str:
    """The lines of text that other does not have: the difference, not the whole."""
    lines = set(other.splitlines())
    return "; ".join([line for line in text.splitlines() if line not in lines][:3]) or "nothing of it"


# ------------------------------------------------------------------------------------------------ what is shown

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, and orders to move the cursor or clear the screen
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # titles of windows and other texts to the terminal
    r"|\x1b[ -/]*[0-~]?"
)
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control characters, and those that turn the direction of writing
_PARTS = (
    "a batch that does not fit is computed in parts with prepare(..., micro_batch='auto') and the body of the loop"
    " inside `with paceline.retry():`"
)
_OURS = str(Path(__file__).parent) + os.sep


def plain(text: str) -> str:
    """The text of another process without control characters and escape codes, which a terminal would obey."""
    text = _ESCAPES.sub("", text)
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _UNSEEN)


def users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The line of the user's program that called us, as "train.py:12: loss.backward()"; empty where none did.

    frames: from the outermost to the innermost, each with its line.
    """
    theirs = ""
    torchs = str(Path(getattr(sys.modules.get("torch"), "__file__", None) or "/no torch/x").parent) + os.sep
    for frame, number in frames:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            break
        if not name.startswith((torchs, "<")):
            theirs = f"{_near(name)}:{number}: {linecache.getline(name, number).strip()}".rstrip(": ")
    return theirs


def _near(name: str) -> str:
    """The name of a file as seen from the current folder, if it is in there."""
    with contextlib.suppress(OSError, ValueError):  # the folder may have been removed
        return str(Path(name).relative_to(Path.cwd()))
    return name


def _last_words(error: PacelineError, trace: TracebackType | None) -> str:
    """What a worker says about the error that ends it. What the launcher will say in full is said in one line."""
    if not isinstance(error, PeerError):
        return plain(error.said(users_line(traceback.walk_tb(trace))))
    if error.posted and os.environ.get(LAUNCHED):
        return f"worker {os.environ.get('RANK', '')} ends, because of this: {plain(error.what)}"
    return plain(error.said())  # the line at which this worker waited is not where the mistake is


def show_uncaught() -> None:
    """Show an error of ours that a script does not catch without our traceback, and end with the error's exit code."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if out_of_memory(error) and "paceline.session.session" in sys.modules and not hasattr(error, "__notes__"):
            error.add_note(f"paceline: {_PARTS}")
        if not isinstance(error, PacelineError) or os.environ.get(DEBUG):
            before(kind, error, trace)
        else:
            sys.stdout.flush()
            print(f"paceline: {_last_words(error, trace)}", file=sys.stderr, flush=True)
        # Python takes the exit code of the process from here; a hook around this one has yet to print what this wrote.
        if isinstance(error, PacelineError) and sys.excepthook is show and not hasattr(sys, "ps1"):
            raise SystemExit(error.exit_code)

    sys.excepthook = show
