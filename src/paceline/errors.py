"""What can go wrong, said so that the reader knows what to do next.

Every error has three sentences: what happened, why, and what to do. The class decides the exit code of the
command line (2 usage, 3 data or checkpoint, 4 peers) and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PacelineError(Exception):
    """The base of every error Paceline raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what, why, do)
        self.what, self.why, self.do = what, why, do

    def __str__(self) -> str:
        return "\n  ".join(
            line for line in (self.what, self.why and f"why: {self.why}", self.do and f"do:  {self.do}") if line
        )


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


class DeadlineError(PeerError):
    """A wait for other workers ran past its deadline."""


class MismatchError(PeerError):
    """Workers do not do the same thing: another model, method, operation or step."""


class NonFiniteError(PacelineError):
    """Gradients stayed NaN or infinite for too many steps in a row."""


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
