"""Critical regimes: stretches of training in which gradients change fast, told by their norms and the learning rate.

For policies that spend more while training is in one: more bytes, smaller batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import MethodError


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What is known of a gradient's norms and of the learning rate so far, and whether that is critical.

    Steps are counted in windows. Of each window there is one norm: that of the gradient summed up over it. A window is
    critical if that norm differed from the one before it by a share of `threshold` or more, and as long as there are no
    two to compare. A fall of the learning rate is critical at once, and for as many steps as a window has.

    It is a value: every step makes a new one, and those of workers that were told the same numbers are equal.
    """

    critical: bool = True
    steps: int = 0  # of the window under way
    norm: float | None = None  # of the window before; None: there was none that later ones could be compared with
    ratio: float | None = None  # |before − now| / before at the end of the last window, if that decided
    rate: float = 0.0  # the largest learning rate since its last fall
    forced: int = 0  # steps for which it stays critical whatever norms say
    decisions: int = 0

    def begin(self, rate: float, *, window: int, fall: float = 0.0) -> Regime:
        """A step begins at this learning rate. fall: the share of itself that it may lose unnoticed."""
        if rate >= (1.0 - fall) * self.rate:
            return replace(self, rate=max(rate, self.rate))
        decisions = self.decisions + (not self.critical)
        return replace(self, rate=rate, critical=True, forced=window, ratio=None, decisions=decisions)

    def end(self) -> Regime:
        """The step is over."""
        return replace(self, steps=self.steps + 1, forced=max(self.forced - 1, 0))

    def judge(self, norm: float, *, threshold: float) -> Regime:
        """The window is over: the norm of its gradient decides about the next one."""
        ratio = abs(self.norm - norm) / self.norm if self.norm else None
        return replace(
            self,
            critical=ratio is None or not ratio < threshold or self.forced > 0,  # NaN is not below it
            steps=0,
            norm=norm if math.isfinite(norm) else None,
            ratio=ratio if ratio is None or math.isfinite(ratio) else None,
            decisions=self.decisions + 1,
        )


def check_rate_is_seen(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose learning rate the host cannot follow. name: of the policy that must."""
    if any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups):
        raise MethodError(
            f"{name} cannot see the learning rate fall, because it is a tensor",
            why="it may be on a GPU, and the host would wait for it in every step",
            do="give the optimizer lr= as a float",
        )
