"""Cells that fail and are known to: (loops, methods) -> why, both as patterns. The aim is that nothing stands here."""

from __future__ import annotations

from fnmatch import fnmatchcase

KNOWN: dict[tuple[str, str], str] = {
    ("batch_norm", "measured"): "each worker normalizes by its own samples, and shares are no halves",
    ("scaler_overflow_on_one", "gossip*"): "each worker's loss scale is its own; gradients are right by any of them",
    ("forward_raises_on_one", "any_batch*"): "a micro-batch without a backward counts nothing in a round",
}


def line(loop: str, column: str) -> tuple[str, str] | None:
    """The first line that names this cell."""
    return next((key for key in KNOWN if fnmatchcase(loop, key[0]) and fnmatchcase(column, key[1])), None)


def known(loop: str, column: str) -> str:
    """Why this cell fails, if that is known."""
    found = line(loop, column)
    return KNOWN[found] if found else ""
