"""Reducers around reducers: schedules, choice by parameter, error feedback; and state that outlives its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import threads
from laws_table import BUCKETS, fresh, together, vector
from paceline.core.bucket import Bucket
from paceline.core.cutting import cut
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.core.state import State
from paceline.errors import MethodError, MismatchError
from paceline.method import Method, method
from paceline.reducers.accordion import Accordion
from paceline.reducers.dgc import DGC
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.exact import Exact
from paceline.reducers.half import Half
from paceline.reducers.int8 import Int8
from paceline.reducers.per_bucket import PerBucket
from paceline.reducers.powersgd import PowerSGD
from paceline.reducers.qsgd import QSGD
from paceline.reducers.topk import TopK
from paceline.reducers.warmup import Warmup
from rig import Rig, data, loop, mlp, same


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---------------------------------------------------------------------------------------------------- warmup


@dataclass(kw_only=True)
class Spy(Reducer):
    """Awaits twice and notes its knobs before, between and after."""

    name: ClassVar[str] = "spy"
    ratio: float = 0.001
    rank: int = 4

    async def mean(self, b, x, comm):
        seen = [self.ratio]
        for _ in range(2):
            x = await comm.mean(x)
            seen.append(self.ratio)
        self.state[b.index, "seen"] = seen
        return Reduced(x)

    def sends(self, b, world_size):
        return round(1e6 * self.ratio)


def scheduled(steps, **knobs):
    """The value the reducer inside has at each step."""
    b, warm = BUCKETS[0](2), Warmup(steps=8, **knobs)
    values = []
    for b.step in steps:
        turned = warm.choose(b)
        values.append(next(getattr(p, warm.schedule) for p in turned.parts() if hasattr(p, warm.schedule)))
    return values


def test_a_ratio_falls_by_equal_factors():
    want = [0.001 ** (e / 5) for e in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    assert want[::2] == pytest.approx([0.251, 0.0631, 0.0158, 0.00398, 0.001], rel=4e-3)
    assert scheduled(range(10), of=TopK(ratio=0.001), schedule="ratio") == pytest.approx(want)
    deep = PerBucket(of=ErrorFeedback(of=TopK(ratio=0.001)))
    assert scheduled(range(10), of=deep, schedule="ratio") == pytest.approx(want)
    assert scheduled([0, 8], of=TopK(ratio=0.01), schedule="ratio", start=0.16, stages=1) == pytest.approx([0.16, 0.01])


def test_whole_numbers_and_choices_take_legal_values():
    assert scheduled([0, 2, 4, 6, 8], of=PowerSGD(rank=4), schedule="rank") == [1024, 256, 64, 16, 4]
    assert scheduled([0, 2, 4, 6, 8], of=PowerSGD(rank=4), schedule="rank", start=64) == [64, 32, 16, 8, 4]
    assert scheduled([0, 2, 4, 6, 8], of=PowerSGD(rank=4), schedule="rank", start=1) == [1, 1, 2, 3, 4]
    assert scheduled([0, 7, 8], of=PowerSGD(rank=32), schedule="rank", start=8, stages=1) == [8, 8, 32]
    assert scheduled([0, 2, 4, 6, 8], of=QSGD(bits=2), schedule="bits") == [8, 4, 4, 2, 2]
    assert scheduled([0], of=QSGD(bits=2), schedule="bits", start=5.8) == [8], "nearest by factor: 8/5.8 < 5.8/4"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"of": TopK(), "schedule": "ration"}, "has no knob 'ration'.*\n.*\n.*did you mean 'ratio'"),
        ({"of": ErrorFeedback(), "schedule": "anyway"}, "has no knob 'anyway'"),
        ({"of": Half(), "schedule": "dtype"}, "has no knob 'dtype'.*\n.*\n.*leave schedule empty"),
        ({"of": PowerSGD(), "schedule": "rank", "start": 1e6}, "out of range"),
        ({"of": TopK(), "schedule": "ratio", "start": -1.0}, "out of range"),
        ({"of": Spy(), "schedule": "rank"}, "no upper end.*\n.*give start="),
    ],
)
def test_what_cannot_be_scheduled_is_refused(knobs, words):
    with pytest.raises(MethodError, match=words):
        Warmup(**knobs)


def test_buckets_under_way_together_have_each_their_own_value():
    """Nothing of the schedule stays in the part: not between two awaits of another bucket, not after."""

    def work(comm):
        spy = Spy()
        whole = Warmup(of=spy, schedule="ratio", start=0.25, steps=8)
        before = str(Method(reducer=whole)), whole.config()
        buckets = [BUCKETS[0](comm.world_size) for _ in range(3)]
        for i, b in enumerate(buckets):
            b.index, b.step = i, 4 * i
        together(*(whole.mean(b, vector(b, comm.rank), comm) for b in buckets))
        assert (str(Method(reducer=whole)), whole.config()) == before
        assert spy.ratio == 0.001
        for b, value in zip(buckets, (0.25, 0.015811, 0.001), strict=True):
            assert spy.state[b.index, "seen"] == pytest.approx([value] * 3, rel=1e-4)
            assert whole.sends(b, 2) == round(1e6 * spy.state[b.index, "seen"][0])

    threads.run(2, work)


def test_every_value_uses_the_same_memory():
    """A mean in fresh memory would cost more than the exchange."""

    def work(comm):
        b, whole = BUCKETS[3](comm.world_size), Warmup(of=PowerSGD(rank=4), schedule="rank", start=1, stages=2, steps=4)
        places = set()
        for b.step in range(6):
            places.add(together(whole.mean(b, vector(b, comm.rank), comm))[0].mean.data_ptr())
            whole.of.state.commit()
        return places

    assert [len(places) for places in threads.run(2, work)] == [1, 1]


@pytest.mark.parametrize("name", ["topk", "randomk", "qsgd", "powersgd"])
def test_bytes_follow_the_schedule_and_nothing_is_lost(name):
    """What the wire counted is what `sends` says at every step, and leftovers live on from stage to stage."""
    knob, final, start = {"powersgd": ("rank", 1, 8), "qsgd": ("bits", 2, 0)}.get(name, ("ratio", 0.01, 0))

    def work(comm):
        b, feedback = BUCKETS[3](comm.world_size), ErrorFeedback(of=fresh(name, {knob: final}), anyway=True)
        whole = Warmup(of=feedback, schedule=knob, start=start, steps=6)
        given, got, sizes = torch.zeros(b.n), torch.zeros(b.n), []
        for b.step in range(8):
            before, x = comm.sent, vector(b, 10 * b.step + comm.rank)
            given += x[: b.n]
            got += together(whole.mean(b, x, comm))[0].mean[: b.n]
            for part in whole.parts():
                part.state.commit()
            assert comm.sent - before == whole.sends(b, comm.world_size)
            sizes.append(comm.sent - before)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1]
        return given, got, feedback.state[0, "e"][: b.n]

    given, got, kept = map(torch.stack, zip(*threads.run(2, work), strict=True))
    torch.testing.assert_close(given.mean(0), got[0] + kept.mean(0), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- per_bucket


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embed(x).mean(1))))


def one_step(spec):
    """Each parameter after a step on two workers."""
    g = torch.Generator().manual_seed(3)
    batch = torch.randint(0, 12, (8, 5), generator=g), torch.randint(0, 3, (8,), generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = Words()

    def work(comm):
        model = Words()
        model.load_state_dict(first.state_dict())
        opt = plain(model)
        rig = Rig(comm, model, opt, spec=spec, bucket_mb=1.0)
        loop([batch], model, opt, rig.take)
        kinds = [{method(spec).reducer.kind(s.name, s.param) for s in b.slots} for b in rig.engine.buckets]
        assert all(len(kind) == 1 for kind in kinds)
        return {name: p.detach() for name, p in model.named_parameters()}

    results = threads.run(2, work)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return results[0]


def small(**knobs):
    return PerBucket(**{"of": ErrorFeedback(of=TopK(ratio=0.02)), "smallest": 0, **knobs})


@pytest.mark.parametrize(
    ("reducer", "exact"),
    [
        (small(), {"inner.bias", "head.bias"}),
        (small(names="embed.*, head.w*"), {"inner.bias", "head.bias", "embed.weight", "head.weight"}),
        (small(smallest=100), {"inner.bias", "head.bias", "embed.weight", "head.weight"}),
        (small(dims=0), set()),
        (small(other=small(names="embed.*", dims=0), names="embed.*"), {"embed.weight"}),
        (Warmup(of=small(), steps=1, schedule="ratio", start=0.02), {"inner.bias", "head.bias"}),
        (small(of=Warmup(of=DGC(ratio=0.02), steps=1, schedule="ratio", start=0.02)), {"inner.bias", "head.bias"}),
    ],
    ids=["vectors", "names", "smallest", "nobody", "nested", "inside", "outside"],
)
def test_some_are_exact_while_others_are_compressed(reducer, exact):
    want, seen = one_step("exact"), one_step(Method(reducer=reducer))
    assert {name for name in want if torch.equal(want[name], seen[name])} == exact


def test_a_choice_is_no_exact_mean_and_refuses_by_what_is_inside():
    """The engine sends a word along with exact means; one reducer that is exact must not speak for the other."""
    assert Fact.EXACT_MEAN in Warmup(of=Exact()).facts()
    assert Fact.EXACT_MEAN not in Warmup(of=PerBucket(other=Warmup(of=Exact()))).facts()
    with pytest.raises(MethodError, match="error_feedback does not go together with qsgd"):
        Method(reducer=PerBucket(of=ErrorFeedback(of=QSGD())))


def test_kinds_never_share_a_bucket_and_are_numbered_as_they_fill():
    """A bucket must not wait behind one that fills later: the order of backward lets nobody overtake."""
    named = [(f"{i}{k}", nn.Parameter(torch.zeros(s))) for i in range(3) for k, s in (("b", (20,)), ("w", (20, 20)))]
    buckets = list(cut(named, 2, 1600, kind=lambda name, p: p.dim()))
    assert [[s.name for s in b.slots] for b in buckets] == [["2w"], ["1w"], ["0w"], ["2b", "1b", "0b"]]
    assert [b.index for b in buckets] == [0, 1, 2, 3]


def test_a_wrappers_kinds_are_those_inside():
    matrix, bias = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))
    for reducer in (DGC(), Warmup(of=DGC()), ErrorFeedback(of=PerBucket(smallest=1)), PerBucket(smallest=9)):
        assert reducer.kind("w", matrix) != reducer.kind("b", bias)
    assert Exact().kind("w", matrix) == Exact().kind("b", bias)


# ---------------------------------------------------------------------------------------------------- error feedback


def test_unbiased_reducers_are_fed_back_only_if_asked():
    with pytest.raises(MethodError, match=r"(?s)error_feedback does not go together with qsgd.*anyway=True"):
        Method(reducer=ErrorFeedback(of=QSGD()))
    assert str(Method(reducer=ErrorFeedback(of=QSGD(), anyway=True))).startswith("error_feedback(of=qsgd, anyway=True")
    assert Fact.UNBIASED in ErrorFeedback.refuses
    for inner in (DGC(), ErrorFeedback(), Warmup(of=DGC())):
        with pytest.raises(MethodError, match="does not go together"):
            Method(reducer=ErrorFeedback(of=inner, anyway=True))


@pytest.mark.parametrize("reducer", [ErrorFeedback(), ErrorFeedback(of=PowerSGD(rank=1)), DGC(), DGC(nesterov=True)])
@pytest.mark.parametrize("shape", [(40, 30), (70,)])
def test_what_was_committed_is_never_written_to(reducer, shape):
    """Also not through the mean or x, which belong to whoever asked; and x itself becomes nobody's memory."""

    def work(comm):
        b = Bucket(0, [("p", nn.Parameter(torch.zeros(shape)))], comm.world_size)
        own = Method(reducer=reducer).copy().reducer
        for step in range(3):
            before = [{k: (v, v.clone()) for k, v in part.state.real.items()} for part in own.parts()]
            x = vector(b, 5 * step + comm.rank)
            given = together(own.mean(b, x, comm))[0].mean
            for part in own.parts():
                part.state.commit()
            kept = [v.clone() for part in own.parts() for v in part.state.values()]
            given.fill_(7.0)
            x.fill_(7.0)
            assert all(torch.equal(now, then) for part in before for now, then in part.values())
            now = [v for part in own.parts() for v in part.state.values()]
            assert all(torch.equal(a, c) for a, c in zip(kept, now, strict=True))

    threads.run(2, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_left_is_made_of_the_one_vector_it_allocates(dtype):
    """e is fp32 whatever the gradients are, and it is the very vector that the reducer inside was given."""
    given = []

    class Watched(TopK):
        async def mean(self, b, x, comm):
            given.append((x, x.clone()))
            return await super().mean(b, x, comm)

    def work(comm):
        b = Bucket(0, [("p", nn.Parameter(torch.zeros(50, 4, dtype=dtype)))], comm.world_size)
        own = ErrorFeedback(of=Watched(ratio=0.1))
        for step in range(2):
            x = vector(b, step)
            e = own.state.get((0, "e"), 0.0)
            mean = together(own.mean(b, x.clone(), comm))[0].mean
            assert mean.dtype == dtype
            assert own.state[0, "e"].dtype == torch.float32
            assert own.state[0, "e"].data_ptr() == given[-1][0].data_ptr()
            torch.testing.assert_close(given[-1][1], x.float() + e)

    threads.run(1, work)


@pytest.mark.parametrize("name", ["topk", "powersgd", "sign", "int8"])
def test_the_mean_is_made_where_the_gradients_were(name):
    """They are not needed once g + e is made: a vector and two passes over memory less."""

    def work(comm):
        b, own = BUCKETS[3](comm.world_size), ErrorFeedback(of=fresh(name, {}))
        for step in range(2):
            x = b.flat.copy_(vector(b, step))
            assert together(own.mean(b, x, comm))[0].mean.data_ptr() == b.flat.data_ptr()

    threads.run(2, work)


def test_e_is_over_once_everything_is_sent():
    """A reducer that sends all of g + e has nothing left: e must not be sent a second time."""

    class Fitful(TopK):
        async def mean(self, b, x, comm):
            return await super().mean(b, x, comm) if b.step % 2 == 0 else Reduced(await comm.mean(x))

    def work(comm):
        b, own = BUCKETS[0](comm.world_size), ErrorFeedback(of=Fitful())
        given, got = torch.zeros(b.n), torch.zeros(b.n)
        for b.step in range(4):
            x = vector(b, 10 * b.step + comm.rank)
            given += x[: b.n]
            got += together(own.mean(b, x, comm))[0].mean[: b.n]
            own.state.commit()
        return given, got

    given, got = map(torch.stack, zip(*threads.run(2, work), strict=True))
    torch.testing.assert_close(got[0], given.mean(0))


# ---------------------------------------------------------------------------------------------------- facts of a job


def test_what_a_part_needs_of_the_job_is_asked_where_there_is_one():
    @dataclass(kw_only=True)
    class Picky(Reducer):
        name: ClassVar[str] = "picky"
        needs: ClassVar = {Fact.SGD: "nothing else will do; use SGD"}

    whole = Method(reducer=Picky())
    whole.check(frozenset({Fact.SGD}))
    for job in ({"optimizer:Adam"}, set()):
        with pytest.raises(MethodError, match="picky needs optimizer:SGD"):
            whole.check(frozenset(job))


# ---------------------------------------------------------------------------------------------------- save and resize


def spec_of(name):
    if name == "dgc":
        return method("dgc", ratio=0.1, warmup=6)
    if name == "per_bucket":
        return Method(reducer=small(other=ErrorFeedback(of=Half()), names="0.*"))
    if name == "accordion":
        return Method(reducer=Accordion(of=ErrorFeedback(of=TopK(ratio=0.4)), threshold=0.3, window=3, smallest=50))
    return method(name)


def go_on(world_size, name, batches, *, model=None, states=None, step=0, bucket_mb=0.0005):
    """Train on `world` workers from these weights and these states, one a part; the weights and everyone's saves."""

    def work(comm):
        own = mlp()
        if model is not None:
            nn.utils.vector_to_parameters(model.clone(), own.parameters())
        opt = plain(own)
        rig = Rig(comm, own, opt, spec=spec_of(name).copy(), bucket_mb=bucket_mb)
        rig.engine.ex.step = step
        parts = list(rig.engine.method.parts())
        mine = states[comm.rank] if isinstance(states, list) else states
        for i, part in enumerate(parts if mine else ()):
            part.state.load(mine[i], rig.engine.buckets)
        begun = {i: part.state.save(rig.engine.buckets) for i, part in enumerate(parts)}
        end = loop(batches, own, opt, rig.take)
        return end, begun, {i: part.state.save(rig.engine.buckets) for i, part in enumerate(parts)}

    ends, begun, saves = zip(*threads.run(world_size, work), strict=True)
    return same(list(ends)), list(begun), list(saves)


def average(saves):
    """Each saved vector's mean over the workers, in float64."""
    return {
        (part, key): torch.stack([saved[part][key] for saved in saves]).double().mean(0)
        for part in saves[0]
        for key, value in saves[0][part].items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", ["topk", "powersgd", "sign", "dgc", "per_bucket", "accordion"])
def test_resize_3_2_3(name):
    """What all workers together still have to send survives each change of their number; replicas stay equal."""
    batches, model, merged, before, step = data(12), None, None, {}, 0
    for world_size in (3, 2, 3):
        model, begun, saves = go_on(world_size, name, batches[step : step + 4], model=model, states=merged, step=step)
        if step:
            now = average(begun)
            assert now.keys() == before.keys()
            for key, value in before.items():
                assert torch.equal(now[key].float(), value.float()), f"{key} changed on the way"
        vectors = [(p, k) for p in saves[0] for k, value in saves[0][p].items() if isinstance(value, torch.Tensor)]
        assert any(not torch.equal(saves[0][p][k], saves[1][p][k]) for p, k in vectors)
        before, step = average(saves), step + 4
        merged = {part: State.merge([saved[part] for saved in saves]) for part in saves[0]}
        assert any(value.any() for value in before.values())


@pytest.mark.parametrize("name", ["dgc", "per_bucket", "accordion"])
def test_save_and_load_goes_on_bit_equal_in_another_cut(name):
    batches = data(8)
    whole, _, _ = go_on(2, name, batches)
    half, _, saves = go_on(2, name, batches[:4])
    for bucket_mb in (0.0005, 1.0):
        rest, _, _ = go_on(2, name, batches[4:], model=half, states=saves, step=4, bucket_mb=bucket_mb)
        assert torch.equal(rest, whole)


def test_merge_takes_what_is_equal_and_refuses_what_is_not():
    q = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    saves = [{"calls": 3, "lot": torch.tensor([1, 2]), ("w", "Q"): q} for _ in range(3)]
    merged = State.merge(saves)
    assert merged["calls"] == 3
    assert torch.equal(merged["lot"], torch.tensor([1, 2]))
    assert torch.equal(merged["w", "Q"], q)
    for other in ({"calls": 4}, {"lot": torch.tensor([1, 3])}):
        with pytest.raises(MismatchError, match=f"different values of '{next(iter(other))}'"):
            State.merge([*saves, {**saves[0], **other}])


def test_a_worker_without_a_vector_counts_as_zero():
    """A vector over a bucket is a sum of what is to come; anything else is as those have it who do."""
    b, state = BUCKETS[1](1), State()
    state[0, "e"], state["p0", "Q"] = torch.full_like(b.flat, 6.0), torch.full((2, 2), 6.0)
    state.commit()
    other = State()
    other.load(State.merge([state.save([b]), {}, {}]), [b])
    assert other[0, "e"][0] == 2.0
    assert other["p0", "Q"].eq(6.0).all()


def test_state_moves_to_where_its_parameters_are():
    here = Bucket(0, [("p", nn.Parameter(torch.zeros(4, 4)))], 1)
    there = Bucket(0, [("p", nn.Parameter(torch.zeros(4, 4, device="meta")))], 1)
    state, moved = State(), State()
    state[0, "e"], state["p", "Q"], state["seed"] = torch.ones_like(here.flat), torch.ones(4, 2), torch.tensor(1)
    state.commit()
    moved.load(state.save([here]), [there])
    assert {key: value.device.type for key, value in moved.items()} == {
        (0, "e"): "meta",
        ("p", "Q"): "meta",
        "seed": "cpu",
    }


def test_error_feedback_keeps_nothing_in_the_padding():
    """Zero is not among the levels of int8, so it leaves something there."""

    def work(comm):
        b = BUCKETS[0](comm.world_size)
        reducer = ErrorFeedback(of=Int8())
        together(reducer.mean(b, vector(b, comm.rank), comm))
        return reducer.state[0, "e"], b.n

    for e, n in threads.run(2, work):
        assert e[:n].any()
        assert not e[n:].any()


def test_error_feedback_works_in_old_memory_and_never_in_what_a_rollback_needs():
    """Several exchanges in one step, and steps that do not count: the real e stays as it was, bit for bit."""

    def work(comm):
        b = BUCKETS[0](comm.world_size)
        reducer = ErrorFeedback(of=TopK(ratio=0.1))
        for step in range(4):
            together(reducer.mean(b, vector(b, step), comm))
            reducer.state.commit()
        real = reducer.state[0, "e"].clone()
        for _ in range(2):
            for step in range(3):
                together(reducer.mean(b, vector(b, 10 + step), comm))
                assert torch.equal(reducer.state.real[0, "e"], real)
            reducer.state.rollback()
            assert torch.equal(reducer.state[0, "e"], real)

    threads.run(2, work)
