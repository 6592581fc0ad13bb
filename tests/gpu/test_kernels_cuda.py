"""The Triton kernels on a GPU give what the plain formulations give on a CPU, and never wait for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch

import threads
from laws_table import fresh
from paceline.core.bucket import Bucket
from paceline.core.pipeline import Pipeline
from paceline.kernels.code import BlockCode, split

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    pytest.importorskip("triton")
    import kernel_cases as same
    from paceline.kernels import gpu

KINDS = same.KINDS if torch.cuda.is_available() else [("sign", 1, "mean")]


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("levels", "bits", "norm"), KINDS)
class TestBlocks:
    @pytest.mark.parametrize(
        ("d", "n"),
        [(32, 0), (32, 1), (32, 1 << 20), (1024, 1_000_003), (1024, 1 << 20), (8192, 99_999), (65536, 1_000_003)],
    )
    def test_encode(self, levels, bits, norm, d, n):
        same.encode_blocks(same.vector(n).cuda(), BlockCode(levels, bits, d, norm))

    @pytest.mark.parametrize("kind", ["zeros", "wide", "huge"])
    def test_encode_extremes(self, levels, bits, norm, kind):
        same.encode_blocks(same.vector(100_000, kind).cuda(), BlockCode(levels, bits, 64, norm))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, levels, bits, norm, dtype):
        same.encode_blocks(same.vector(100_003).to(dtype).cuda(), BlockCode(levels, bits, 1024, norm))

    def test_encode_unaligned(self, levels, bits, norm):
        same.encode_blocks(same.vector(100_003).cuda()[1:], BlockCode(levels, bits, 1024, norm))

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(
        ("world_size", "d", "n"), [(1, 32, 1), (1, 1024, 1 << 20), (2, 1024, 300_003), (3, 65536, 300_003)]
    )
    def test_add(self, levels, bits, norm, world_size, d, n, keep):
        vectors = [same.vector(n, seed=i) for i in range(world_size)]
        into = same.vector(n, seed=9).cuda()
        same.add_blocks(into, vectors, BlockCode(levels, bits, d, norm), factor=1 / world_size, keep=keep)

    def test_add_extremes(self, levels, bits, norm):
        vectors = [same.vector(100_000, "wide"), same.vector(100_000, "zeros")]
        same.add_blocks(same.vector(100_000).cuda(), vectors, BlockCode(levels, bits, 64, norm), factor=-0.5, keep=True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_add_to_other_types(self, levels, bits, norm, dtype):
        into, code = same.vector(100_003, seed=9).to(dtype).cuda(), BlockCode(levels, bits, 1024, norm)
        same.add_blocks(into, [same.vector(100_003)], code, factor=-1.0, keep=True)

    def test_never_waits(self, levels, bits, norm):
        x, code = torch.randn(100_003, device="cuda"), BlockCode(levels, bits, 1024, norm)
        with no_waiting():
            coded = gpu.encode_blocks(x, code, 1)
            gpu.add_blocks(x, coded[None], code, factor=-1.0, keep=True)

    def test_one_binary_for_every_key(self, levels, bits, norm):
        """0, 1 and multiples of 16 are what Triton would make binaries of their own for."""
        for key in (0, 1, 16, -(2**31), 2**31 - 1):
            same.encode_blocks(same.vector(5000).cuda(), BlockCode(levels, bits, 1024, norm), key)


class TestBytes:
    @pytest.mark.parametrize(("world_size", "n"), [(1, 4), (1, 1_000_004), (3, 300_008), (1, 1001)])
    def test_encode(self, world_size, n):
        same.encode_bytes(same.vector(world_size * n).view(world_size, n).cuda())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_encode_other_types(self, dtype):
        same.encode_bytes(same.vector(200_000).view(2, -1).to(dtype).cuda())

    def test_encode_extremes(self):
        rows = [same.vector(1000, "wide"), torch.zeros(1000), torch.full((1000,), 7.7), torch.arange(1000) * 1e-43]
        same.encode_bytes(torch.stack(rows).cuda())

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(("world_size", "n"), [(1, 4), (1, 1_000_004), (2, 300_004), (3, 300_008)])
    def test_add(self, world_size, n, keep):
        rows = same.vector(world_size * n).view(world_size, n)
        same.add_bytes(same.vector(n, seed=9).cuda(), rows, factor=1 / world_size, keep=keep)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_add_to_other_types(self, dtype):
        same.add_bytes(same.vector(1000, seed=9).to(dtype).cuda(), same.vector(1000)[None], factor=-1.0, keep=True)

    @pytest.mark.parametrize("n", [100_000, 100_001])
    def test_never_waits(self, n):
        rows = torch.randn(1, n, device="cuda")
        with no_waiting():
            coded = gpu.encode_bytes(rows)
            if n % 4 == 0:
                gpu.add_bytes(rows[0], coded, factor=-1.0, keep=True)


class TestLargest:
    @pytest.mark.parametrize(
        ("n", "k"), [(1000, 10), (20000, 3000), (20000, 1), (1_000_003, 10_001), (1 << 20, 100_000)]
    )
    def test_same(self, n, k):
        same.largest(same.vector(n).cuda(), k)

    @pytest.mark.parametrize("every", [1000, 1])
    def test_few_above(self, every):
        """Single ones, and a stretch of them."""
        x = torch.zeros(200_000)
        x[: 300 * every : every] = 1.0
        same.largest(x.cuda(), 1000)

    @pytest.mark.parametrize("x", [torch.zeros(200_000), torch.ones(200_000)])
    def test_none_above(self, x):
        same.largest(x.cuda(), 1000)

    def test_few_above_and_the_others_of_several_tiles(self):
        same.largest((torch.arange(200_000) % 5000 < 50).float().cuda(), 20_000)

    def test_many_above(self):
        same.largest(same.unlike_its_sample(1_100_001).cuda(), 1000)

    def test_nothing_behind(self, monkeypatch):
        same.largest_stays_in_its_places(same.vector(300_000).cuda(), 3000, monkeypatch)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_types(self, dtype):
        same.largest(same.vector(300_000).to(dtype).cuda(), 3000)

    def test_unaligned(self):
        same.largest(same.vector(300_001).cuda()[1:], 3000)

    @pytest.mark.parametrize("n", [1000, 1_000_003])
    def test_never_waits(self, n):
        x = torch.randn(n, device="cuda")
        with no_waiting():
            gpu.largest(x, n // 100)


def test_more_than_two_to_the_31():
    """The blocks at the far end are those of the end alone; no dice, because those know where they are."""
    code, end = BlockCode("sign", 1, 1024, "mean"), 10_001
    x = torch.zeros((1 << 31) + end, dtype=torch.bfloat16, device="cuda")
    x[-end:] = torch.randn(end, device="cuda")
    coded = gpu.encode_blocks(x, code, 0)
    alone = gpu.encode_blocks(x[-end:].clone(), code, 0)
    for all_of_it, part in zip(split(coded[None], code), split(alone[None], code), strict=True):
        assert torch.equal(all_of_it[0, -part.shape[1] :], part[0])
    want = x[-end:].clone()
    gpu.add_blocks(x, coded[None], code, factor=-1.0, keep=True)
    gpu.add_blocks(want, alone[None], code, factor=-1.0, keep=True)
    assert torch.equal(x[-end:], want)


REDUCERS = [
    ("qsgd", {}),
    ("qsgd", {"bits": 8, "norm": "l2"}),
    ("qsgd", {"route": "slices"}),
    ("nuqsgd", {}),
    ("sign", {}),
    ("int8", {}),
    ("topk", {"how": "sampled"}),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("name", "knobs"), REDUCERS)
def test_reducers(name, knobs, world_size):
    """The mean and what is left are those of a CPU, but for elements in a thousand that were rounded the other way."""

    def work(device):
        def on(comm):
            b = Bucket(0, [("p", torch.nn.Parameter(torch.zeros(300, 301, device=device)))], world_size)
            x = torch.zeros(b.flat.numel())
            x[: b.n] = same.vector(b.n, seed=comm.rank)
            x, out = x.to(device), []

            async def run():
                reduced = await fresh(name, knobs).mean(b, x, comm)
                out.extend([reduced.mean.cpu(), reduced.left().cpu()])

            pipeline = Pipeline()
            pipeline.start(run())
            pipeline.drain()
            return out

        return threads.run(world_size, on, timeout_s=100.0)

    for cuda, cpu in zip(work("cuda"), work("cpu"), strict=True):
        for got, want in zip(cuda, cpu, strict=True):
            assert torch.isclose(got, want, rtol=1e-4, atol=1e-5).float().mean() > 0.999


@pytest.mark.parametrize(("wire", "tolerance"), [("fp32", 1e-5), ("bf16", 2.0**-8), ("int8", 1e-5), ("int4", 1e-5)])
def test_powersgd(wire, tolerance):
    """Nothing is lost, all workers have one mean, and no step but the first, which draws Q, waits for the device."""
    # torch loads its library at the first use, and not in two threads at once.
    torch.linalg.qr(torch.eye(2, device="cuda"))
    shapes = [(300, 200), (64,), (300, 200), (96, 8, 3, 3)]
    named = [(f"p{i}", torch.nn.Parameter(torch.zeros(shape, device="cuda"))) for i, shape in enumerate(shapes)]
    buckets, reducers = [Bucket(0, named, 2) for _ in range(2)], [fresh("powersgd", {"wire": wire}) for _ in range(2)]

    def work(comm):
        b, reducer, out = buckets[comm.rank], reducers[comm.rank], []

        async def run():
            reduced = await reducer.mean(b, given[comm.rank].clone(), comm)
            out.extend([reduced.mean, reduced.left()])

        pipeline = Pipeline()
        pipeline.start(run())
        pipeline.drain()
        reducer.state.commit()
        return out

    for step in range(3):
        given = [same.vector(b.flat.numel(), seed=2 * step + r).cuda() for r, b in enumerate(buckets)]
        for b, x in zip(buckets, given, strict=True):
            x[b.n :], b.step = 0.0, step
        with no_waiting() if step else contextlib.nullcontext():
            (mean, left), (other, rest) = threads.run(2, work, timeout_s=100.0)
    assert torch.equal(mean, other)
    x, y = given
    assert ((x + y) / 2 - mean - (left + rest) / 2).abs().max() <= tolerance * x.abs().max()
