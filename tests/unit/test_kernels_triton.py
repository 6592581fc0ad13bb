"""The Triton kernels give what the plain formulations give: by Triton's interpreter, on the CPU.

Triton decides at its import whether it interprets, for the whole process. So this file runs itself again in a process
of its own, where it does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from marks import slow
from paceline.kernels.code import BlockCode

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which is for Linux", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import kernel_cases as same
else:

    def interpreted(which):
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", which, __file__]
        done = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_in_a_process_of_its_own():
        interpreted("not slow")

    @pytest.mark.slow
    def test_the_long_ones_in_a_process_of_its_own():
        interpreted("slow")


KINDS = same.KINDS if INTERPRETED else []


@pytest.mark.parametrize(("levels", "bits", "norm"), KINDS)
class TestBlocks:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        ("d", "n"), [(32, 0), slow(32, 1), (32, 4777), slow(1024, 9001), slow(16384, 32768), slow(16384, 20001)]
    )
    def test_encode(self, levels, bits, norm, d, n):
        same.encode_blocks(same.vector(n), BlockCode(levels, bits, d, norm))

    @pytest.mark.parametrize("kind", ["zeros", "wide", slow("huge")])
    def test_encode_extremes(self, levels, bits, norm, kind):
        same.encode_blocks(same.vector(5000, kind), BlockCode(levels, bits, 64, norm))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, levels, bits, norm, dtype):
        same.encode_blocks(same.vector(3001).to(dtype), BlockCode(levels, bits, 256, norm))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(
        ("world_size", "d", "n"), [(1, 32, 0), slow(1, 32, 4777), (2, 1024, 9001), slow(3, 16384, 20001)]
    )
    def test_add(self, levels, bits, norm, world_size, d, n, keep):
        vectors = [same.vector(n, seed=i) for i in range(world_size)]
        same.add_blocks(
            same.vector(n, seed=9), vectors, BlockCode(levels, bits, d, norm), factor=1 / world_size, keep=keep
        )

    def test_add_extremes(self, levels, bits, norm):
        vectors = [same.vector(3000, "wide"), same.vector(3000, "zeros")]
        same.add_blocks(same.vector(3000), vectors, BlockCode(levels, bits, 64, norm), factor=-0.5, keep=True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_add_to_other_types(self, levels, bits, norm, dtype):
        into, code = same.vector(3001, seed=9).to(dtype), BlockCode(levels, bits, 256, norm)
        same.add_blocks(into, [same.vector(3001)], code, factor=-1.0, keep=True)


class TestBytes:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("world_size", "n"), [(1, 4), slow(1, 20004), slow(3, 5008), (1, 1001)])
    def test_encode(self, world_size, n):
        same.encode_bytes(same.vector(world_size * n).view(world_size, n))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, dtype):
        same.encode_bytes(same.vector(2000).view(2, -1).to(dtype))

    def test_encode_extremes(self):
        narrow = torch.arange(1000) * 1e-43
        same.encode_bytes(torch.stack([same.vector(1000, "wide"), torch.zeros(1000), torch.full((1000,), 7.7), narrow]))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(("world_size", "n"), [(1, 4), (2, 9004), (3, 5008)])
    def test_add(self, world_size, n, keep):
        rows = same.vector(world_size * n).view(world_size, n)
        same.add_bytes(same.vector(n, seed=9), rows, factor=1 / world_size, keep=keep)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_add_to_other_types(self, dtype):
        same.add_bytes(same.vector(1000, seed=9).to(dtype), same.vector(1000)[None], factor=-1.0, keep=True)


class TestLargest:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("n", "k"), [(1000, 10), (20000, 3000), (20000, 1), slow(33333, 4000), slow(200001, 20)])
    def test_same(self, n, k):
        same.largest(same.vector(n), k)

    @pytest.mark.parametrize("x", [torch.zeros(20000), torch.arange(20000) % 100 == 0, torch.arange(20000) // 300 == 7])
    def test_few_above(self, x):
        same.largest(x.float(), 1000)

    @pytest.mark.slow
    def test_few_above_and_the_others_of_several_tiles(self):
        same.largest((torch.arange(40000) % 5000 < 50).float(), 4999)

    @pytest.mark.slow
    def test_many_above(self):
        same.largest(same.unlike_its_sample(140001), 100)

    def test_nothing_behind(self, monkeypatch):
        same.largest_stays_in_its_places(same.vector(30000), 300, monkeypatch)

    def test_bf16(self):
        same.largest(same.vector(30000).bfloat16(), 300)
