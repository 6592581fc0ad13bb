"""What the user passes through a checkpoint beside models and optimizers."""

from __future__ import annotations

import math
from typing import Any

from paceline.checkpoint.manifest import MOST
from paceline.errors import UsageError

_DEEPEST = 100  # readers of JSON follow it about ten times as deep


def plain(extra: Any, where: str = "extra", depth: int = 0) -> Any:
    """Give `extra` in JSON's own types. One that JSON cannot hold is refused, before anything is written."""
    if depth > _DEEPEST:
        raise UsageError(
            f"{where[:80]}... cannot be saved", why=f"it is nested deeper than {_DEEPEST}, or holds itself"
        )
    if isinstance(extra, dict) and all(isinstance(key, str) for key in extra):
        return {_word(key, where): plain(value, f"{where}[{key!r}]", depth + 1) for key, value in extra.items()}
    if isinstance(extra, (list, tuple)) and depth:
        return [plain(value, f"{where}[{i}]", depth + 1) for i, value in enumerate(extra)]
    if depth:
        if extra is None or isinstance(extra, bool):
            return extra
        if isinstance(extra, int) and abs(extra) <= MOST:
            return int(extra)
        if isinstance(extra, float) and math.isfinite(extra):  # of numpy's too, which is one
            return float(extra)
        if isinstance(extra, str):
            return _word(extra, where)
    raise UsageError(
        f"{where} cannot be saved: it is {repr(extra)[:80]}",
        why="extra is a dictionary and becomes JSON: words, finite numbers (whole ones up to 2**53), lists, "
        "dictionaries with words as keys",
        do="of a scheduler or a loader give its state_dict(), without what its constructor makes anew",
    )


def _word(text: str, where: str) -> str:
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where} cannot be saved: {text[:80]!r} is no text", why="half a character is in it"
        ) from None
