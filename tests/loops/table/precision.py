"""Autocast, loss scaling, normalisation, dropout: what depends on precision or on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loops.job import BATCH, INPUTS, STEPS, Job, batches, loop, loss_of, net, samples


@loop(tolerance=500)
def autocast_bf16(job: Job):
    """autocast(bfloat16)"""
    model, opt, loader = job.start()
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


def _scaled(job: Job, *, hand_over: bool, autocast: bool, overflow: bool = False, clip: bool = False) -> Any:
    model = net()
    opt = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    if hand_over:
        model, opt, loader, scaler = job.prepare(model, opt, batches(), scaler)
    else:
        model, opt, loader = job.prepare(model, opt, batches())
    scales = []
    for step, (x, y) in enumerate(loader):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = loss_of(model(x), y)
        if overflow and step == 2 and len(x[job.has(1)]):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    return model, scales


@loop
def scaler(job: Job):
    """a GradScaler that was handed over"""
    return _scaled(job, hand_over=True, autocast=False)


@loop(tolerance=500)
def scaler_fp16(job: Job):
    """a GradScaler that was handed over, autocast(float16)"""
    return _scaled(job, hand_over=True, autocast=True)


@loop(tolerance=500)
def scaler_unknown(job: Job):
    """a GradScaler that was not handed over, autocast(float16)"""
    return _scaled(job, hand_over=False, autocast=True)


@loop
def scaler_unknown_fp32(job: Job):
    """a GradScaler that was not handed over, without autocast"""
    return _scaled(job, hand_over=False, autocast=False)


@loop(nonlinear=True)
def scaler_clipped(job: Job):
    """unscale_ and clip_grad_norm_"""
    return _scaled(job, hand_over=True, autocast=False, clip=True)


@loop(nonlinear=True)
def scaler_overflow_on_one(job: Job):
    """an overflow on one worker: all skip, and all scales fall"""
    return _scaled(job, hand_over=True, autocast=False, overflow=True)


@loop(nonlinear=True)
def scaler_unknown_overflow_on_one(job: Job):
    """an overflow on one worker under a GradScaler that was not handed over"""
    return _scaled(job, hand_over=False, autocast=False, overflow=True)


def _by_halves(job: Job, model: nn.Module, x: Tensor) -> Tensor:
    """The forward of a model whose layers look at the whole batch: each worker has half of it."""
    return torch.cat([model(half) for half in x.chunk(2)]) if job.plain else model(x)


def _parameters(model: nn.Module) -> dict[str, Any]:
    """Parameters are compared; running statistics must be finite and alike on the workers. A worker that steps alone
    counts its batches alone.
    """
    names = {name for name, _ in model.named_parameters()}
    state = model.state_dict()
    own = {name: x for name, x in state.items() if name in names}
    rest = {name: x for name, x in state.items() if name not in names and not name.endswith("num_batches_tracked")}
    return {"weights": own, "law": rest}


def _norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@loop
def batch_norm(job: Job):
    """BatchNorm: statistics of each worker's share, running ones alike on all"""
    model, opt, loader = job.start(_norms())
    for x, y in loader:
        loss_of(_by_halves(job, model, x), y).backward()
        opt.step()
        opt.zero_grad()
    return _parameters(model)


@loop
def batch_norm_evaluated(job: Job):
    """BatchNorm, with evaluations in between"""
    model, opt, loader = job.start(_norms())
    x_val, _ = samples(8, seed=3)
    for x, y in loader:
        loss_of(_by_halves(job, model, x), y).backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x_val)
        model.train()
    return _parameters(model)


@loop
def batch_norm_two_forwards(job: Job):
    """two losses of a model with BatchNorm, both forwards before the first backward"""
    model, opt, loader = job.start(_norms())
    for x, y in loader:
        a = loss_of(_by_halves(job, model, x), y)
        b = 0.1 * _by_halves(job, model, x + 1).square().mean()
        a.backward()
        b.backward()
        opt.step()
        opt.zero_grad()
    return _parameters(model)


@loop
def batch_norm_accumulated(job: Job):
    """BatchNorm, two micro-batches by hand"""
    model, opt, loader = job.start(_norms())
    for i, (x, y) in enumerate(loader):
        (loss_of(_by_halves(job, model, x), y) / 2).backward()
        if i % 2:
            opt.step()
            opt.zero_grad()
    return _parameters(model)


@loop
def batch_norm_frozen(job: Job):
    """BatchNorm in eval mode while the rest trains, as detectron2 has it"""
    model, opt, loader = job.start(_norms())
    for x, y in loader:
        model.train()
        model[1].eval()
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def batch_norm_nan_on_one(job: Job):
    """a NaN batch on one worker: skipped, and the running statistics are what they were"""
    model, opt, loader = job.start(_norms())
    for step, (x, y) in enumerate(loader):
        if step == 2:
            if job.plain:
                continue
            x[job.has(1)] = float("nan")
        loss_of(_by_halves(job, model, x), y).backward()
        opt.step()
        opt.zero_grad()
    return _parameters(model)


@loop
def group_norm(job: Job):
    """GroupNorm and LayerNorm"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    model, opt, loader = job.start(model)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


def _with_masks() -> DataLoader[Any]:
    x, y = samples(STEPS * BATCH)
    masks = (torch.rand(len(x), 8, generator=torch.Generator().manual_seed(5)) < 0.5).float() * 2
    return DataLoader(TensorDataset(x, y, masks), batch_size=BATCH)


@loop
def dropout(job: Job):
    """dropout by masks that come with the samples"""
    model = net()
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), _with_masks())
    for x, y, mask in loader:
        hidden = model[:2](x) * mask
        loss_of(model[2:](hidden), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(nonlinear=True)
def dropout_seeded(job: Job):
    """nn.Dropout: it runs, and replicas agree"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    model, opt, loader = job.start(model)
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return {"law": model.state_dict()}


@loop
def loss_by_hand_summed(job: Job):
    """reduction="sum" divided by the size of the batch at hand"""
    model, opt, loader = job.start()
    for x, y in loader:
        (nn.functional.cross_entropy(model(x), y, reduction="sum") / len(x)).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def loss_with_weights(job: Job):
    """a mean over tokens: prepare(weight=...)"""
    model = net()

    def tokens(batch: Any) -> float:
        return float((batch[1] != 0).sum())

    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), batches(), weight=tokens)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y, ignore_index=0).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(compiles=True)
def compiled(job: Job):
    """torch.compile of the model before prepare"""
    model = torch.compile(net(), backend="aot_eager")
    model, opt, loader = job.prepare(model, job.optimizer(model.parameters()), batches())
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop(compiles=True)
def compiled_after(job: Job):
    """torch.compile of the prepared model"""
    model, opt, loader = job.start()
    fast = torch.compile(model, backend="aot_eager")
    for x, y in loader:
        loss_of(fast(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model
