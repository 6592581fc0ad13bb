"""Laws of reducers that send less: right on average, exact in the limit, nothing lost over time, saved and
resized.
"""

from __future__ import annotations

import pytest
import torch

import threads
from laws_table import BUCKETS, fresh, reduce, vector
from marks import slow
from paceline import registry
from paceline.core.bucket import Bucket
from paceline.errors import MethodError
from paceline.kernels import encode_blocks
from paceline.method import Method, method
from rig import alone, close, data, loop, mlp, same, sgd, train, weights

UNBIASED = [
    case for n in ("qsgd", "nuqsgd") for case in ((n, {"bits": 2}), slow(n, {"bits": 4}), slow(n, {"bits": 8}))
] + [
    slow("qsgd", {"bits": 4, "norm": "l2"}),
    ("qsgd", {"route": "slices"}),
    ("nuqsgd", {"route": "slices"}),
]
DENSE = [("topk", {"ratio": 1.0}), ("randomk", {"ratio": 1.0}), ("powersgd", {"rank": 64})]
BIASED = ["topk", "randomk", "sign", "powersgd", "half", "int8"]


@pytest.mark.parametrize(("name", "knobs"), UNBIASED)
def test_unbiased(name, knobs):
    """The mean over many draws is the mean: each element within five standard errors."""
    draws = 200

    def work(comm):
        b = BUCKETS[0](comm.world_size)
        reducer, x, means = fresh(name, {**knobs, "d": 64}), vector(b, comm.rank), []
        for b.step in range(draws):
            means.append(reduce(comm, reducer, b, x.clone())[0])
        return x, torch.stack(means).double()

    results = threads.run(2, work)
    want = (results[0][0] + results[1][0]).double() / 2
    seen = results[0][1]
    error = (seen.mean(0) - want).abs()
    assert (error <= 5 * seen.std(0) / draws**0.5 + 1e-6).all(), f"off by {error.max():.3g}"


def test_workers_round_independently():
    def work(comm):
        b = BUCKETS[3](comm.world_size)
        x = torch.full_like(b.flat, 0.3)
        x[0] = 1.0
        qsgd = fresh("qsgd", {})
        return encode_blocks(x, qsgd.code(), qsgd.key(b, comm.rank))

    a, b = threads.run(2, work)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(("name", "knobs"), DENSE)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dense_limit(name, knobs, world_size):
    """At the loosest knob the trajectory is that of the exact mean."""
    batches = data(8)
    close(same(train(world_size, batches, spec=name, knobs=knobs)), alone(batches), tol=2e-4)


@pytest.mark.parametrize("name", BIASED)
def test_error_feedback_loses_nothing_over_time(name):
    """The sum of all means and of what is still kept is the sum of all gradients: in fp64, after 30 steps."""
    steps = 30

    def work(comm):
        b = BUCKETS[0](comm.world_size)
        reducer = registry.find("error_feedback")(of=fresh(name, {}))
        given, got = torch.zeros(b.n, dtype=torch.float64), torch.zeros(b.n, dtype=torch.float64)
        for b.step in range(steps):
            x = vector(b, 10 * b.step + comm.rank)
            given += x[: b.n]
            got += reduce(comm, reducer, b, x)[0][: b.n]
            reducer.state.commit()
        return given, got, reducer.state[0, "e"][: b.n].double()

    given, got, kept = (torch.stack([r[i] for r in threads.run(3, work)]) for i in range(3))
    scale = given.abs().max()
    tolerance = 30 * max(fresh(name, {}).tolerance, 1e-6)
    assert ((given.mean(0) - got[0] - kept.mean(0)).abs().max() / scale) < tolerance


@pytest.mark.parametrize("name", ["topk", "powersgd", "sign", "randomk", "qsgd", "nuqsgd", "int8"])
def test_it_still_learns(name):
    knobs = {"topk": {"ratio": 0.1}, "randomk": {"ratio": 0.5}, "powersgd": {"rank": 2}}.get(name, {})
    x, y = data(1, size=24)[0]
    batches = [(x, y)] * 60

    def loss(flat):
        model = mlp()
        torch.nn.utils.vector_to_parameters(flat, model.parameters())
        return torch.nn.functional.cross_entropy(model(x), y).item()

    start, end = loss(weights(mlp())), loss(same(train(2, batches, spec=name, knobs=knobs)))
    assert end < 0.75 * start, f"{name}: {start:.3f} -> {end:.3f}"


@pytest.mark.parametrize("name", ["topk", "powersgd", "sign"])
def test_save_and_load_goes_on_bit_equal_in_another_cut(name):
    """State is keyed by parameter name: it survives other bucket sizes."""
    from rig import Rig

    batches = data(8)

    def run(comm, split):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt, spec=name)
        loop(batches[:4], model, opt, r.take)
        if split:
            saved = [part.state.save(r.engine.buckets) for part in r.engine.method.parts()]
            fresh_model = mlp()
            fresh_model.load_state_dict(model.state_dict())
            fresh_opt = sgd(fresh_model)
            fresh_opt.load_state_dict(opt.state_dict())
            model, opt = fresh_model, fresh_opt
            lane = type(comm)(comm.room, comm.rank, "again")
            r = Rig(lane, model, opt, spec=name, bucket_mb=1.0)
            r.engine.ex.step = 4
            for part, state in zip(r.engine.method.parts(), saved, strict=True):
                part.state.load(state, r.engine.buckets)
        return loop(batches[4:], model, opt, r.take)

    whole = same(threads.run(2, lambda comm: run(comm, False)))
    parted = same(threads.run(2, lambda comm: run(comm, True)))
    close(parted, whole, tol=1e-6 if name != "sign" else 5e-2)  # sign's blocks are a bucket's, not a parameter's


@pytest.mark.parametrize(
    ("knobs", "tolerance"),
    [
        ({}, 1e-5),
        ({"share": 0.1}, 1e-5),
        ({"wire": "bf16"}, 2.0**-8),
        ({"wire": "int8"}, 1e-5),
        ({"wire": "int4"}, 1e-5),
    ],
)
def test_powersgd_loses_nothing(knobs, tolerance):
    """The law's tolerance is that of bf16, whose sums are rounded as they go; all others are held to less here."""

    def work(comm):
        b, reducer = BUCKETS[3](comm.world_size), fresh("powersgd", knobs)
        out = []
        for b.step in range(3):
            x = vector(b, 10 * b.step + comm.rank)
            out.append((x.clone(), *reduce(comm, reducer, b, x)))
            reducer.state.commit()
        return out

    for step in zip(*threads.run(3, work), strict=True):
        x, mean, left = (torch.stack([r[i] for r in step]).double() for i in range(3))
        assert (x.mean(0) - mean[0] - left.mean(0)).abs().max() <= tolerance * x.abs().max()


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_powersgd_in_few_bits_sends_what_it_says(wire, world_size):
    def work(comm):
        b, reducer = BUCKETS[3](comm.world_size), fresh("powersgd", {"wire": wire, "rank": 3})
        before = comm.sent
        mean = reduce(comm, reducer, b, vector(b, comm.rank))[0].clone()
        return comm.sent - before, reducer.sends(b, comm.world_size), mean

    results = threads.run(world_size, work)
    for sent, said, mean in results:
        assert sent == said
        assert torch.equal(mean, results[0][2]), "all workers have one mean"


def test_powersgds_leftover_is_what_this_worker_lacks():
    """Of its own matrix, everything that P can say has been sent: what is left is orthogonal to the mean's columns."""

    def work(comm):
        b = Bucket(0, [("p", torch.nn.Parameter(torch.zeros(16, 12)))], comm.world_size)
        mean, left = reduce(comm, fresh("powersgd", {"rank": 2}), b, vector(b, comm.rank))
        return mean[: b.n].view(16, 12), left[: b.n].view(16, 12)

    for mean, left in threads.run(2, work):
        assert (mean.T @ left).abs().max() < 1e-4 * mean.norm() * left.norm()


def test_powersgd_never_rounds_twice_with_the_same_dice(monkeypatch):
    """Another key for each worker, each of the two legs, and each of the two roundings of a leg."""
    from paceline.kernels import key
    from paceline.reducers import powersgd

    keys = []
    monkeypatch.setattr(powersgd, "key", lambda *numbers: keys.append(key(*numbers)) or keys[-1])

    def work(comm):
        b = BUCKETS[3](comm.world_size)
        reduce(comm, fresh("powersgd", {"wire": "int8"}), b, vector(b, comm.rank))

    threads.run(2, work)
    assert len(set(keys)) == len(keys) == 2 * 2 * 2


def test_randomk_draws_other_places_in_every_step():
    def work(comm):
        b = BUCKETS[3](comm.world_size)
        reducer, seen = fresh("randomk", {}), []
        for b.step in range(2):
            seen.append(reduce(comm, reducer, b, vector(b, comm.rank))[0].nonzero())
        return seen

    for first, second in threads.run(2, work):
        assert len(first) == len(second)
        assert not torch.equal(first, second)


@pytest.mark.parametrize(("wire", "off"), [("fp32", 1e-5), ("bf16", 0.01), ("int8", 0.02), ("int4", 0.5)])
def test_powersgd_finds_what_is_of_low_rank(wire, off):
    """Each worker's matrices have rank one, so nothing but the rounding stands between the mean and its estimate."""

    def work(comm):
        b, reducer = BUCKETS[3](comm.world_size), fresh("powersgd", {"wire": wire, "rank": 4})
        x = vector(b, comm.rank)
        for s in b.slots:
            if s.param.dim() > 1:
                m = x[s.start : s.stop].view(s.param.shape)
                m.copy_(m[:, :1] @ m[:1])
        return x.clone(), reduce(comm, reducer, b, x)[0].clone()

    (x, mean), (y, _) = threads.run(2, work)
    want = (x + y) / 2
    assert (mean - want).norm() <= off * want.norm()


def test_powersgd_keeps_what_it_has_found_when_its_rank_changes():
    """A matrix of rank 40, its directions ever smaller: steps at rank 16 help one at 24 and one at 8."""

    def off(comm, ranks):
        b, reducer = BUCKETS[3](comm.world_size), fresh("powersgd", {})
        slot, generator = b.slots[0], torch.Generator().manual_seed(1)
        n, m = slot.param.shape
        x = torch.zeros_like(b.flat)
        x[: n * m] = (
            torch.randn(n, 40, generator=generator)
            @ torch.diag(0.8 ** torch.arange(40.0))
            @ torch.randn(40, m, generator=generator)
        ).view(-1)
        for b.step, reducer.rank in enumerate(ranks):
            mean = reduce(comm, reducer, b, x.clone())[0].clone()
            reducer.state.commit()
        return float((mean - x).norm() / x.norm())

    def work(comm):
        return [off(comm, ranks) for ranks in ([24], [16] * 4 + [24], [8], [16] * 4 + [8])]

    grown_cold, grown_warm, shrunk_cold, shrunk_warm = threads.run(1, work)[0]
    assert grown_warm < 0.8 * grown_cold
    assert shrunk_warm < 0.8 * shrunk_cold


def test_powersgd_ranks_by_share():
    """Each matrix gets the rank whose two factors are that share of its bytes, and at least one."""
    b = BUCKETS[3](2)
    assert [fresh("powersgd", {"share": s})._rank(b.slots[0]) for s in (0.01, 0.1, 0.5, 1.0)] == [1, 4, 21, 42]
    assert fresh("powersgd", {"share": 1.0}).sends(b, 2) <= b.flat.nbytes


def test_recipes_and_what_is_refused():
    assert str(method("topk")).startswith("error_feedback(of=topk")
    assert method("powersgd", rank=2).reducer.of.rank == 2
    for name in ("qsgd", "nuqsgd", "exact"):
        with pytest.raises(MethodError, match="does not go together"):
            Method(reducer=registry.find("error_feedback")(of=fresh(name, {})))


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("powersgd", {"rank": 0}),
        ("topk", {"ratio": 0.0}),
        ("topk", {"ratio": 1.5}),
        ("randomk", {"ratio": -1.0}),
        ("qsgd", {"bits": 3}),
        ("qsgd", {"d": 0}),
        ("warmup", {"steps": 0}),
    ],
)
def test_bad_knobs(name, knobs):
    with pytest.raises(MethodError):
        method(name, **knobs)


def test_warmup_is_exact_first_and_then_not():
    batches = data(6)
    warm = method("warmup", steps=6)
    close(same(train(2, batches, spec=warm)), alone(batches))
    for steps in (4, 5):
        short = same(train(2, batches[:5], spec=method("warmup", steps=steps)))
        assert torch.equal(short, same(train(2, batches[:5], spec="exact"))) == (steps == 5)
