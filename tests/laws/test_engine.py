"""Engine laws: N workers are one worker with the whole batch, whatever the loop around them does."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from laws_table import WORLDS
from paceline.core.engines import Engines
from paceline.errors import MismatchError, NonFiniteError
from rig import Rig, adamw, alone, built, close, data, mlp, same, sgd, train, weights


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("size", [12, 7])  # 7 does not divide: the mean is over samples, not over workers
def test_n_workers_equal_one(world_size, optimizer, size):
    batches = data(20, size)
    close(same(train(world_size, batches, optimizer)), alone(batches, optimizer))


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_worker_without_samples_counts_nothing(world_size):
    batches = data(6, size=2)  # with three workers and more, some take none
    close(same(train(world_size, batches)), alone(batches))


def test_what_a_worker_without_samples_computes_is_not_looked_at():
    batches = data(3, size=2)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        for x, y in batches:
            x, y = rig.take(x, y)
            (cross_entropy(model(x), y) * (float("nan") if comm.rank == 2 else 1.0)).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    close(same(threads.run(3, work)), alone(batches))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_stays_near_and_agrees(dtype):
    batches = data(20)
    close(same(train(3, batches, spec="half", knobs={"dtype": dtype})), alone(batches), tol=5e-2)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("n", [2, 3])
def test_accumulate_equals_the_large_batch(world_size, n):
    """The plain loop with accumulate=N; the last window is partial and counts right."""
    batches = data(7, size=6)
    large = [
        (torch.cat([x for x, _ in batches[i : i + n]]), torch.cat([y for _, y in batches[i : i + n]]))
        for i in range(0, 7, n)
    ]

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt, accumulate=n)
        for i, (x, y) in enumerate(batches):
            x, y = r.take(x, y, last=i == 6)
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # looks at every window once, and never at half of one
            opt.step()
            opt.zero_grad()
        return weights(model), r.engine.ex.step, comm.ops

    results = threads.run(world_size, work)
    close(same([r[0] for r in results]), alone(large))
    assert results[0][1] == len(large)


def test_accumulate_without_a_loader():
    """Every window begins at the same scale, though no batch says which."""
    batches = data(6)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, accumulate=2)
        for x, y in batches:
            cross_entropy(model(x[comm.rank :: 2]), y[comm.rank :: 2]).backward()
            opt.step()
            opt.zero_grad()
        return weights(model), rig.engine.ex.step

    large = [tuple(torch.cat(parts) for parts in zip(*batches[i : i + 2], strict=True)) for i in (0, 2, 4)]
    close(same([w for w, _ in threads.run(2, work)]), alone(large))


@pytest.mark.parametrize("world_size", WORLDS)
def test_hold_equals_the_large_batch_with_unequal_parts(world_size):
    parts = [data(1, size)[0] for size in (8, 3, 5)]
    large = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))] * 3

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        sent = []
        for _ in range(3):
            for x, y in parts[:2]:
                x, y = r.take(x, y)
                with r.engine.no_sync():
                    cross_entropy(model(x), y).backward()
            sent.append(comm.sent)
            x, y = r.take(*parts[2])
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        assert sent[0] == 0, "something was sent inside the block"
        return weights(model)

    close(same(threads.run(world_size, work)), alone(large))


@pytest.mark.parametrize("world_size", WORLDS)
def test_everything_held_back_is_exchanged_at_step(world_size):
    batches = data(4)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for x, y in batches:
            x, y = r.take(x, y)
            with r.engine.no_sync():
                cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    close(same(threads.run(world_size, work)), alone(batches))


@pytest.mark.parametrize("world_size", WORLDS)
def test_several_backwards_before_a_step(world_size):
    """As in DDP: gradients add up, the user divides."""
    batches = data(6)

    def loop(model, opt, take):
        for (x1, y1), (x2, y2) in zip(batches[::2], batches[1::2], strict=True):
            x1, y1 = take(x1, y1)
            (cross_entropy(model(x1), y1) / 2).backward()
            x2, y2 = take(x2, y2)
            (cross_entropy(model(x2), y2) / 2).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        return loop(model, opt, Rig(comm, model, opt).take)

    model = mlp()
    close(same(threads.run(world_size, work)), loop(model, sgd(model), lambda *t: t))


@pytest.mark.parametrize("world_size", [2, 3])
def test_p_grad_is_the_agreed_mean_when_backward_returns(world_size):
    (x, y) = data(1)[0]
    model = mlp()
    cross_entropy(model(x), y).backward()
    want = [p.grad for p in model.parameters()]

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        mine = r.take(x, y)
        cross_entropy(model(mine[0]), mine[1]).backward()
        return [p.grad.clone() for p in model.parameters()]

    for grads in threads.run(world_size, work):
        for g, w in zip(grads, want, strict=True):
            close(g, w)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zero_grad_of_every_kind(set_to_none, whose):
    batches = data(6)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for x, y in batches:
            x, y = r.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            (opt if whose == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        return weights(model)

    close(same(threads.run(2, work)), alone(batches))


class Branches(nn.Module):
    """Uses one of two branches; a third is never used; two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.tied = nn.Linear(6, 3)
        self.tied.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(1.0))  # 0-dim

    def forward(self, x, which):
        out = (self.a(x) if which == 0 else self.b(x)) + self.tied(x)
        return out * self.scale


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parameters_that_differ_per_worker(world_size):
    """No hang; what nobody used keeps no gradient; what somebody used is the mean with zeros."""
    x, y = data(1, size=6 * world_size)[0]

    build = built(Branches)

    def work(comm):
        model = build()
        opt = adamw(model)
        r = Rig(comm, model, opt)
        for _ in range(3):
            mine = r.take(x, y)
            cross_entropy(model(mine[0], comm.rank % 2), mine[1]).backward()
            assert model.never.weight.grad is None
            opt.step()
            opt.zero_grad()
        return weights(model)

    model = build()
    opt = adamw(model)
    for _ in range(3):
        parts = [
            cross_entropy(model(x[6 * r : 6 * r + 6], r % 2), y[6 * r : 6 * r + 6]) / world_size
            for r in range(world_size)
        ]
        sum(parts).backward()
        opt.step()
        opt.zero_grad()
    named = pytest.warns(UserWarning, match="never.bias, never.weight") if world_size > 1 else contextlib.nullcontext()
    with named:
        results = threads.run(world_size, work)
    close(same(results), weights(model))


def two_optimizers(comm, x, y, **rig):
    """Two models, each with an optimizer of its own, and this worker's share of a batch for both."""
    model, engines = nn.ModuleList([mlp(0), mlp(1)]), Engines()
    opts = [sgd(one) for one in model]
    lanes = [type(comm)(comm.room, comm.rank, f"o{i}") for i in range(2)]
    rigs = [Rig(lanes[i], model[i], opts[i], engines=engines, **rig) for i in range(2)]
    mine, _ = (one.take(x, y) for one in rigs)
    return model, opts, mine


def test_a_worker_whose_loss_touches_nothing_of_an_optimizer_joins_at_step():
    x, y = data(1, size=8)[0]

    def work(comm):
        model, opts, mine = two_optimizers(comm, x, y)
        used = model[0](mine[0]) if comm.rank == 0 else model[0](mine[0]) + model[1](mine[0])
        cross_entropy(used, mine[1]).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        return weights(model)

    same(threads.run(2, work))


def test_all_bytes_of_a_backward_leave_before_any_is_waited_for():
    """A worker waits in its backward for an optimizer that the other one joins with only after its own backward."""
    x, y = data(1, size=8)[0]

    def work(comm):
        model, opts, mine = two_optimizers(comm, x, y, spec="half")
        out = model[1](mine[0]) if comm.rank == 0 else model[0](mine[0]) + model[1](mine[0])
        cross_entropy(out, mine[1]).backward()
        for opt in opts:
            opt.step()
        return weights(model)

    same(threads.run(2, work, timeout_s=15))


def test_workers_that_reach_different_optimizers_and_leave_out_parameters_do_not_wait_for_each_other():
    """One waits for the first optimizer's mean, which the other joins at its step, and that one for what the first
    has to say of a parameter without a gradient in the second.
    """
    x, y = data(1, size=8)[0]

    def work(comm):
        model, opts, mine = two_optimizers(comm, x, y)
        if comm.rank == 0:
            out = model[0](mine[0]) + model[1](mine[0])
        else:
            out = model[1][2:](mine[0].new_ones(len(mine[0]), 16))
        cross_entropy(out, mine[1]).backward()
        for opt in opts:
            opt.step()
        return weights(model)

    same(threads.run(2, work, timeout_s=10))


@pytest.mark.parametrize("size", [12, 11])
def test_frozen_and_thawed_on_the_way(size):
    """size: of the batches from the fourth on, in which a layer is frozen; some are not shared equally."""
    batches = data(3) + data(6, size=size)

    def loop(model, opt, take):
        for i, (x, y) in enumerate(batches):
            model[0].requires_grad_(i not in (3, 4, 5))
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    def start():
        model = mlp()
        model[2].requires_grad_(False)  # frozen at the start: no bytes for it
        return model, sgd(model)

    def thaw_later(model, opt, take):
        loop(model, opt, take)
        model[2].requires_grad_(True)
        return loop(model, opt, take)

    def work(comm):
        model, opt = start()
        return thaw_later(model, opt, Rig(comm, model, opt).take)

    model, opt = start()
    close(same(threads.run(3, work)), thaw_later(model, opt, lambda *t: t))


def test_frozen_on_one_worker_only_is_named():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        (x, y) = data(1)[0]
        for i in range(2):
            if i == 1:
                model[0].requires_grad_(comm.rank == 1 and False)
                if comm.rank == 1:
                    model[4].requires_grad_(False)
            mine = r.take(x, y)
            cross_entropy(model(mine[0]), mine[1]).backward()
            opt.step()
            opt.zero_grad()

    with pytest.raises(MismatchError, match=r"trainable parameters at step 1.*worker"):
        threads.run(2, work)


def test_batchnorm_statistics_agree_after_every_step():
    build = built(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))

    def work(comm):
        model = build()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for x, y in data(4):
            mine = r.take(x, y)
            cross_entropy(model(mine[0]), mine[1]).backward()
            opt.step()
            opt.zero_grad()
        return torch.cat([model[1].running_mean, model[1].running_var])

    same(threads.run(3, work))


class Odd(nn.Module):
    """Sparse, complex, float64 and bf16 parameters in one model."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(4).bfloat16())

    def forward(self, i):
        h = self.words(i).mean(1) * self.phase
        return (h.abs() * self.narrow.float()).double() * self.wide


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_dtypes_and_sparse_gradients(world_size):
    g = torch.Generator().manual_seed(0)
    index = torch.randint(0, 20, (6, 5), generator=g)

    build = built(Odd)

    def work(comm):
        model = build()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        r = Rig(comm, model, opt)
        for _ in range(3):
            (mine,) = r.take(index)
            model(mine).square().mean().backward()
            assert model.words.weight.grad.is_sparse
            opt.step()
            opt.zero_grad()
        return [p.detach() for p in model.parameters()]

    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(index).square().mean().backward()
        opt.step()
        opt.zero_grad()
    for result in threads.run(world_size, work):
        for got, want in zip(result, model.parameters(), strict=True):
            close(
                torch.view_as_real(got) if got.is_complex() else got,
                torch.view_as_real(want.detach()) if want.is_complex() else want.detach(),
                tol=2e-2 if got.dtype == torch.bfloat16 else 1e-5,
            )


@pytest.mark.parametrize("where", [0, 2])
def test_a_nan_on_one_worker_skips_the_step_on_all_and_names_it(where):
    batches = data(5)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        for i, (x, y) in enumerate(batches):
            x, y = r.take(x, y)
            if i == 2 and comm.rank == where:
                x = x * float("nan")
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model), r.engine.ex.step

    with pytest.warns(UserWarning, match=f"step 2 is skipped on all workers: the gradient of worker {where} "):
        results = threads.run(3, work)
    close(same([r[0] for r in results]), alone(batches[:2] + batches[3:]))
    assert results[0][1] == 4


def test_guard_raise_and_patience():
    def work(guard, steps):
        def run(comm):
            model = mlp()
            opt = sgd(model)
            r = Rig(comm, model, opt, guard=guard)
            for x, y in data(steps):
                x, y = r.take(x * float("inf"), y)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()

        return run

    with pytest.raises(NonFiniteError, match="worker"):
        threads.run(2, work("raise", 1))
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(NonFiniteError, match="20 in a row"):
        threads.run(2, work("skip", 25))


@pytest.mark.filterwarnings("ignore:paceline. step")
def test_patience_begins_again_with_every_step_that_counts():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        for step, (x, y) in enumerate(data(30)):
            x, y = rig.take(x, y)
            cross_entropy(model(x if step % 10 == 0 else x * float("inf")), y).backward()
            opt.step()
            opt.zero_grad()
        return rig.engine.ex.step

    assert threads.run(2, work) == [3, 3]


def test_one_backward_more_on_one_worker_is_named():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        x, y = data(1)[0]
        mine = r.take(x, y)
        for step in range(3):
            for _ in range(2 if comm.rank == 1 and step == 1 else 1):
                cross_entropy(model(mine[0]), mine[1]).backward()
            opt.step()
            opt.zero_grad()

    with pytest.raises(MismatchError, match=r"worker \d is at step"):
        threads.run(2, work, timeout_s=3)


def test_gradients_thrown_away_by_one_worker_alone_are_named():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        x, y = Rig(comm, model, opt).take(*data(1)[0])
        cross_entropy(model(x), y).backward()
        if comm.rank == 0:
            opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()

    with pytest.raises(MismatchError, match="worker 0 is at step 0, backward 1, the others at step 0, backward 2"):
        threads.run(3, work)


def test_a_batch_left_out_by_one_worker_alone_is_named():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        for step, (x, y) in enumerate(data(4)):
            x, y = rig.take(x, y)
            if step == 1 and comm.rank == 0:
                continue
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    with pytest.raises(MismatchError, match="worker 0 is at batch 3, the others at batch 2"):
        threads.run(3, work)


def test_a_window_that_does_not_count_is_over():
    """A NaN in its last micro-batch: the next window begins with the next batch, whoever zeroes the gradients."""
    batches = data(6)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, accumulate=2)
        for step, (x, y) in enumerate(batches):
            x, y = rig.take(x, y)
            cross_entropy(model(x * float("nan") if step == 1 and comm.rank else x), y).backward()
            opt.step()
            model.zero_grad()
        return weights(model)

    large = [tuple(torch.cat(parts) for parts in zip(*batches[i : i + 2], strict=True)) for i in (2, 4)]
    with pytest.warns(UserWarning, match="step 0 is skipped"):
        close(same(threads.run(2, work)), alone(large))


def test_blocks_of_no_sync_inside_each_other():
    batches = data(6)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        for step, (x, y) in enumerate(batches):
            x, y = rig.take(x, y)
            with rig.engine.no_sync() if step % 3 < 2 else contextlib.nullcontext():
                with rig.engine.no_sync() if step % 3 < 2 else contextlib.nullcontext():
                    pass
                before = comm.sent
                cross_entropy(model(x), y).backward()
                assert comm.sent == before or step % 3 == 2
            if step % 3 == 2:
                opt.step()
                opt.zero_grad()
        return weights(model)

    large = [tuple(torch.cat(parts) for parts in zip(*batches[i : i + 3], strict=True)) for i in (0, 3)]
    close(same(threads.run(2, work)), alone(large))


class Mixed(nn.Module):
    """The first layer, which is the last whose gradients are ready, is too narrow for a whisper."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x.bfloat16()).float())


def test_a_whisper_is_of_its_own_backward():
    """After a step with a whisper comes one whose last bucket cannot carry any."""
    build = built(Mixed)

    def work(comm):
        model = build()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        rig = Rig(comm, model, opt)
        for step, (x, y) in enumerate(data(3)):
            model.first.requires_grad_(step > 0)
            x, y = rig.take(x, y)
            cross_entropy(model(x * float("nan") if step == 1 and comm.rank else x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    with pytest.warns(UserWarning, match="step 1 is skipped on all workers: the gradient of worker 1 "):
        assert same(threads.run(2, work)).isfinite().all()


def test_what_was_held_back_and_zeroed_is_forgotten():
    """Without a step: the window begins again with the next batch."""
    batches = data(4)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        with rig.engine.no_sync():
            x, y = rig.take(*batches[0])
            cross_entropy(model(x), y).backward()
            opt.zero_grad()
        for x, y in batches[1:]:
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    close(same(threads.run(2, work)), alone(batches[1:]))


def test_a_plain_step_sends_its_buckets_and_nothing_else():
    """The vote is whispered with the gradients: [Note: whisper]."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt)
        counts = []
        for x, y in data(3):
            x, y = rig.take(x, y)
            before = comm.ops
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            counts.append(comm.ops - before)
        assert rig.recorder.sent == comm.sent
        return counts[1:], len(rig.engine.buckets)

    for counts, buckets in threads.run(2, work):
        assert counts == [buckets, buckets]


def test_a_copy_of_the_model_is_free_of_the_engine():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        r = Rig(comm, model, opt)
        ema = copy.deepcopy(model)
        x, y = data(1)[0]
        cross_entropy(ema(x), y).backward()
        assert comm.sent == 0
        assert list(ema.state_dict()) == list(mlp().state_dict()) == list(model.state_dict())
        return r is not None

    threads.run(2, work)


def test_learning_rate_schedulers_before_and_after(recwarn):
    batches = data(6)

    def loop(model, opt, take, late):
        early = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) if not late else None
        rig = take(model, opt)
        late_one = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) if late else None
        for x, y in batches:
            x, y = rig(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            (early or late_one).step()
        return weights(model)

    for late in (True, False):
        model = mlp()
        want = loop(model, sgd(model), lambda m, o: lambda *t: t, late)

        def work(comm, late=late):
            model = mlp()
            return loop(model, sgd(model), lambda m, o: Rig(comm, m, o).take, late)

        close(same(threads.run(2, work)), want)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
