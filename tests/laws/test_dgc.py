"""Deep Gradient Compression against the paper's formulas, written out again in float64."""

from __future__ import annotations

import math

import pytest
import torch

import threads
from laws_table import fresh, reduce, vector
from paceline.core.bucket import Bucket
from paceline.errors import MethodError
from paceline.method import method
from rig import Rig, alone, close, data, loop, mlp, same, train, weights

SHAPES = [(17, 9), (4, 3, 2)]


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def heavy(nesterov):
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)


def bucket(world_size, *shapes, index=0):
    return Bucket(index, [(f"p{i}", torch.nn.Parameter(torch.zeros(s))) for i, s in enumerate(shapes)], world_size)


class Paper:
    """One tensor on W workers, as the paper's algorithm box has it."""

    def __init__(self, *, m=0.9, nesterov=False, clip=0.0, sparse=True):
        self.m, self.nesterov, self.clip, self.sparse = m, nesterov, clip, sparse
        self.u = self.v = 0.0

    def step(self, g, ratio):
        """g: [W, n] in float64, everyone's gradient; the update everyone makes."""
        W, n = g.shape
        if self.clip:
            g = g * (self.clip / math.sqrt(W) / g.norm(dim=1, keepdim=True)).clamp(max=1.0)
        self.u = (self.u + g) * self.m if self.nesterov else self.m * self.u + g
        pushed = self.u + g if self.nesterov else self.u
        self.v = self.v + pushed
        if not self.sparse or ratio == 1.0:
            all_, self.v = self.v, 0.0
            return all_.mean(0)
        sent = torch.zeros_like(g)
        for w in range(W):
            places = self.v[w].abs().argsort(descending=True)[: max(1, math.ceil(ratio * n))]
            sent[w, places] = self.v[w, places]
            self.v[w, places] = 0.0
            self.u[w, places] = 0.0
        return sent.mean(0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("knobs", [{}, {"nesterov": True}, {"clip": 2.0}, {"momentum": 0.5}])
@pytest.mark.parametrize("shapes", [SHAPES, [(33,), (5,)]], ids=["matrices", "vectors"])
def test_the_formulas_over_20_steps(world_size, knobs, shapes):
    def work(comm):
        b, reducer, means = bucket(comm.world_size, *shapes), fresh("dgc", {"ratio": 0.1, **knobs}), []
        for b.step in range(20):
            means.append(reduce(comm, reducer, b, vector(b, 10 * b.step + comm.rank))[0])
            reducer.state.commit()
        return torch.stack(means)

    seen = same(threads.run(world_size, work))
    m, b = knobs.get("momentum", 0.9), bucket(world_size, *shapes)
    for s in b.slots:
        kept = {k: v for k, v in knobs.items() if k != "momentum"}
        paper = Paper(m=m, sparse=s.param.dim() > 1, **kept)
        for step in range(20):
            g = torch.stack([vector(b, 10 * step + w)[s.start : s.stop] for w in range(world_size)]).double()
            close(seen[step, s.start : s.stop].double(), paper.step(g, 0.1), tol=1e-5)


@pytest.mark.parametrize(("world_size", "warmup"), [(2, 0), (3, 0), (2, 8)])
def test_training_follows_the_paper(world_size, warmup):
    """The engine, its buckets and the schedule of the ratio; biases are not sparsified."""
    batches, ratio = data(12), 0.01
    spec = {"ratio": ratio, "warmup": warmup}
    seen = same(train(world_size, batches, plain, spec="dgc", knobs=spec))
    model = mlp()
    papers = [Paper(sparse=p.dim() > 1) for p in model.parameters()]
    for step, (x, y) in enumerate(batches):
        grads = []
        for mine in zip(x.chunk(world_size), y.chunk(world_size), strict=True):
            torch.nn.functional.cross_entropy(model(mine[0]), mine[1]).backward()
            grads.append([p.grad.flatten().double() for p in model.parameters()])
            model.zero_grad()
        now = ratio ** ((step * 4 // warmup + 1) / 5) if step < warmup else ratio
        for p, paper, *g in zip(model.parameters(), papers, *grads, strict=True):
            p.data -= 0.1 * paper.step(torch.stack(g), now).view_as(p)
    close(seen, weights(model), tol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.9], ids=["ratio 1", "fewer bytes"])
def test_dense_limit_is_sgd_with_momentum(world_size, nesterov, ratio):
    batches = data(10)
    seen = same(train(world_size, batches, plain, spec="dgc", knobs={"ratio": ratio, "nesterov": nesterov}))
    close(seen, alone(batches, heavy(nesterov)), tol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_waits_is_sent_when_all_is_sent(nesterov):
    """From sparse to dense and back: nothing stays behind, nothing is sent twice, and workers agree."""

    def work(comm):
        b, reducer, means = bucket(comm.world_size, *SHAPES), fresh("dgc", {"nesterov": nesterov}), []
        for b.step in range(12):
            reducer.ratio = 1.0 if b.step in (0, 5, 6, 11) else 0.1
            means.append(reduce(comm, reducer, b, vector(b, 10 * b.step + comm.rank))[0])
            reducer.state.commit()
        return torch.stack(means)

    seen, b = same(threads.run(2, work)), bucket(2, *SHAPES)
    for s in b.slots:
        paper = Paper(nesterov=nesterov)
        for step in range(12):
            g = torch.stack([vector(b, 10 * step + w)[s.start : s.stop] for w in range(2)]).double()
            want = paper.step(g, 1.0 if step in (0, 5, 6, 11) else 0.1)
            close(seen[step, s.start : s.stop].double(), want, tol=1e-5)


def test_momentum_is_masked_where_it_was_sent_and_only_there():
    def work(comm):
        b, reducer = bucket(comm.world_size, *SHAPES), fresh("dgc", {"ratio": 0.1})
        select, chosen = reducer.select, []
        reducer.select = lambda b, x: chosen.append(select(b, x)) or chosen[-1]
        for b.step in range(5):
            reduce(comm, reducer, b, vector(b, 10 * b.step + comm.rank))
            reducer.state.commit()
            sent = torch.zeros(b.n, dtype=torch.bool).index_fill_(0, chosen[-1], True)
            assert sent.sum() == 16 + 3
            for slot in "uv":
                kept = reducer.state[0, slot][: b.n]
                assert not kept[sent].any(), f"{slot} goes on where it was sent"
                assert kept[~sent].all(), f"{slot} is forgotten where it was not sent"

    threads.run(2, work)


def test_clipping_is_each_tensors_own_and_by_the_root_of_the_world():
    """At ratio 1 and momentum 0 the mean is that of the clipped gradients; small ones are left alone."""

    def work(comm):
        b, reducer = bucket(comm.world_size, *SHAPES), fresh("dgc", {"ratio": 1.0, "momentum": 0.0, "clip": 3.0})
        x = torch.zeros_like(b.flat)
        x[: SHAPES[0][0] * SHAPES[0][1]] = 1e25  # the sum of its squares does not fit fp32
        x[b.slots[1].start] = 1e-3
        return reduce(comm, reducer, b, x)[0]

    seen, b = same(threads.run(4, work)), bucket(4, *SHAPES)
    assert seen[: b.slots[0].stop].norm().item() == pytest.approx(3.0 / math.sqrt(4), rel=1e-5)
    assert seen[b.slots[1].start].item() == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), r"(?s)dgc.*set momentum=0"),
        (lambda model: torch.optim.Adam(model.parameters()), r"(?s)dgc needs optimizer:SGD.*use torch.optim.SGD"),
    ],
    ids=["momentum", "adam"],
)
def test_the_optimizer_must_be_plain_sgd(optimizer, words):
    with pytest.raises(MethodError, match=words):
        train(2, data(1), optimizer, spec="dgc")


def test_the_recipe_and_what_wraps_it():
    whole = method("dgc", ratio=0.01)
    assert whole.reducer.name == "warmup"
    assert whole.reducer.of.ratio == 0.01
    assert method("dgc", warmup=0).reducer.name == "dgc"
    with pytest.raises(MethodError, match="error_feedback does not go together with dgc"):
        method(fresh("error_feedback", {"of": fresh("dgc", {})}))


def test_a_step_that_does_not_count_leaves_no_trace():
    batches = data(6)
    batches.insert(3, (torch.full_like(batches[0][0], math.nan), batches[0][1]))

    def work(comm, batches):
        model = mlp()
        opt = plain(model)
        r = Rig(comm, model, opt, spec="dgc", knobs={"ratio": 0.1, "warmup": 0})
        return loop(batches, model, opt, r.take)

    with pytest.warns(UserWarning, match="skipped"):
        seen = same(threads.run(2, lambda comm: work(comm, batches)))
    assert torch.equal(seen, same(threads.run(2, lambda comm: work(comm, batches[:3] + batches[4:]))))
