"""How noisy gradients are, in pure arithmetic: what one step shows of it, and the moving averages.

[Note: noise scale] The gradient of one sample has a mean G over the data and a covariance Σ. The mean over a batch of n
samples has the expected square |G|² + tr(Σ)/n. A step shows this at two sizes: with the units u of a step (the
micro-batches of all workers, or one batch of each), n_u samples in unit u and N in all,

    S = Σ_u n_u/N · |g_u|²   has the expectation |G|² + tr(Σ)·U/N   over U units,
    |ḡ|²                     has the expectation |G|² + tr(Σ)/N     for the mean of the whole step.

So (S − |ḡ|²)·N/(U − 1) estimates tr(Σ), and (U·|ḡ|² − S)/(U − 1) estimates |G|², both without bias and whatever the
units' shares are. The simple noise scale B = tr(Σ)/|G|² (McCandlish et al., An Empirical Model of Large-Batch Training,
2018) is the batch, in samples, beyond which more samples hardly make a step better. It is the quotient of two moving
averages: one step's quotient means nothing, for its |G|² may even be negative. One unit alone shows nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DECAY = 0.95  # of the moving averages: about the last twenty measurements count


class NoiseSample(NamedTuple):
    """What one step has shown: [Note: noise scale]."""

    square: float  # an estimate of |G|²; it may be negative
    trace: float  # an estimate of tr(Σ)
    mean_square: float  # the square of the step's mean gradient itself


def sampled(parts: float, mean_square: float, units: float, samples: float) -> NoiseSample | None:
    """Estimate |G|² and tr(Σ) from S, |ḡ|², U and N of [Note: noise scale]. None: one unit, or nothing finite."""
    if units < 2 or not (math.isfinite(parts) and math.isfinite(mean_square)):
        return None
    trace = (parts - mean_square) * samples / (units - 1)
    return NoiseSample((units * mean_square - parts) / (units - 1), trace, mean_square)


class Noise(NamedTuple):
    """Moving averages of |G|² and tr(Σ). As they are kept they begin at zero; `corrected` has that taken out."""

    square: float = 0.0
    trace: float = 0.0
    seen: int = 0  # measurements

    def after(self, sample: NoiseSample) -> Noise:
        """The averages with one more measurement."""
        square, trace = (
            DECAY * old + (1 - DECAY) * new
            for old, new in zip((self.square, self.trace), (sample.square, sample.trace), strict=True)
        )
        return Noise(square, trace, self.seen + 1)

    def corrected(self) -> tuple[float, float]:
        """|G|² and tr(Σ), neither below zero, without the bias of averages that begin at zero."""
        weight = 1 - DECAY**self.seen or 1.0
        return max(self.square, 0.0) / weight, max(self.trace, 0.0) / weight

    @property
    def scale(self) -> float:
        """The noise scale B in samples; infinite while |G|² is lost in the noise."""
        square, trace = self.corrected()
        return trace / square if square else math.inf if trace else 0.0

    def gain(self, base: float, batch: float) -> float:
        """How many steps of `base` samples one step of `batch` is worth: from 1 to batch/base.

        It is (tr(Σ)/base + |G|²)/(tr(Σ)/batch + |G|²) (Johnson et al., ICML 2020). Divided by batch/base it is the
        statistical efficiency of Pollux, (B + base)/(B + batch).
        """
        square, trace = self.corrected()
        after = trace / batch + square
        return (trace / base + square) / after if after else 1.0
