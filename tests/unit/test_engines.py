"""Who is forgotten when the user has dropped everything, and who is not."""

from __future__ import annotations

import gc
import weakref

import pytest

import processes
import threads
from paceline.core.engines import Engines
from rig import Rig, adamw, data, loop, mlp


class Engine:
    pass


@pytest.mark.parametrize("alone", [True, False])
def test_a_pack_of_one_worker_keeps_nobody(alone):
    pack, engine, other = Engines(alone=alone), Engine(), Engine()
    pack.append(engine)
    pack.append(other)
    assert [*pack] == [engine, other]
    del engine
    gc.collect()
    assert [*pack][-1] is other
    assert len(pack) == len([*pack]) == (1 if alone else 2)


@pytest.mark.filterwarnings("ignore:paceline")
@pytest.mark.parametrize(
    ("world_size", "spec"),
    [(1, "exact"), (1, "zero2"), (1, "zero3"), (2, "exact"), (2, "priority"), (2, "zero3"), (2, "powersgd")],
)
def test_an_engine_goes_with_the_model_and_the_optimizer(world_size, spec):
    def work(comm):
        model = mlp()
        optimizer = adamw(model)
        rig = Rig(comm, model, optimizer, spec=spec, accumulate=2)
        loop(data(4), model, optimizer, rig.take)
        return [weakref.ref(x) for x in (rig.engine, model, optimizer)]

    results = threads.run(world_size, work)
    gc.collect()
    assert [[ref() for ref in refs] for refs in results] == [[None] * 3] * world_size


def test_among_others_those_go_that_are_gone_on_every_worker():
    pack, engines = Engines(), [Engine() for _ in range(3)]
    for engine in engines:
        pack.append(engine)
    first, second, third = engines
    engines.clear()
    engine = None
    del first, second
    assert pack.collect() == [False, False, True]
    pack.keep([False, False, True])
    assert [*pack] == [third]


def _cycles(rank):
    import threading
    from pathlib import Path

    import torch

    import paceline

    held = []
    for _ in range(6):
        model = mlp()
        optimizer = adamw(model)
        model, optimizer = paceline.prepare(model, optimizer)
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
        held.append((sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()))
        del model, optimizer
    return held


def test_cycles_of_prepare_leave_nothing_behind():
    for held in processes.values(processes.run(2, _cycles)):
        assert held[2:] == held[2:3] * 4  # the first two make the lanes
