"""What an order of bytes can reach at best: the real `priority` over a wire and workers that exist only on paper.

    python bench/order_model.py --out bench/results/order_model.json

Twelve equal layers; forward takes a third of a step's computing, backward the rest; all bytes together take `ratio`
times the computing. A piece is on the wire when both workers have sent it and what left before has arrived. A layer's
forward waits for its own bytes (with a barrier: for all). Each layer takes `noise` more or less time by chance, each
worker its own. Given is the ideal pipeline, the larger of computing and communication, over the mean step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.parts import Event, Order
from paceline.orders.backward import Backward
from paceline.orders.priority import Priority
from paceline.telemetry.files import write
from paceline.tools.race import result

LAYERS, WORKERS, STEPS, WARM, SEEDS = 12, 2, 100, 40, 5
FORWARD, BACKWARD = 1 / (3 * LAYERS), 2 / (3 * LAYERS)  # of a layer; a step computes for 1
BYTES = 1 << 20  # of a layer


@dataclass(eq=False)
class Layer:
    """As much of a Bucket as an Order looks at."""

    index: int

    @property
    def whole(self) -> Layer:
        return self

    @property
    def flat(self) -> Layer:
        return self

    nbytes = BYTES


class Fixed(Priority):
    """A pace that is given, not learned."""

    def hear(self, backlog: float) -> None:
        pass


def fixed(pace: float) -> Order:
    order = Fixed(credit=0.5)
    order.pace = pace
    return order


def mean_step(order: Order, ratio: float, noise: float, seed: int) -> float:
    """In units of a step's computing."""
    dice = random.Random(seed)
    wire_free, took = 0.0, ratio / LAYERS
    clocks = [0.0] * WORKERS
    landed = [0.0] * LAYERS  # by the layer's place in forward
    ends = []

    def computed(clock: float, seconds: float) -> float:
        return clock + seconds * dice.lognormvariate(-noise * noise / 2, noise)

    for _ in range(STEPS):
        for w in range(WORKERS):
            for place in range(LAYERS):
                there = landed[place] if order.crosses else max(landed)
                clocks[w] = computed(max(clocks[w], there), FORWARD)
        ready: list[Any] = []
        sent: list[Any] = []

        def leave(event: Event, ready: list[Any] = ready, sent: list[Any] = sent) -> None:
            nonlocal wire_free
            for layer in list(order.next(ready, sent, event)):
                ready.remove(layer)
                sent.append(layer)
                wire_free = max(wire_free, *clocks) + took
                landed[LAYERS - 1 - layer.index] = wire_free

        for index in range(LAYERS):
            clocks[:] = [computed(clock, BACKWARD) for clock in clocks]
            ready.append(Layer(index))
            under_way = [landed[LAYERS - 1 - layer.index] for layer in sent]
            backlog = statistics.mean(sum(t > clock for t in under_way) for clock in clocks)
            leave(Event.READY)
        order.hear(backlog * BYTES)
        leave(Event.END)
        ends.append(max(clocks))
    return (ends[-1] - ends[WARM]) / (STEPS - 1 - WARM)


ORDERS: dict[str, Callable[[], Order]] = {
    "backward": Backward,
    "priority": Priority,
    "priority credit=0.5": lambda: Priority(credit=0.5),
    "priority credit=4": lambda: Priority(credit=4.0),
    "pace 0.6, not learned": lambda: fixed(0.6),
}


def cells(noises: Sequence[float], ratios: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "noise": noise,
            "ratio": ratio,
            "order": name,
            "near_ideal": round(
                max(1.0, ratio) / statistics.mean(mean_step(make(), ratio, noise, seed) for seed in range(SEEDS)), 3
            ),
        }
        for noise in noises
        for ratio in ratios
        for name, make in ORDERS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = cells((0.0, 0.2, 0.4), (0.5, 1.0, 2.0))
    print(f"{'noise':>5s}{'ratio':>6s}  {'order':24s}{'near':>5s}")
    for cell in found:
        print(f"{cell['noise']:5.1f}{cell['ratio']:6.1f}  {cell['order']:24s}{cell['near_ideal']:5.2f}")
    write(args.out, json.dumps({**result.header("order_model"), "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
