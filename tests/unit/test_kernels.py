"""The plain formulations of the inner loops, against what the papers say in float64."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels import BlockCode, add_blocks, add_bytes, blocks, encode_blocks, encode_bytes, key, largest, minmax
from paceline.kernels.blocks import Dice
from paceline.kernels.code import deal, join
from paceline.kernels.largest import threshold

UNIFORM = [BlockCode("uniform", bits, d, norm) for bits in (2, 4, 8) for d in (32, 256) for norm in ("max", "l2")]
POWERS = [BlockCode("powers", bits, 64, "l2") for bits in (2, 4, 8)]
SIGN = [BlockCode("sign", 1, 64, "mean")]


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3


def there_and_back(x: torch.Tensor, code: BlockCode, key: int = 5) -> torch.Tensor:
    coded = encode_blocks(x, code, key)
    assert coded.numel() == code.bytes(x.numel())
    return add_blocks(torch.full_like(x, 7.0), coded[None], code, factor=1.0, keep=False)


def norms(x: torch.Tensor, code: BlockCode) -> torch.Tensor:
    """Each element's block's norm, in float64."""
    v = torch.nn.functional.pad(x.double(), (0, -len(x) % code.d)).view(-1, code.d)
    of = {"max": v.abs().amax(1), "l2": v.norm(dim=1), "mean": v.abs().mean(1)}[code.norm]
    return of.repeat_interleave(code.d)[: len(x)]


@pytest.mark.parametrize("code", UNIFORM, ids=str)
@pytest.mark.parametrize("n", [1, 31, 1000])
def test_uniform_levels_are_the_two_next_to_the_value(code, n):
    x = values(n)
    norm, s = norms(x, code), code.top
    level = there_and_back(x, code).double() * s / norm
    assert (level - level.round()).abs().max() < 1e-4, "not a level"
    wanted = x.double() * s / norm
    assert (level.round() >= (wanted - 1e-4).floor()).all()
    assert (level.round() <= (wanted + 1e-4).ceil()).all()


@pytest.mark.parametrize("code", POWERS, ids=str)
def test_powers_are_the_two_next_to_the_value(code):
    x = values(1000) * torch.logspace(-3, 0, 1000)
    r = (x.double() / norms(x, code)).abs()
    got = (there_and_back(x, code).double() / norms(x, code)).abs()
    smallest = 2.0 ** (1 - code.top)
    below = torch.where(r < smallest, 0.0, 2.0 ** torch.floor(torch.log2(r)))
    above = torch.where(r < smallest, smallest, 2 * below)
    near = torch.minimum((got - below).abs(), (got - above).abs())
    assert (near <= 1e-5 * above).all()
    signs = there_and_back(x, code)
    assert ((signs == 0) | (signs.sign() == x.sign())).all()


def test_sign_is_the_mean_magnitude():
    x = values(1000)
    want = norms(x, SIGN[0]) * torch.where(x >= 0, 1.0, -1.0)
    torch.testing.assert_close(there_and_back(x, SIGN[0]).double(), want, rtol=1e-5, atol=1e-7)


def test_a_value_on_a_level_stays_there():
    code = BlockCode("uniform", 4, 32, "max")
    x = torch.arange(-7, 8).repeat(32)[:320].float()
    for k in range(50):
        torch.testing.assert_close(there_and_back(x, code, key(k)), x)
    powers = BlockCode("powers", 4, 32, "l2")
    x = torch.zeros(32)
    x[3] = -2.0
    for k in range(50):
        assert torch.equal(there_and_back(x, powers, key(k)), x)


@pytest.mark.parametrize("code", UNIFORM + POWERS + SIGN, ids=str)
def test_zeros_and_extremes(code):
    assert not there_and_back(torch.zeros(100), code).any()
    for size in (1e-44, 1e-38, 1e-20, 1e38):
        assert there_and_back(torch.full((100,), size), code).isfinite().all()


@pytest.mark.parametrize("code", [UNIFORM[2], POWERS[1], SIGN[0]], ids=str)
def test_chunks_make_no_difference(code, monkeypatch):
    x = values(5000)
    whole, back = encode_blocks(x, code, 9), there_and_back(x, code, 9)
    monkeypatch.setattr(blocks, "CHUNK", 512)
    assert torch.equal(encode_blocks(x, code, 9), whole)
    assert torch.equal(there_and_back(x, code, 9), back)


def test_messages_are_added_up():
    code = UNIFORM[4]
    xs = [values(500, seed) for seed in range(3)]
    coded = torch.stack([encode_blocks(x, code, key(i)) for i, x in enumerate(xs)])
    each = sum(there_and_back(x, code, key(i)).double() for i, x in enumerate(xs))
    start = values(500, 9)
    total = add_blocks(start.clone(), coded, code, factor=-0.5, keep=True)
    torch.testing.assert_close(total.double(), start.double() - 0.5 * each, rtol=1e-5, atol=1e-5)


def test_a_message_is_dealt_out_and_joined_again():
    """Each worker's share is what its blocks would be as a message of their own."""
    code, x = BlockCode("uniform", 4, 64, "max"), values(3 * 128).round().clamp(-7, 7)
    x[::64] = 7.0  # every value is a level, whatever the dice say
    whole = encode_blocks(x, code, 0)
    dealt = deal(whole, 3, code)
    assert torch.equal(dealt, torch.stack([encode_blocks(part, code, 0) for part in x.view(3, -1)]))
    assert torch.equal(join(dealt, code), whole)


def test_bytes_are_the_nearest_of_256():
    rows = values(3 * 400).view(3, 400)
    coded = encode_bytes(rows)
    assert coded.shape == (3, 400 + minmax.HEAD)
    for row, one in zip(rows, coded, strict=True):
        width = (row.max() - row.min()) / 255
        back = add_bytes(torch.empty(400), one[None], factor=1.0, keep=False)
        assert (back - row).abs().max() <= width * 0.5001
    total = add_bytes(torch.ones(400), coded, factor=2.0, keep=True)
    torch.testing.assert_close(total, 1 + 2 * rows.sum(0), rtol=0.05, atol=0.2)


def test_a_flat_row_is_exact():
    for value in (0.0, -3.25, 1e38, 1e-38):
        row = torch.full((1, 64), value)
        assert torch.equal(add_bytes(torch.empty(64), encode_bytes(row), factor=1.0, keep=False), row[0])


@pytest.mark.parametrize("n", [10, 1 << 12, 1 << 17])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
def test_the_largest(n, ratio):
    x, k = values(n), max(1, int(ratio * n))
    found = largest(x, k, sampled=False)
    assert torch.equal(found.sort().values, x.abs().topk(k).indices.sort().values)
    some = largest(x, k, sampled=True)
    assert len(some.unique()) == k
    assert x[some].norm() >= 0.9 * x[found].norm()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_largest_of_what_a_sample_does_not_show(sampled):
    """Mostly zeros, all zeros, all the same, and all that is large in one corner."""
    n, k = 1 << 17, 1000
    sparse = torch.zeros(n)
    sparse[-50:] = torch.arange(1.0, 51.0)
    for x in (sparse, torch.zeros(n), torch.ones(n)):
        found = largest(x, k, sampled=sampled)
        assert len(found.unique()) == k
        assert set(x.nonzero().view(-1)[:50].tolist()) <= set(found.tolist()) or x.all()


def test_a_threshold_is_about_right():
    x = values(1 << 20)
    over = (x.abs() > threshold(x, 10_000, spare=0.0)).sum()
    assert 8_000 < over < 12_000


def test_dice_are_fair_and_know_nothing_of_each_other():
    """Over steps, places, neighbours and workers: means and correlations within five standard errors."""
    n, throws, cpu = 1024, 400, torch.device("cpu")

    def table(worker):
        rolls = [Dice(n, key(0, worker, 0, step), cpu).roll(torch.empty(1, n), 0) for step in range(throws)]
        return torch.cat(rolls).double() / 65536

    one, other = table(0), table(1)
    sigma = 12**-0.5
    assert one.mean(0).abs().max() < 5 * sigma / throws**0.5
    assert abs(one.var() * 12 - 1) < 0.01
    pairs = [(one[:, :-lag], one[:, lag:]) for lag in (1, 2, 3, 4, 64, 512)]
    pairs += [(one[:-1], one[1:]), (one, other)]
    for a, b in pairs:
        assert abs((a * b).mean()) < 5 * sigma**2 / a.numel() ** 0.5


def test_later_blocks_have_dice_of_their_own():
    cpu = torch.device("cpu")
    whole = Dice(256, 7, cpu).roll(torch.empty(8, 32), 0)
    assert torch.equal(Dice(256, 7, cpu).roll(torch.empty(4, 32), 4), whole[4:])
    assert (whole.remainder(2) == 1).all()
