"""Weights after 50 steps of every method, as hashes: what must not change when only the code's shape does.

`python tests/recorded --write` records them anew, after a change that was meant to change numbers. It is run with the
environment that tests/laws/test_recorded.py sets, so that every x86 machine gets the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor

import threads
from laws_table import WORLDS, brisk, variants
from paceline import registry
from paceline.core.facts import Fact
from rig import Rig, adamw, data, loop, mlp, sgd

FILE = Path(__file__).parent / "weights.json"
STEPS = 50
_AXES = ("reducer", "sync", "layout", "order")


def rounded_root(x: Tensor) -> Tensor:
    """The square root, rounded right: the last bit of MKL's depends on the processor, whatever it is told."""
    return torch.from_numpy(np.sqrt(x.detach().numpy()))


def cases(*, plain: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every registered part of the data path with every choice of its knobs, at a setting that no clock decides.
    plain: with the defaults of those choices alone.
    """
    found = {}
    for axis in _AXES:
        for name, cls in registry.parts(axis).items():
            for knobs in variants(cls)[: 1 if plain else None]:
                if {"nvme", "auto"} & set(knobs.values()):  # they need a disk, or go by the machine's memory
                    continue
                if "step" in knobs:  # it says something only beside a store, where the laws of offload hold it
                    continue
                fixed = getattr(cls, "limit", None) or {} if _is_async(cls) else brisk(cls)
                full = {**fixed, **knobs, **({"store": "cpu"} if "params" in knobs else {})}
                found[" ".join([name, *(f"{k}={v}" for k, v in full.items())])] = (name, full)
    return found


def _is_async(cls: type) -> bool:
    return bool(getattr(cls, "is_async", False))


def _worlds(name: str) -> tuple[int, ...]:
    """Workers that write into one memory, or push at their own pace, go by the clock as soon as there are two."""
    return (1,) if name in ("hogwild", "parameter_server") else WORLDS


def weights(name: str, knobs: dict[str, Any], world_size: int) -> str:
    """A hash of every worker's weights after training."""
    optimizer = adamw if Fact.ADAM in registry.find(name).needs else sgd

    def work(comm: Any) -> bytes:
        model = mlp()
        opt = optimizer(model)
        if name == "dgc":
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
        rig = Rig(comm, model, opt, spec=name, knobs=knobs)
        loop(data(STEPS, size=11), model, opt, rig.take)
        rig.engine.settle()
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    return hashlib.sha256(b"".join(threads.run(world_size, work))).hexdigest()[:16]


def record(worlds: list[int], *, plain: bool) -> dict[str, str]:
    return {
        f"{case}, {world_size} worker{'s' * (world_size > 1)}": weights(name, knobs, world_size)
        for case, (name, knobs) in cases(plain=plain).items()
        for world_size in _worlds(name)
        if world_size in worlds
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--worlds", default="1,2,3,4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Tensor.sqrt = rounded_root  # type: ignore[method-assign]
    torch._foreach_sqrt = lambda tensors: [rounded_root(x) for x in tensors]
    text = json.dumps(record([int(w) for w in options.worlds.split(",")], plain=options.plain), indent=1)
    if options.write:
        FILE.write_text(text + "\n")
    else:
        print(text)
