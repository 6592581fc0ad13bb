"""Buckets: whatever the parameters are, each has exactly one place, and the places do not overlap."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.cutting import cut

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])


@given(
    st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 4000),
    st.none() | st.integers(1, 500),
)
@settings(max_examples=150, deadline=None)
def test_every_parameter_has_one_place(specs, world_size, cap, first):
    named = [(f"p{i}", nn.Parameter(torch.zeros(s, dtype=d))) for i, (s, d) in enumerate(specs)]
    buckets = list(cut(named, world_size, cap, first))
    assert sorted(s.name for b in buckets for s in b.slots) == sorted(n for n, _ in named)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    for b in buckets:
        assert b.flat.numel() % world_size == 0
        assert {s.param.dtype.to_real() if s.param.is_complex() else s.param.dtype for s in b.slots} == {b.flat.dtype}
        ends = [0]
        for s in b.slots:
            assert s.start == ends[-1]
            ends.append(s.stop)
            assert s.view.shape == s.param.shape
            s.view.fill_(1)
        assert ends[-1] == b.n <= b.flat.numel()
        assert b.flat[: b.n].abs().sum() == sum(s.param.numel() for s in b.slots), "views overlap"
        assert not b.flat[b.n :].any(), "a view reaches into the padding"
        size = b.n * b.flat.element_size()
        last = (b.slots[-1].stop - b.slots[-1].start) * b.flat.element_size()
        assert size <= max(cap, first or 0) or size - last < max(cap, first or 0) / 4 + 1


def test_reverse_order_and_a_small_first_bucket():
    named = [(f"p{i}", nn.Parameter(torch.zeros(100))) for i in range(6)]
    buckets = list(cut(named, 1, cap_bytes=1200, first_bytes=400))
    assert [[s.name for s in b.slots] for b in buckets] == [["p5"], ["p4", "p3", "p2"], ["p1", "p0"]]


def test_a_bias_leaves_with_the_matrix_after_it():
    named = [(f"{i}{kind}", nn.Parameter(torch.zeros(n))) for i in range(3) for kind, n in (("w", 1000), ("b", 10))]
    buckets = list(cut(named, 1, cap_bytes=2000, first_bytes=2000))
    assert [[s.name for s in b.slots] for b in buckets] == [["2b", "2w"], ["1b", "1w"], ["0b", "0w"]]


def test_chunks_are_the_bucket_and_none_is_of_padding_alone():
    for n in (100, 509, 510, 512, 640):
        [b] = cut([("p", nn.Parameter(torch.zeros(n)))], 2, 1 << 20)
        b.divide(512, 2)
        assert sum(chunk.n for chunk in b.chunks) == n
        assert sum(chunk.flat.numel() for chunk in b.chunks) == b.flat.numel()
        assert all(chunk.n > 0 for chunk in b.chunks)


def test_channels_last_stays_so():
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    slot = next(cut([("w", conv.weight)], 2, 1 << 20)).slots[0]
    assert slot.view.stride() == conv.weight.stride()


def test_split_gives_back_by_name():
    named = [(f"p{i}", nn.Parameter(torch.zeros(2, 3))) for i in range(2)]
    b = next(cut(named, 2, 1 << 20))
    parts = dict(b.split(torch.arange(float(b.flat.numel()))))
    assert parts["p1"].tolist() == [0, 1, 2, 3, 4, 5]
    assert parts["p0"].tolist() == [6, 7, 8, 9, 10, 11]
