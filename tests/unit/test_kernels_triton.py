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

from paceline.kernels.code import Code

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which is for Linux", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import kernel_cases as same
else:

    def test_in_a_process_of_its_own():
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


KINDS = same.KINDS if INTERPRETED else []


@pytest.mark.parametrize(("levels", "bits", "norm"), KINDS)
class TestBlocks:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("d", "n"), [(32, 0), (32, 1), (32, 4777), (1024, 9001), (16384, 32768), (16384, 20001)])
    def test_encode(self, levels, bits, norm, d, n):
        same.encode_blocks(same.vector(n), Code(levels, bits, d, norm))

    @pytest.mark.parametrize("kind", ["zeros", "wide", "huge"])
    def test_encode_extremes(self, levels, bits, norm, kind):
        same.encode_blocks(same.vector(5000, kind), Code(levels, bits, 64, norm))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, levels, bits, norm, dtype):
        same.encode_blocks(same.vector(3001).to(dtype), Code(levels, bits, 256, norm))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(("world", "d", "n"), [(1, 32, 0), (1, 32, 4777), (2, 1024, 9001), (3, 16384, 20001)])
    def test_add(self, levels, bits, norm, world, d, n, keep):
        vectors = [same.vector(n, seed=i) for i in range(world)]
        same.add_blocks(same.vector(n, seed=9), vectors, Code(levels, bits, d, norm), factor=1 / world, keep=keep)

    def test_add_extremes(self, levels, bits, norm):
        vectors = [same.vector(3000, "wide"), same.vector(3000, "zeros")]
        same.add_blocks(same.vector(3000), vectors, Code(levels, bits, 64, norm), factor=-0.5, keep=True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_add_to_other_types(self, levels, bits, norm, dtype):
        into, code = same.vector(3001, seed=9).to(dtype), Code(levels, bits, 256, norm)
        same.add_blocks(into, [same.vector(3001)], code, factor=-1.0, keep=True)


class TestBytes:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("world", "n"), [(1, 4), (1, 20004), (3, 5008), (1, 1001)])
    def test_encode(self, world, n):
        same.encode_bytes(same.vector(world * n).view(world, n))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, dtype):
        same.encode_bytes(same.vector(2000).view(2, -1).to(dtype))

    def test_encode_extremes(self):
        narrow = torch.arange(1000) * 1e-43
        same.encode_bytes(torch.stack([same.vector(1000, "wide"), torch.zeros(1000), torch.full((1000,), 7.7), narrow]))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(("world", "n"), [(1, 4), (2, 9004), (3, 5008)])
    def test_add(self, world, n, keep):
        rows = same.vector(world * n).view(world, n)
        same.add_bytes(same.vector(n, seed=9), rows, factor=1 / world, keep=keep)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_add_to_other_types(self, dtype):
        same.add_bytes(same.vector(1000, seed=9).to(dtype), same.vector(1000)[None], factor=-1.0, keep=True)


class TestLargest:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(("n", "k"), [(1000, 10), (20000, 3000), (20000, 1), (33333, 4000), (200001, 20)])
    def test_same(self, n, k):
        same.largest(same.vector(n), k)

    @pytest.mark.parametrize("x", [torch.zeros(20000), torch.arange(20000) % 100 == 0, torch.arange(20000) // 300 == 7])
    def test_few_above(self, x):
        same.largest(x.float(), 1000)

    def test_few_above_and_the_others_of_several_tiles(self):
        same.largest((torch.arange(40000) % 5000 < 50).float(), 4999)

    def test_many_above(self):
        same.largest(same.unlike_its_sample(140001), 100)

    def test_nothing_behind(self, monkeypatch):
        same.largest_stays_in_its_places(same.vector(30000), 300, monkeypatch)

    def test_bf16(self):
        same.largest(same.vector(30000).bfloat16(), 300)
