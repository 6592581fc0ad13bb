"""priority: urgent bytes first, and a step that does not wait. Whatever is reordered, the numbers stay the same."""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
import types
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import processes
import threads
from laws_table import on_every_world
from marks import slow
from paceline.core.bucket import Bucket
from paceline.core.parts import Event
from paceline.core.pipeline import Pipeline
from paceline.core.vote import Place, Vote
from paceline.errors import MethodError
from paceline.method import Method, method
from paceline.orders.priority import Priority
from rig import Rig, adamw, built, data, mlp, same, sgd, weights

STEPS = 7
TIGHT = {"partition": 0.0003, "credit": 0.0}  # several pieces even of a tiny layer, and nothing ahead


def trained(
    world_size,
    spec,
    optimizer=sgd,
    make=mlp,
    *,
    batches=None,
    step=None,
    end=None,
    scheduled=False,
    early_zero=False,
    told=None,
    **rig,
):
    """The plain loop; `step` is what happens between forward and zero_grad, if not the usual. Why a barrier was kept
    comes into `told`: warnings of threads are not a thing to test.
    """

    def work(comm):
        model = make()
        opt = optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5) if scheduled else None
        one = Rig(comm, model, opt, spec=spec, knobs=TIGHT if spec.startswith("priority") else None, **rig)
        for x, y in batches or data(STEPS):
            x, y = one.take(x, y)
            if early_zero:
                opt.zero_grad()
            if step is not None:
                step(one, model, opt, x, y)
            else:
                cross_entropy(model(x), y).backward()
                opt.step()
            if not early_zero:
                opt.zero_grad()
            if scheduler is not None:
                scheduler.step()
        if told is not None and comm.rank == 0:
            told.update(one.engine.overlap._told)
        if end is not None:
            return end(one, model, opt)
        return torch.cat([value.flatten() for value in model.state_dict().values()])

    return threads.run(world_size, work)


def equal(*, world_size=3, why=None, **how):
    """Under `priority` and in the order of backward: the same bits, with a barrier only for the reason given."""
    told = set()
    other = same(trained(world_size, "backward", **how))
    with warnings.catch_warnings(action="ignore"):
        assert torch.equal(same(trained(world_size, "priority", told=told, **how)), other)
    assert [why in text for text in told] == ([True] if why else [])


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "foreach": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, foreach=True),
    "groups": lambda m: torch.optim.RMSprop([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(m.parameters())]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name):
    equal(optimizer=OPTIMIZERS[name])


@on_every_world
def test_any_world(world_size):
    equal(world_size=world_size)


@pytest.mark.parametrize(
    "optimizer", [sgd, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-2), foreach=False)]
)
def test_a_learning_rate_that_changes_before_the_update_is_made(optimizer):
    equal(scheduled=True, optimizer=optimizer)


def test_zero_grad_at_the_start_of_the_loop():
    equal(early_zero=True)


def test_gradients_that_are_zeroed_in_place():
    """Not before they are used, and the step does not wait for that."""

    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        assert one.engine.overlap.under_way == one.engine.overlap.on

    equal(step=step)


def test_hooks_of_the_optimizer_run_once_a_step():
    calls = []

    def hooked(model):
        opt = sgd(model)
        opt.register_step_post_hook(lambda *_: calls.append(1))
        return opt

    equal(optimizer=hooked, why="the optimizer has hooks")
    assert len(calls) == 2 * 3 * STEPS


@pytest.mark.filterwarnings("ignore:paceline. 1 parameters got no gradient")
def test_a_gradient_that_is_taken_away():
    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        model[2].weight.grad = None
        opt.step()

    equal(step=step, why="gradients are replaced")


def test_gradients_that_are_never_zeroed():
    def step(one, model, opt, x, y):
        opt.zero_grad = lambda: None
        cross_entropy(model(x), y).backward()
        opt.step()

    equal(step=step)


def test_a_window_of_micro_batches():
    equal(batches=data(8), accumulate=2)


def test_bf16_autocast():
    def step(one, model, opt, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()

    equal(step=step)


@pytest.mark.parametrize("name", ["half", slow("int8"), slow("topk"), "powersgd", "qsgd"])
def test_reducers_that_may_be_cut_and_those_that_may_not(name):
    """In pieces a quantiser rounds otherwise, so those are compared whole."""
    whole = {"partition": 64.0, "credit": 0.0}

    def run(spec, knobs):
        def work(comm):
            model = mlp()
            opt = sgd(model)
            one = Rig(comm, model, opt, spec=spec, knobs=knobs)
            pieces = max(len(b.chunks) for b in one.engine.buckets)
            for x, y in data(STEPS):
                x, y = one.take(x, y)
                cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            model.state_dict()
            return weights(model), pieces

        results = threads.run(3, work)
        return same([w for w, _ in results]), results[0][1]

    plain, _ = run(name, {})
    together, _ = run(f"priority+{name}", whole)
    assert torch.equal(together, plain)
    cut, pieces = run(f"priority+{name}", TIGHT)
    assert (pieces > 1) == (name in ("half", "int8", "qsgd"))
    assert cut.isfinite().all()


def batch_norm():
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 3)
    )


def test_buffers_are_agreed_on_before_they_are_used_again():
    equal(make=built(batch_norm))


def test_a_first_layer_that_has_buffers_alone():
    """It waits for no parameter, and where the vote is a ballot for no bucket either."""
    make = built(lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)))
    other = same(trained(3, "half", make=make))
    assert torch.equal(same(trained(3, "priority+half", make=make)), other)


class Odd(nn.Module):
    """Weights used by another module than their own, tied ones, and ones that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.never, self.loose = nn.Linear(2, 2), nn.Parameter(torch.ones(8))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight

    def forward(self, x):
        h = torch.tanh(nn.functional.linear(x, self.first.weight, self.first.bias))
        return self.out(self.tied(torch.tanh(self.second(h))) * self.loose)


@pytest.mark.filterwarnings("ignore:paceline. 2 parameters got no gradient")
def test_a_module_with_odd_ways():
    equal(make=built(Odd))


def test_two_backwards_to_a_step():
    def step(one, model, opt, x, y):
        out = model(x)
        cross_entropy(out, y).backward(retain_graph=True)
        out.square().mean().backward()
        opt.step()

    equal(step=step)


def test_two_forwards_to_a_step():
    def step(one, model, opt, x, y):
        for _ in range(2):
            cross_entropy(model(x), y).backward()
        opt.step()

    equal(step=step)


def test_a_closure():
    def step(one, model, opt, x, y):
        def closure():
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert opt.step(closure).isfinite()

    equal(step=step)


def test_clipping_has_its_barrier_back():
    clip = nn.utils.clip_grad_norm_  # as from torch.nn.utils import clip_grad_norm_ before all this

    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        norm = clip(model.parameters(), 0.1)
        assert norm > 0.1
        opt.step()

    equal(step=step, why="gradients are clipped")


def test_clipping_by_value():
    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()

    equal(step=step, why="gradients are clipped")


def test_a_loss_scaler_keeps_the_barrier():
    def run(spec):
        def work(comm):
            model = mlp()
            opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0)
            one = Rig(comm, model, opt, spec=spec, scaler=scaler)
            for x, y in data(STEPS):
                x, y = one.take(x, y)
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            assert one.engine.overlap._told <= {"a loss scaler must have seen every gradient before the first update"}
            return weights(model)

        return same(threads.run(2, work))

    with warnings.catch_warnings(action="ignore"):
        assert torch.equal(run("priority"), run("backward"))


@pytest.mark.parametrize("spec", ["priority", "priority+powersgd"])
@pytest.mark.parametrize("at", [0, 3, STEPS])
def test_a_step_that_does_not_count_leaves_no_trace(at, spec):
    batches = data(STEPS)
    x, y = data(1, seed=1)[0]
    x[6:] = torch.nan  # worker 1's half
    with pytest.warns(UserWarning, match="the gradient of worker 1 is not finite"):
        spoiled = same(trained(2, spec, batches=[*batches[:at], (x, y), *batches[at:]]))
    assert torch.equal(spoiled, same(trained(2, spec)))


def test_nothing_of_a_step_that_does_not_count_is_under_way():
    """Its bytes have arrived before their memory is used again."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="priority", knobs=TIGHT)
        x, y = one.take(*data(1)[0])
        cross_entropy(model(x * float("nan") if comm.rank else x), y).backward()
        opt.step()
        assert one.engine.pipeline._flights
        model(x)
        assert not one.engine.pipeline._flights

    with pytest.warns(UserWarning, match="the gradient of worker 1 is not finite"):
        threads.run(2, work)


def test_it_can_be_told_when_a_step_is_made():
    """Optimizer and model, asked for their state, have all steps in them."""

    def end(one, model, opt):
        state = opt.state_dict()["state"]
        return torch.cat([state[i]["exp_avg"].flatten() for i in sorted(state)])

    equal(optimizer=adamw, end=end)


def test_who_looks_at_what_the_optimizer_remembers_sees_the_update():
    def end(one, model, opt):
        return torch.cat([opt.state[p]["exp_avg"].flatten() for p in model.parameters()])

    equal(optimizer=adamw, end=end)


def test_who_holds_what_the_optimizer_remembers_sees_the_update():
    """Without asking the optimizer's state for it after the step."""

    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        held = [opt.state[p]["exp_avg"] for p in model.parameters() if p in opt.state]
        opt.step()
        one.seen = torch.stack([x.sum() for x in held]) if held else None

    equal(optimizer=adamw, step=step, end=lambda one, model, opt: one.seen)


def test_a_mode_that_the_user_leaves_after_the_forward_is_the_one_that_ends():
    """Modes leave torch's stack from the top, whichever they are."""

    def step(one, model, opt, x, y):
        with torch.device("cpu"):
            loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        one.seen = weights(model)

    equal(step=step, end=lambda one, model, opt: one.seen)


@pytest.mark.parametrize("look", ["eval", "agreed", "load"])
def test_who_looks_sees_the_update(look):
    from paceline.core import consensus

    def end(one, model, opt):
        if look == "eval":
            with torch.no_grad():
                return model(data(1)[0][0])
        if look == "agreed":
            with consensus.consensus_weights(one.engine):
                return weights(model)
        model.load_state_dict(mlp(seed=1).state_dict())  # an update under way must not come on top of it
        opt.zero_grad()
        return weights(model)

    equal(end=end)


def test_a_step_returns_while_another_worker_has_not_even_sent():
    go = threading.Event()

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="priority")
        for t, (x, y) in enumerate(data(4)):
            x, y = one.take(x, y)
            loss = cross_entropy(model(x), y)
            if comm.rank == 1 and t == 2:
                assert go.wait(20), "worker 0 waits in its step"
            loss.backward()
            opt.step()
            opt.zero_grad()
            if comm.rank == 0 and t == 2:
                go.set()
        model.state_dict()
        return weights(model)

    same(threads.run(2, work))


def test_the_forward_waits_layer_by_layer():
    """While the first layer computes, the last one's update has not been made; a user who looks has it made."""
    layers = built(lambda: nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((6, 16), (16, 16), (16, 3)))))
    seen = []

    def work(comm):
        model = layers()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="priority", knobs=TIGHT)
        before = [p.detach().clone() for p in model.parameters()]

        def look(module, args):
            with torch._C.DisableTorchFunction():  # unseen: else they would land
                there = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
            if comm.rank == 0:
                seen.append(there)

        for layer in model:
            layer.register_forward_pre_hook(look)
        for x, y in data(2):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    threads.run(2, work)
    assert seen == [[False] * 3] * 3 + [[True, False, False], [True, True, False], [True, True, True]]


class Reads(nn.Module):
    """A module that uses the weight of one that is called later, as well as its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.first(x)
        return self.second(h) + 0.1 * self.second.weight.sum(1)


@pytest.mark.filterwarnings("ignore:paceline. priority")
def test_what_a_forward_uses_in_another_way_has_landed():
    equal(make=built(Reads))


def test_two_steps_by_one_gradient():
    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.step()

    equal(step=step)


@pytest.mark.parametrize("how", ["cleared", "replaced", "of one"])
def test_a_state_that_is_forgotten_after_the_step(how):
    """The update under way goes by the old state, whatever the user has put there since."""

    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        opt.step()
        if how == "cleared":
            opt.state.clear()
        elif how == "replaced":
            opt.state = collections.defaultdict(dict)
        else:
            opt.state[next(model.parameters())] = {}

    equal(step=step, optimizer=adamw)


def test_a_rate_in_a_tensor_that_changes_before_the_update_is_made():
    def step(one, model, opt, x, y):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.param_groups[0]["lr"].mul_(0.5)

    equal(step=step, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), foreach=True))


def test_a_loop_that_never_calls_the_model_has_its_barrier():
    def step(one, model, opt, x, y):
        for layer in model:
            x = nn.functional.linear(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer(x)
        cross_entropy(x, y).backward()
        opt.step()

    equal(step=step, why="the model itself is never called")


def test_a_second_round_goes_by_urgency_too():
    """What is needed first leaves last, at the end of backward. Its second message overtakes those of all others."""
    layers = built(lambda: nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((6, 16), (16, 16), (16, 3)))))
    rounds = []

    def work(comm):
        model = layers()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="priority+int8", knobs={"credit": 100.0})
        grad = one.engine.ex.grad

        @types.coroutine
        def watched(b):
            coroutine = grad(b)
            with contextlib.suppress(StopIteration):
                while True:
                    handle = coroutine.send(None)
                    rounds.append(b.index)
                    yield handle

        if comm.rank == 0:
            one.engine.ex.grad = watched
        for x, y in data(2):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        model.state_dict()

    threads.run(2, work)
    assert rounds == [0, 1, 2, 2, 1, 0] * 2


class Soon:
    """What a coroutine awaits once."""

    def __await__(self):
        yield self


def test_buffers_do_not_wait_behind_gradients():
    """The next forward asks for them first, and they have no size of their own."""
    pipeline, seen = Pipeline(), []

    async def two_rounds(name):
        await Soon()
        seen.append(name)

    for name, size in (("late", 8), ("soon", 8), ("buffers", 0)):
        pipeline.start(two_rounds(name), name, size)
    pipeline.rearrange({"late": 1, "soon": 0}.__getitem__)
    pipeline.drain()
    assert seen == ["buffers", "soon", "late"]


@pytest.mark.parametrize("whispers", [True, False])
def test_workers_hear_of_the_mean_backlog(whispers):
    def work(comm):
        b = Bucket(0, [("p", nn.Parameter(torch.zeros(3)))], comm.world_size)
        vote = Vote(lambda: comm, guard=True, whispers=whispers)
        vote.begin(Place())
        if whispers:
            vote.close(b, [b], backlog=10.0 * comm.rank)
            comm.mean(b.flat).wait()
        else:
            vote.call([b], backlog=10.0 * comm.rank)
        return vote.backlog()

    assert threads.run(3, work) == [10.0] * 3


def test_foreign_optimizers_keep_the_barrier():
    class Own(torch.optim.SGD):
        pass

    equal(optimizer=lambda m: Own(m.parameters(), lr=0.1), why="Own is not torch's own")


def test_compiled_models_keep_the_barrier():
    equal(make=lambda: torch.compile(mlp(), backend="eager"), world_size=2, why="a compiled model is one piece")


def test_a_copy_of_the_model_does_not_wait():
    def end(one, model, opt):
        ema = copy.deepcopy(mlp(seed=1))
        return ema(data(1)[0][0]).detach()

    equal(end=end)


# ---------------------------------------------------------------------------------------------------- the schedule


def buckets(sizes, world_size=2):
    made = [Bucket(i, [(f"p{i}", torch.zeros(size))], world_size) for i, size in enumerate(sizes)]
    for b in made:
        b.divide(256, world_size)
    return made


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    credit=st.floats(0, 8),
    pace=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_every_piece_leaves_once_and_no_more_than_the_credit_allows(sizes, credit, pace):
    order = Priority(partition=0.001, credit=credit)
    order.pace = pace
    ready, sent, made = [], [], 0
    largest = max(p.flat.nbytes for b in buckets(sizes) for p in b.chunks)
    for b in buckets(sizes):
        ready += b.chunks
        made += b.flat.nbytes
        for piece in order.next(ready, sent, Event.READY):
            sent.append(piece)
        ready = [p for p in ready if p not in sent]
        assert sum(p.flat.nbytes for p in sent) < pace * made + credit * largest + largest + 1
    rest = list(order.next(ready, sent, Event.END))
    assert [p.whole.index for p in rest] == sorted((p.whole.index for p in rest), reverse=True)
    everything = [*sent, *rest]
    assert len({id(p) for p in everything}) == len(everything) == sum(len(b.chunks) for b in buckets(sizes))


def test_the_pace_is_learned():
    """The wire carries a third of the bytes while backward makes them: what is left at its end comes to the credit."""
    order, sizes = Priority(partition=0.001, credit=4.0), [600] * 40
    for _ in range(60):
        ready, sent = [], []
        for b in buckets(sizes):
            ready += b.chunks
            sent += order.next(ready, sent, Event.READY)
            ready = [p for p in ready if p not in sent]
        out = sum(p.flat.nbytes for p in sent)
        order.next(ready, sent, Event.END)
        total = out + sum(p.flat.nbytes for p in ready)
        backlog = max(0.0, out - total / 3)
        order.hear(backlog)
    piece = total / (len(sent) + len(ready))
    assert abs(backlog - 4 * piece) < 2 * 2560
    assert order.pace < 0.5


class Shuffled(nn.Module):
    """Layers run in an order that differs from worker to worker, and so do their gradients arrive."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, w) for w in widths)
        self.turn = list(range(len(widths)))

    def forward(self, x):
        return sum(self.layers[i](x).square().sum() for i in self.turn)


def random_models(count, seed):
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))  # noqa: E731
    for _ in range(count):
        world_size = draw(2, 4)
        make = built(lambda: Shuffled([draw(1, 60) for _ in range(draw(1, 8))]), seed=draw(0, 10**6))
        turns = [torch.randperm(len(make().layers), generator=g).tolist() for _ in range(world_size)]
        knobs = {"partition": draw(1, 8) / 4096, "credit": draw(0, 8) / 2}
        skips = draw(0, world_size - 1) if draw(0, 3) == 0 else None

        def work(comm, make=make, turns=turns, knobs=knobs, skips=skips):
            model = make()
            model.turn = turns[comm.rank]
            if comm.rank == skips:
                model.turn = model.turn[1:] or model.turn  # a parameter that this worker does not use
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            Rig(comm, model, opt, spec="priority", knobs=knobs)
            for t in range(3):
                model(torch.full((2, 4), 0.1 * (comm.rank + t))).backward()
                opt.step()
                opt.zero_grad()
            model.state_dict()
            return weights(model)

        same(threads.run(world_size, work, timeout_s=20))


def test_random_models_never_block():
    random_models(20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_random_models_never_block():
    random_models(1000, seed=2)


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("knobs", [{"partition": 0.0}, {"credit": -1.0}, {"partition": float("nan")}])
def test_bad_knobs(knobs):
    with pytest.raises(MethodError):
        method("priority", **knobs)


@pytest.mark.parametrize("sync", ["local_sgd", "gossip", "delayed", "async_average"])
def test_a_sync_without_a_mean_gradient_to_wait_for(sync):
    with pytest.raises(MethodError, match="priority needs gradients agree"):
        method(f"priority+{sync}")


# ---------------------------------------------------------------------------------------------------- processes


def job(rank, world_size, spec, knobs):
    import paceline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, opt = paceline.prepare(model, opt, method=spec, bucket_mb=0.0005, **knobs)
    for x, y in data(STEPS):
        cross_entropy(model(x[rank::world_size]), y[rank::world_size]).backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize(("world_size", "knobs"), [(2, TIGHT), slow(3, {"credit": 0.0})])
def test_between_processes(world_size, knobs):
    """Three workers' sums are rounded otherwise where pieces begin elsewhere, so there they are whole."""
    runs = [processes.run(world_size, job, world_size, *spec) for spec in (("priority", knobs), ("exact", {}))]
    ours, plain = ([torch.as_tensor(outcome.value) for outcome in run] for run in runs)
    assert torch.equal(same(ours), same(plain))


def test_a_method_of_parts():
    assert str(Method(order=Priority(credit=2.0))) == "priority(credit=2.0)"


def test_an_evaluation_that_waits_for_a_step_does_not_hide_its_bytes():
    """What lands because somebody looks at the weights was sent by the step, and is not the evaluation's."""

    def work(comm, looks):
        model = mlp()
        one = Rig(comm, model, sgd(model), spec="priority", knobs=TIGHT)
        for x, y in data(3):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
            if looks:
                with one.engine.recorder.untimed():
                    model.state_dict()
        one.engine.overlap.land()
        return one.engine.recorder.sent

    assert threads.run(2, lambda comm: work(comm, True)) == threads.run(2, lambda comm: work(comm, False))


def test_when_all_has_settled_nothing_lies_on_torchs_stack():
    """A thread that ended with a mode on it could abort the process at its exit."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec="priority", knobs=TIGHT)
        seen = []
        for x, y in data(3):
            x, y = one.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            seen.append(torch._C._len_torch_function_stack())
            opt.zero_grad()
        one.engine.settle()
        return seen, torch._C._len_torch_function_stack()

    assert threads.run(2, work) == [([1, 1, 1], 0)] * 2
