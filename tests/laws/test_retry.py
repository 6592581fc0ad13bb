"""`paceline.retry()` in real processes: the error is swallowed, the memory is free, the batch comes again."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import processes
from marks import slow
from paceline.errors import PacelineError, UsageError
from rig import close, mlp, same, sgd, weights

SAMPLES, BATCH = 48, 12


def batches(loader_processes=0, n=SAMPLES, batch=BATCH):
    g = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))
    return DataLoader(data, batch, shuffle=True, num_workers=loader_processes)


def train(rank, method, knobs, most, where, who, loader_processes, micro_batch="auto"):
    """Two epochs; on some workers memory suffices for `most` samples."""
    import paceline

    torch.manual_seed(0)
    model = mlp()
    opt = sgd(model)
    model, opt, loader = paceline.prepare(
        model,
        opt,
        batches(loader_processes),
        method=method,
        micro_batch=micro_batch,
        timeout=20,
        bucket_mb=0.001,
        **knobs,
    )
    iterations = 0
    for _ in range(2):
        for x, y in loader:
            iterations += 1
            with paceline.retry():
                out = model(x)
                if len(x) > most and rank in who and where == "loss":
                    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
                if len(x) > most and rank in who and where == "backward":
                    out.register_hook(too_much)
                loss = cross_entropy(out, y)
                loss.backward()
                opt.step()
                opt.zero_grad()
    with paceline.consensus():
        return weights(model), iterations


def too_much(grad):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


CASES = [
    ("exact", {}, "loss", (1,), 0),
    slow("exact", {}, "backward", (0, 1), 2),
    ("local_sgd", {"every": 2}, "loss", (1,), 0),
    ("zero3", {"store": "cpu"}, "backward", (1,), 0),
    slow("zero3", {}, "loss", (0,), 2),
    slow("powersgd", {}, "backward", (1,), 2),
    slow("zero1", {}, "loss", (0,), 0),
]


@pytest.mark.parametrize(("method", "knobs", "where", "who", "loader_processes"), CASES)
def test_the_same_training(method, knobs, where, who, loader_processes):
    found = processes.values(processes.run(2, train, method, knobs, 2, where, who, loader_processes))
    if method in ("exact", "zero1", "zero3"):
        whole, iterations = alone(1000, 0)
    else:
        whole, iterations = processes.values(processes.run(2, train, method, knobs, 1000, where, (), 0))[0]
    close(same([w for w, _ in found]), whole, 1e-5)
    assert found[who[0]][1] > iterations


def test_with_processes_that_read_ahead():
    found, iterations = alone(5, 2)
    close(found, alone(1000, 0)[0], 1e-5)
    assert iterations == 2 + 2 * 4 * (SAMPLES // BATCH)  # in twelves, sixes, threes


@functools.cache
def alone(most, loader_processes):
    """One worker, in this process."""
    import paceline

    try:
        return train(0, "exact", {}, most, "loss", (0,), loader_processes)
    finally:
        paceline.shutdown()


# ------------------------------------------------------------------------------------------------ real memory

WIDTH = 1 << 20  # floats of an activation of one sample: 4 MB


class Wide(nn.Module):
    """Little weights, large activations."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        wide = x[:, :1].expand(-1, WIDTH) * self.a
        return ((wide * self.b).sin() * self.b).mean(1)


def real(rank, cap):
    """Each activation of 24 samples is 96 MB, and there are some."""
    import os

    import paceline

    torch.manual_seed(0)
    model = Wide()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    arguments = {"memory_gb": resident + cap} if cap else {}
    model, opt, loader = paceline.prepare(
        model, opt, batches(n=24, batch=24), method="exact", micro_batch="auto", timeout=30, **arguments
    )
    sizes = []
    for x, y in loader:
        with paceline.retry():
            out = model(x)
            sizes.append(len(x))
            loss = (out - y).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
    return weights(model), sizes


def test_a_cap_on_the_hosts_memory():
    found = processes.values(processes.run(1, real, 0.3))
    whole = processes.values(processes.run(1, real, None))
    close(found[0][0], whole[0][0], 1e-4)
    assert whole[0][1] == [24]
    assert max(found[0][1]) < 24


def held(x, weight, refs):
    """A product whose graph alone holds one of its factors."""
    factor = x * 1.0
    refs.append(weakref.ref(factor))
    return factor * weight


def test_nothing_that_the_body_computed_stays_alive():
    import paceline

    model, refs, kept = mlp(), [], []
    weight = model[0].weight[0]

    def fails(x):
        mine = held(x, weight, refs)
        raise RuntimeError(f"no kernel for {len(mine)}")

    def fails_again(x):
        try:
            fails(x)
        except RuntimeError as error:
            raise MemoryError from error  # the other kernel's memory does not suffice

    try:
        model, _, loader = paceline.prepare(model, sgd(model), batches(), micro_batch="auto")
        for x, _ in loader:
            if refs:
                break
            with paceline.retry():
                out = held(x, weight, refs)  # the loop's own variables, which stay
                view = held(x, weight, refs).view(-1)
                losses = [held(x, weight, refs).sum()]
                assert all(ref() is not None for ref in refs)
                try:
                    fails_again(x)
                except MemoryError as error:
                    kept.append(error)  # a script's own log
                    raise
        assert [ref() is None for ref in refs] == [True] * 4
        assert out.shape == (BATCH, 6)
        assert view.numel() == BATCH * 6
        assert len(losses) == 1
    finally:
        paceline.shutdown()


# ------------------------------------------------------------------------------------------------ what is refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(8, 6))


def objects(**more):
    model = mlp()
    return {"model": model, "optimizer": sgd(model), "loader": batches()} | more


REFUSED = [
    ({"micro_batch": 0}, {}, "micro_batch=0 is not a whole number"),
    ({"micro_batch": "largest"}, {}, "micro_batch='largest' is not a whole number"),
    ({"micro_batch": 2}, {"loader": None}, "and no loader"),
    ({"micro_batch": 2}, {"loader": [(1, 2)]}, "list cannot be dealt in micro-batches"),
    ({"micro_batch": "auto"}, {"loader": DataLoader(Stream(), 4)}, "the stream Stream cannot be dealt"),
    ({"micro_batch": "auto", "weight": len}, {}, "micro_batch='auto' and weight="),
    ({"micro_batch": "auto", "method": "delayed", "staleness": 1}, {}, "micro_batch='auto' with delayed"),
    ({"micro_batch": 2, "method": "torch:ddp"}, {}, "torch:ddp does not know micro_batch=2"),
    ({"memory_gb": 0}, {}, "memory_gb=0 is out of range"),
]


@pytest.mark.parametrize(("arguments", "given", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_does_not_go_together_is_refused_before_anything_is_started(arguments, given, said):
    import paceline
    from paceline.session.session import current

    with pytest.raises(UsageError, match=said):
        paceline.prepare(*[one for one in objects(**given).values() if one is not None], **arguments)
    assert current() is None


def test_a_cap_below_what_is_used_is_refused():
    import paceline

    try:
        with pytest.raises(UsageError, match="is less than this process uses already"):
            paceline.prepare(*objects().values(), memory_gb=0.001)
    finally:
        paceline.shutdown()


def test_without_a_loader_that_can_deal_again_it_is_refused():
    import paceline

    try:
        paceline.prepare(*objects().values())
        with pytest.raises(UsageError, match="has no batch to deal again"), paceline.retry():
            pass
    finally:
        paceline.shutdown()


SEVERAL = "micro_batch='auto' with 2 optimizers"


def test_two_optimizers_are_refused():
    import paceline

    one, two = mlp(), mlp()
    with pytest.raises(UsageError, match=SEVERAL):
        paceline.prepare(one, two, sgd(one), sgd(two), batches(), micro_batch="auto")


def test_another_optimizer_that_steps_in_the_same_batch_is_refused():
    import paceline

    def loop(loader, *trained):
        for x, y in loader:
            for model, opt in trained:
                cross_entropy(model(x), y).backward()
                opt.step()

    one, two = mlp(), mlp()
    try:
        one, a, loader = paceline.prepare(one, sgd(one), batches(), micro_batch="auto")
        two, b = paceline.prepare(two, sgd(two))
        loop(loader, (one, a))
        loop(batches(), (two, b))  # one after the other is right
        with pytest.raises(UsageError, match=SEVERAL):
            loop(loader, (one, a), (two, b))
    finally:
        paceline.shutdown()


def test_only_memory_is_caught_and_only_in_forward_and_backward():
    import paceline

    model = mlp()
    opt = sgd(model)
    try:
        model, opt, loader = paceline.prepare(model, opt, batches(), micro_batch="auto")
        x, y = next(iter(loader))
        with pytest.raises(ValueError, match="mine"), paceline.retry():
            raise ValueError("mine")
        cross_entropy(model(x), y).backward()
        with pytest.raises(MemoryError) as said, paceline.retry():
            raise MemoryError  # all workers have agreed on the gradients by now
        assert "smaller micro-batches do not help" in said.value.__notes__[0]
        opt.step()
        with pytest.raises(MemoryError), torch.no_grad(), paceline.retry():
            raise MemoryError  # in an evaluation
    finally:
        paceline.shutdown()


def test_what_the_optimizer_lacks_is_not_asked_of_the_batch():
    """Also where no gradients are exchanged, so that nothing has been agreed on before."""
    import paceline

    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    model = mlp()
    try:
        model, opt, loader = paceline.prepare(
            model, Hungry(model.parameters(), lr=0.1), batches(), method="local_sgd", micro_batch="auto"
        )
        x, y = next(iter(loader))
        cross_entropy(model(x), y).backward()
        with pytest.raises(MemoryError), paceline.retry():
            opt.step()
    finally:
        paceline.shutdown()


SCRIPT = """
import torch, paceline
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
model, opt, loader = paceline.prepare(model, opt, DataLoader(torch.ones(4, 2), 4))
for x in loader:
    model(x)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


def test_an_error_that_is_not_caught_says_what_to_write(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "with paceline.retry():" in ended.stderr


def test_batch_norm_over_one_sample_is_warned_of_once():
    import paceline

    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model, _, loader = paceline.prepare(model, sgd(model), batches(n=24), micro_batch=1)
            list(loader)
        assert sum("BatchNorm" in str(w.message) for w in said) == 1
    except PacelineError as error:
        raise AssertionError(str(error)) from error
    finally:
        paceline.shutdown()
