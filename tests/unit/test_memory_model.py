"""What lies where, chosen by what there is: nothing is placed where there is no room, and nothing goes farther than it
must.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.offload import free_memory
from paceline.offload.memory_model import AT_ONCE, RING, STATE, STATE_BUFFERS, FreeMemory, Load, Placement, place

G = 10**9
H200 = FreeMemory(device=142 * G, host=119 * G, disk=55 * G, total=149 * G)


def gpt(layers: int, width: int) -> list[int]:
    """As bench/offload_gpu.py has it, in the order in which it is stepped."""
    block = [3 * width * width, width * width, 4 * width * width, 4 * width * width]
    return [50304 * width, 1024 * width, *block * layers, 50304 * width][::-1]


def on_h200(sizes: list[int], **how) -> Placement | None:
    """The parameters are there already."""
    room = H200._replace(device=H200.device - 2 * sum(sizes))
    return place(Load(sizes=sizes, reserve=15 * G, bucket=13_000_000, **how), room)


def test_one_and_a_half_billion_stay_on_the_device():
    sizes = gpt(24, 2048)
    chosen = on_h200(sizes)
    assert chosen is not None
    assert (chosen.device, chosen.host, chosen.disk) == (sum(sizes), 0, 0)


def test_thirteen_billion_do_not_need_the_disk():
    chosen = on_h200(gpt(40, 5120))
    assert chosen is not None
    assert chosen.disk == 0
    assert chosen.room, "new parameters wait on the device"
    assert chosen.device > chosen.host > 0


def test_twenty_billion_need_it_and_do_not_keep_gradients():
    sizes = gpt(44, 6144)
    assert on_h200(sizes) is None
    chosen = on_h200(sizes, keeps_gradients=False)
    assert chosen is not None
    assert 0 < STATE * chosen.disk <= H200.disk
    assert chosen.largest < max(sizes), "the head would need four buffers of its size"
    assert on_h200(gpt(88, 6144), keeps_gradients=False) is None


def test_every_device_has_a_reserve():
    sizes = [1000] * 100
    room = FreeMemory(device=14 * 100_000 + AT_ONCE, host=10**9, disk=0)
    for reserve in (0, room.device // 2, room.device - 1):
        chosen = place(Load(sizes=sizes, reserve=reserve), room)
        assert chosen is not None
        assert STATE * chosen.device + reserve <= room.device
    assert place(Load(sizes=sizes, reserve=room.device + 1), room) is None


def test_what_was_said_wins():
    load = Load(sizes=[100] * 10)
    assert place(load, FreeMemory(0, 0, 10**9), device=300, host=200) == Placement(300, 200, 500, 100)
    assert place(load, FreeMemory(0, 10**9, 0), device=1000) == Placement(1000, 0, 0, 0)


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.sampled_from([2, 4]), st.booleans(),
    st.integers(0, 10**10), st.tuples(*[st.integers(0, 10**11)] * 3),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_what_is_placed_has_room(sizes, s, keeps, reserve, room):
    room = FreeMemory(*room)
    chosen = place(Load(sizes=sizes, s=s, keeps_gradients=keeps, reserve=reserve), room)
    if chosen is None:
        return
    large = [n for n in sizes if n > chosen.largest] if chosen.disk else []
    total = sum(sizes)
    away = total - chosen.device
    assert chosen.host + chosen.disk <= away <= chosen.host + chosen.disk + sum(large)
    state = STATE if s < 4 else STATE - 4
    assert state * chosen.device + max(reserve, s * chosen.device) <= room.device
    ring = RING * s * (min(sizes) if away else 0)
    buffers = STATE_BUFFERS * STATE * (min(sizes) if chosen.disk else 0)
    assert STATE * (away - chosen.disk) + (s * away if keeps else 0) + ring + buffers <= room.host
    assert STATE * chosen.disk <= room.disk
    more = place(
        Load(sizes=sizes, s=s, keeps_gradients=keeps, reserve=reserve), FreeMemory(*(2 * x + 10**12 for x in room[:3]))
    )
    assert more is not None
    assert more.disk == 0, "with room for all nothing is on disk"
    if keeps:
        assert place(Load(sizes=sizes, s=s, keeps_gradients=False, reserve=reserve), room) is not None


def test_a_container_may_have_less_than_its_host(tmp_path, monkeypatch):
    for name, text in (
        ("memory.max", "5000"),
        ("memory.current", "3000"),
        ("memory.stat", "anon 1\ninactive_file 700"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(free_memory, "_CGROUPS", {tmp_path: ("memory.max", "memory.current")})
    assert free_memory.free_host_memory() == 2700
    (tmp_path / "memory.max").write_text("max")
    assert free_memory.free_host_memory() > 2700


@pytest.mark.parametrize("folder", ["", "."])
def test_the_device_is_the_host_where_there_is_no_other(folder):
    assert free_memory.measured(free_memory.torch.device("cpu"), folder) is None
