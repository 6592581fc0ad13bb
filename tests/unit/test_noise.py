"""The noise of gradients: what is estimated is what the gradients were drawn with."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.core.noise import DECAY, Noise, NoiseSample, sampled

G, SIGMA, N = 0.7, 1.3, 24
DIM = 50


def seen(shares: list[int], generator: torch.Generator) -> NoiseSample:
    """One step of units with these shares of its samples, in float64: every sample's gradient is G plus noise."""
    each = G + SIGMA * torch.randn(sum(shares), DIM, generator=generator, dtype=torch.float64)
    units = [part.mean(0) for part in each.split(shares)]
    n = sum(shares)
    parts = sum(k / n * float(u.square().sum()) for k, u in zip(shares, units, strict=True))
    sample = sampled(parts, float(each.mean(0).square().sum()), len(units), n)
    assert sample is not None
    return sample


@pytest.mark.parametrize("shares", [[12, 12], [6, 6, 6, 6], [1, 5, 18], [1] * 24])
def test_both_estimates_are_right_on_average(shares):
    """Within four standard errors of what the gradients were drawn with, whatever the shares are."""
    generator = torch.Generator().manual_seed(0)
    found = torch.tensor([seen(shares, generator)[:2] for _ in range(800)], dtype=torch.float64)
    error = found.std(0) / math.sqrt(len(found))
    want = torch.tensor([DIM * G**2, DIM * SIGMA**2], dtype=torch.float64)
    assert ((found.mean(0) - want).abs() < 4 * error).all(), (found.mean(0), want, error)


def test_one_unit_shows_nothing_and_neither_does_a_nan():
    assert sampled(1.0, 1.0, 1, 8) is None
    assert sampled(math.nan, 1.0, 2, 8) is None
    assert sampled(1.0, math.inf, 2, 8) is None


def test_averages_are_corrected_for_their_beginning_at_zero():
    noise = Noise()
    for _ in range(3):
        noise = noise.after(NoiseSample(2.0, 8.0, 0.0))
    assert noise.square == pytest.approx(2.0 * (1 - DECAY**3))
    assert noise.corrected() == pytest.approx((2.0, 8.0))
    assert noise.scale == pytest.approx(4.0)


def test_a_square_below_zero_is_noise_alone():
    noise = Noise().after(NoiseSample(-1.0, 3.0, 0.0))
    assert noise.scale == math.inf
    assert noise.gain(4, 32) == pytest.approx(8.0)


@pytest.mark.parametrize(("square", "trace"), [(1.0, 0.0), (0.0, 1.0), (2.0, 5.0), (1e-9, 1e3)])
def test_the_gain_is_between_one_and_the_growth(square, trace):
    """r = (σ²/base + μ²)/(σ²/batch + μ²), and divided by the growth it is Pollux's efficiency."""
    noise = Noise().after(NoiseSample(square, trace, 0.0))
    for base, batch in ((8.0, 8.0), (8.0, 16.0), (4.0, 256.0)):
        gain = noise.gain(base, batch)
        assert 1.0 - 1e-12 <= gain <= batch / base + 1e-9
        if square:
            b = trace / square
            assert gain == pytest.approx(batch / base * (b + base) / (b + batch))
    assert noise.gain(8.0, 8.0) == 1.0
    assert Noise().gain(8.0, 64.0) == 1.0, "nothing was measured yet"
