"""What a batch counts: losses that are sums over samples, and loops that read several loaders at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import threads
from laws_table import WORLDS
from paceline.comm.single import SingleComm
from paceline.core.engines import Engines
from paceline.errors import UsageError
from paceline.session.settings import Settings
from rig import Rig, Share, close, data, mlp, same, weights

LR = 1e-2


def summed(x, y, model):
    return cross_entropy(model(x), y, reduction="sum")


def slow_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(world_size, batches, *, accumulate=1, **settings):
    """The plain loop with a summed loss; the last window may be partial."""

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt, loss="sum", accumulate=accumulate, **settings)
        for k, (x, y) in enumerate(batches):
            x, y = rig.take(x, y, last=k == len(batches) - 1)
            summed(x, y, model).backward()
            opt.step()
            opt.zero_grad()
        rig.engine.settle()
        return torch.cat([x.flatten() for x in model.state_dict().values()])

    return threads.run(world_size, work)


def alone(batches, accumulate=1):
    model = mlp()
    opt = slow_sgd(model)
    for k, (x, y) in enumerate(batches):
        summed(x, y, model).backward()
        if (k + 1) % accumulate == 0 or k == len(batches) - 1:
            opt.step()
            opt.zero_grad()
    return weights(model)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("size", [12, 7, 2])  # equal shares, unequal ones, and workers without any sample
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_summed_loss_is_that_of_one_process(world_size, size, accumulate):
    batches = data(7, size)
    close(same(train(world_size, batches, accumulate=accumulate)), alone(batches, accumulate), tol=1e-5)


@pytest.mark.parametrize("spec", ["zero1", "zero3", "half", "priority"])
def test_a_summed_loss_with_other_parts(spec):
    batches = data(5, 7)
    tol = 5e-2 if spec == "half" else 1e-5
    close(same(train(2, batches, spec=spec)), alone(batches), tol=tol)


def test_a_summed_loss_without_a_loader():
    """As with batches that each worker makes by itself."""
    batches = data(4, 6)

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        Rig(comm, model, opt, loss="sum")
        for x, y in batches:
            summed(x[comm.rank :: 2], y[comm.rank :: 2], model).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    close(same(threads.run(2, work)), alone(batches), tol=1e-5)


def test_a_summed_loss_held_back():
    parts = [data(1, size)[0] for size in (8, 3, 5)]

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt, loss="sum")
        for x, y in parts[:2]:
            x, y = rig.take(x, y)
            with rig.engine.no_sync():
                summed(x, y, model).backward()
        x, y = rig.take(*parts[2])
        summed(x, y, model).backward()
        opt.step()
        return weights(model)

    close(same(threads.run(3, work)), alone(parts, accumulate=3), tol=1e-5)


def test_a_sum_has_no_weights():
    with pytest.raises(UsageError, match="do not go together"):
        Settings(loss="sum", weight=len)
    with pytest.raises(UsageError, match="did you mean"):
        Settings(loss="summ")


F = torch.nn.functional


@pytest.mark.parametrize(
    ("loss", "hinted"),
    [
        (lambda out, y: F.cross_entropy(out, y, reduction="sum"), True),
        (lambda out, y: torch.nn.MSELoss(reduction="sum")(out, out.detach() + 1), True),
        (
            lambda out, y: F.binary_cross_entropy(out.sigmoid(), out.detach().sigmoid(), reduction="sum") + out.sum(),
            True,
        ),
        (lambda out, y: F.cross_entropy(out, y), False),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y), False),
        (lambda out, y: F.cross_entropy(out, y, reduction="none").mean(), False),
        (lambda out, y: out.mean(), False),
    ],
)
def test_a_hint_where_the_loss_is_a_sum(loss, hinted):
    """Said once, and only of what is surely a sum."""
    [(x, y)] = data(1)

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        Rig(comm, model, opt, accumulate=2)
        for _ in range(4):
            loss(model(x), y).backward()
            opt.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work(SingleComm())
    assert sum("prepare(loss='sum')" in str(one.message) for one in said) == hinted


# ------------------------------------------------------------------------------------------ several loaders


def both(model, a, b, loss):
    return cross_entropy(model(a[0]), a[1], reduction=loss) + cross_entropy(model(b[0]), b[1], reduction=loss)


def side_by_side(world_size, first, second, *, accumulate=1, loss="mean"):
    """One backward for two batches: the mean loss over one plus the mean loss over the other."""

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt, accumulate=accumulate, loss=loss)
        for k, (a, b) in enumerate(zip(first, second, strict=True)):
            a = _share(rig, a, 0, last=k == len(first) - 1)
            b = _share(rig, b, 1)
            (
                cross_entropy(model(a[0]), a[1], reduction=loss) + cross_entropy(model(b[0]), b[1], reduction=loss)
            ).backward()
            opt.step()
            opt.zero_grad()
        return weights(model), rig.engine.ex.step

    return threads.run(world_size, work)


def _share(rig, batch, loader, last=False):
    x, y = batch
    sizes = rig.shares(len(x))
    start, size = sum(sizes[: rig.comm.rank]), sizes[rig.comm.rank]
    rig.engine.take_batch(Share(size, len(x), last), loader)
    return x[start : start + size], y[start : start + size]


def both_alone(first, second, accumulate=1, loss="mean"):
    model = mlp()
    opt = slow_sgd(model)
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        value = both(model, a, b, loss)
        (value / accumulate if loss == "mean" else value).backward()
        if (k + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
    return weights(model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_loaders_that_are_shared_alike(accumulate):
    first, second = data(4, 12), data(4, 4, seed=8)
    results = side_by_side(2, first, second, accumulate=accumulate)
    close(same([w for w, _ in results]), both_alone(first, second, accumulate), tol=1e-5)


def test_two_loaders_that_are_shared_unlike_are_refused_by_name():
    one_of_both = r"worker (0 has 6 of 12 of loader 1's, and 3|1 has 6 of 12 of loader 1's, and 2) of 5 of loader 2's"
    with pytest.raises(UsageError, match=one_of_both):
        side_by_side(2, data(3, 12), data(3, 5))


def test_two_loaders_out_of_proportion_within_a_window_are_refused():
    first = [*data(1, 12), *data(1, 6)]
    with pytest.raises(UsageError, match="count differently"):
        side_by_side(2, first, data(2, 4), accumulate=2)
    close(side_by_side(2, first, data(2, 4))[0][0], both_alone(first, data(2, 4)), tol=1e-5)


def test_two_loaders_of_any_sizes_under_a_summed_loss():
    first, second = data(3, 12), data(3, 5)
    close(side_by_side(2, first, second, loss="sum")[0][0], both_alone(first, second, loss="sum"), tol=1e-5)


def test_the_end_of_one_loader_ends_the_window():
    first, second = data(3, 12), data(3, 4)
    assert [step for _, step in side_by_side(2, first, second, accumulate=2)] == [2, 2]


@pytest.mark.parametrize("how", ["no_grad", "to its end", "alternating"])
def test_a_loader_beside_it_that_is_not_in_the_same_backward(how):
    """An evaluation between the batch and its backward, and loaders in turns: each backward has its own weight."""
    batches, others = data(4, 7), data(4, 4)

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt)
        for batch, other in zip(batches, others, strict=True):
            x, y = _share(rig, batch, 0)
            if how == "no_grad":
                with torch.no_grad():
                    model(_share(rig, other, 1)[0])
            elif how == "to its end":
                _share(rig, other, 1)
                rig.engine.loop_ended(1)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if how == "alternating":
                x, y = _share(rig, other, 1)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        return weights(model)

    model = mlp()
    opt = slow_sgd(model)
    for batch, other in zip(batches, others, strict=True):
        for x, y in (batch, other) if how == "alternating" else (batch,):
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    close(same(threads.run(2, work)), weights(model), tol=1e-5)


@pytest.mark.parametrize("size", [12, 7])
def test_batches_that_were_collected_must_be_shared_alike(size):
    """The backward of batches[0] comes after the last batch was handed out."""
    batches = [*data(2, 12), *data(1, size)]

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt)
        shares = [_share(rig, batch, 0) for batch in batches]
        rig.engine.loop_ended(0)
        for x, y in shares:
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    if size == 7:
        with pytest.raises(UsageError, match="several batches before this backward, shared differently"):
            threads.run(2, work)
        return
    same(threads.run(2, work))


def test_a_backward_of_another_optimizer_has_used_a_batch_too():
    """The second optimizer has one backward, after the loop: of the last batch, however the others were shared."""
    batches = [*data(2, 12), *data(1, 7)]

    def work(comm):
        engines, models = Engines(), [mlp(0), mlp(1)]
        lanes = [type(comm)(comm.room, comm.rank, f"o{i}") for i in range(2)]
        rigs = [Rig(lane, model, slow_sgd(model), engines=engines) for lane, model in zip(lanes, models, strict=True)]
        for batch in batches:
            (x, y), _ = (_share(rig, batch, 0) for rig in rigs)
            cross_entropy(models[0](x), y).backward()
            rigs[0].optimizer.step()
            rigs[0].optimizer.zero_grad()
        for rig in rigs:
            rig.engine.loop_ended(0)
        cross_entropy(models[1](x), y).backward()
        rigs[1].optimizer.step()
        return weights(models[1])

    model = mlp(1)
    x, y = batches[-1]
    cross_entropy(model(x), y).backward()
    slow_sgd(model).step()
    close(same(threads.run(2, work)), weights(model), tol=1e-5)


def test_an_evaluation_leaves_batches_of_ones_own_alone():
    """Batches that each worker makes for itself count the same, whatever an evaluation's loader handed out last."""
    batches = data(4, 6)

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt)
        for x, y in batches:
            with torch.no_grad():
                for other in data(2, 7):
                    model(_share(rig, other, 0)[0])
            rig.engine.loop_ended(0)
            cross_entropy(model(x[comm.rank :: 2]), y[comm.rank :: 2]).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    model = mlp()
    opt = slow_sgd(model)
    for x, y in batches:
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    close(same(threads.run(2, work)), weights(model), tol=1e-5)


@pytest.mark.parametrize("before", ["backward", "forward"])
def test_a_batch_fetched_ahead(before):
    """Fetched between forward and backward it waits for its turn; before the forward nothing tells whose turn it is."""
    batches = [*data(2, 12), *data(1, 7)]

    def work(comm):
        model = mlp()
        opt = slow_sgd(model)
        rig = Rig(comm, model, opt)
        ahead = _share(rig, batches[0], 0)
        for following in [*batches[1:], None]:
            x, y = ahead
            if before == "forward" and following is not None:
                ahead = _share(rig, following, 0)
            loss = cross_entropy(model(x), y)
            if before == "backward" and following is not None:
                ahead = _share(rig, following, 0)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    if before == "forward":
        with pytest.raises(UsageError, match="several batches before this backward, shared differently"):
            threads.run(2, work)
        return
    model = mlp()
    opt = slow_sgd(model)
    for x, y in batches:
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    close(same(threads.run(2, work)), weights(model))
