"""1-bit Adam against its formulas in fp64, against plain Adam, and in the loops users write around it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.core.facts import Fact
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.exact import Exact
from paceline.reducers.sign import Sign
from paceline.reducers.topk import TopK
from paceline.session.objects import Objects
from paceline.syncs.onebit_adam import OneBitAdam
from paceline.syncs.qadam import QAdam
from rig import Complex, Rig, adamw, built, close, data, loop, same, weights

LR, EPS = 1e-2, 1e-8
B1, B2 = 0.9, 0.999

# 448 elements: blocks of 32 end where the gradients end, so the padding of a bucket is in none of them.
mlp = built(
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
)


def exactly(warmup=4):
    return Method(sync=OneBitAdam(warmup=warmup), reducer=Exact())


def one_bit(warmup=4):
    return Method(sync=OneBitAdam(warmup=warmup), reducer=ErrorFeedback(of=Sign(d=32)))


def adam(**options):
    return lambda model: torch.optim.Adam(model.parameters(), lr=LR, **options)


def named(name, **knobs):
    return lambda: method(name, **knobs)


def train_by(make, world_size, batches, optimizer, **rig):
    """As rig.train, with a method of its own for each worker: thread-workers must not share state."""

    def work(comm):
        model = mlp()
        opt = optimizer(model)
        return loop(batches, model, opt, Rig(comm, model, opt, spec=make(), bucket_mb=1.0, **rig).take)

    return same(threads.run(world_size, work))


# ---------------------------------------------------------------------------------------------------- the oracle


def whole(v):
    return v


def sign(v):
    """Blocks of 32: the mean magnitude, with each value's sign."""
    blocks = v.view(-1, 32)
    return (torch.where(blocks >= 0, 1.0, -1.0) * blocks.abs().mean(1, keepdim=True)).view(-1)


def simulate(world_size, batches, *, C, warmup=4, lr=lambda t: LR, decay=0.0, l2=0.0, flip=1.0):
    """All workers in one fp64 loop, by the paper's formulas; parameters in the order a bucket has them."""
    model = mlp().double()
    params = list(reversed(list(model.parameters())))
    n = sum(p.numel() for p in params)
    m, v, e = torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(world_size, n).double()

    def gradient(x, y):
        found = torch.autograd.grad(cross_entropy(model(x.double()), y), params)
        return torch.cat([g.flatten() for g in found]) * flip

    for t, (x, y) in enumerate(batches, 1):
        g = torch.stack([gradient(*half) for half in zip(x.chunk(world_size), y.chunk(world_size), strict=True)])
        w = torch.cat([p.detach().flatten() for p in params])
        if t <= warmup:
            mean = g.mean(0) + l2 * w
            m = B1 * m + (1 - B1) * mean
            v = B2 * v + (1 - B2) * mean**2
        else:
            corrected = B1 * m + (1 - B1) * g + e
            sent = torch.stack([C(c) for c in corrected])
            e = corrected - sent
            m = sent.mean(0) + (1 - B1) * l2 * w
        w = w * (1 - lr(t) * decay) - lr(t) * (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS)
        nn.utils.vector_to_parameters(w, params)
    return weights(model).float()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("make", "C"), [(exactly, whole), (one_bit, sign)])
def test_it_is_the_paper_s_formulas(world_size, make, C):
    batches = data(12)
    got = train_by(make, world_size, batches, adam())
    close(got, simulate(world_size, batches, C=C), tol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("options", "terms"),
    [({"weight_decay": 0.1}, {"l2": 0.1}), ({"maximize": True}, {"flip": -1.0})],
)
def test_adam_s_options(fused, options, terms):
    batches = data(12)
    got = train_by(one_bit, 2, batches, adam(fused=fused, **options))
    close(got, simulate(2, batches, C=sign, **terms), tol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_s_decay_is_decoupled(fused):
    batches = data(12)
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=fused)  # noqa: E731
    got = train_by(one_bit, 2, batches, optimizer)
    close(got, simulate(2, batches, C=sign, decay=0.1), tol=1e-5)


def test_a_scheduler_sets_the_rate():
    batches = data(12)

    def work(comm):
        model = mlp()
        opt = adam()(model)
        before = torch.optim.lr_scheduler.StepLR(opt, 5, gamma=0.5)  # made before prepare, and one after
        r = Rig(comm, model, opt, spec=exactly(), bucket_mb=1.0)
        after = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for batch in batches:
            loop([batch], model, opt, r.take)
            before.step()
            after.step()
        return weights(model)

    rate = lambda t: LR * 0.9 ** (t - 1) * 0.5 ** ((t - 1) // 5)  # noqa: E731
    close(same(threads.run(2, work)), simulate(2, batches, C=whole, lr=rate), tol=1e-5)


# ---------------------------------------------------------------------------------------------------- the two phases


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_the_warm_up_is_plain_adam(world_size, name):
    batches = data(6)
    plain = train_by(named("exact"), world_size, batches, adamw)
    assert torch.equal(train_by(named(name, warmup=6), world_size, batches, adamw), plain)
    assert not torch.equal(train_by(named(name, warmup=5), world_size, batches, adamw), plain)


def state_of(opt):
    return [copy.deepcopy(opt.state[p]) for group in opt.param_groups for p in group["params"]]


def equal(a, b):
    return all(
        x.keys() == y.keys() and all(torch.equal(torch.as_tensor(x[k]), torch.as_tensor(y[k])) for k in x)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "make", [one_bit, exactly, lambda: Method(sync=OneBitAdam(warmup=4), reducer=ErrorFeedback(of=TopK(ratio=0.2)))]
)
def test_the_variance_is_frozen_and_the_step_goes_on(world_size, make):
    batches = data(10)

    def work(comm):
        model = mlp()
        opt = adam()(model)
        r = Rig(comm, model, opt, spec=make())
        loop(batches[:4], model, opt, r.take)
        early = state_of(opt)
        loop(batches[4:], model, opt, r.take)
        return early, state_of(opt), weights(model)

    results = threads.run(world_size, work)
    same([r[2] for r in results])
    for early, late, _ in results:
        assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(early, late, strict=True))
        assert all(s["step"] == 10 for s in late)
        assert equal(late, results[0][1]), "the workers' moments differ"


def test_the_gradient_stays_in_gradient_units():
    """Means that are exact give back the mean gradient, so a norm to clip at means what it meant."""
    batches = data(8)

    def run(spec):
        def work(comm):
            model = mlp()
            opt = torch.optim.Adam(model.parameters(), lr=0.0)
            r = Rig(comm, model, opt, spec=spec())
            for x, y in batches:
                x, y = r.take(x, y)
                cross_entropy(model(x), y).backward()
                grads = torch.cat([p.grad.flatten() for p in model.parameters()])
                opt.step()
                opt.zero_grad()
            return grads

        return same(threads.run(2, work))

    close(run(exactly), run(lambda: "exact"), tol=1e-6)


def test_the_user_s_step_hooks_run_once_a_step():
    batches = data(8)

    def work(comm):
        model = mlp()
        opt = adam()(model)
        r = Rig(comm, model, opt, spec=one_bit())
        seen = []
        opt.register_step_pre_hook(lambda o, a, k: seen.append(next(model.parameters()).grad is not None))
        opt.register_step_post_hook(lambda o, a, k: seen.append("after"))
        loop(batches, model, opt, r.take)
        return seen

    assert threads.run(2, work) == [[True, "after"] * 8] * 2


def test_it_learns():
    x, y = data(1, size=24)[0]
    batches = [(x, y)] * 80
    for name in ("onebit_adam", "qadam"):
        model = mlp()
        start = cross_entropy(model(x), y).item()
        flat = train_by(named(name, warmup=20), 2, batches, adamw)
        nn.utils.vector_to_parameters(flat, model.parameters())
        assert cross_entropy(model(x), y).item() < 0.25 * start, name


# ---------------------------------------------------------------------------------------------------- what may happen


@pytest.mark.parametrize("at", [2, 7])  # in the warm-up, and after it
def test_a_skipped_step_leaves_the_optimizer_as_it_was(at):
    batches = data(10)

    def run(spoiled):
        def work(comm):
            model = mlp()
            opt = adam()(model)
            r = Rig(comm, model, opt, spec=one_bit())
            for step, (x, y) in enumerate(batches):
                if step == at and not spoiled:
                    continue
                x, y = r.take(x, y)
                before = state_of(opt)
                cross_entropy(model(x * float("nan") if step == at and comm.rank == 1 else x), y).backward()
                opt.step()
                opt.zero_grad()
                assert equal(before, state_of(opt)) == (step == at)
            return weights(model)

        return same(threads.run(2, work))

    with pytest.warns(UserWarning, match="worker 1 is not finite"):
        spoiled = run(True)
    assert torch.equal(spoiled, run(False))


@pytest.mark.parametrize("saved_at", [2, 7])
@pytest.mark.parametrize("bucket_mb", [1.0, 0.0005])
def test_save_and_load_goes_on_bit_equal(saved_at, bucket_mb):
    batches = data(10)

    def run(comm, split):
        model = mlp()
        opt = adam()(model)
        r = Rig(comm, model, opt, spec=one_bit(), bucket_mb=bucket_mb)
        loop(batches[:saved_at], model, opt, r.take)
        if split:
            saved = [part.state.save(r.engine.buckets) for part in r.engine.method.parts()]
            new = mlp()
            new.load_state_dict(model.state_dict())
            new_opt = adam()(new)
            new_opt.load_state_dict(opt.state_dict())
            model, opt = new, new_opt
            r = Rig(type(comm)(comm.room, comm.rank, "again"), model, opt, spec=one_bit(), bucket_mb=bucket_mb)
            for part, state in zip(r.engine.method.parts(), saved, strict=True):
                part.state.load(state, r.engine.buckets)
        return loop(batches[saved_at:], model, opt, r.take)

    through = same(threads.run(2, lambda comm: run(comm, False)))
    assert torch.equal(same(threads.run(2, lambda comm: run(comm, True))), through)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_s_scale_does_not_matter(fused, unscale):
    batches = data(12)

    def run(growth):
        def work(comm):
            model = mlp()
            opt = adam(fused=fused)(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth)
            r = Rig(comm, model, opt, spec=one_bit(), scaler=scaler, bucket_mb=1.0)
            for x, y in batches:
                x, y = r.take(x, y)
                scaler.scale(cross_entropy(model(x), y)).backward()
                if unscale:
                    scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            return weights(model)

        return same(threads.run(2, work))

    wandering = run(2)
    assert torch.equal(wandering, run(1000))  # scales are powers of two: not even the rounding differs
    close(wandering, simulate(2, batches, C=sign), tol=1e-5)


@pytest.mark.filterwarnings("ignore:paceline")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("guard", ["skip", "off"])  # off: only the scaler sees it, and a fused Adam skips by itself
def test_an_overflow_under_a_grad_scaler_is_skipped_by_all(fused, guard):
    batches = data(9 if guard == "skip" else 7)

    def work(comm):
        model = mlp()
        opt = adam(fused=fused)(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        r = Rig(comm, model, opt, spec=one_bit(), scaler=scaler, guard=guard)
        for step, (x, y) in enumerate(batches):
            x, y = r.take(x, y)
            before, was = state_of(opt), weights(model).clone()
            scaler.scale(cross_entropy(model(x * float("inf") if step == 6 and comm.rank == 0 else x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert equal(before, state_of(opt)) == torch.equal(was, weights(model)) == (step == 6)
        return weights(model), scaler.get_scale()

    results = threads.run(2, work)
    same([w for w, _ in results])
    assert [scale for _, scale in results] == [4.0, 4.0]


def test_a_parameter_that_comes_later_has_a_warm_up_of_its_own():
    batches = data(14)
    head = built(lambda: nn.Linear(4, 3), 5)

    def growing(model, opt, take):
        old = list(model.parameters())
        variances = []
        for i, batch in enumerate(batches):
            if i == 6:
                model.append(head())
                opt.add_param_group({"params": list(model[-1].parameters())})
            loop([batch], model, opt, take)
            variances.append([opt.state[p]["exp_avg_sq"].clone() for p in model.parameters()])
        assert [float(opt.state[p]["step"]) for p in model.parameters()] == [14.0] * len(old) + [8.0] * 2
        for k in range(len(old) + 2):
            history = [v[k] for v in variances if k < len(v)]
            still = [torch.equal(a, b) for a, b in itertools.pairwise(history)]
            assert still == [False] * 3 + [True] * (len(still) - 3), "four updates, then frozen"
        return weights(model)

    def work(comm):
        model = mlp()
        opt = adam()(model)
        return growing(model, opt, Rig(comm, model, opt, spec=one_bit()).take)

    assert same(threads.run(2, work)).isfinite().all()


class Forked(nn.Module):
    """A side branch that may go unused, and an input that is always zero."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, side):
        return self.main(x) + (self.side(x) if side else 0.0)


def test_no_gradient_no_movement():
    """Nobody used it: left alone, its moments too. No gradient in all of the warm-up: an element stays in place."""
    batches = data(12)
    fork = built(Forked)

    def work(comm):
        model = fork()
        opt = adam()(model)
        r = Rig(comm, model, opt, spec=one_bit(), bucket_mb=1.0)
        start = model.main.weight.detach()[:, 2].clone()
        for step, (x, y) in enumerate(batches):
            x, y = r.take(x, y)
            x = x.index_fill(1, torch.tensor(2), 0.0)
            was, before = model.side.weight.detach().clone(), copy.deepcopy(opt.state.get(model.side.weight))
            cross_entropy(model(x, step % 2 == 0), y).backward()
            opt.step()
            opt.zero_grad()
            if step % 2:
                assert torch.equal(was, model.side.weight)
                assert equal([before], [opt.state[model.side.weight]])
        assert torch.equal(start, model.main.weight.detach()[:, 2])
        return weights(model)

    assert same(threads.run(2, work)).isfinite().all()


def test_two_halves_of_a_batch_are_the_batch():
    batches = data(10)
    halves = lambda t: [torch.cat(part) for part in zip(*(w.chunk(2) for w in t.chunk(2)), strict=True)]  # noqa: E731
    small = [pair for x, y in batches for pair in zip(halves(x), halves(y), strict=True)]
    decayed = adam(weight_decay=0.1)  # plain Adam does not see a gradient that is twice too large
    close(train_by(one_bit, 2, small, decayed, accumulate=2), train_by(one_bit, 2, batches, decayed), tol=1e-5)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False, "weight_decay": 0.1}])
def test_complex_parameters(options):
    """Means that are exact and a v that has come to rest: plain Adam's steps, but for what v would still have moved."""
    batches, build = data(1) * 30, built(Complex)

    def run(spec):
        def work(comm):
            model = build()
            opt = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.5), **options)
            r = Rig(comm, model, opt, spec=spec())
            loop(batches, model, opt, r.take)
            return torch.view_as_real(model.w.detach()) - torch.view_as_real(build().w.detach())

        return same(threads.run(2, work))

    close(run(lambda: exactly(25)), run(lambda: "exact"), tol=2e-5)


@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_bf16_parameters_and_a_worker_without_samples(name):
    batches = [(x.bfloat16(), y) for x, y in data(10, size=2)]

    def work(comm):
        model = mlp().bfloat16()
        opt = adam()(model)
        return loop(batches, model, opt, Rig(comm, model, opt, spec=method(name, warmup=4)).take)

    got = same(threads.run(3, work))
    assert got.dtype == torch.bfloat16
    assert got.isfinite().all()


def test_plain_adam_goes_on_from_its_state():
    batches = data(8)

    def work(comm):
        model = mlp()
        opt = adam()(model)
        loop(batches, model, opt, Rig(comm, model, opt, spec=one_bit()).take)
        alone = mlp()
        plain = adam(fused=True)(alone)
        plain.load_state_dict(opt.state_dict())
        loop(batches[:1], alone, plain)
        return [float(s["step"]) for s in plain.state.values()]

    assert threads.run(2, work)[0] == [9.0] * 5


def test_in_a_world_of_one_it_is_plain_adam():
    batches = data(8)
    model = mlp()
    assert torch.equal(train_by(one_bit, 1, batches, adam()), loop(batches, model, adam()(model)))


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        adam(amsgrad=True),
        lambda model: torch.optim.NAdam(model.parameters()),
    ],
)
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_other_optimizers_are_refused(name, optimizer):
    with pytest.raises(MethodError, match=r"use torch\.optim\.Adam or AdamW with amsgrad=False"):
        train_by(named(name), 2, data(1), optimizer)


def test_which_optimizers_are_adam():
    model = mlp()
    things = Objects.sort([model])
    for options, known in (({}, True), ({"fused": True}, True), ({"amsgrad": True}, False)):
        for cls in (torch.optim.Adam, torch.optim.AdamW):
            assert (Fact.ADAM in things.facts(cls(model.parameters(), **options))) is known


def test_no_warm_up_is_refused():
    for cls in (OneBitAdam, QAdam):
        with pytest.raises(MethodError, match="warmup=0 is out of range"):
            cls(warmup=0)


def test_recipes():
    assert str(method("onebit_adam").reducer.of) == str(Sign())
    assert method("qadam").reducer.config() == {"name": "int8"}
