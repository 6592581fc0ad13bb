"""Loaders: sizes that do not divide, streams, several of them, epochs that are broken off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from loops.job import BATCH, STEPS, Job, batches, loop, loss_of, net, samples


def _train(model: Any, opt: Any, loader: Any) -> None:
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()


def _prepared(job: Job, loader: Any, **arguments: Any) -> Any:
    model = net()
    return job.prepare(model, job.optimizer(model.parameters()), loader, **arguments)


def _of(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count)), **{"batch_size": BATCH} | options)


@loop
def last_batch_small(job: Job):
    """the last batch has three samples: two for one worker, one for the other"""
    model, opt, loader = _prepared(job, _of(4 * BATCH + 3))
    _train(model, opt, loader)
    return model


@loop
def last_batch_of_one(job: Job):
    """the last batch has one sample, and one worker has none"""
    model, opt, loader = _prepared(job, _of(4 * BATCH + 1))
    _train(model, opt, loader)
    return model


@loop
def last_batch_dropped(job: Job):
    """drop_last=True"""
    model, opt, loader = _prepared(job, _of(4 * BATCH + 3, drop_last=True))
    _train(model, opt, loader)
    return model


@loop
def odd_batches(job: Job):
    """a batch size of seven: every batch is shared out unevenly"""
    model, opt, loader = _prepared(job, _of(35, batch_size=7))
    _train(model, opt, loader)
    return model


@loop
def several_epochs(job: Job):
    """three epochs over one loader"""
    model, opt, loader = _prepared(job, _of(2 * BATCH + 4))
    for _ in range(3):
        _train(model, opt, loader)
    return model


@loop
def broken_off(job: Job):
    """an epoch is broken off after two batches, the next is whole"""
    model, opt, loader = _prepared(job, _of(4 * BATCH))
    for limit in (2, 9):
        for i, (x, y) in enumerate(loader):
            if i == limit:
                break
            loss_of(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def next_of_iter(job: Job):
    """next(iter(loader)), kept over epochs, as iteration-based trainers do"""
    model, opt, loader = _prepared(job, _of(2 * BATCH))
    it = iter(loader)
    for _ in range(STEPS):
        try:
            x, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, y = next(it)
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def fetched_ahead(job: Job):
    """nanoGPT: the next batch is fetched before the backward of this one"""
    model, opt, loader = _prepared(job, _of(STEPS * BATCH))
    it = iter(loader)
    batch = next(it)
    while batch is not None:
        loss = loss_of(model(batch[0]), batch[1])
        batch = next(it, None)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def fetched_ahead_uneven(job: Job):
    """the next batch is fetched before the backward of this one, and is a small one"""
    model, opt, loader = _prepared(job, _of(3 * BATCH + 3))
    it = iter(loader)
    batch = next(it)
    while batch is not None:
        loss = loss_of(model(batch[0]), batch[1])
        batch = next(it, None)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return model


class _Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*samples(self.count), strict=True)


@loop
def stream(job: Job):
    """an IterableDataset"""
    model, opt, loader = _prepared(job, DataLoader(_Stream(STEPS * BATCH), batch_size=BATCH))
    _train(model, opt, loader)
    return model


@loop
def stream_with_a_rest(job: Job):
    """an IterableDataset whose last batch has three samples"""
    model, opt, loader = _prepared(job, DataLoader(_Stream(3 * BATCH + 3), batch_size=BATCH))
    _train(model, opt, loader)
    return model


@loop
def per_worker(job: Job):
    """prepare(batch="per_worker"): every worker takes the whole batch size"""
    loader = _of(STEPS * BATCH, batch_size=BATCH if job.plain else BATCH // 2)
    model, opt, loader = _prepared(job, loader, batch="per_worker")
    _train(model, opt, loader)
    return model


@loop
def two_loaders_by_turns(job: Job):
    """two loaders, a step on each by turns"""
    model = net()
    opt = job.optimizer(model.parameters())
    model, opt, one, two = job.prepare(model, opt, batches(3), batches(3, seed=8))
    for first, second in zip(one, two, strict=True):
        for x, y in (first, second):
            loss_of(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return model


@loop
def two_loaders_zipped(job: Job):
    """two loaders zipped, one loss over both batches"""
    model = net()
    opt = job.optimizer(model.parameters())
    model, opt, one, two = job.prepare(model, opt, batches(3), batches(3, seed=8))
    for (x, y), (u, v) in zip(one, two, strict=True):
        (loss_of(model(x), y) + 0.5 * loss_of(model(u), v)).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def two_loaders_zipped_uneven(job: Job):
    """two loaders zipped whose batches are shared out differently: one of seven, one of eight"""
    model = net()
    opt = job.optimizer(model.parameters())
    model, opt, one, two = job.prepare(model, opt, batches(3, size=7), batches(3, seed=8))
    for (x, y), (u, v) in zip(one, two, strict=True):
        (loss_of(model(x), y) + 0.5 * loss_of(model(u), v)).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def validated(job: Job):
    """a validation loader is prepared too"""
    model = net()
    opt = job.optimizer(model.parameters())
    model, opt, loader, val = job.prepare(model, opt, batches(), batches(2, seed=8))
    seen = []
    for x, y in loader:
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(sum(job.mean(loss_of(model(u), v)) for u, v in val))
        model.train()
    return model, seen


@loop
def validated_uneven(job: Job):
    """a validation loader of odd size in the middle of an epoch; training weighs its own batches"""
    model = net()
    opt = job.optimizer(model.parameters())
    model, opt, loader, val = job.prepare(model, opt, batches(), _of(BATCH + 3))
    for x, y in loader:
        with torch.no_grad():
            for u, _ in val:
                model(u)
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return model


@loop
def batch_sampler(job: Job):
    """DataLoader(batch_sampler=...)"""
    data = TensorDataset(*samples(STEPS * BATCH))
    sampler = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
    model, opt, loader = _prepared(job, DataLoader(data, batch_sampler=sampler))
    _train(model, opt, loader)
    return model


@loop
def own_collate(job: Job):
    """a collate_fn that gives dictionaries"""

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    model, opt, loader = _prepared(job, _of(STEPS * BATCH, collate_fn=collate))
    for batch in loader:
        loss_of(model(batch["x"]), batch["y"]).backward()
        opt.step()
        opt.zero_grad()
    return model


class _Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = samples(STEPS * BATCH)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


@loop
def list_of_batches(job: Job):
    """the loader is a list of this worker's batches"""
    rows = [(job.mine(x), job.mine(y)) for x, y in batches()]
    model, opt, loader = _prepared(job, rows)
    _train(model, opt, loader)
    return model


@loop
def rows_in_own_dataset(job: Job):
    """a Dataset of one's own"""
    model, opt, loader = _prepared(job, DataLoader(_Rows(), batch_size=BATCH))
    _train(model, opt, loader)
    return model


@loop
def reinforce(job: Job):
    """REINFORCE: no loader, episodes of different length on each worker, a mean over episodes"""
    model = net()
    model, opt = job.prepare(model, job.optimizer(model.parameters()))
    for step in range(STEPS):
        x, y = samples(6, seed=step)
        episodes = [(x[:2], y[:2]), (x[2:], y[2:])]
        mine = episodes if job.plain else [episodes[job.rank]]
        sum(loss_of(model(u), v) / len(mine) for u, v in mine).backward()
        opt.step()
        opt.zero_grad()
    return model
