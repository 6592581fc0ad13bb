"""Measure the speed of gloo between workers, without Paceline in between. Worker 0 prints it as JSON."""

from __future__ import annotations

import json
import time

# torch.distributed rather than Comm: `paceline doctor` measures the bare transport below Comm.
import torch
import torch.distributed as dist

_BYTES = 4 << 20
_WARM_UP, _LARGE, _SMALL = 2, 8, 50


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    large, small = torch.ones(_BYTES // 4), torch.ones(1)
    for _ in range(_WARM_UP):
        dist.all_reduce(large.zero_())
        dist.all_reduce(small.zero_())
    # The best of several counts: other programs can only make it slower.
    large_s = min(_timed(large) for _ in range(_LARGE))
    small_s = min(_timed(small) for _ in range(_SMALL))
    world_size = dist.get_world_size()
    sent = 2 * _BYTES * (world_size - 1) / world_size
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"mbit_per_s": sent * 8 / large_s / 1e6, "latency_us": small_s * 1e6, "workers": world_size}))
    dist.destroy_process_group()


def _timed(tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
