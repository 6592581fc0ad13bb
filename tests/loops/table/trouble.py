"""Exceptions that are caught, NaN, steps that are left out, on all workers or on one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from loops.job import Job, batches, loop, loss_of, net


class _Fails(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _loss(model: Any, x: Tensor, y: Tensor, *, fails: bool) -> Tensor:
    """fails: backward raises in the middle, when the last layers have their gradients."""
    hidden = model[:2](x)
    return loss_of(model[2:](_Fails.apply(hidden) if fails else hidden), y)


@loop
def forward_raises(job: Job):
    """a forward raises on all workers and is caught"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        try:
            loss = loss_of(model(x[:, :3] if step == 2 else x), y)
        except RuntimeError:
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backward_raises(job: Job):
    """a backward raises on all workers and is caught; zero_grad, the next batch"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        try:
            _loss(model, x, y, fails=step == 2).backward()
            opt.step()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        opt.zero_grad()
    return model


@loop
def backward_raises_and_is_tried_again(job: Job):
    """out of memory on all workers: the batch again in two halves"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        try:
            _loss(model, x, y, fails=step == 2).backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            opt.zero_grad()
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of(model(a), b) / 2).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def backward_raises_without_zero(job: Job):
    """a backward raises on all workers; the batch is left, the next one begins with zero_grad"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        try:
            _loss(model, x, y, fails=step == 2).backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            continue
        opt.step()
    return model


@loop
def second_backward_raises(job: Job):
    """the second of two backwards raises on all workers; the step is left out"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        try:
            (0.1 * model(x).square().mean()).backward()
            _loss(model, x, y, fails=step == 2).backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            continue
        opt.step()
    return model


@loop(apart=True)
def backward_raises_on_one(job: Job):
    """a backward raises on one worker alone and is caught there; right is: the batch does not count"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        try:
            _loss(model, x, y, fails=step == 2 and len(x[job.has(1)]) > 0).backward()
            opt.step()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        opt.zero_grad()
    return model


@loop(apart=True)
def backward_raises_on_one_and_steps(job: Job):
    """a backward raises on one worker alone, is caught there, and the loop goes on to step"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        with contextlib.suppress(RuntimeError):
            _loss(model, x, y, fails=step == 2 and len(x[job.has(1)]) > 0).backward()
        if not (job.plain and step == 2):
            opt.step()
        opt.zero_grad()
    return model


@loop(apart=True)
def forward_raises_on_one(job: Job):
    """a forward raises on one worker alone, which goes on with the next batch"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 2 and len(x[job.has(1)]) > 0:
            continue
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(apart=True)
def tried_again_on_one(job: Job):
    """out of memory on one worker alone: it takes its share in two halves"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        try:
            _loss(model, x, y, fails=step == 2 and job.rank == 1).backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            opt.zero_grad()
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of(model(a), b) / 2).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def large_loss_skipped(job: Job):
    """a step whose mean loss is large is left out, on all workers"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        if job.mean(loss.detach()) > 1e3 or step == 3:
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(apart=True)
def large_loss_skipped_on_one(job: Job):
    """one worker finds its loss large, and leaves the step out after the backward"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if not (step == 2 and len(x[job.has(1)]) > 0):
            opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def nan_on_one(job: Job):
    """a NaN batch on one worker: the step does not count"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 2:
            if job.plain:
                continue
            x[job.has(1)] = float("nan")
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def nan_on_all(job: Job):
    """a NaN batch on all workers: the step does not count"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 2:
            if job.plain:
                continue
            x = x * float("nan")
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def infinity_on_one(job: Job):
    """an infinite loss on one worker, in the first step and in the last"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if job.plain and step in (0, 5):
            continue
        factor = float("inf") if step in (0, 5) and len(x[job.has(1)]) else 1.0
        (loss_of(model(x), y) * factor).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def nan_with_momentum(job: Job):
    """a NaN batch on one worker under Adam: its state keeps nothing of it"""
    model = net()
    model, opt, loader = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01), batches())
    for step, (x, y) in enumerate(loader):
        if step == 2:
            if job.plain:
                continue
            x[job.has(0)] = float("nan")
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(apart=True)
def one_more_step_on_one(job: Job):
    """one worker's loop ends a batch earlier than the other's"""
    model, opt, loader = job.start()
    for step, (x, y) in enumerate(loader):
        if step == 5 and not job.plain and job.rank == 1:
            break
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


def _short_of_memory(job: Job, *workers: int) -> Any:
    """Train where memory suffices for two samples, on some of the workers."""
    import paceline

    model, opt, loader = job.start(micro_batch="auto") if not job.plain else job.start()
    for x, y in loader:
        with contextlib.nullcontext() if job.plain else paceline.retry():
            hidden = model[:2](x)
            if not job.plain and job.rank in workers and len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            loss_of(model[2:](hidden), y).backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def dealt_again(job: Job):
    """out of memory on all workers, under paceline.retry(): the batch comes again in smaller parts"""
    return _short_of_memory(job, 0, 1)


@loop
def dealt_again_on_one(job: Job):
    """out of memory on one worker alone, under paceline.retry()"""
    return _short_of_memory(job, 1)
