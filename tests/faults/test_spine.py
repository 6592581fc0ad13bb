"""Faults that belong to the spine (FAULTS F5-F12, F14, F35, F38): named on every worker, nobody hangs, nobody
aborts.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import processes
from processes import run, values

WORLD = 3
VICTIM = 2


def _lane(timeout_s=8.0):
    """A bare lane over the workers, without prepare."""
    return processes.join(timeout_s).group.lane("test")


def _job(**settings):
    import paceline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    data = TensorDataset(torch.randn(90, 8), torch.randint(0, 3, (90,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings.setdefault("timeout", 8.0)
    return paceline.prepare(model, optimizer, DataLoader(data, batch_size=9), **settings)


def _loop(model, optimizer, loader, at=lambda step: None):
    for step, (x, y) in enumerate(loader):
        at(step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def named_by_all(outcomes, *words, but=(), error=None):
    """Every surviving worker raised an error of that class with all those words; nobody was aborted or hung."""
    for rank, o in enumerate(outcomes):
        assert o.exitcode != -signal.SIGABRT, f"worker {rank} was aborted"
        assert o.error != "Hang", f"worker {rank} hangs"
        if rank in but:
            continue
        assert o.error == error if error else o.error, f"worker {rank} did not notice: {o}"
        for word in words:
            assert word in o.message, f"worker {rank} says {o.message!r}, not {word!r}"


# ---------------------------------------------------------------------------------------------------- F5, F6, F7


def other_shape(rank):
    _lane().mean(torch.ones(900 if rank == VICTIM else 1000)).wait()


def other_dtype(rank):
    _lane().mean(torch.ones(1000, dtype=torch.float64 if rank == VICTIM else torch.float32)).wait()


def other_operation(rank):
    lane = _lane()
    for _ in range(3):
        lane.mean(torch.ones(10)).wait()
    x = torch.ones(10)
    (lane.broadcast(x) if rank == VICTIM else lane.mean(x)).wait()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_shape, ("worker 2", "float32[900]", "float32[1000]")),
        (other_dtype, ("worker 2", "float64[1000]", "float32[1000]")),
    ],
)
def test_f5_f6_shape_and_dtype_mismatch(fault, words):
    named_by_all(run(WORLD, fault), *words, error="MismatchError")


def test_f7_another_operation():
    named_by_all(run(WORLD, other_operation), "worker 2", "broadcast", "mean #3", error="MismatchError")


# ---------------------------------------------------------------------------------------------------- F8, B22


def other_model(rank):
    import paceline

    model = nn.Linear(4, 5 if rank == VICTIM else 3)
    loader = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=6)
    paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, timeout=8.0)


def other_settings(rank, what):
    import paceline

    model = nn.Linear(4, 3)
    loader = DataLoader(TensorDataset(torch.randn(31 if what == "data" and rank == VICTIM else 30, 4)), batch_size=6)
    lr = 0.2 if what == "lr" and rank == VICTIM else 0.1
    method = "half" if what == "method" and rank == VICTIM else "exact"
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    paceline.prepare(model, optimizer, loader, method=method, timeout=8.0)


def test_f8_another_model():
    named_by_all(run(WORLD, other_model), "worker 2", "[5, 4]", "[3, 4]", error="MismatchError")


@pytest.mark.parametrize(("what", "word"), [("lr", '"lr": 0.2'), ("method", "half"), ("data", "31 samples")])
def test_b22_another_configuration(what, word):
    named_by_all(run(WORLD, other_settings, what), "worker 2", word, error="MismatchError")


# ---------------------------------------------------------------------------------------------------- F9


class Uneven(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        g = torch.Generator().manual_seed(self.n)
        for _ in range(self.n):
            yield torch.randn(8, generator=g), torch.tensor(1)


def uneven(rank):
    import paceline

    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(Uneven(12 if rank == VICTIM else 20), batch_size=4))
    model, optimizer, loader = paceline.prepare(model, optimizer, batches, timeout=8.0, batch="per_worker")
    _loop(model, optimizer, loader)
    return [p.detach() for p in model.parameters()]


def test_f9_uneven_data_ends_well_and_exact():
    results = values(run(WORLD, uneven))
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    per_worker = [list(DataLoader(Uneven(n), batch_size=4)) for n in (20, 20, 12)]
    for step in range(5):
        batches = [b[step] for b in per_worker if step < len(b)]
        x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(results[0], model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- F10


def not_a_number(rank, method):
    model, optimizer, loader = _job(method=method)
    steps = []

    def at(step):
        steps.append(step)

    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, (x, y) in enumerate(loader):
            x = x * float("nan") if step == 4 and rank == VICTIM else x
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finite = all(p.isfinite().all() for p in model.parameters())
    return finite, [str(w.message) for w in said if "paceline" in str(w.message)], step


@pytest.mark.parametrize("method", ["exact", "half"])
def test_f10_nan_on_one_worker(method):
    results = values(run(WORLD, not_a_number, method))
    assert all(finite and steps == 9 for finite, _, steps in results)
    assert "step 4 is skipped on all workers: the gradient of worker 2 is not finite" in results[0][1][0]
    assert results[2][1], "the worker itself is told too"


# ---------------------------------------------------------------------------------------------------- F11, F12, F14


def raises(rank):
    def at(step):
        if step == 3 and rank == VICTIM:
            raise ValueError("a bug in the script")

    _loop(*_job(), at)


def exits(rank):
    from paceline.session.session import current

    def at(step):
        if step == 3 and rank == VICTIM:
            current().process.leave()
            raise SystemExit(0)

    _loop(*_job(), at)


def killed(rank):
    def at(step):
        if step == 3 and rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    _loop(*_job(), at)


def test_f11_the_first_cause_wins():
    outcomes = run(WORLD, raises)
    assert outcomes[VICTIM].error == "ValueError"
    named_by_all(
        outcomes,
        "worker 2 failed in step 3: ValueError: a bug in the script",
        "samples",
        but=(VICTIM,),
        error="PeerError",
    )


def test_f12_leaving_in_the_middle_is_a_failure():
    outcomes = run(WORLD, exits)
    named_by_all(outcomes, "worker 2 left after 3 steps", but=(VICTIM,), error="PeerError")


def test_a_killed_worker_is_named_without_a_launcher():
    outcomes = run(WORLD, killed)
    named_by_all(outcomes, "worker 2 stopped answering in step 3", but=(VICTIM,), error="PeerError")


def stops(rank):
    def at(step):
        if step == 3 and rank == VICTIM:
            time.sleep(6)

    _loop(*_job(timeout=2.5), at)


def test_a_silent_worker_is_named_at_the_deadline():
    outcomes = run(WORLD, stops, wait_s=20)
    named_by_all(outcomes[:VICTIM], "workers [2] are not waiting", error="PeerTimeoutError")


def finishes_first(rank):
    lane = _lane()
    for _ in range(3):
        lane.mean(torch.ones(400_000)).wait()
    return True


def test_f14_a_worker_that_finishes_first_stays_for_the_others():
    for _ in range(2):
        assert values(run(WORLD, finishes_first)) == [True] * WORLD


# ---------------------------------------------------------------------------------------------------- F35, F38, B56


class Deadly(Dataset):
    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if self.deadly and i >= 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(8), torch.tensor(1)


def loader_dies(rank):
    import paceline

    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Deadly(rank == VICTIM), batch_size=6, num_workers=1)
    _loop(*paceline.prepare(model, optimizer, loader, timeout=10.0))


def test_f35_a_data_loader_worker_dies():
    outcomes = run(WORLD, loader_dies)
    assert outcomes[VICTIM].error
    named_by_all(outcomes, "worker 2", "data loader", but=(VICTIM,), error="PeerError")


def forks(rank):
    import paceline

    _job()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            other = nn.Linear(2, 2)
            paceline.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
            os.write(write, b"went through")
        except Exception as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return os.read(read, 1000).decode()


def twice(rank):
    import paceline

    model, optimizer, loader = _job()
    with pytest.raises(paceline.UsageError, match="prepared already"):
        paceline.prepare(model, optimizer)
    with pytest.raises(paceline.UsageError, match="prepared already"):
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return True


def test_f38_fork_after_init_and_prepare_twice():
    assert all("forked from a worker" in said for said in values(run(2, forks)))
    assert values(run(2, twice)) == [True, True]


def no_scalar(rank):
    model, optimizer, loader = _job()
    for step, (x, _) in enumerate(loader):
        out = model(x)
        (out if rank == VICTIM and step == 1 else out.sum()).backward()
        optimizer.step()


def test_b56_a_loss_that_is_no_scalar_on_one_worker():
    outcomes = run(WORLD, no_scalar)
    named_by_all(outcomes, "worker 2 failed in step 1", "scalar", but=(VICTIM,), error="PeerError")
