"""delayed: the mean of step t is applied in step t + s."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import processes
import threads
from laws_table import reducers
from marks import slow
from paceline import registry
from paceline.core.pipeline import Task
from paceline.errors import MethodError, UsageError
from paceline.method import Method, method
from paceline.syncs.delayed import Delayed
from rig import Rig, alone, close, data, loop, mlp, same, sgd, train, weights

STEPS, LAM = 9, 0.7
CORRECTIONS = ["none", "scale", "dc"]


def sharp(batches):
    return [(x.double(), y) for x, y in batches]


def oracle(world_size, batches, s, correction="none", without=None):
    """All workers in one process, in fp64: gradients of each at w_t, their mean, applied s steps later; those of step
    `without` never.
    """
    model = mlp().double()
    params, opt, queue = list(model.parameters()), sgd(model), []
    for t, (x, y) in enumerate(sharp(batches)):
        total = [torch.zeros_like(p) for p in params]
        for mine, labels in zip(x.tensor_split(world_size), y.tensor_split(world_size), strict=True):
            loss = nn.functional.cross_entropy(model(mine), labels)
            for g_bar, g in zip(total, torch.autograd.grad(loss, params), strict=True):
                g_bar += g / world_size
        queue.append((total, [p.detach().clone() for p in params]))
        if len(queue) <= s:
            continue
        means = queue.pop(0)
        if t - s == without:
            continue
        for p, g, then in zip(params, *means, strict=True):
            p.grad = g
            if correction == "scale":
                p.grad = g / (1 + s)
            elif correction == "dc":
                p.grad = g + LAM * g * g * (p.detach() - then)
        opt.step()
    return weights(model)


def delayed(world_size, batches, s, correction="none", **rig):
    def work(comm):
        model = mlp().double()
        opt = sgd(model)
        spec = Method(sync=Delayed(staleness=s, correction=correction, lam=LAM))
        return loop(sharp(batches), model, opt, Rig(comm, model, opt, spec=spec, **rig).take)

    return threads.run(world_size, work)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("s", [1, 2, 3])
@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
def test_it_goes_as_the_formula(world_size, s, correction):
    batches = data(STEPS)
    result = same(delayed(world_size, batches, s, correction))
    close(result, oracle(world_size, batches, s, correction), 1e-12)


def test_a_world_of_one_has_nobody_to_wait_for():
    [result] = train(1, data(STEPS), spec=Method(sync=Delayed(staleness=3)))
    assert torch.equal(result, alone(data(STEPS)))


@pytest.mark.parametrize("name", ["exact", "int8", "topk", "powersgd"])
@pytest.mark.parametrize("world_size", [slow(1), slow(2), 3, slow(4)])
def test_without_a_delay_it_is_every_step_bit_for_bit(world_size, name):
    recipe = method(name)
    spec = Method(**{**recipe.axes(), "sync": Delayed(staleness=0)})
    assert torch.equal(same(train(world_size, data(STEPS), spec=spec)), same(train(world_size, data(STEPS), spec=name)))


class Fixed(nn.Module):
    """Its gradient is what it is given, wherever the weights are."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(24, 12)), nn.Parameter(torch.zeros(40))

    def forward(self, g):
        return (self.a * g[:288].view(24, 12)).sum() + (self.b * g[288:]).sum()


def fixed(world_size, steps, spec, seed=3):
    """The sum of the means applied, in `steps` steps."""
    g = torch.Generator().manual_seed(seed)
    gradients = torch.randn(10, world_size, 328, generator=g)

    def work(comm):
        model = Fixed()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        Rig(comm, model, opt, spec=spec)
        for t in range(steps):
            model(gradients[t, comm.rank]).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    return same(threads.run(world_size, work))


@pytest.mark.parametrize("s", [1, slow(3)])
@pytest.mark.parametrize(
    "name", sorted({name for name, _ in reducers()} - {"accordion", "error_feedback", "per_bucket", "warmup"})
)
def test_any_reducer_gives_the_means_it_gives_without_a_delay(name, s):
    """Where gradients do not depend on the weights a delay only shifts them: leftovers and all, to the bit."""
    plain = method(name)
    late = Method(**{**plain.axes(), "sync": Delayed(staleness=s)})
    assert torch.equal(fixed(3, 7 + s, late), fixed(3, 7, plain))


def test_a_mean_that_is_not_finite_is_not_applied():
    batches = data(STEPS)
    batches[4][0][-1] = torch.nan  # worker 2 alone
    with pytest.warns(UserWarning, match="step 4 is skipped on all workers: the gradient of worker 2 is not finite"):
        result = same(delayed(3, batches, 2))
    batches[4][0][-1] = 0.0
    close(result, oracle(3, batches, 2, without=4), 1e-12)


@pytest.mark.parametrize("name", ["topk", "qsgd", "powersgd"])
def test_what_is_not_finite_gets_into_nobodys_memory(name):
    batches = data(STEPS)
    batches[4][0][-1] = torch.nan
    with pytest.warns(UserWarning, match="worker 2 is not finite"):
        result = same(train(3, batches, spec=Method(**{**method(name).axes(), "sync": Delayed(staleness=2)})))
    assert result.isfinite().all()


@pytest.mark.parametrize("s", [1, 2])
def test_a_worker_is_s_steps_ahead_of_one_that_stands_still(s):
    stuck = 3
    go = threading.Event()

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=Delayed(staleness=s)))
        for t, (x, y) in enumerate(data(STEPS)):
            x, y = rig.take(x, y)
            loss = nn.functional.cross_entropy(model(x), y)
            if comm.rank == 1 and t == stuck:
                assert go.wait(20), "worker 0 waits for worker 1"
            loss.backward()
            opt.step()
            opt.zero_grad()
            if comm.rank == 0 and t == stuck + s - 1:  # its mean is of step stuck - 1, to which all have contributed
                go.set()
        return weights(model)

    same(threads.run(2, work))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_loss_scale_that_changes_changes_nothing(correction):
    spec = Method(sync=Delayed(staleness=2, correction=correction, lam=LAM))

    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        rig = Rig(comm, model, opt, spec=spec, scaler=scaler)
        for x, y in data(STEPS):
            x, y = rig.take(x, y)
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scaler.get_scale() > 2.0**10
        return weights(model)

    close(same(threads.run(2, work)), same(train(2, data(STEPS), spec=spec)), 1e-6)


def test_an_overflow_under_a_loss_scaler_costs_one_attempt():
    """The scaler leaves out the step that the spoilt mean comes to; the next attempt is of that step, and makes it."""

    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        rig = Rig(comm, model, opt, spec=Method(sync=Delayed(staleness=2)), scaler=scaler)
        for t, (x, y) in enumerate(data(STEPS)):
            x, y = rig.take(x, y)
            x = x * float("inf") if t == 3 and comm.rank == 1 else x
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return rig.engine.ex.step, scaler.get_scale(), bool(weights(model).isfinite().all())

    assert threads.run(2, work) == [(STEPS - 1, 2.0**7, True)] * 2


def test_bytes_travel_while_training_goes_on_and_arrive_when_asked():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=Method(sync=Delayed(staleness=2)))
        loop(data(4), model, opt, rig.take)
        sync = rig.engine.method.sync
        flying = [isinstance(v, Task) for v in sync.state.real.values()]
        sync.settle(rig.engine.ex)
        here = [isinstance(v, torch.Tensor) for v in sync.state.real.values()]
        return len(flying) == 2 * len(rig.engine.buckets), all(flying), all(here)

    assert threads.run(2, work) == [(True, True, True)] * 2


def test_what_was_used_only_then_is_not_lost():
    """A parameter used in even steps only, by one worker: its gradient comes in an odd step, and is applied."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, odd):
            return self.always.sum() + (0.0 if odd else self.sometimes.sum())

    def work(comm):
        model = Two()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        Rig(comm, model, opt, spec=Method(sync=Delayed(staleness=1)))
        for t in range(5):
            model(t % 2 == 1 or comm.rank == 1).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    # Steps 0, 2 and 4 use it; by step 4 those of 0 and 2 have been applied, at half weight.
    assert same(threads.run(2, work)).tolist() == [-4.0] * 3 + [-1.0] * 3


def test_a_window_of_micro_batches_is_one_gradient():
    batches = data(8)
    pairs = [
        (torch.cat([x, x2]), torch.cat([y, y2])) for (x, y), (x2, y2) in zip(batches[::2], batches[1::2], strict=True)
    ]
    spec = Method(sync=Delayed(staleness=1))
    close(same(train(2, batches, spec=spec, accumulate=2)), same(train(2, pairs, spec=spec)), 1e-6)


def test_a_second_backward_in_a_step_is_refused():
    def work(comm):
        model = mlp()
        rig = Rig(comm, model, sgd(model), spec=Method(sync=Delayed(staleness=1)))
        x, y = rig.take(*data(1)[0])
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()

    with pytest.raises(UsageError, match="second backward in step 0"):
        threads.run(2, work)


@pytest.mark.parametrize(
    "knobs", [{"staleness": -1}, {"staleness": 1.5}, {"correction": "half"}, {"lam": -0.1}, {"lam": float("nan")}]
)
def test_bad_knobs(knobs):
    with pytest.raises(MethodError):
        registry.find("delayed")(**knobs)


def job(rank, s, correction):
    import paceline

    torch.manual_seed(rank)
    model = mlp().double()
    opt = sgd(model)
    spec = Method(sync=Delayed(staleness=s, correction=correction, lam=LAM))
    model, opt = paceline.prepare(model, opt, method=spec, bucket_mb=0.0005)
    for x, y in sharp(data(STEPS)):
        x, y = x.tensor_split(paceline.world_size())[rank], y.tensor_split(paceline.world_size())[rank]
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    ("world_size", "s", "correction"),
    [slow(2, 1, "none"), (3, 2, "dc"), slow(4, 3, "scale")],
)
def test_between_processes(world_size, s, correction):
    result = same(processes.values(processes.run(world_size, job, s, correction)))
    close(result, oracle(world_size, data(STEPS), s, correction), 1e-12)
