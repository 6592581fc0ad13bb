"""accordion: the paper's rule for each layer, and what must not depend on it: nothing is lost, all workers agree."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import threads
from laws_table import BUCKETS, fresh, together, vector
from marks import slow
from paceline.core.parts import Reducer
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.reducers.accordion import Accordion
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.per_bucket import PerBucket
from paceline.reducers.powersgd import PowerSGD
from paceline.reducers.qsgd import QSGD
from paceline.reducers.topk import TopK
from paceline.reducers.warmup import Warmup
from paceline.telemetry.events import Choice
from rig import Rig, alone, close, data, loop, mlp, same, sgd, train

WINDOW, STEPS = 8, 48
LOW, HIGH = 0.9, 0.2


@dataclass(kw_only=True)
class Watched(TopK):
    """Notes the setting with which each bucket's first parameter was reduced in each step that began."""

    name: ClassVar[str] = "watched"

    def __post_init__(self):
        super().__post_init__()
        self.seen = []  # shared by the copies that a policy makes

    async def mean(self, b, x, comm):
        self.seen.append((b.step, b.slots[0].name, self.ratio))
        return await super().mean(b, x, comm)


class Layers(nn.Module):
    """Gradients are what the loss says: the weights' own do not depend on them."""

    def __init__(self):
        super().__init__()
        self.steady = nn.Parameter(torch.zeros(20, 10))
        self.restless = nn.Parameter(torch.zeros(30, 10))
        self.bias = nn.Parameter(torch.zeros(30))
        self.scale = nn.Parameter(torch.zeros(3, 3))  # a matrix, but a small one


FACTORS = {"steady": [1.0, 1.1, 1.2, 1.1, 1.2, 1.3], "restless": [1.0, 3.0, 9.0, 9.5, 3.0, 3.0]}
LAYERS = ("steady", "restless", "bias", "scale")


def gradient(name, step, rank, shape):
    g = torch.Generator().manual_seed(1000 * step + 10 * LAYERS.index(name) + rank)
    return (1.0 + 0.2 * torch.randn(shape, generator=g)) * FACTORS.get(name, [1.0] * 6)[step // WINDOW]


def descend(comm, spec, *, rates=(), spoilt=(), tell=None):
    """STEPS steps of plain SGD on given gradients: the agreed gradients of each, and the engine. spoilt: steps that are
    tried with a NaN first. tell: is given every event.
    """
    model = Layers()
    first, *rest = model.parameters()
    opt = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=1.0)
    rig = Rig(comm, model, opt, spec=spec, bucket_mb=1.0)  # layers share a bucket, if nothing keeps them apart
    if tell is not None:
        rig.recorder.emit = tell
    means = []
    for step in range(STEPS):
        opt.param_groups[1]["lr"] = rates[step] if step < len(rates) else 1.0
        for attempt in range(1 + (step in spoilt)):
            bad = step in spoilt and attempt == 0
            terms = [(p * gradient(n, step, comm.rank, p.shape)).sum() for n, p in model.named_parameters()]
            (sum(terms) * (math.nan if bad and comm.rank == 1 else 1.0)).backward()
            if not bad:
                means.append(
                    {n: p.grad.double().clone() for n, p in model.named_parameters() if type(p.grad) is torch.Tensor}
                )
            opt.step()
            opt.zero_grad()
    return means, rig.engine


def watched(**knobs):
    return Method(
        reducer=Accordion(
            **{"of": ErrorFeedback(of=Watched(ratio=LOW)), "high": HIGH, "window": WINDOW, "smallest": 100, **knobs}
        )
    )


def inner(engine):
    return next(part for part in engine.method.reducer.parts() if isinstance(part, Watched))


def papers_rule(means, rates, names):
    """Which steps use low compression for a layer, by the paper's rule in float64; before there are two norms: all."""
    norms = [
        torch.cat([sum(m[n] for m in means[i : i + WINDOW]).flatten() for n in names]).norm().item()
        for i in range(0, STEPS, WINDOW)
    ]
    low = []
    for k in range(len(norms)):
        fell = k > 0 and rates[k * WINDOW] < rates[k * WINDOW - 1]  # here the rate changes between windows only
        low += [k < 2 or fell or abs(norms[k - 2] - norms[k - 1]) / norms[k - 2] >= 0.5] * WINDOW
    return low


@pytest.mark.parametrize("world_size", [2, slow(3)])
@pytest.mark.parametrize("drop", [None, 40])
@pytest.mark.parametrize("layout", ["replicated", "zero2"])
def test_every_layer_goes_by_the_papers_rule(world_size, drop, layout):
    rates = [1.0 if drop is None or step < drop else 0.1 for step in range(STEPS)]
    plain, sharded = watched(), method(layout) if layout != "replicated" else Method()

    def work(comm):
        means, engine = descend(comm, Method(reducer=plain.reducer, layout=sharded.layout), rates=rates)
        return means, inner(engine).seen

    results = threads.run(world_size, work)
    assert all(seen == results[0][1] for _, seen in results)
    means = results[0][0]
    if layout == "zero2":  # p.grad is a shard there; the means do not depend on the layout
        means = threads.run(world_size, lambda comm: descend(comm, watched(), rates=rates)[0])[0]
    regimes = {}
    for names in (("steady",), ("restless",), ("bias", "scale")):
        low = papers_rule(means, rates, names)
        [ratios] = {tuple(r for _, name, r in seen if name in names) for _, seen in results}
        assert ratios == tuple(LOW if critical else HIGH for critical in low), names
        regimes[names[0]] = "".join("C" if critical else "-" for critical in low[::WINDOW])
    end = "C" if drop else "-"
    assert regimes == {"steady": f"CC---{end}", "restless": "CCCC-C", "bias": f"CC---{end}"}


@dataclass(kw_only=True)
class Dirty(Watched):
    """Leaves much behind the gradients."""

    name: ClassVar[str] = "dirty"

    async def mean(self, b, x, comm):
        reduced = await super().mean(b, x, comm)
        assert b.flat.numel() > b.n
        reduced.mean[b.n :] = 1e3
        return reduced


def test_a_norm_is_of_the_gradients_alone():
    def work(comm, of):
        _, engine = descend(comm, watched(of=ErrorFeedback(of=of(ratio=LOW))))
        return inner(engine).seen

    assert threads.run(2, lambda comm: work(comm, Dirty)) == threads.run(2, lambda comm: work(comm, Watched))


def test_a_step_that_does_not_count_leaves_no_trace():
    def work(comm, spoilt):
        told = []
        means, engine = descend(comm, watched(), spoilt=spoilt, tell=told.append)
        saved = [part.state.save(engine.buckets) for part in engine.method.reducer.parts()]
        return means, saved, [(e.step, e.layer, e.value, e.ratio) for e in told if isinstance(e, Choice)]

    want = threads.run(2, lambda comm: work(comm, ()))
    with pytest.warns(UserWarning, match="is skipped"):
        got = threads.run(2, lambda comm: work(comm, (7, 16, 25, 47)))  # ends of windows, and a beginning
    for (means, saved, told), (means_, saved_, told_) in zip(want, got, strict=True):
        assert told == told_
        assert all(torch.equal(a[n], b[n]) for a, b in zip(means, means_, strict=True) for n in LAYERS)
        for a, b in zip(saved, saved_, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def test_telemetry_hears_of_every_decision_alike_on_all_workers():
    rates = [1.0] * 36 + [0.5] * 12  # falls in the middle of a window

    def work(comm):
        told = []
        descend(comm, watched(), rates=rates, tell=told.append)
        return [(e.step, e.layer, e.knob, e.value, e.critical, e.ratio) for e in told if isinstance(e, Choice)]

    one, other = threads.run(2, work)
    assert one == other
    assert {knob for _, _, knob, *_ in one} == {"ratio"}
    by = {layer: [(step, value) for step, name, _, value, *_ in one if name == layer] for layer in LAYERS}
    steps = [8, 16, 24, 32, 37, 40, 48]
    assert by["restless"] == list(zip(steps, [LOW, LOW, LOW, HIGH, LOW, LOW, HIGH], strict=True))
    assert by["steady"] == by["bias"] == by["scale"]
    assert by["steady"] == list(zip(steps, [LOW, HIGH, HIGH, HIGH, LOW, LOW, HIGH], strict=True))
    ratios = [ratio for _, layer, *_, ratio in one if layer == "restless"]
    assert ratios[0] is ratios[4] is None
    assert ratios[1] == pytest.approx(2.0, rel=0.3)


def test_a_growing_loss_scale_changes_nothing():
    """Around a reducer that keeps nothing too: sums of several steps are in true units."""
    spec = Method(reducer=Accordion(of=Watched(ratio=LOW), high=HIGH, window=4, smallest=0, threshold=2.0))

    def scaled(comm, growth):
        model = mlp()
        opt = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth)
        rig = Rig(comm, model, opt, spec=spec, scaler=scaler)
        for x, y in data(16):
            x, y = rig.take(x, y)
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return inner(rig.engine).seen

    steady, growing = (threads.run(2, lambda comm, g=growth: scaled(comm, g)) for growth in (1000, 1))
    assert steady == growing
    assert {ratio for _, _, ratio in steady[0]} == {LOW, HIGH}


def switching(of, **knobs):
    """Around `of`: judged every second step, always critical at first and hardly ever later."""
    return Accordion(of=of, threshold=1e9, window=2, smallest=0, **knobs)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("topk", {"ratio": 0.2}),
        ("randomk", {"ratio": 0.2}),
        ("powersgd", {"rank": 4}),
        ("powersgd", {"rank": 4, "wire": "int8"}),
        ("qsgd", {"bits": 8}),
    ],
)
def test_bytes_are_those_of_the_setting_and_nothing_is_lost_when_it_changes(name, knobs, where):
    """What the wire counted is what `sends` said before; what is left over lives on from setting to setting."""

    def work(comm):
        feedback = lambda of: ErrorFeedback(of=of, anyway=True)  # noqa: E731
        of = fresh(name, knobs)
        whole = feedback(switching(of)) if where == "outside" else switching(feedback(of))
        b, rates = BUCKETS[3](comm.world_size), [1.0] * 8 + [0.5] * 4
        given, got, sizes = torch.zeros(b.n), torch.zeros(b.n), []
        for b.step, b.rate in enumerate(rates):
            before, x, said = comm.sent, vector(b, 10 * b.step + comm.rank), whole.sends(b, comm.world_size)
            given += x[: b.n]
            got += together(whole.mean(b, x, comm))[0].mean[: b.n]
            for part in whole.parts():
                part.state.commit()
            assert comm.sent - before == said
            sizes.append(said)
        assert sizes[0] == sizes[2] == sizes[8] > sizes[4] == sizes[6] == sizes[10], sizes
        assert sizes[1] - sizes[0] == 16 * (comm.world_size - 1) // comm.world_size  # the norm
        kept = next(part for part in whole.parts() if isinstance(part, ErrorFeedback)).state[0, "e"]
        return given, got, kept[: b.n]

    results = threads.run(3, work)
    given, got, kept = map(torch.stack, zip(*results, strict=True))
    assert torch.equal(got, got[0].expand_as(got))
    torch.testing.assert_close(given.mean(0), got[0] + kept.mean(0), rtol=1e-4, atol=1e-4)


def test_powersgd_goes_on_from_the_directions_it_knows():
    def work(comm):
        b, whole = BUCKETS[3](comm.world_size), switching(PowerSGD(rank=3), high=1)
        known = []
        for b.step, b.rate in enumerate([1.0] * 6 + [0.5]):
            together(whole.mean(b, vector(b, comm.rank), comm))
            whole.of.state.commit()
            whole.state.commit()
            known.append(whole.of.state["p0", "Q"])
        assert [len(q) for q in known] == [3, 3, 3, 3, 1, 1, 3]
        along = [nn.functional.cosine_similarity(a[0], b[0], dim=0).abs() for a, b in itertools.pairwise(known)]
        assert min(along[3:]) > 0.5, along
        return known[-1]

    same(threads.run(2, work))


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("spec", ["accordion+topk", "accordion+powersgd"])
def test_layouts_change_nothing(layout, spec):
    knobs = {"window": 2, "smallest": 50, "threshold": 0.2, "low": {"t": 0.5, "p": 2}[spec[10]]}
    batches = data(9)
    want = same(train(3, batches, spec=spec, knobs=knobs))
    close(same(train(3, batches, spec=f"{layout}+{spec}", knobs=knobs)), want, tol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, slow(3)])
def test_dense_limit(world_size):
    """Always low, and low is everything: as the exact mean."""
    spec = Method(reducer=Accordion(of=TopK(ratio=1.0), threshold=0.0, window=2, smallest=50))
    close(same(train(world_size, data(8), spec=spec)), alone(data(8)), tol=2e-4)


def test_under_local_sgd_a_window_counts_agreements():
    spec = Method(reducer=watched(smallest=0, window=4, threshold=9.0).reducer, sync=method("local_sgd", every=2).sync)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec)
        loop(data(20), model, opt, rig.take)
        return torch.tensor([r for _, name, r in inner(rig.engine).seen if name == "0.weight"])

    ratios = same(threads.run(2, work))
    assert ratios.tolist() == pytest.approx([LOW] * 8 + [HIGH] * 2)


def test_what_both_settings_send_alike_has_no_regime_and_keeps_its_way():
    """Vectors under powersgd, and what is exact anyway: a worker that wants its shard alone gets no more."""

    def work(comm):
        whole = Accordion(of=PerBucket(names="p0"), window=1)
        b = BUCKETS[0](comm.world_size)
        together(whole.mine(b, vector(b, comm.rank), comm))
        assert comm.sent == b.flat.nbytes * (comm.world_size - 1) // comm.world_size
        assert not whole.state

    threads.run(2, work)


def test_knobs_of_two_policies_meet():
    """A schedule around it moves the value that low and high go by."""
    b = BUCKETS[3](2)
    whole = Warmup(of=Accordion(of=ErrorFeedback(of=PowerSGD(rank=4))), schedule="rank", start=16, stages=1, steps=5)

    def rank():
        chosen = whole.choose(b).choose(b)
        return next(part.rank for part in chosen.parts() if isinstance(part, PowerSGD))

    assert [rank() for b.step in (0, 4, 5)] == [16, 16, 4]
    assert whole.of.of.of.rank == 4


@pytest.mark.parametrize(
    ("reducer", "knobs", "words"),
    [
        (PowerSGD(), {"low": 1, "high": 4}, r"low=1 compresses more than high=4\n.*rank=1 and .*\n.*swap low and high"),
        (TopK(), {"low": 0.01, "high": 0.99}, "low=0.01 compresses more than high=0.99"),
        (QSGD(), {"low": 2, "high": 8}, "low=2 compresses more than high=8"),
        (PowerSGD(), {"low": 2, "high": 2}, r"low=2 compresses as much as high=2\n.*\n.*that differ"),
        (PowerSGD(rank=1), {}, "low=1 compresses as much as high=1"),
        (PowerSGD(), {"low": 2.5}, "accordion: powersgd: rank=2.5 has the wrong type"),
        (PowerSGD(), {"low": 5000}, "accordion: powersgd: rank=5000 is out of range"),
        (QSGD(), {"low": 8, "high": 3}, "accordion: qsgd: bits=3 is not a choice"),
        (TopK(), {"low": -1.0}, "low=-1.0 is out of range"),
        (TopK(), {"turn": "rank"}, r"topk has no knob 'rank' that could be turned\n.*\n.*known: ratio"),
        (TopK(), {"window": 0}, "window=0 is out of range"),
        (TopK(), {"threshold": -0.1}, "threshold=-0.1 is out of range"),
        (TopK(), {"fall": 1.5}, "fall=1.5 is out of range"),
    ],
)
def test_bad_knobs_are_refused(reducer, knobs, words):
    with pytest.raises(MethodError, match=words):
        Accordion(of=reducer, **knobs)


@pytest.mark.parametrize("spec", ["accordion+half", "accordion+exact", "accordion+int8"])
def test_a_reducer_without_a_number_is_refused(spec):
    with pytest.raises(MethodError, match="has no knob that could be turned"):
        method(spec)


def test_a_learning_rate_that_is_a_tensor_is_refused():
    def work(comm):
        model = mlp()
        with pytest.raises(MethodError, match="cannot see the learning rate fall"):
            Rig(comm, model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), spec="accordion")

    threads.run(1, work)


@pytest.mark.parametrize("spec", ["gossip+accordion", "async_average+accordion", "hogwild+accordion"])
def test_workers_that_do_not_agree_have_no_common_regime(spec):
    with pytest.raises(MethodError, match=r"does not go together|needs exact mean"):
        method(spec)


def test_by_name_it_wraps_the_recipe():
    assert str(method("accordion+powersgd", low=4, high=1)) == (
        "accordion(of=error_feedback(of=powersgd), low=4.0, high=1.0)"
    )
    assert isinstance(method("local_sgd+accordion+topk").reducer, Reducer)
