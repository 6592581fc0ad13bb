"""What users' loops do besides the plain one: mixed precision, loss scaling, clipping, compiled models, closures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.errors import UsageError
from paceline.method import Method
from rig import Rig, adamw, alone, built, close, data, loop, mlp, same, sgd, weights


def test_bf16_autocast():
    batches = data(8)

    def work(comm):
        model = mlp()
        opt = adamw(model)
        return loop(batches, model, opt, Rig(comm, model, opt).take, autocast=torch.bfloat16)

    model = mlp()
    close(same(threads.run(2, work)), loop(batches, model, adamw(model), autocast=torch.bfloat16), tol=2e-2)


@dataclass(kw_only=True)
class Hoarder(Reducer):
    """Sends half of what it has and keeps the rest: the simplest reducer with a memory, for these tests alone."""

    name: ClassVar[str] = "hoarder"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.KEEPS_LEFTOVERS})

    async def mean(self, b, x, comm):
        x = x + self.state.get((b.index, "kept"), 0.0)
        self.state[b.index, "kept"] = x / 2
        return Reduced(await comm.mean(x / 2))


def _scaled_loop(batches, model, opt, take, scaler, spoil=lambda step, x: x, *, set_to_none=True):
    scales = []
    for step, (x, y) in enumerate(batches):
        x, y = take(x, y)
        scaler.scale(cross_entropy(model(spoil(step, x)), y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none)
        scales.append(scaler.get_scale())
    return weights(model), scales


def _scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


@pytest.mark.parametrize("spec", ["exact", "half"])
def test_grad_scaler_all_skip_together(spec):
    """An overflow on one worker skips the step and lowers the scale on all of them."""
    batches = data(8)

    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), _scaler()
        take = Rig(comm, model, opt, spec=spec, scaler=scaler).take
        spoil = lambda step, x: x * float("inf") if step == 4 and comm.rank == 1 else x  # noqa: E731
        return _scaled_loop(batches, model, opt, take, scaler, spoil)

    results = threads.run(3, work)
    model = mlp()
    want, scales = _scaled_loop(
        batches, model, sgd(model), lambda *t: t, _scaler(), lambda step, x: x * float("inf") if step == 4 else x
    )
    assert all(r[1] == scales for r in results)
    assert scales[4] < scales[3]
    close(same([r[0] for r in results]), want, tol=2e-6 if spec == "exact" else 5e-3)


@dataclass(kw_only=True)
class Blind(Reducer):
    """Does not let an infinity through, as a compressor may."""

    name: ClassVar[str] = "blind"

    async def mean(self, b, x, comm):
        return Reduced(await comm.mean(x.nan_to_num(posinf=0.0, neginf=0.0)))


def test_a_reducer_that_hides_an_infinity_does_not_hide_it_from_the_scaler():
    batches = data(6)

    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), _scaler()
        take = Rig(comm, model, opt, spec=Method(reducer=Blind()), scaler=scaler).take
        spoil = lambda step, x: x * float("inf") if step == 4 and comm.rank == 1 else x  # noqa: E731
        return _scaled_loop(batches, model, opt, take, scaler, spoil)

    for _, scales in threads.run(2, work):
        assert scales[4] < scales[3]


def test_what_is_kept_back_follows_the_loss_scale():
    """With a memory in the reducer, the trajectory must not depend on how the scale wandered."""
    batches = data(10)

    def run(growth):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth)
            take = Rig(comm, model, opt, spec=Method(reducer=Hoarder()), scaler=scaler).take
            return _scaled_loop(batches, model, opt, take, scaler)

        return threads.run(2, work)

    steady, wandering = run(1000), run(2)
    assert steady[0][1] != wandering[0][1]
    close(same([r[0] for r in steady]), same([r[0] for r in wandering]), tol=1e-5)


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_a_skipped_step_leaves_no_trace_in_a_reducer(whose):
    """Whether or not the optimizer is told that the gradients are zeroed, in place."""
    batches = data(6)

    def run(spoiled):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            r = Rig(comm, model, opt, spec=Method(reducer=Hoarder()))
            for step, (x, y) in enumerate(batches):
                if step == 3 and not spoiled:
                    continue
                x, y = r.take(x, y)
                cross_entropy(model(x * float("nan") if step == 3 and comm.rank == 0 else x), y).backward()
                opt.step()
                (opt if whose == "optimizer" else model).zero_grad(set_to_none=False)
            return weights(model)

        return same(threads.run(2, work))

    with pytest.warns(UserWarning, match="worker 0 is not finite"):
        spoiled = run(True)
    assert torch.equal(spoiled, run(False))


@pytest.mark.parametrize("kind", ["leftovers", "alone"])
def test_unknown_scaler_is_refused_where_it_matters(kind):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt, spec=Method(reducer=Hoarder()) if kind == "leftovers" else "local_sgd")
        x, _ = r.take(*data(1)[0])
        with torch.autocast("cpu", torch.float16):
            model(x)

    with pytest.raises(UsageError, match="needs to know your GradScaler"):
        threads.run(2, work)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_a_scaler_leaves_out_leaves_no_trace_in_a_reducer(set_to_none):
    """Nothing but `zero_grad` tells that it was left out."""
    batches = data(6)

    def run(spoiled):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            take = Rig(comm, model, opt, spec=Method(reducer=Hoarder()), scaler=scaler).take
            spoil = lambda step, x: x * float("inf") if spoiled and step == 3 and comm.rank == 1 else x  # noqa: E731
            some = batches if spoiled else batches[:3] + batches[4:]
            return _scaled_loop(some, model, opt, take, scaler, spoil, set_to_none=set_to_none)[0]

        return same(threads.run(2, work))

    close(run(True), run(False))


@pytest.mark.parametrize("spec", ["exact", "topk", "local_sgd"])
def test_a_grad_scaler_that_is_switched_off_does_nothing(spec):
    def run(handed):
        def work(comm):
            model = mlp()
            opt, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=False)
            take = Rig(comm, model, opt, spec=spec, scaler=scaler if handed else None).take
            return _scaled_loop(data(4), model, opt, take, scaler)[0]

        return threads.run(2, work)

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_grad_scaler_in_a_window():
    batches = data(6, size=6)
    large = [
        (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]

    def work(comm):
        model = mlp()
        opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0)
        take = Rig(comm, model, opt, scaler=scaler, accumulate=2).take
        for x, y in batches:
            x, y = take(x, y)
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return weights(model)

    close(same(threads.run(2, work)), alone(large))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_losses_of_one_batch_in_a_window(world_size):
    """A batch counts once, however many backwards it takes."""
    batches = data(4, size=6)

    def twice(model, opt, take, halves):
        for i, (x, y) in enumerate(batches):
            x, y = take(x, y)
            for _ in range(2):
                (cross_entropy(model(x), y) / 2 / halves).backward()
            if halves == 1 or i % 2:
                opt.step()
                opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return twice(model, opt, Rig(comm, model, opt, accumulate=2).take, 1)

    model = mlp()
    close(same(threads.run(world_size, work)), twice(model, sgd(model), lambda *t: t, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_as_weights(world_size):
    """Unequal weights of equal batches: the mean is over what the weights count."""
    x, y = data(1, size=12)[0]
    mask = torch.rand(12, generator=torch.Generator().manual_seed(1)) < 0.6
    tokens = [mask[r::world_size].sum().item() for r in range(world_size)]

    def masked(model, x, y, m):
        return (cross_entropy(model(x), y, reduction="none") * m).sum() / m.sum()

    def work(comm):
        from rig import Share

        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for _ in range(3):
            r.engine.take_batch(Share(tokens[comm.rank], sum(tokens)))
            mine = slice(comm.rank, None, world_size)
            masked(model, x[mine], y[mine], mask[mine]).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    model = mlp()
    opt = sgd(model)
    for _ in range(3):
        masked(model, x, y, mask).backward()
        opt.step()
        opt.zero_grad()
    close(same(threads.run(world_size, work)), weights(model))


def test_a_closure():
    batches = data(4)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for x, y in batches:
            mine = r.take(x, y)

            def closure(mine=mine):
                opt.zero_grad()
                loss = cross_entropy(model(mine[0]), mine[1])
                loss.backward()
                return loss

            assert opt.step(closure).item() > 0
        return weights(model)

    close(same(threads.run(2, work)), alone(batches))


def test_activation_checkpointing():
    batches = data(5)

    def checkpointed(model, opt, take, reentrant):
        for x, y in batches:
            x, y = take(x, y)
            h = model[:2](x).requires_grad_()
            h = torch.utils.checkpoint.checkpoint(model[2:], h, use_reentrant=reentrant)
            cross_entropy(h, y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    for reentrant in (False, True):

        def work(comm, reentrant=reentrant):
            model = mlp()
            opt = sgd(model)
            return checkpointed(model, opt, Rig(comm, model, opt).take, reentrant)

        close(same(threads.run(2, work)), alone(batches))


def test_parameters_added_later():
    batches = data(6)
    head = built(lambda: nn.Linear(3, 3), 5)

    def growing(model, opt, take):
        extra = None
        for i, (x, y) in enumerate(batches):
            if i == 3:
                extra = head()
                model.append(extra)
                opt.add_param_group({"params": list(extra.parameters())})
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return growing(model, opt, Rig(comm, model, opt).take)

    model = mlp()
    close(same(threads.run(2, work)), growing(model, sgd(model), lambda *t: t))


@pytest.mark.parametrize("spec", ["exact", "priority", "local_sgd", "zero2"])
def test_a_step_inside_a_backward_is_refused(spec):
    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec)
        next(model.parameters()).register_post_accumulate_grad_hook(lambda p: opt.step())
        for x, y in data(2):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()

    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was called inside a backward"):
        threads.run(2, work)


@pytest.mark.parametrize("spec", ["zero1", "zero3"])
def test_the_state_of_a_whole_parameter_is_refused_where_it_is_in_shards(spec):
    def work(comm):
        model = mlp()
        opt = adamw(model)
        loop(data(2), model, opt, Rig(comm, model, opt, spec=spec).take)
        opt.state[next(model.parameters())]

    with pytest.raises(UsageError, match=r"the optimizer's state of 0\.weight is asked for"):
        threads.run(2, work)
