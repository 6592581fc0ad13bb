"""An all-reduce between processes: the way Paceline takes beside gloo over all workers, taking turns.

    python bench/collectives.py --out bench/results/collectives.json

On one host the way is shared memory; between two hosts of two workers each at 100 Mbit/s (network namespaces: wants
root) it is hierarchical. There the workers are dealt to the hosts in blocks (0 1, 2 3), as launchers do, and in turn
(0 2, 1 3), where every step of a ring crosses the link. `ratio` is gloo's median over ours; the goals are 2 for
25 MB between two workers of one host, and 1.8 between the hosts. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KB, MB = 1 << 10, 1 << 20
LOCAL = {KB: 200, MB: 60, 25 * MB: 20}  # bytes -> turns of each
LINKED = {KB: 40, MB: 10, 25 * MB: 4}
LINK = "100mbit"


def worker(turns: dict[int, int]) -> None:
    """In each process. Worker 0 prints what the slowest worker took for each turn, in ms."""
    import torch

    from paceline.comm.environment import Environment
    from paceline.session.session import open_session
    from paceline.session.settings import Settings

    torch.set_num_threads(1)
    here = open_session(Environment.read(), Settings(backend="gloo", timeout=120.0))
    group, transport = here.group, here.rendezvous.transport
    assert group.board is not None
    assert transport is not None
    own = group.lane("own")  # the first lane decides the route
    flat = transport.lane("flat", group.board, group.rank, group.world_size)
    lanes = {"gloo": flat, here.rendezvous.route.way: own}
    for nbytes, n in turns.items():
        x = torch.zeros(nbytes // 4)
        spent: dict[str, list[float]] = {name: [] for name in lanes}
        for turn in range(n + 2):
            for name, lane in lanes.items():
                lanes["gloo"].sum(torch.zeros(1)).wait()
                began = time.perf_counter()
                lane.mean(x).wait()
                mine = torch.tensor([(time.perf_counter() - began) * 1e3], dtype=torch.float64)
                slowest = float(lanes["gloo"].all_gather(mine).wait().max())
                if turn >= 2:  # the first ones make connections and pages
                    spent[name].append(slowest)
        if group.rank == 0:
            print(json.dumps({"bytes": nbytes, "ms": spent}), flush=True)
    here.process.leave()


def start(ranks: list[int], turns: dict[int, int], prefixes: list[list[str]], env: dict[str, str]) -> list[Any]:
    """Run the workers, `ranks` in the order of their places, to their end: what worker 0 printed."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(len(ranks)), **env}
    command = [sys.executable, __file__, "--turns", json.dumps(turns)]
    running = {
        rank: subprocess.Popen([*prefix, *command], env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank, prefix in zip(ranks, prefixes, strict=True)
    }
    try:
        out, _ = running[0].communicate(timeout=600)
        if any(process.wait(60) for process in running.values()):
            raise SystemExit("a worker failed")
    finally:
        for process in running.values():
            process.kill()
    return [json.loads(line) for line in out.splitlines()]


def on_one_host(workers: int) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return start(list(range(workers)), LOCAL, [[]] * workers, env)


def between_hosts(ranks: list[int]) -> list[Any]:
    """Two on each host, `ranks` the first host's first."""
    from paceline.tools.lab.namespaces import Lab, parse_link

    with Lab(2, parse_link(LINK)) as lab:
        first = 0 if 0 in ranks[:2] else 1
        env = {"MASTER_ADDR": lab.address(first), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": lab.interface}
        return start(ranks, LINKED, [lab.exec_prefix(i // 2) for i in range(4)], env)


def cells(where: str, found: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for one in found:
        (_, gloo), (way, ours) = one["ms"].items()
        row = {"where": where, "bytes": one["bytes"], "way": way, "turns": len(ours)}
        row |= {"gloo_ms": round(statistics.median(gloo), 3), "ours_ms": round(statistics.median(ours), 3)}
        row |= {"gloo_best_ms": round(min(gloo), 3), "ours_best_ms": round(min(ours), 3)}
        row["ratio"] = round(row["gloo_ms"] / row["ours_ms"], 2)
        rows.append(row)
        print(
            f"{where:32s} {_size(row['bytes']):>6s} {row['gloo_ms']:9.2f} {row['ours_ms']:9.2f} {row['ratio']:6.2f}",
            flush=True,
        )
    return rows


def _size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("host", "hosts"))
    args = parser.parse_args()
    if args.turns:
        worker({int(nbytes): n for nbytes, n in json.loads(args.turns).items()})
        return
    from msgspec.structs import asdict

    from paceline.tools.race.result import commit, machine

    print(f"{'an all-reduce, median':32s} {'size':>6s} {'gloo ms':>9s} {'ours ms':>9s} {'ratio':>6s}")
    found = []
    if args.only != "hosts":
        for workers in (2, 4):
            found += cells(f"{workers} workers, one host", on_one_host(workers))
    if args.only != "host":
        found += cells(f"2 hosts x 2, {LINK}, in blocks", between_hosts([0, 1, 2, 3]))
        found += cells(f"2 hosts x 2, {LINK}, in turn", between_hosts([0, 2, 1, 3]))
    if args.out:
        result = {
            "bench": "collectives",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": asdict(machine()),
            "command": "python bench/collectives.py",
            "cells": found,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
