"""How many workers pay: the model against brute force, and what is said where it cannot be said."""

from __future__ import annotations

import math

import pytest
from torch import nn

import paceline
import threads
from paceline.errors import MethodError
from paceline.session import session
from paceline.session.advice import FAR, Advice, GoodputModel, advise
from paceline.telemetry.recorder import Lap
from rig import NoRate, Rig, data, loop, mlp, sgd

MODELS = [
    GoodputModel(sample_s=c, exposed_s=e, noise_scale=n)
    for c in (1e-4, 1e-2)
    for e in (0.0, 1e-3, 0.2)
    for n in (50.0, 5000.0)
]


def goodput(model, world_size, batch):
    """Pollux's goodput, written down once more."""
    exposed = 0.0 if world_size == 1 else model.exposed_s
    throughput = batch / (model.sample_s * batch / world_size + exposed)
    return throughput * model.noise_scale / (model.noise_scale + batch)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_best_batch_is_that_of_brute_force(model):
    for world_size in (1, 2, 7, 32):
        grid = [world_size * 1.002**i for i in range(7000)]
        best = max(goodput(model, world_size, batch) for batch in grid)
        assert model.goodput(world_size, model.best_batch(world_size)) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("batch", [None, 256])
def test_the_last_worker_that_pays_is_that_of_brute_force(model, batch):
    limit, found = 40, 1
    for world_size in range(2, limit + 1):
        before, now = (
            max(goodput(model, w, b) for b in ([batch] if batch else [w * 1.005**i for i in range(2800)]))
            for w in (world_size - 1, world_size)
        )
        if (now - before) / (before / (world_size - 1)) >= 0.5 - 1e-9:
            found = world_size
    assert model.most_workers(limit, batch) == pytest.approx(found, abs=0 if batch else 1)


def advised(world_size, steps=12, waits=0.01, told=True, **rig):
    """Advice after some steps of a tenth of a second each."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, **{"advice": 1, **rig})
        loop(data(steps, 24), model, opt, one.take if told else lambda *t: t)
        one.recorder.laps.extend([Lap(0.1, waits, 24 // world_size)] * steps)
        one.engine.settle()
        return advise(one.engine)

    return threads.run(world_size, work)


def test_what_it_rests_on():
    found = advised(2)
    assert found[0] == found[1]
    [advice, _] = found
    assert (advice.unknown, advice.world_size, advice.batch, advice.measurements) == ("", 2, 24.0, 12)
    assert advice.compute_s == pytest.approx(0.1)
    assert advice.exposed_s == pytest.approx(0.01)
    assert advice.samples_per_s == pytest.approx(24 / 0.11)
    assert advice.efficiency == pytest.approx(advice.noise_scale / (advice.noise_scale + 24))
    # c·B/W is 0.2/W: the last W with (W − 1)·(0.2/(W − 1) + 0.01)/(0.2/W + 0.01) − (W − 1) ≥ 1/2
    pays = [w for w in range(3, 25) if (w - 1) * ((0.2 / (w - 1) + 0.01) / (0.2 / w + 0.01) - 1) >= 0.5]
    assert advice.workers == max(pays)
    assert advice.workers_to_add == max(pays) - 2
    said = str(advice)
    assert f"workers pay up to {advice.workers}" in said
    assert f"noise scale {advice.noise_scale:.0f} samples" in said
    assert "100 ms computing and 10 ms waiting" in said


def test_a_step_of_several_batches():
    [advice, _] = advised(2, steps=24, accumulate=2)
    assert (advice.batch, advice.compute_s, advice.exposed_s) == (48.0, pytest.approx(0.2), pytest.approx(0.02))


def test_free_communication_says_how_far_it_looked():
    [advice, _] = advised(2, waits=0.0)
    assert advice.workers_any_batch == 2 * FAR
    assert f"up to {2 * FAR} or more" in str(advice)


def test_one_worker_has_a_noise_scale_and_no_price_of_waiting():
    [advice] = advised(1, steps=24, accumulate=2)
    assert advice.noise_scale > 0
    assert advice.workers == advice.workers_to_add == 0
    assert "one worker does not show what waiting for others would cost" in str(advice)


@pytest.mark.parametrize(
    ("why", "how"),
    [
        ("3 measurements in 3 steps are too few", {"steps": 3}),
        ("nothing is measured", {"advice": 0}),
        ("has one gradient a step", {"world_size": 1}),
        ("with local_sgd a worker's gradients are not those", {"spec": "local_sgd"}),
        ("estimates has another norm than the mean itself", {"spec": "topk"}),
        ("no loader was given", {"told": False}),
    ],
)
def test_when_it_cannot_say(why, how):
    found = advised(**{"world_size": 2, **how})
    assert why in found[0].unknown
    assert str(found[0]).startswith("no advice: ")
    assert found[0].workers_to_add == 0


def test_noise_that_hides_the_gradient():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, advice=1)
        loop(data(12, 24), model, opt, rig.take)
        rig.recorder.laps.extend([Lap(0.1, 0.0, 12)] * 12)
        rig.engine.settle()
        rig.engine.method.balance.state.real["noise square"] = -1.0
        return advise(rig.engine)

    assert "lost in its noise, by 12 measurements" in threads.run(2, work)[0].unknown


def test_a_laps_figures_come_from_the_recorder():
    from paceline.telemetry.recorder import Recorder

    recorder = Recorder(None, 0)
    recorder.start_lap(8, 0.5)
    recorder.wait_s += 0.25
    recorder.end_lap()
    [lap] = recorder.laps
    assert (lap.wait_s, lap.samples) == (0.25, 8)
    assert 0.25 <= lap.compute_s < 0.5


def test_advice_before_prepare():
    with pytest.raises(paceline.UsageError, match="before"):
        paceline.advice()


@pytest.mark.parametrize(
    ("optimizer", "knobs", "what"),
    [
        (sgd, {"method": "adascale"}, "needs two workers"),
        (sgd, {"method": "adaptive_batch", "low": 3, "high": 2}, "low=3 is above high=2"),
        (lambda m: NoRate(m.parameters()), {"method": "adascale", "accumulate": 2}, "NoRate has none"),
    ],
)
def test_bad_input_is_refused_before_workers_meet(optimizer, knobs, what, monkeypatch):
    monkeypatch.setattr(session, "open_session", lambda *args: pytest.fail("the workers were about to meet"))
    model = nn.Linear(2, 2)
    with pytest.raises(MethodError, match=what):
        paceline.prepare(model, optimizer(model), **knobs)


def test_a_setting_that_is_no_number_of_steps():
    model = nn.Linear(2, 2)
    with pytest.raises(paceline.UsageError, match="advice=-1 is not a whole number of 0 or more"):
        paceline.prepare(model, sgd(model), advice=-1)


def test_an_advice_of_nothing_is_text():
    assert str(Advice(world_size=3, unknown="there is no data")) == "no advice: there is no data"
    assert math.isfinite(GoodputModel(sample_s=1e-3, exposed_s=0.0, noise_scale=1.0).best_batch(4))
