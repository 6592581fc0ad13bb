"""Loops that people write, under layouts that shard: right to rounding, or refused by name.

Each loop is plain PyTorch. It is run by one process with the whole batch, and by thread-workers with a share each.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import processes
import threads
from paceline.core import blank
from paceline.core.bucket import Bucket
from paceline.errors import UsageError
from rig import Rig, adamw, data, mlp, sgd, weights

LOOPS = {}
SIZE, BATCHES = 12, data(8)


def each(change):
    """A loop from what it does with one batch."""

    def loop(m, o, batches):
        for i, (x, y) in enumerate(batches):
            change(m, o, x, y, i)

    LOOPS[change.__name__] = loop
    return loop


def of_whole(loop):
    LOOPS[loop.__name__] = loop
    return loop


def whole(m, x, y):
    return cross_entropy(m(x), y)


def part(m, x):
    """A loss of the first layer alone."""
    return m[1](m[0](x)).square().mean()


def end(o):
    o.step()
    o.zero_grad()


def plain(m, o, x, y):
    whole(m, x, y).backward()
    end(o)


# ------------------------------------------------------------------------------------------------ backwards


@each
def a_second_backward_into_some(m, o, x, y, i):
    whole(m, x, y).backward()
    part(m, x).backward()
    end(o)


@each
def a_first_backward_into_some(m, o, x, y, i):
    part(m, x).backward()
    part(m, x).mul(0.5).backward()
    whole(m, x, y).backward()
    end(o)


@each
def into_some_and_never_zeroed(m, o, x, y, i):
    whole(m, x, y).backward()
    part(m, x).backward()
    o.step()


@each
def two_forwards_then_two_backwards(m, o, x, y, i):
    first, second = whole(m, x, y), part(m, x)
    first.backward()
    second.backward()
    end(o)


@each
def a_graph_that_is_kept(m, o, x, y, i):
    loss = whole(m, x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    end(o)


@each
def without_step_and_zeroed(m, o, x, y, i):
    whole(m, x, y).backward()
    if i % 3 != 1:
        o.step()
    o.zero_grad()


@each
def without_step_and_kept(m, o, x, y, i):
    if i % 3 == 1:
        part(m, x).backward()
        return
    plain(m, o, x, y)


@each
def zeroed_in_between(m, o, x, y, i):
    part(m, x).backward()
    (o if i % 2 else m).zero_grad()
    whole(m, x, y).backward()
    if i % 3:
        m.zero_grad()
        part(m, x).backward()
    end(o)


@each
def some_set_to_none_in_between(m, o, x, y, i):
    whole(m, x, y).backward()
    m[4].weight.grad = m[0].bias.grad = m[2].bias.grad = None
    part(m, x).backward()
    end(o)


@each
def zeroed_by_hand(m, o, x, y, i):
    whole(m, x, y).backward()
    m[0].weight.grad.zero_()
    m[4].weight.grad.detach_().zero_()
    part(m, x).backward()
    o.step()
    o.zero_grad(set_to_none=False)


@each
def scaled_and_clipped_in_between(m, o, x, y, i):
    whole(m, x, y).backward()
    m[0].weight.grad.mul_(0.3)
    nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    part(m, x).backward()
    end(o)


@each
def replaced_in_between(m, o, x, y, i):
    whole(m, x, y).backward()
    for p in (m[0].weight, m[4].weight):
        p.grad = torch.full(p.shape, 0.01)
    part(m, x).backward()
    end(o)


@each
def gradients_by_autograd_grad(m, o, x, y, i):
    params = list(m.parameters())
    for p, g in zip(params, torch.autograd.grad(whole(m, x, y), params), strict=True):
        p.grad = g
    end(o)


@each
def autograd_grad_beside_a_backward(m, o, x, y, i):
    whole(m, x, y).backward()
    torch.autograd.grad(part(m, x), [m[0].weight])  # only looked at
    end(o)


@each
def a_penalty_on_gradients(m, o, x, y, i):
    x = x.clone().requires_grad_()
    out = m(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (cross_entropy(out, y) + g.square().sum(1).mean()).backward()
    end(o)


@each
def frozen_between_backward_and_step(m, o, x, y, i):
    whole(m, x, y).backward()
    m[0].requires_grad_(False)
    end(o)
    m[0].requires_grad_(True)


@each
def frozen_and_thawed(m, o, x, y, i):
    m[0].requires_grad_(i % 2 == 0)
    m[4].bias.requires_grad_(i % 3 != 0)
    plain(m, o, x, y)


OF_GRADIENTS = [*LOOPS]  # those above


# ------------------------------------------------------------------------------------------------ parameters


@each
def changed_in_place(m, o, x, y, i):
    whole(m, x, y).backward()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(0.9)
    end(o)
    for p in m.parameters():
        p.data.clamp_(-0.3, 0.3)


@each
def replaced(m, o, x, y, i):
    whole(m, x, y).backward()
    m[2].weight.data = m[2].weight.data * 0.9
    end(o)
    for p in m.parameters():
        p.data = p.data * 0.9
    with torch.no_grad():
        m(x)
    m[4].weight.data = m[4].weight.data * 0.9


@each
def through_one_vector(m, o, x, y, i):
    plain(m, o, x, y)
    v = nn.utils.parameters_to_vector(m.parameters()).detach()
    nn.utils.vector_to_parameters(v * 0.9, m.parameters())
    torch._foreach_mul_([p.data for p in m.parameters()], 0.9)


@of_whole
def through_what_was_held_all_along(m, o, batches):
    held = [p.data for p in m.parameters()]
    for x, y in batches:
        plain(m, o, x, y)
        for p in held:
            p.mul_(0.9)


@each
def copies(m, o, x, y, i):
    whole(m, x, y).backward()
    before = copy.deepcopy(m)
    end(o)
    after = copy.deepcopy(m)
    with torch.no_grad():
        for p, a, b in zip(m.parameters(), before.parameters(), after.parameters(), strict=True):
            p.copy_(a * 0.5 + b * 0.5)
        before(x)


@of_whole
def averages(m, o, batches):
    ema = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for x, y in batches:
        whole(m, x, y).backward()
        ema.update_parameters(m)
        end(o)
        ema.update_parameters(m)
    with torch.no_grad():
        for p, a in zip(m.parameters(), ema.module.parameters(), strict=True):
            p.copy_(a)


@each
def a_penalty_on_weights(m, o, x, y, i):
    penalty = 0.01 * sum(p.square().sum() for p in m.parameters())
    loss = whole(m, x, y) + m[0].weight.t()[:, :3].exp().sum() * 0.01
    with torch.no_grad():
        m(x)
    loss.backward()
    penalty.backward()
    end(o)


@each
def a_weight_that_another_layer_borrows(m, o, x, y, i):
    cross_entropy(linear(m[3](m[2](m[1](m[0](x)))), m[4].weight * 2) + m[4].bias, y).backward()
    end(o)


@each
def called_with_other_weights(m, o, x, y, i):
    held = {k: v.detach() for k, v in m.named_parameters()}
    teacher = functional_call(m, held, (x,)).detach()
    half = functional_call(m, {k: v * 0.5 for k, v in m.named_parameters()}, (x,))
    (cross_entropy(half, y) + (m(x) - teacher * 0.5).square().mean()).backward()
    end(o)


@each
def a_layer_that_is_replaced(m, o, x, y, i):
    whole(m, x, y).backward()
    if i == 3:
        m[2] = _constant()
        o.add_param_group({"params": list(m[2].parameters()), "lr": 0.05})
    end(o)


@each
def a_layer_that_takes_the_place_of_another(m, o, x, y, i):
    plain(m, o, x, y)
    if i == 2:
        m[2] = _constant()
        o.param_groups[0]["params"][2:4] = list(m[2].parameters())


def _constant():
    layer = nn.Linear(16, 16)
    nn.init.constant_(layer.weight, 0.05)
    nn.init.zeros_(layer.bias)
    return layer


@each
def tied_later(m, o, x, y, i):
    plain(m, o, x, y)
    if i == 2:
        m[2].bias = m[0].bias


@each
def parametrised(m, o, x, y, i):
    if i == 0:
        nn.utils.parametrizations.weight_norm(m[2])
    if i == 0 and len(o.param_groups) == 1:
        o.add_param_group({"params": list(m[2].parametrizations.parameters())})
    plain(m, o, x, y)


@each
def loaded(m, o, x, y, i):
    if i == 2:
        m.saved = copy.deepcopy((m.state_dict(), o.state_dict()))
    whole(m, x, y).backward()
    if i == 5:
        model, state = m.saved
        m.load_state_dict(model)
        o.load_state_dict(state)
    end(o)


@each
def the_optimizer_forgets(m, o, x, y, i):
    if i == 4:
        o.state = defaultdict(dict)
    plain(m, o, x, y)


# ------------------------------------------------------------------------------------------------ forwards


@each
def evaluated_in_mid_step(m, o, x, y, i):
    loss = whole(m, x, y)
    with torch.inference_mode():
        m(x)
    loss.backward()
    with torch.no_grad():
        m.eval()(x)
    m.train()
    end(o)


@each
def used_twice(m, o, x, y, i):
    h = m[3](m[2](m[3](m[2](m[1](m[0](x))))))
    cross_entropy(m[4](h), y).backward()
    end(o)


@each
def computed_again(m, o, x, y, i):
    again = i % 2 == 0
    h = checkpoint(lambda h: m[1](m[0](h)), x.clone().requires_grad_(), use_reentrant=again)
    h = checkpoint(lambda h: m[3](m[2](h)), h, use_reentrant=again)
    cross_entropy(m[4](h), y).backward()
    part(m, x).backward()
    end(o)


class FailsError(Exception):
    pass


@each
def a_forward_that_fails(m, o, x, y, i):
    def fail(*_):
        raise FailsError

    if i in (1, 3):
        hook = m[2].register_forward_hook(fail)
        with pytest.raises(FailsError):
            whole(m, x, y)
        hook.remove()
    plain(m, o, x, y)


# ------------------------------------------------------------------------------------------------ the law


def outcome(loop, world_size, spec, optimizer, **knobs):
    def work(comm):
        model = mlp()
        opt = optimizer(model)
        Rig(comm, model, opt, spec=spec, knobs=knobs)
        ends = slice(comm.rank * SIZE // world_size, (comm.rank + 1) * SIZE // world_size)
        loop(model, opt, [(x[ends], y[ends]) for x, y in BATCHES])
        state = model.state_dict()
        return torch.cat([state[name].flatten() for name, _ in model.named_parameters()])

    return threads.run(world_size, work)


def holds(loop, world_size, spec, optimizer=sgd, **knobs):
    model = mlp()
    loop(model, optimizer(model), BATCHES)
    want = weights(model)
    for got in outcome(loop, world_size, spec, optimizer, **knobs):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def calm_adamw(model):
    """Without moments Adam's step is the gradient over its own size, and all rounding where that is next to nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


every = pytest.mark.parametrize("name", LOOPS)
quiet = pytest.mark.filterwarnings("ignore:paceline")


@quiet
@every
def test_is_right_where_parameters_are_in_shards(name):
    holds(LOOPS[name], 2, "zero3")


@quiet
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_is_right_where_gradients_are_in_shards(name):
    holds(LOOPS[name], 2, "zero2")


@pytest.mark.slow
@quiet
@every
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_is_right_on_three_workers(stage, name):
    holds(LOOPS[name], 3, stage, calm_adamw if "forgets" in name else sgd)


# Undoing what was stepped ahead rounds, and Adam divides by what may be small.
_ROUNDS = {"changed_in_place", "scaled_and_clipped_in_between"}


@pytest.mark.slow
@quiet
@every
@pytest.mark.parametrize("params", ["device", "cpu"])
def test_is_right_with_state_on_the_host(params, name):
    if name in _ROUNDS:
        pytest.skip("compared with SGD only")
    holds(LOOPS[name], 2, "zero3", calm_adamw if "forgets" in name else adamw, store="cpu", params=params)


# ------------------------------------------------------------------------------------------------ what is refused


def refused(match, stage, change, world_size=2):
    def loop(m, o, batches):
        for x, y in batches:
            whole(m, x, y).backward()
            change(m, o, x, y)
            end(o)

    with pytest.raises(UsageError, match=match):
        outcome(loop, world_size, stage, sgd)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_model_that_is_cast_is_named(stage):
    match = "0.weight cannot become another" if stage == "zero3" else "was .* float32 when it was prepared"
    refused(match, stage, lambda m, o, x, y: (end(o), m.double(), m(x.double()).sum().backward()))


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_gradient_that_was_put_aside_is_named_when_it_is_gone(stage):
    def change(m, o, x, y):
        kept = [p.grad for p in m.parameters()]
        o.zero_grad()
        whole(m, x, y).backward()
        for p, g in zip(m.parameters(), kept, strict=True):
            p.grad = g

    refused("put aside is gone", stage, change)


@pytest.mark.parametrize("stage", ["replicated", "zero2"])
def test_a_layer_in_two_reentrant_checkpoints_is_named(stage):
    def change(m, o, x, y):
        h = m[1](m[0](x))
        for _ in range(2):
            h = checkpoint(lambda h: m[3](m[2](h)), h, use_reentrant=True)
        m[4](h).sum().backward()

    refused("second gradient in one backward", stage, change)


def test_other_memory_for_a_sharded_parameter_is_refused():
    refused(
        "resize_ gives it other memory", "zero3", lambda m, o, x, y: m[0].weight.data.shape and m[0].weight.resize_(3)
    )


# ------------------------------------------------------------------------------------------------ processes

_IN_PROCESSES = ["a_second_backward_into_some", "changed_in_place", "copies", "a_layer_that_is_replaced"]


def _job(rank, stage):
    import paceline

    found = []
    for name in _IN_PROCESSES:
        model = mlp()
        model, opt = paceline.prepare(model, sgd(model), method=stage, bucket_mb=0.0005)
        n = paceline.world_size()
        LOOPS[name](
            model, opt, [(x[rank * SIZE // n :][: SIZE // n], y[rank * SIZE // n :][: SIZE // n]) for x, y in BATCHES]
        )
        state = model.state_dict()
        found.append(torch.cat([state[name].flatten() for name, _ in model.named_parameters()]))
    return found


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_between_processes(stage):
    results = processes.values(processes.run(2, _job, stage))
    for i, name in enumerate(_IN_PROCESSES):
        model = mlp()
        LOOPS[name](model, sgd(model), BATCHES)
        want = weights(model)
        for found in results:
            assert (found[i] - want).abs().max() <= 1e-5 * want.abs().max(), name


def _load_alone(rank, everyone):
    import paceline

    model = mlp()
    model, opt = paceline.prepare(model, sgd(model), method="zero1", bucket_mb=0.0005)
    for i, (x, y) in enumerate(BATCHES[:4]):
        if i == 2 and (everyone or rank == 1):
            model.load_state_dict(mlp(1).state_dict())
        plain(model, opt, x[rank * 6 :][:6], y[rank * 6 :][:6])
    return weights(model)


def test_weights_that_one_worker_alone_has_loaded_are_named():
    """A step would make a mixture of both, alike on all workers."""
    first, second = processes.run(2, _load_alone, False)
    assert first.error
    assert second.error == "PeerError"
    assert "load_state_dict was called on this worker" in second.message
    got = processes.values(processes.run(2, _load_alone, True))
    assert torch.equal(*got)


def test_memory_without_values_is_nan_in_tests():
    """What reads it is found out by any law here."""
    assert blank.POISON
    b = Bucket(0, [("w", torch.zeros(40))], 2)
    before = b.flat
    b.free()
    assert before.isnan().all()
