"""hogwild: one set of weights, written by all workers without a lock."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import processes
import threads
from paceline.comm import host_memory as sharing
from paceline.errors import MethodError, UsageError
from paceline.method import Method, method
from paceline.session.session import current
from paceline.syncs.hogwild import Hogwild
from rig import Rig, alone, close, data, loop, mlp, same, sgd, train, weights

WORDS, DIM = 400, 8


class Bag(nn.Module):
    """Sparse logistic regression on embeddings: a bag of words, a label."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, DIM, mode="sum", sparse=True)
        self.out = nn.Linear(DIM, 1)
        with torch.no_grad():
            g = torch.Generator().manual_seed(0)
            self.words.weight.copy_(torch.randn(WORDS, DIM, generator=g) * 0.1)
            self.out.weight.copy_(torch.randn(1, DIM, generator=g))
            self.out.bias.zero_()

    def forward(self, x):
        return self.out(self.words(x)).squeeze(1)


def bags(samples, seed=1):
    """Words are good or bad; a bag is what most of its words are."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WORDS, (samples, 7), generator=g)
    return x, ((x % 2).sum(1) > 3).float()


def loss_of(model, x, y):
    return nn.functional.binary_cross_entropy_with_logits(model(x), y)


SAMPLES, BATCH, LR = 2400, 8, 0.5


@functools.cache
def one_worker():
    """The oracle: one process, the same samples, the same batches, one after the other."""
    model = Bag().double()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in zip(*(t.split(BATCH) for t in bags(SAMPLES)), strict=True):
        loss_of(model, x, y.double()).backward()
        opt.step()
        opt.zero_grad()
    x, y = bags(500, seed=2)
    return loss_of(model, x, y.double()).item()


def shm():
    """What is left of those who are gone. Other tests may be running: torch's files have their process's number."""
    names = [p.name for p in Path("/dev/shm").iterdir()] if Path("/dev/shm").exists() else []
    return {name for name in names if not Path("/proc", (name + "__").split("_")[1]).exists()}


def job(rank):
    import paceline

    model = Bag()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    model, opt = paceline.prepare(model, opt, method="hogwild")
    sparse = True
    for i, (x, y) in enumerate(zip(*(t.split(BATCH) for t in bags(SAMPLES)), strict=True)):
        if i % paceline.world_size() != rank:
            continue
        loss_of(model, x, y).backward()
        sparse = sparse and model.words.weight.grad.is_sparse
        opt.step()
        opt.zero_grad()
    [engine] = current().engines
    engine.method.sync.settle(engine.ex)
    x, y = bags(500, seed=2)
    loss, ended = loss_of(model, x, y).item(), weights(model)
    engine.method.sync.settle(engine.ex)  # all have read
    with torch.no_grad():
        model.out.bias.fill_(7.0) if rank == 0 else None
    engine.method.sync.settle(engine.ex)
    return loss, sparse, ended, model.out.bias.item(), engine.comm.sent


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_between_processes(world_size):
    """As good as one worker with the same samples; the gradients stay sparse; a write of one is seen by all."""
    before = shm()
    results = processes.values(processes.run(world_size, job))
    same([ended for _, _, ended, _, _ in results])
    for loss, sparse, _, bias, sent in results:
        assert abs(loss - one_worker()) < 0.05
        assert sparse
        assert bias == 7.0
        assert sent < 1000  # a few words to set up, and no gradients
    assert shm() <= before


def test_it_learns_at_all():
    x, y = bags(500, seed=2)
    assert one_worker() < 0.6 * loss_of(Bag(), x, y).item()


def in_turn(world_size, steps, optimizer):
    """Thread-workers that step one after the other: worker 0, 1, ..., 0, 1, ..."""
    turn, changed = [0], threading.Condition()

    def work(comm):
        model = mlp().double()
        opt = optimizer(model)
        rig = Rig(comm, model, opt, spec=Method(sync=Hogwild()))
        ex, sync = rig.engine.ex, rig.engine.method.sync
        sync._share(ex)
        for i, (x, y) in enumerate(data(world_size * steps)):
            if i % world_size != comm.rank:
                continue
            with changed:
                changed.wait_for(lambda i=i: turn[0] == i)
            nn.functional.cross_entropy(model(x.double()), y).backward()
            opt.step()
            opt.zero_grad()
            with changed:
                turn[0] += 1
                changed.notify_all()
        sync.settle(ex)
        return weights(model)

    return same(threads.run(world_size, work))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_after_the_other_it_is_one_worker(world_size):
    """Without momentum, which is each worker's own."""
    plain = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    batches = [(x.double(), y) for x, y in data(world_size * 5)]
    model = mlp().double()
    close(in_turn(world_size, 5, plain), loop(batches, model, plain(model)), 1e-12)
    assert torch.equal(in_turn(world_size, 5, plain), in_turn(world_size, 5, plain))


@pytest.mark.parametrize("world_size", [2, 3])
def test_momentum_is_each_workers_own(world_size):
    model = mlp().double()
    opts = [sgd(model) for _ in range(world_size)]
    for i, (x, y) in enumerate(data(world_size * 5)):
        nn.functional.cross_entropy(model(x.double()), y).backward()
        opts[i % world_size].step()
        opts[0].zero_grad()
    close(in_turn(world_size, 5, sgd), weights(model), 1e-12)


def test_only_the_rows_used_are_written():
    """Worker 1 writes rows that worker 0's step did not use, while worker 0 steps: they stay."""

    def work(comm):
        model = nn.Embedding(10, 4, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = torch.optim.SparseAdam(model.parameters(), lr=1.0)
        rig = Rig(comm, model, opt, spec=Method(sync=Hogwild()))
        model(torch.tensor([comm.rank])).sum().backward()
        assert model.weight.grad.is_sparse
        opt.step()
        opt.zero_grad()
        rig.engine.method.sync.settle(rig.engine.ex)
        return model.weight.detach().clone()

    w = same(threads.run(2, work))
    assert w[:2].abs().min() > 0.9
    assert w[2:].abs().max() == 0


def test_a_bad_gradient_of_one_worker_is_left_out():
    batches = data(6)
    batches[3][0][4:8] = torch.nan
    with pytest.warns(UserWarning, match="worker 1 is not finite"):
        assert all(w.isfinite().all() for w in train(3, batches, spec=Method(sync=Hogwild())))


def test_with_one_worker_it_is_the_optimizer_alone():
    assert torch.equal(train(1, data(6), spec=Method(sync=Hogwild()))[0], alone(data(6)))


def test_strides_and_dtypes_stay():
    def work(comm):
        model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.LazyLinear(2))
        x = torch.randn(2, 3, 5, 5).to(torch.bfloat16)
        model.to(torch.bfloat16)(x)
        before = [(p.stride(), p.dtype) for p in model.parameters()]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        rig = Rig(comm, model, opt, spec=Method(sync=Hogwild()))
        model(x).sum().backward()
        opt.step()
        rig.engine.method.sync.settle(rig.engine.ex)
        assert [(p.stride(), p.dtype) for p in model.parameters()] == before
        return weights(model)

    same(threads.run(2, work))


def test_a_parameter_that_leaves_is_an_error():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=Hogwild()))
        loop(data(1), model, opt, rig.take)
        model.double()
        loop([(x.double(), y) for x, y in data(1)], model, opt, rig.take)

    with pytest.raises(UsageError, match="has left the shared memory"):
        threads.run(2, work)


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(sharing, "place", lambda: int(threading.current_thread().name == "far"))

    def work(comm):
        threading.current_thread().name = "far" if comm.rank else "near"
        model = mlp()
        opt = sgd(model)
        loop(data(1), model, opt, Rig(comm, model, opt, spec=Method(sync=Hogwild())).take)

    with pytest.raises(MethodError, match="all workers on one host"):
        threads.run(2, work)


def test_another_users_memory_is_refused_on_all(monkeypatch):
    real = os.open

    def closed(path, *args, **kwargs):
        if "/fd/" in str(path):
            raise PermissionError(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(MethodError, match="1 of 2 workers cannot map"):
        threads.run(2, lambda comm: sharing.shared(torch.zeros(3), comm))


def test_what_does_not_go_together():
    with pytest.raises(MethodError, match="nothing is sent"):
        method("hogwild+topk")
    with pytest.raises(MethodError):
        method("hogwild", lock=True)


def killed(rank):
    import paceline

    model = mlp()
    opt = sgd(model)
    model, opt = paceline.prepare(model, opt, method="hogwild", timeout=20)
    for x, y in data(30):
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return weights(model).isfinite().all().item()


def test_nothing_is_left_of_a_killed_worker():
    before = shm()
    outcomes = processes.run(2, killed)
    assert outcomes[1].error == "Died"
    assert outcomes[0].value, outcomes[0]  # it trained on: nobody waits for anybody
    assert shm() <= before
