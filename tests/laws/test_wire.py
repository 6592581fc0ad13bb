"""Bytes, three times over: what a reducer's formula says, what Comm counts and what the network interface saw.

[Note: headers] A frame of Ethernet carries at most 1500 bytes of IP. TCP over IPv4 with timestamps spends 20 + 32 of
them, the frame itself 14 more: 66 bytes of header to 1448 of payload, a factor of 1514/1448 = 1.046. An acknowledgement
is a frame of 66 bytes without payload, if there is no payload going the same way to carry it: one for every two full
frames received at most, 66/2896 = 2.3 %. So the interface sends 1.046 to 1.068 times the payload: 1.057 within 2 %.
What TCP sends again, because it took long for lost, is not the method's; the kernel counts it. A veth would pass on
64 KB at a time with a single header; the test's hosts may not, so that their interface counts what a network card does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab

SRC = Path(next(iter(paceline.__path__))).parent
HEADER, FULL = 66, 1514
WORLD, STEPS = 2, 4
METHODS = ["exact", "half", "int8", "qsgd", "topk", "sign", "powersgd", "zero1"]

# One pair of processes measures all methods: starting torch for each of them would take most of the time.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import paceline
from paceline.session.session import current
from paceline.session.session import barrier

torch.set_num_threads(1)
statistics = Path("/sys/class/net/eth0/statistics")

def counters():
    tcp = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
    seen = {name: int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets")}
    return seen | {"again": int(dict(zip(*tcp))["RetransSegs"])}

for method in sys.argv[2:]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # One bucket: gloo spends some 600 bytes of its own on every operation, which nobody's formula has in it.
    model, optimizer = paceline.prepare(model, optimizer, method=method, bucket_mb=64)
    engine, control = current().by_optimizer[id(optimizer)], current().control
    def step():
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    step()  # the first use of every operation is agreed on beforehand
    barrier(control)
    sent, before = engine.comm.sent, counters()
    for _ in range(int(sys.argv[1])):
        step()
    barrier(control)
    after = counters()
    world, slots = engine.comm.world_size, sum(len(b.slots) for b in engine.buckets)
    print(json.dumps({
        "method": method,
        # zero1 sends half of the formula for the gradients, and as much for the parameters.
        "formula": sum(engine.method.reducer.sends(b, world) for b in engine.buckets),
        # A mean that is exact whispers inside its last bucket; others sum one vector of fp64: ballot.py.
        "ballot": 0 if engine.ex.exact_everywhere else 2 * 8 * (6 * world + slots + 1) * (world - 1) // world,
        "counted": engine.comm.sent - sent,
        "bytes": after["tx_bytes"] - before["tx_bytes"],
        "frames": after["tx_packets"] - before["tx_packets"],
        "again": after["again"] - before["again"],
    }), flush=True)
"""

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By method: what each of two workers on two hosts says of its steps."""
    if why := namespaces.available():
        pytest.skip(f"no network lab: {why}")
    script = tmp_path_factory.mktemp("wire") / "script.py"
    script.write_text(SCRIPT)
    with Lab(WORLD) as lab:
        for name in lab._names:
            namespaces._ip("-n", name, "link", "set", lab.interface, "gso_max_segs", "1")  # [Note: headers]
        base = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORLD)}
        base |= {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": lab.interface}
        workers = [
            subprocess.Popen(
                [*lab.exec_prefix(rank), sys.executable, str(script), str(STEPS), *METHODS],
                env={**base, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
        try:
            for worker in workers:
                out, err = worker.communicate(timeout=60)
                assert worker.returncode == 0, err
                for line in map(json.loads, out.splitlines()):
                    found[line["method"]].append(line)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(10)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_the_formula_is_what_comm_counts(measured: dict[str, list[dict[str, Any]]], method: str) -> None:
    for worker in measured[method]:
        assert worker["counted"] == STEPS * (worker["formula"] + worker["ballot"])


@pytest.mark.parametrize("method", METHODS)
def test_what_comm_counts_is_what_the_interface_sends(measured: dict[str, list[dict[str, Any]]], method: str) -> None:
    for worker in measured[method]:
        payload = worker["bytes"] - HEADER * worker["frames"] - (FULL - HEADER) * worker["again"]
        assert payload == pytest.approx(worker["counted"], rel=0.02)


@pytest.mark.parametrize("method", ["exact", "half", "int8", "qsgd", "zero1"])  # the others' frames are not full
def test_headers_are_the_share_that_ethernet_says(measured: dict[str, list[dict[str, Any]]], method: str) -> None:
    payload = FULL - HEADER
    none_alone, all_alone = FULL / payload, FULL / payload + HEADER / (2 * payload)  # acknowledgements
    for worker in measured[method]:
        factor = (worker["bytes"] - FULL * worker["again"]) / worker["counted"]
        assert factor == pytest.approx((none_alone + all_alone) / 2, rel=0.02)
