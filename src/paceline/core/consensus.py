"""The weights that all workers agree on, where each trains its own: to evaluate, to save, to end with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.bucket import Bucket
from paceline.core.facts import Fact
from paceline.core.pipeline import Pipeline

if TYPE_CHECKING:
    from paceline.core.engine import Engine


@contextlib.contextmanager
def consensus_weights(engine: Engine) -> Iterator[None]:
    """Inside, parameters and buffers are those all workers agree on; after it, this worker's own again.

    Every worker must enter. How far apart they were is reported as `consensus_distance`: the root mean square, over the
    workers, of the distance to the agreed weights.
    """
    if not engine.idle:
        engine.settle()
        engine.unstepped.check()
    agree = Fact.REPLICAS_AGREE in engine.method.sync.facts()
    if engine.idle or (agree and not engine.method.sync.is_async):
        yield
        return
    buckets = [] if agree else engine.buckets  # else their buffers alone are each worker's own
    with _own_again((*buckets, *engine.buffer_buckets)) as own:
        engine.recorder.log({"consensus_distance": _take_centre(engine, buckets, own)})
        if engine.method.sync.is_async:  # else they are compared every K steps
            engine.replicas.check_buffers()
        yield


def adopt(engine: Engine) -> None:
    """Every worker takes the weights and buffers that all agree on, for good. Every worker must call it."""
    with torch.no_grad():
        _take_centre(engine, engine.buckets, [b.weights() for b in (*engine.buckets, *engine.buffer_buckets)])


@contextlib.contextmanager
def latest_weights(engine: Engine) -> Iterator[None]:
    """Inside, parameters are the newest that were all workers', as far as this one knows: it waits for nobody."""
    known = [(b, x) for b in engine.buckets if (x := engine.method.sync.latest(b)) is not None]
    with _own_again([b for b, _ in known]):
        with torch.no_grad():
            for b, x in known:
                b.write(x)
        yield


@contextlib.contextmanager
def _own_again(buckets: Sequence[Bucket]) -> Iterator[list[Tensor]]:
    """Inside, weights may be others; after it they are as they were."""
    with torch.no_grad():
        own = [b.weights() for b in buckets]
    try:
        yield own
    finally:
        with torch.no_grad():
            for b, x in zip(buckets, own, strict=True):
                b.write(x)


@torch.no_grad()
def _take_centre(engine: Engine, buckets: Sequence[Bucket], own: list[Tensor]) -> float:
    """Take the centre's parameters and the mean of the buffers; gives how far the workers' own parameters were away.

    own: what this worker has of both.
    """
    ex, apart = engine.ex, torch.zeros(1, dtype=torch.float64)

    async def parameters(b: Bucket, x: Tensor) -> None:
        z = await engine.method.sync.centre(b, ex)
        apart.add_((x[: b.n] - z[: b.n]).square().sum(dtype=torch.float64).cpu())
        b.write(z)

    async def buffers(b: Bucket, x: Tensor) -> None:
        b.write(await ex.exact(x.clone()))

    pipeline, count = Pipeline(), len(buckets)
    for b, x in zip(buckets, own[:count], strict=True):
        pipeline.start(parameters(b, x))
    for b, x in zip(engine.buffer_buckets, own[count:], strict=True):
        pipeline.start(buffers(b, x))
    pipeline.drain()
    return float(ex.comm.mean(apart).wait().sqrt())
