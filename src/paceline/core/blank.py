"""Memory that has no values yet, or none any more.

With PACELINE_POISON=1 it is filled with NaN, so that whoever reads it is found out. The tests run like this: a number
that nobody wrote must not reach a weight.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

POISON = os.environ.get("PACELINE_POISON", "") == "1"


def blank(x: Tensor) -> Tensor:
    """Give x, whose elements nobody may read before they are written. In poisoned runs they are NaN."""
    if POISON and (x.is_floating_point() or x.is_complex()) and not x.is_meta:
        with torch.no_grad():
            x.detach().fill_(torch.nan)
    return x
