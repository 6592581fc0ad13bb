"""Cells that fail and are known to: (loops, methods) -> why, both as patterns. The aim is that nothing stands here."""

from __future__ import annotations

from fnmatch import fnmatchcase

KNOWN: dict[tuple[str, str], str] = {
    ("gan", "measured"): "paceline.mean of a loss counts every worker once, and shares are no halves",
    ("batch_norm*", "measured"): "each worker normalizes by its own samples, and shares are no halves",
    (
        "scaler_overflow_on_one",
        "hogwild",
    ): "no worker waits for another in any step, so each has a loss scale of its own",
    ("forward_raises_on_one", "any_batch*"): "a micro-batch without a backward counts nothing in a round",
    ("backward_raises_on_one*", "any_batch*"): "a micro-batch without a backward counts nothing in a round",
    ("weights_clamped*", "sma"): "replicas are clamped, and consensus() shows the centre, which follows their mean",
    ("ema_*", "gossip_lowbit"): "an average of a worker's own weights is its own, and no replica is another's",
}


def line(loop: str, column: str) -> tuple[str, str] | None:
    """The first line that names this cell."""
    return next((key for key in KNOWN if fnmatchcase(loop, key[0]) and fnmatchcase(column, key[1])), None)


def known(loop: str, column: str) -> str:
    """Why this cell fails, if that is known."""
    found = line(loop, column)
    return KNOWN[found] if found else ""
