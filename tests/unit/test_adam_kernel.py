"""Adam on the CPU: against torch's own and against float64, compiled and not."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from marks import slow
from paceline.errors import UsageError
from paceline.kernels import adam

HALVES = [torch.bfloat16, torch.float16]
PLAIN = adam.Adam(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False)
SETTINGS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "eps": 1e-3, "lr": 0.01}),
    (torch.optim.AdamW, {"betas": (0.0, 0.0)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (torch.optim.Adam, {"maximize": True}),
]
settings = pytest.mark.parametrize(
    ("cls", "options"), SETTINGS, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(adam, "_compiled", lambda: None)
    else:
        pytest.importorskip("numba")
    return request.param


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def state(n: int) -> list[torch.Tensor]:
    return [values(n), torch.zeros(n), torch.zeros(n)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def oracle(cls, options, dtype: torch.dtype, n: int, steps: int) -> list[torch.Tensor]:
    return _oracle(cls, tuple(options.items()), dtype, n, steps)


@functools.cache
def _oracle(cls, options, dtype: torch.dtype, n: int, steps: int) -> list[torch.Tensor]:
    p = torch.nn.Parameter(values(n).to(dtype))
    optimizer = cls([p], **dict(options))
    for t in range(1, steps + 1):
        p.grad = gradient(n, t).to(dtype)
        optimizer.step()
    return [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


def gradient(n: int, t: int) -> torch.Tensor:
    return values(n, seed=t) * 10.0 ** (t % 5 - 4)


def ours(cls, options, n: int, steps: int) -> list[torch.Tensor]:
    group = cls([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0]
    a = adam.of(group, decoupled=cls is torch.optim.AdamW)
    assert a is not None
    x = state(n)
    for t in range(1, steps + 1):
        adam.step(a, t, *x, gradient(n, t))
    return x


@settings
def test_fifty_steps_are_those_of_float64_and_of_torch(way, cls, options):
    n = 5000
    got = ours(cls, options, n, 50)
    exact = oracle(cls, options, torch.float64, n, 50)
    moved = (exact[0] - values(n)).abs().mean()
    for kind in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        for name, x, theirs, true in zip(
            "pmv", got, oracle(cls, options | kind, torch.float32, n, 50), exact, strict=True
        ):
            error, their_error = (x - true).abs(), (theirs - true).abs()
            assert error.max() <= 1.5 * their_error.max() + 1e-12, f"{name}: worse than torch's {kind}"
            assert error.mean() <= 1.1 * their_error.mean() + 1e-12, f"{name}: worse than torch's {kind}"
    assert (got[0] - exact[0]).abs().mean() < 1e-3 * moved


@settings
def test_the_bits_are_those_of_torchs_fused_adam(cls, options):
    pytest.importorskip("numba")
    if not torch.cpu._is_avx2_supported():
        pytest.skip("no fused multiply-add in torch's loops on this processor")
    n = 4096  # whole vectors: torch's own loop rounds the last few differently
    for x, theirs in zip(
        ours(cls, options, n, 20), oracle(cls, options | {"fused": True}, torch.float32, n, 20), strict=True
    ):
        assert torch.equal(bits(x), bits(theirs))


@pytest.mark.parametrize("n", [0, 1, 3, 17, 100_003])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("place", ["elsewhere", "over g", "nowhere"])
def test_half_gradients_and_half_results_are_only_conversions(way, n, dtype, place):
    g = (values(n, 7) * 1e-3).to(dtype)
    wanted, got = state(n), state(n)
    adam.step(PLAIN, 1, *wanted, g.float())
    out = {"elsewhere": torch.empty_like(g), "over g": g, "nowhere": None}[place]
    adam.step(PLAIN, 1, *got, g, out)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(got, wanted, strict=True))
    if out is not None:
        assert torch.equal(bits(out), bits(wanted[0].to(dtype)))


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_of_every_kind_of_number(way, dtype):
    ties = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, 3.4e38, 1e-40, 6e-8]
    )
    p = torch.cat([ties, -ties, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan]), values(1000)])
    p = torch.cat(
        [p, torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)]
    )  # NaNs all the same
    still = adam.Adam(lr=0.0, beta1=0.9, beta2=0.999, eps=1.0, weight_decay=0.0, decoupled=True, maximize=False)
    n, out = len(p), torch.empty(len(p), dtype=dtype)
    before = p.clone()
    adam.step(still, 1, p, torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=dtype), out)
    assert torch.equal(p.isnan(), before.isnan())
    wanted = before.to(dtype)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(bits(out)[~out.isnan()], bits(wanted)[~out.isnan()])


def test_nan_and_infinite_gradients_show(way):
    x = state(64)
    g = torch.zeros(64, dtype=torch.bfloat16)
    g[3], g[40] = torch.nan, torch.inf
    adam.step(PLAIN, 1, *x, g, g)
    assert g.isnan().nonzero().flatten().tolist() == [3, 40]
    assert x[0].isfinite().sum() == 62


def test_scale_multiplies_the_gradient_and_one_changes_no_bit(way):
    n = 1000
    plain, one, half = state(n), state(n), state(n)
    adam.step(PLAIN, 3, *plain, gradient(n, 4))
    adam.step(PLAIN, 3, *one, gradient(n, 4), scale=1.0)
    adam.step(PLAIN, 3, *half, gradient(n, 4) * 2, scale=0.5)
    for x, y, z in zip(plain, one, half, strict=True):
        assert torch.equal(bits(x), bits(y))
        assert torch.equal(bits(x), bits(z))


@settings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undo_goes_back_to_rounding(way, cls, options, dtype):
    n = 3001
    a = adam.of(cls([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0], cls is torch.optim.AdamW)
    assert a is not None
    x = state(n)
    for t in range(1, 5):
        adam.step(a, t, *x, values(n, t))
    before = [y.clone() for y in x]
    g = (values(n, 9) * 3).to(dtype)
    adam.step(a, 5, *x, g, scale=0.5)
    assert not torch.equal(x[0], before[0])
    adam.undo(a, 5, *x, g, scale=0.5)
    torch.testing.assert_close(x[0], before[0], rtol=1e-6, atol=1e-6)
    for i, beta in ((1, a.beta1), (2, a.beta2)):
        torch.testing.assert_close(x[i], before[i] if beta else torch.zeros(n), rtol=1e-5, atol=3e-6)
    assert (x[2] >= 0).all()


def test_undo_leaves_no_negative_variance(way):
    coupled = dataclasses.replace(PLAIN, decoupled=False, lr=9.0)  # so far that it does not come back to the bit
    p, m, v = state(1000)
    g = values(1000, 1)
    v.copy_(g.square() * 1e-11)  # so small beside g² that rounding decides its sign
    adam.step(coupled, 2, p, m, v, g)
    adam.undo(coupled, 2, p, m, v, g)
    assert (v == 0).any()
    assert (v >= 0).all()
    assert v.max() < 1e-8


def test_pieces_in_threads_are_the_whole(way):
    n = 200_001
    whole, pieces = state(n), state(n)
    g = gradient(n, 3).bfloat16()
    adam.step(PLAIN, 1, *whole, g)
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, n, 9_999)  # at odd places in memory
        for done in [pool.submit(adam.step, PLAIN, 1, *(x[i : i + 9_999] for x in (*pieces, g))) for i in starts]:
            done.result(60)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(whole, pieces, strict=True))


def test_memory_that_is_not_aligned(way):
    n = 999
    odd = [torch.from_numpy(np.frombuffer(bytearray(4 * n + 1), np.uint8)[1:].view(np.float32)) for _ in range(3)]
    wanted = state(n)
    for x, y in zip(odd, wanted, strict=True):
        x.copy_(y)
    adam.step(PLAIN, 1, *wanted, gradient(n, 1))
    adam.step(PLAIN, 1, *odd, gradient(n, 1))
    torch.testing.assert_close(odd, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it reads the assembly of x86")
def test_the_loop_takes_several_numbers_at_a_time():
    numba = pytest.importorskip("numba")
    from paceline.kernels import one_pass

    kept = one_pass.step_over
    loop = numba.jit(**kept.targetoptions)(kept.py_func)  # of what comes from the cache nothing is shown
    floats, halves = numba.float32[::1], numba.int16[::1]
    loop.compile((floats, floats, floats, halves, numba.typeof(one_pass.Single(*[np.float32(1)] * 10))))
    (text,) = loop.inspect_asm().values()
    assert "sqrtps" in text


def test_what_a_group_asks_for():
    assert adam.of({"lr": 0.1, "momentum": 0.9}, decoupled=False) is None
    p = [torch.nn.Parameter(torch.zeros(1))]
    assert adam.of(torch.optim.Adam(p, amsgrad=True).param_groups[0], decoupled=False) is None
    assert adam.of(torch.optim.AdamW(p, lr=torch.tensor(0.125)).param_groups[0], decoupled=True) == adam.Adam(
        lr=0.125, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, decoupled=True, maximize=False
    )


@pytest.mark.parametrize(
    ("t", "change", "said"),
    [
        (0, {}, "counted from 1"),
        (1, {"m": torch.zeros(9)}, "m is a torch.float32 tensor [9]"),
        (1, {"v": torch.zeros(8, dtype=torch.float64)}, "v as float32"),
        (1, {"g": torch.zeros(8, dtype=torch.int16)}, "g as float32 or bfloat16 or float16 [8]"),
        (1, {"out": torch.zeros(16)[::2]}, "contiguous"),
        (1, {"p": torch.zeros(2, 4)}, "flat"),
        (1, {"g": torch.zeros(8, device="meta")}, "on meta"),
    ],
)
def test_what_is_refused(t, change, said):
    tensors = dict.fromkeys("pmv", torch.zeros(8)) | {"g": torch.zeros(8), "out": None} | change
    with pytest.raises(UsageError) as refused:
        adam.step(PLAIN, t, **tensors)
    assert said in str(refused.value)


@pytest.mark.parametrize("hidden", ["numba", slow("folder")])
def test_it_runs_without_numba_and_without_a_folder_for_what_is_compiled(hidden, tmp_path):
    pytest.importorskip("numba")
    here = Path(adam.__file__).parents[1]
    code = "import sys, torch\n" + ("sys.modules['numba'] = None\n" if hidden == "numba" else "")
    code += """
if 'nowhere' in sys.argv:
    from numba.core import caching
    caching.CacheImpl._locator_classes = []
from paceline.kernels import adam
a = adam.Adam(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True, maximize=False)
p = torch.ones(5)
adam.step(a, 1, p, torch.zeros(5), torch.zeros(5), torch.ones(5))
print(adam.compiled(), p.tolist() == [p[0]] * 5 and abs(p[0].item() - 0.9) < 1e-6)
"""
    command = [sys.executable, "-c", code, *(["nowhere"] if hidden == "folder" else [])]
    env = os.environ | {"PYTHONPATH": str(here.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.stdout.split() == [str(hidden == "folder"), "True"], done.stderr
