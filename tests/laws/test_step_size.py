"""Balances that change the size of a step or its learning rate, and what they measure for it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import processes
import threads
from laws_table import on_every_world
from marks import slow
from paceline import registry
from paceline.balances._step_size import SizedStep
from paceline.checkpoint import load as loading
from paceline.checkpoint import save as saving
from paceline.comm.threads import ThreadComm
from paceline.core.engine import EngineOptions
from paceline.core.noise import NoiseSample, sampled
from paceline.core.parts import Balance, StepSize
from paceline.errors import MethodError, UsageError
from paceline.method import Method, method
from paceline.session.objects import Objects
from rig import NoRate, Rig, adamw, close, data, loop, mlp, same, sgd, weights

ADAPTIVE = [name for name, cls in registry.parts("balance").items() if cls.adapts]
LIVELY: dict[str, dict[str, Any]] = {  # knobs at which something happens within a few steps
    "adascale": {"every": 2},
    "adaptive_batch": {"every": 2, "hold": 3, "high": 4, "aim": 20.0},
    "accordion_batch": {"every": 1, "window": 3, "high": 3, "threshold": 5.0},
}


@dataclass(kw_only=True)
class Scripted(SizedStep):
    """Sizes and rates by the number of the step, for these tests alone."""

    name: ClassVar[str] = "scripted"
    needs: ClassVar[dict[Any, str]] = {}

    multiples: list[int] = field(default_factory=lambda: [1])
    rates: list[float] = field(default_factory=lambda: [1.0])
    worth: float = 1.0  # steps of the schedule for each batch

    def _now(self, values):
        return values[min(self.state.get("made", 0), len(values) - 1)]

    def multiple(self):
        return self._now(self.multiples)

    def rate(self, size):
        return self._now(self.rates)

    def counts(self, size):
        return size.multiple * self.worth

    def made(self, size):
        self.state["made"] = self.state.get("made", 0) + 1


def scripted(**knobs: Any) -> Method:
    return Method(balance=Scripted(**knobs))


def run(world_size, batches, optimizer=sgd, **rig):
    """The weights of all workers, and the workers themselves."""

    def work(comm):
        model = mlp()
        opt = optimizer(model)
        one = Rig(comm, model, opt, **rig)
        return loop(batches, model, opt, one.take), one

    found = threads.run(world_size, work)
    return [w for w, _ in found], [one for _, one in found]


def remembered(rig: Rig) -> dict[Any, Any]:
    return dict(rig.engine.method.balance.state.real)


# ------------------------------------------------------------------------------------------------ the mechanism


def by_hand(batches, multiples, rates, optimizer=sgd):
    """The oracle: plain PyTorch, one process, the batches of each step in one, at these rates."""
    model = mlp()
    opt = optimizer(model)
    rest, step = list(batches), 0
    while rest:
        n, rate = (values[min(step, len(values) - 1)] for values in (multiples, rates))
        x, y = (torch.cat(tensors) for tensors in zip(*rest[:n], strict=True))
        del rest[:n]
        lr = opt.param_groups[0]["lr"]
        opt.param_groups[0]["lr"] = lr * rate
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["lr"] = lr
        step += 1
    return weights(model)


@on_every_world
@pytest.mark.parametrize("layout", ["replicated", slow("zero1"), "zero3"])
def test_steps_of_any_size_and_rate_are_those_of_one_process(world_size, layout):
    batches, multiples, rates = data(9), [1, 3, 2, 1, 2], [1.0, 1.5, 0.5]
    spec = Method(balance=Scripted(multiples=multiples, rates=rates), layout=registry.find(layout)())
    got, _ = run(world_size, batches, adamw, spec=spec)
    close(same(got), by_hand(batches, multiples, rates, adamw), tol=2e-5)


@on_every_world
def test_a_constant_multiple_is_accumulation_bit_for_bit(world_size):
    batches = data(10)
    spec = method("adaptive_batch", low=3, high=3)
    got, _ = run(world_size, batches, spec=spec)
    want, _ = run(world_size, batches, accumulate=3)
    assert torch.equal(same(got), same(want))


@on_every_world
@pytest.mark.parametrize("spec", [method("adaptive_batch", low=1, high=1), method("adascale", base=12)])
def test_the_dense_limit_is_even(world_size, spec):
    """Bounds of one batch, and a gain of one: every bit as without."""
    if world_size == 1 and spec.balance.name == "adascale":
        pytest.skip("adascale is refused where a step has one gradient")
    batches = data(8)
    got, _ = run(world_size, batches, spec=spec)
    want, _ = run(world_size, batches)
    if world_size == 1:
        close(same(got), same(want))  # alone, plain PyTorch's own vectors: they may be summed in another order
    else:
        assert torch.equal(same(got), same(want))


def test_will_step_and_scheduled_steps_follow():
    """What a step counts of the schedule is its batches, and nothing in the middle of it."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=scripted(multiples=[1, 3, 2]))
        seen = []
        for x, y in data(8):
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            closing = rig.engine.window.closing
            opt.step()
            seen.append((closing, rig.engine.sizes.scheduled))
            opt.zero_grad()
        return seen

    for seen in threads.run(2, work):
        assert seen == [(True, 1), (False, 0), (False, 0), (True, 3), (False, 0), (True, 2), (False, 0), (True, 2)]


SCHEDULERS = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),  # reads group["lr"] and goes on from it
    "chained": lambda opt: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 3), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "plateau": lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_never_see_the_factor(kind):
    def rates(comm, spec):
        model = mlp()
        opt = sgd(model)
        rig, scheduler, seen = Rig(comm, model, opt, spec=spec), SCHEDULERS[kind](opt), []
        for x, y in data(8):
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            seen.append(opt.param_groups[0]["lr"])
        return seen

    scaled, plain = (threads.run(2, lambda comm, s=s: rates(comm, s)) for s in (scripted(rates=[3.0, 0.2]), Method()))
    assert scaled == plain


def test_a_rate_that_the_optimizer_sets_itself_stays():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] = 0.05

    _, [rig, _] = run(2, data(3), lambda model: Own(model.parameters(), lr=0.1), spec=scripted(rates=[2.0]))
    assert rig.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("step", ["ahead", "stream", "on_step"])
def test_a_host_that_steps_ahead_knows_the_rate(step):
    batches, rates = data(6), [1.0, 2.0, 0.5]
    layout = registry.find("zero2")(store="cpu", step=step)
    got, _ = run(2, batches, adamw, spec=Method(balance=Scripted(rates=rates), layout=layout))
    close(same(got), by_hand(batches, [1], rates, adamw), tol=2e-5)


def test_workers_of_another_size_are_named():
    """A balance whose workers disagree breaks its contract; the vote names them before the replicas drift apart."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        spec = scripted(rates=[1.0, 2.0 if comm.rank == 1 else 1.0])
        return loop(data(4), model, opt, Rig(comm, model, opt, spec=spec).take)

    with pytest.raises(Exception, match="worker 1 is at other settings"):
        threads.run(3, work)


# ------------------------------------------------------------------------------------------------ the measurement


def true_sample(units, *, sizes):
    """From plain autograd, in float64: each unit's mean gradient, and that of all samples."""
    grads = []
    for x, y in units:
        model = mlp().double()
        cross_entropy(model(x.double()), y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    n = sum(sizes)
    mean = sum(k / n * g for k, g in zip(sizes, grads, strict=True))
    parts = sum(k / n * float(g.square().sum()) for k, g in zip(sizes, grads, strict=True))
    return sampled(parts, float(mean.square().sum()), len(units), n)


LAYOUTS = [{}, {"layout": "zero1"}, {"layout": "zero2"}, {"layout": "zero3"}, {"layout": "zero2", "store": "cpu"}]


@pytest.mark.parametrize("layout", [slow(one) if i in (1, 2) else one for i, one in enumerate(LAYOUTS)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
@on_every_world
def test_what_is_measured_is_what_the_gradients_are(world_size, accumulate, layout, monkeypatch):
    """Of any layout, with unequal shares (13 samples), with micro-batches, whatever the workers are."""
    if world_size * accumulate == 1:
        pytest.skip("one gradient shows nothing")
    batches, heard = data(accumulate, 13), []
    monkeypatch.setattr(Balance, "hear", lambda self, sample: heard.append(sample))
    knobs = dict(layout)
    spec = Method(layout=registry.find(knobs.pop("layout", "replicated"))(**knobs))
    _, rigs = run(world_size, batches, adamw, spec=spec, accumulate=accumulate, advice=1)

    for rig in rigs:
        rig.engine.noise.read()
    shares = [len(part) for part in torch.arange(13).tensor_split(world_size)]
    units = [u for x, y in batches for u in zip(x.tensor_split(world_size), y.tensor_split(world_size), strict=True)]
    want = true_sample(units, sizes=shares * accumulate)
    assert len(heard) == world_size
    assert all(one == heard[0] for one in heard), "not the same on all workers"
    assert heard[0] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_sums_and_loss_scales_are_taken_out(loss, monkeypatch):
    heard = []
    monkeypatch.setattr(Balance, "hear", lambda self, sample: heard.append(sample))
    [(x, y)] = data(1, 13)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        rig = Rig(comm, model, opt, scaler=scaler, advice=1, loss=loss)
        a, b = rig.take(x, y)
        scaler.scale(cross_entropy(model(a), b, reduction=loss)).backward()
        scaler.step(opt)
        scaler.update()
        rig.engine.settle()

    threads.run(2, work)
    want = true_sample(list(zip(x.split([7, 6]), y.split([7, 6]), strict=True)), sizes=[7, 6])
    assert heard[0] == pytest.approx(want, rel=1e-4)


def test_a_batch_in_two_backwards_is_not_measured():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, advice=1)
        for x, y in data(3):
            a, b = rig.take(x, y)
            for half in (slice(0, 3), slice(3, 6)):
                cross_entropy(model(a[half]), b[half]).backward()
            opt.step()
            opt.zero_grad()
        rig.engine.settle()
        return rig.engine.method.balance.noise.seen

    assert threads.run(2, work) == [0, 0]


def test_nothing_is_done_when_nobody_asks(monkeypatch):
    def refuse(*args):
        raise AssertionError("measured")

    monkeypatch.setattr("paceline.core.noise_meter._square", refuse)
    batches = data(4)
    _, plain = run(2, batches)
    monkeypatch.undo()
    _, asked = run(2, batches, advice=2)
    assert [rig.comm.ops for rig in asked] == [rig.comm.ops + 2 for rig in plain], "one sum in every second step"


@pytest.mark.parametrize("spec", ["topk", "qsgd", "local_sgd", "delayed"])
def test_where_it_cannot_be_measured_that_is_said(spec):
    _, rigs = run(2, data(3), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), spec=spec, advice=1)
    assert all(rig.engine.noise.why_not() and rig.engine.noise.every == 0 for rig in rigs)


# ------------------------------------------------------------------------------------------------ every such balance


@pytest.mark.parametrize("name", ADAPTIVE)
@on_every_world
def test_workers_agree_and_something_happens(name, world_size):
    batches = data(48, 12 * world_size)
    got, rigs = run(world_size, batches, spec=method(name, **LIVELY[name]), accumulate=2)
    same(got)
    known = [remembered(rig) for rig in rigs]
    assert all(one == known[0] for one in known)
    assert known[0]["noise seen"] >= 2
    plain, _ = run(world_size, batches, accumulate=2)
    assert not torch.equal(got[0], plain[0])


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_step_that_does_not_count_leaves_no_trace(name):
    """Neither in what is remembered nor in the trajectory after it."""
    batches = data(12)

    def work(comm, spoil):
        model = mlp()
        opt = sgd(model)
        rig, known = Rig(comm, model, opt, spec=method(name, **LIVELY[name])), []
        for i, (x, y) in enumerate(batches):
            for bad in (True, False) if i == 6 and spoil else (False,):
                a, b = rig.take(x, y)
                (cross_entropy(model(a), b) * (math.inf if bad and comm.rank == 1 else 1.0)).backward()
                opt.step()
                opt.zero_grad()
                known.append(None if bad else remembered(rig))
        return weights(model), [one for one in known if one is not None]

    with pytest.warns(UserWarning, match="skipped"):
        spoilt = threads.run(2, lambda comm: work(comm, True))
    clean = threads.run(2, lambda comm: work(comm, False))
    assert spoilt[0][1] == clean[0][1]
    assert torch.equal(spoilt[0][0], clean[0][0])


@pytest.mark.parametrize("name", ADAPTIVE)
def test_neither_does_one_that_is_heard_of_late(name):
    """The optimizer skips on the device, and the host hears of it in the next step: device_verdict.py."""
    batches = data(12)

    def work(comm, bad):
        model = mlp()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        options = EngineOptions(device_verdict=True)
        rig = Rig(comm, model, opt, spec=method(name, **{**LIVELY[name], "every": 1}), options=options)
        for i, (x, y) in enumerate(batches if bad is None else [*batches[:bad], batches[0], *batches[bad:]]):
            x, y = rig.take(x, y)
            (cross_entropy(model(x), y) * (math.nan if i == bad and comm.rank == 1 else 1.0)).backward()
            opt.step()
            opt.zero_grad()
        rig.engine.settle()
        return weights(model), remembered(rig)

    with pytest.warns(UserWarning, match="skipped"):
        spoilt = threads.run(2, lambda comm: work(comm, 3))
    clean = threads.run(2, lambda comm: work(comm, None))
    assert spoilt[0][1] == clean[0][1]
    assert torch.equal(same([w for w, _ in spoilt]), same([w for w, _ in clean]))


def objects(rig):
    """What is saved and loaded, the engine, and a lane for it."""
    lane = ThreadComm(rig.comm.room, rig.comm.rank, "checkpoint")
    return Objects.sort([rig.model, rig.optimizer]), [rig.engine], lane


@pytest.mark.parametrize("name", ADAPTIVE)
def test_to_go_on_is_not_to_have_stopped(name, tmp_path, monkeypatch):
    """Saved at the first end of a step from batch 17 on, and loaded by a new run."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    batches, spec = data(40, 24), method(name, **LIVELY[name])

    def work(comm, loads):
        model = mlp()
        opt = sgd(model)
        rig, done = Rig(comm, model, opt, spec=spec), 0
        if loads:
            done = loading.load(tmp_path, *objects(rig))["done"]
        saved = loads
        for i, (x, y) in enumerate(batches[done:], done + 1):
            loop([(x, y)], model, opt, rig.take)
            if not saved and i >= 17 and not rig.engine.window.several:
                saved = True
                rig.engine.settle()
                saving.save(tmp_path, *objects(rig), step=None, extra={"done": i})
        return weights(model), remembered(rig)

    straight, resumed = (threads.run(2, lambda comm, loads=loads: work(comm, loads)) for loads in (False, True))
    assert torch.equal(same([w for w, _ in straight]), same([w for w, _ in resumed]))
    assert straight[0][1] == resumed[0][1]


def _job(rank, folder, loads):
    import paceline

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    opt = sgd(model)
    loader = DataLoader(TensorDataset(*data(1, 480)[0]), batch_size=12, shuffle=True)
    knobs = LIVELY["adaptive_batch"]
    model, opt, loader = paceline.prepare(model, opt, loader, method="adaptive_batch", **knobs)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 10, 0.9)
    if loads:
        extra = paceline.load(folder, model, opt)
        scheduler.load_state_dict(extra["scheduler"])
        loader.load_state_dict(json.loads(extra["loader"]))
    sizes = []
    for x, y in loader:
        closes = paceline.will_step(opt)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        for _ in range(paceline.scheduled_steps(opt)):
            scheduler.step()
        sizes.append(paceline.scheduled_steps(opt))
        assert closes == bool(sizes[-1])
        if closes and len(sizes) >= 20 and not loads and folder is not None:
            extra = {"scheduler": scheduler.state_dict(), "loader": json.dumps(loader.state_dict())}
            paceline.save(folder, model, opt, extra=extra)
            folder = None
    advice = paceline.advice()
    return weights(model), sizes, scheduler.last_epoch, advice.noise_scale, advice.unknown


def test_a_job_of_two_processes_that_is_resumed(tmp_path):
    """A schedule by batches ends with the samples; a run that was stopped goes on with steps of the same size."""
    straight = processes.values(processes.run(2, _job, tmp_path, False))
    resumed = processes.values(processes.run(2, _job, tmp_path, True))
    (w, sizes, scheduled, noise, unknown), (again, rest, at, *_) = straight[0], resumed[0]
    assert scheduled == at == 40
    assert max(sizes) == 4
    assert sizes[-len(rest) :] == rest
    assert torch.equal(w, again)
    assert noise > 0 or unknown


# ------------------------------------------------------------------------------------------------ one by one


def test_what_is_over_of_a_scheduled_step_counts_in_a_later_one():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=scripted(worth=1.5))
        seen = []
        for batch in data(4):
            loop([batch], model, opt, one.take)
            seen.append(one.engine.sizes.scheduled)
        return seen

    assert threads.run(2, work) == [[1, 2, 1, 2]] * 2


def test_adascale_multiplies_by_the_gain_of_its_paper():
    _, [rig, _] = run(2, data(9), spec=method("adascale", every=1))
    balance = rig.engine.method.balance
    square, trace = balance.noise.corrected()
    want = (trace / 6 + square) / (trace / 12 + square)
    size = rig.engine.sizes._size()
    assert balance.rate(size) == pytest.approx(want)
    assert balance.counts(size) == balance.rate(size)
    assert 1.0 < want <= 2.0
    assert balance.rate(size._replace(samples=6.0, units=1)) == pytest.approx(1.0)


def noisy(scale, low=1):
    """An adaptive batch that has heard this noise scale often enough."""
    balance = method("adaptive_batch", low=low, high=6, hold=2, lr_rule="linear").copy().balance
    hear(balance, scale)
    return balance


def hear(balance, scale):
    for name, value in (("square", 1.0), ("trace", scale), ("seen", 1000)):
        balance.state[f"noise {name}"] = value
    balance.state.commit()


def steps(balance, count, batch=12.0):
    for _ in range(count):
        m = balance.multiple()
        balance.made(StepSize(multiple=m, samples=m * batch, units=2 * m, rate=0.1))
        balance.state.commit()
    return balance.multiple()


def test_the_batch_follows_the_noise_scale_within_its_bounds():
    balance = noisy(12.0 * 4.5)
    assert [steps(balance, 1) for _ in range(6)] == [1, 2, 2, 4, 4, 4], "doubled after `hold` steps, up to 4.5 batches"
    hear(balance, 12.0 * 1000)
    assert steps(balance, 9) == 6, "the upper bound itself"
    hear(balance, 12.0 * 4.1)
    assert steps(balance, 9) == 6, "not far enough below"
    hear(balance, 12.0 * 3.9)
    assert steps(balance, 9) == 3
    hear(balance, 0.001)
    assert steps(balance, 9) == 1
    assert steps(noisy(0.001, low=3), 9) == 3, "the lower bound itself"


def test_an_epochs_short_last_step_changes_no_batch():
    balance = noisy(12.0 * 4.5)
    assert steps(balance, 9) == 4
    for _ in range(3):
        balance.made(StepSize(multiple=1, samples=12.0, units=2, rate=0.1))
        balance.state.commit()
    assert balance.multiple() == 4


@pytest.mark.parametrize("rule", ["none", "sqrt", "linear", "adascale"])
def test_learning_rate_rules(rule):
    balance = method("adaptive_batch", lr_rule=rule).copy().balance
    hear(balance, 36.0)
    size = StepSize(multiple=4, samples=48.0, units=8, rate=0.1)
    want = {"none": 1.0, "sqrt": 2.0, "linear": 4.0, "adascale": 4 * (36 + 12) / (36 + 48)}[rule]
    assert balance.rate(size) == pytest.approx(want)
    assert balance.rate(size._replace(multiple=1, samples=12.0)) == 1.0


def test_a_step_counts_against_the_smallest():
    balance = method("adaptive_batch", low=2, lr_rule="linear").copy().balance
    size = StepSize(multiple=6, samples=72.0, units=12, rate=0.1)
    assert balance.rate(size) == balance.counts(size) == 3.0
    short = size._replace(multiple=1, samples=12.0)  # the last of an epoch
    assert balance.rate(short) == balance.counts(short) == 1.0


def told(balance, norms, window=4, rate=lambda step: 0.1):
    """The batches of each step of windows in which |G| has these values."""
    seen, step = [], 0
    for norm in norms:
        for _ in range(window):
            seen.append(balance.multiple())
            balance.hear(NoiseSample(norm**2, 1.0, 0.0))
            balance.made(StepSize(multiple=seen[-1], samples=12.0, units=2, rate=rate(step)))
            balance.state.commit()
            step += 1
    return seen


def accordion(**knobs):
    return method("accordion_batch", window=4, every=1, high=8, **knobs).copy().balance


def test_small_batches_until_the_norm_rests():
    """|8 − 4|/8 is critical, |4 − 3|/4 is not; and then the batch only grows."""
    assert told(accordion(), [8.0, 4.0, 3.0, 30.0, 3.0]) == [1] * 12 + [8] * 8
    assert told(accordion(threshold=0.2), [8.0, 4.0, 3.0, 2.7, 2.7]) == [1] * 16 + [8] * 4


def test_a_fall_of_the_rate_keeps_them_small():
    rate = lambda step: 0.1 if step < 6 else 0.01  # noqa: E731
    assert told(accordion(), [8.0, 8.0, 8.0], rate=rate) == [1] * 12
    assert told(accordion(), [8.0, 8.0, 8.0]) == [1] * 8 + [8] * 4


def test_decisions_go_to_telemetry():
    balance = accordion()
    told(balance, [8.0, 8.0])
    [choice] = balance.news(8)
    assert (choice.step, choice.knob, choice.value, choice.critical, choice.ratio) == (8, "loader batches", 8, False, 0)
    assert not list(balance.news(9))


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("name", ["adaptive_batch", "accordion_batch"])
def test_bounds(name):
    with pytest.raises(MethodError, match="low=4 is above high=2"):
        method(name, low=4, high=2)
    with pytest.raises(MethodError, match="low=0 is out of range"):
        method(name, low=0)


def test_a_window_without_a_measurement():
    with pytest.raises(MethodError, match="every=20 is above window=10"):
        method("accordion_batch", every=20, window=10)


def test_a_rate_that_cannot_be_seen_to_fall():
    with pytest.raises(MethodError, match="it is a tensor"):
        run(2, data(1), lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1)), spec="accordion_batch")


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize(
    "with_", ["topk", "powersgd", "qsgd", "int8", "per_bucket", "local_sgd", "delayed", "sma", "async_average"]
)
def test_compressed_and_local_gradients_are_refused(name, with_):
    with pytest.raises(MethodError, match=f"{name} needs"):
        method(f"{name}+{with_}")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_one_gradient_a_step_is_refused(name):
    with pytest.raises(MethodError, match="needs two workers, or two micro-batches"):
        run(1, data(1), spec=name)
    run(1, data(2), spec=name, accumulate=2)


def test_an_optimizer_without_a_learning_rate():
    for spec in (method("adascale"), method("adaptive_batch", lr_rule="sqrt")):
        with pytest.raises(MethodError, match="NoRate has none"):
            run(2, data(1), lambda model: NoRate(model.parameters()), spec=spec)
    run(2, data(1), lambda model: NoRate(model.parameters()), spec=method("adaptive_batch", lr_rule="none"))


def test_a_scaler_that_is_not_known_is_refused():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        Rig(comm, model, opt, advice=1)
        scaler = torch.amp.GradScaler("cpu")
        [(x, y)] = data(1)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(opt)

    with pytest.raises(UsageError, match="advice= needs to know your GradScaler"):
        threads.run(2, work)
