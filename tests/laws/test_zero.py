"""zero1, zero2, zero3: state is shared out, and nothing else changes. Workers that are threads add in one order, so
what is compared with the layout `replicated` here is compared bit for bit.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import processes
import threads
from marks import slow
from paceline import registry
from paceline.errors import MethodError, PacelineError, UsageError
from paceline.method import Method, method
from paceline.sharding.elementwise import KNOWN
from paceline.sharding.unshard import UnshardOrder
from paceline.tools.lab.live_tensors import LiveTensors
from rig import Complex, Rig, adamw, alone, built, close, data, mlp, same, sgd, train, weights

STAGES = [name for name in registry.parts("layout") if name != "replicated"]
REDUCERS = list(registry.parts("reducer"))
stages = pytest.mark.parametrize("stage", STAGES)


def plain(one, x, y):
    cross_entropy(one.model(x), y).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def trained(world_size, stage, *, optimizer=adamw, make=mlp, batches=None, step=plain, begin=None, end=None, **rig):
    """A loop on every worker: `step` with each batch; what `end` gives, or the weights."""

    def work(comm):
        model = make()
        opt = optimizer(model)
        one = Rig(comm, model, opt, spec=stage, **rig)
        if begin is not None:
            begin(one)
        for x, y in data(6) if batches is None else batches:
            step(one, *one.take(x, y))
        return end(one) if end is not None else torch.cat([v.flatten() for v in model.state_dict().values()])

    return threads.run(world_size, work)


def equal(world_size=3, tol=0.0, stages=STAGES, away=True, **how):
    """As with every worker holding everything, which is given. Adam on the host rounds as torch's fused one does."""
    want = same(trained(world_size, "replicated", **how))
    for stage in stages:
        got = same(trained(world_size, stage, **how))
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, msg=lambda text, stage=stage: f"{stage}: {text}")
    if away:
        got = same(trained(world_size, "zero2", knobs={"store": "cpu"}, **how))
        close(got, want, tol=max(tol, 1e-5))
    return want


# ------------------------------------------------------------------------------------------------ the same steps


@pytest.mark.parametrize("world_size", [slow(1), slow(2), 3, slow(4)])
@pytest.mark.parametrize("optimizer", [adamw, sgd], ids=["adamw", "sgd"])
def test_fifty_steps_are_those_of_the_whole(world_size, optimizer):
    batches = data(50)
    got = equal(world_size, optimizer=optimizer, batches=batches)
    close(got, alone(batches, optimizer), tol=1e-5)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_every_elementwise_optimizer(kind):
    equal(2, optimizer=lambda model: kind(model.parameters(), lr=0.01), batches=data(4))


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_every_kind_of_adam(how):
    tol = 1e-6 if "fused" in how else 0.0  # where its vectors end, it rounds otherwise
    equal(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, **how), tol=tol)


def grouped(model):
    """Weight decay and rates of their own, in groups whose parameters lie mixed in the buckets."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0, "lr": 0.03}, {"params": weights}], lr=0.01)


@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_and_a_schedule(world_size):
    schedulers = {}

    def begin(one):
        schedulers[one.comm.rank] = torch.optim.lr_scheduler.StepLR(one.optimizer, 2, 0.5)

    def step(one, x, y):
        plain(one, x, y)
        schedulers[one.comm.rank].step()

    equal(world_size, optimizer=grouped, begin=begin, step=step, bucket_mb=1.0)


class Tied(nn.Module):
    """An embedding used twice, a frozen layer, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.out.weight = self.embed.weight
        self.frozen, self.unused, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.out(self.middle(self.embed(x).tanh())).tanh()))


@pytest.mark.filterwarnings("ignore:paceline")
def test_tied_frozen_and_unused_parameters():
    equal(make=built(Tied))


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_parameter_that_is_thawed_and_one_that_is_added():
    def step(one, x, y):
        if one.engine.ex.step == 2:
            one.model.frozen.requires_grad_(True)
        if one.engine.ex.step == 4 and len(one.optimizer.param_groups) == 1:
            one.optimizer.add_param_group({"params": list(one.model.last.parameters()), "lr": 0.05})
        plain(one, x, y)

    def optimizer(model):
        return torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("last")], lr=0.01)

    equal(make=built(Tied), optimizer=optimizer, step=step)


def test_complex_parameters():
    equal(make=built(Complex))


def test_memory_in_another_order():
    def conv():
        net = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))
        return net.to(memory_format=torch.channels_last)

    equal(make=built(conv))


def test_a_worker_that_owns_nothing():
    """Seven elements on four workers: most shards are padding."""
    line = built(lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)))
    equal(4, make=line, step=_mean_square, tol=1e-6)


def _mean_square(one, x, y):
    (one.model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
    one.optimizer.step()
    one.optimizer.zero_grad()


@pytest.mark.parametrize("name", REDUCERS)
def test_with_every_reducer(name):
    """Each worker's slice of the same estimate."""
    reducer, how = method(name).reducer, {"batches": data(4)}
    if name == "dgc":
        how["optimizer"] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    want = same(trained(3, Method(reducer=reducer), **how))
    for stage in STAGES:
        got = same(trained(3, Method(reducer=reducer, layout=registry.find(stage)()), **how))
        assert torch.equal(got, want), stage


@stages
def test_a_world_of_one_is_the_optimizer_alone(stage):
    batches = data(8)
    [got] = train(1, batches, adamw, spec=stage)
    assert torch.equal(got, alone(batches, adamw))


# -------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("losses", [1, 2])
def test_micro_batches_of_a_window(losses):
    def step(one, x, y):
        for _ in range(losses):
            cross_entropy(one.model(x), y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()

    equal(batches=data(8), accumulate=2, step=step, tol=0.0 if losses == 1 else 1e-5)


def test_a_state_that_is_looked_at_on_the_way():
    def step(one, x, y):
        plain(one, x, y)
        one.optimizer.state_dict()

    equal(step=step)


def test_a_parameter_that_is_given_other_memory():
    """`p.data = ...` between steps; zero3 refuses it."""

    def step(one, x, y):
        plain(one, x, y)
        for p in one.model.parameters():
            p.data = p.data * 0.9

    equal(step=step, stages=["zero1", "zero2"], away=False)


def test_a_layer_that_is_frozen_between_backward_and_step():
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        one.model[0].requires_grad_(False)
        one.optimizer.step()
        one.model[0].requires_grad_(True)
        one.optimizer.zero_grad()

    equal(step=step, stages=["zero1", "zero2"], away=False)


def test_of_several_backwards_some_gradients_are_thrown_away():
    def step(one, x, y):
        for i in range(3):
            if i == 2:
                for p in one.model[0].parameters():
                    p.grad = None
            cross_entropy(one.model(x), y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()

    equal(step=step, optimizer=sgd, tol=1e-5)


@pytest.mark.parametrize("zeroed", ["optimizer", "model", "kept", "never"])
def test_several_backwards_to_a_step(zeroed):
    def step(one, x, y):
        for part_x, part_y in ((x[:2], y[:2]), (x[2:], y[2:])):
            cross_entropy(one.model(part_x), part_y).backward()
        one.optimizer.step()
        if zeroed == "optimizer":
            one.optimizer.zero_grad()
        elif zeroed == "model":
            one.model.zero_grad()
        elif zeroed == "kept":
            one.optimizer.zero_grad(set_to_none=False)

    equal(step=step, tol=1e-5)  # a mean and a mean are added, not a mean to each summand of one


@stages
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_are_those_of_the_whole(stage, order):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(one.model.parameters(), 0.05, norm_type=order))
        norms.append(nn.utils.get_total_norm([p.grad for p in one.model.parameters()], order))
        norms.append(one.model[0].weight.grad.norm(order))
        norms.append(one.model[2].weight.grad.detach().data.norm(order))
        one.optimizer.step()
        one.optimizer.zero_grad()

    norms: list[torch.Tensor] = []
    got = same(trained(3, stage, step=step))
    mine = torch.stack(sorted(norms))
    norms.clear()
    want = same(trained(3, "replicated", step=step))
    close(got, want, tol=1e-6)
    close(mine, torch.stack(sorted(norms)), tol=1e-6)


def test_values_are_clipped():
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        nn.utils.clip_grad_value_(one.model.parameters(), 0.01)
        one.optimizer.step()
        one.optimizer.zero_grad()

    equal(step=step, away=False)


@stages
def test_what_needs_the_elements_is_refused(stage):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        with pytest.raises(UsageError, match="in shards"):
            one.model[0].weight.grad.sum()
        with pytest.raises(UsageError, match="positive order"):
            one.model[0].weight.grad.norm(0)
        assert "in shards" in repr(one.model[0].weight.grad)

    trained(2, stage, step=step, batches=data(1))


@pytest.mark.filterwarnings("ignore:paceline. 1 parameters got no gradient")
def test_a_gradient_the_user_puts_there_counts():
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        one.model[0].weight.grad = torch.full_like(one.model[0].weight, 0.5)
        one.model[2].bias.grad = None
        one.optimizer.step()
        one.optimizer.zero_grad()

    equal(step=step)


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_bad_gradient_of_one_worker_skips_the_step_on_all():
    batches = data(5)
    batches[2][0][0] = torch.inf
    assert equal(batches=batches).isfinite().all()


@stages
@pytest.mark.parametrize(("name", "known"), [("exact", True), ("exact", False), ("topk", True)])
def test_a_loss_scaler_finds_infinities_on_all_workers(stage, known, name):
    """One that `prepare` was not given, too: but what keeps leftovers must know it."""
    batches = data(5)
    batches[2][0][0] = torch.inf

    def run(layout):
        def work(comm):
            model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**120)
            opt = adamw(model)
            spec = Method(reducer=method(name).reducer, layout=registry.find(layout)())
            one = Rig(comm, model, opt, spec=spec, scaler=scaler if known else None)
            for x, y in batches:
                x, y = one.take(x, y)
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            return torch.cat([v.flatten() for v in model.state_dict().values()]), scaler.get_scale()

        results = threads.run(3, work)
        assert len({scale for _, scale in results}) == 1
        return same([w for w, _ in results]), results[0][1]

    (got, scale), (want, other) = run(stage), run("replicated")
    assert scale == other < 2.0**120
    close(got, want, tol=1e-6)


@stages
def test_an_infinity_in_one_slice_is_found_on_all_workers(stage):
    def work(comm):
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=stage, scaler=scaler)
        x, y = one.take(*data(1)[0])
        scaler.scale(cross_entropy(model(x), y)).backward()
        if comm.rank == 1:
            next(shards for shards in one.engine.method.layout.bucket_shards.values() if shards)[0].grad().fill_(
                torch.inf
            )
        scaler.step(opt)
        scaler.update()
        return scaler.get_scale()

    assert threads.run(3, work) == [4.0] * 3


@stages
def test_what_is_sent(stage):
    """Gradients to their owners, parameters to everybody; stage 3 once more for backward. A window is sent once."""

    def sent(accumulate):
        def end(one):
            n = sum(b.flat.nbytes for b in one.engine.buckets)
            before = one.engine.ex.sent
            for x, y in data(accumulate, seed=3):
                plain(one, *one.take(x, y))
            return (one.engine.ex.sent - before) / n

        return trained(2, stage, batches=data(2 * accumulate), end=end, accumulate=accumulate, bucket_mb=1.0)[0]

    ballot = 0.2  # beside a model as small as this one
    once = {"zero1": 1.0, "zero2": 1.0, "zero3": 1.0}[stage]
    assert once <= sent(1) < once + ballot
    assert once <= sent(2) < once + ballot + (0.5 if stage == "zero3" else 0.0)


def test_buckets_are_small_only_where_their_memory_counts():
    """On a fast link every further operation only takes time; replicated state has nothing to save by it."""

    wide = built(lambda: nn.Sequential(*(nn.Linear(640, 640) for _ in range(8))))

    def buckets(layout):
        return trained(2, layout, make=wide, batches=[], end=lambda one: len(one.engine.buckets), bucket_mb=None)[0]

    assert buckets("replicated") == 1
    assert buckets("zero2") > 4


# -------------------------------------------------------------------------------------------------------- state


def saved(world_size, stage, steps=4, **how):
    def end(one):
        return one.model.state_dict(), one.optimizer.state_dict()

    return trained(world_size, stage, batches=data(8)[:steps], end=end, **how)


def load(saved):
    """Into each worker. Threads must not load one tensor: optimizers keep what they are given."""

    def begin(one):
        model, state = copy.deepcopy(saved)
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(state)

    return begin


def alike(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert list(a["state"]) == list(b["state"])
    for i, known in a["state"].items():
        assert sorted(known) == sorted(b["state"][i])
        for key, value in known.items():
            other = b["state"][i][key]
            assert type(value) is type(other)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (i, key)


@stages
@pytest.mark.parametrize("optimizer", [sgd, grouped], ids=["sgd", "grouped"])
def test_the_state_that_is_saved_is_the_whole_one(stage, optimizer):
    want_model, want = saved(3, "replicated", optimizer=optimizer)[0]
    for model, state in saved(3, stage, optimizer=optimizer):
        alike(state, want)
        assert all(torch.equal(model[key], value) for key, value in want_model.items())


@stages
@pytest.mark.parametrize("before", ["replicated", "itself"])
@pytest.mark.parametrize("worlds", [(3, 2), slow((1, 4))])
def test_training_goes_on_from_it_at_another_world_size(stage, before, worlds):
    before = saved(worlds[0], stage if before == "itself" else before)[0]
    how = {"batches": data(8)[4:], "begin": load(before)}
    assert torch.equal(*(same(trained(worlds[1], spec, **how)) for spec in (stage, "replicated")))


@stages
def test_sharing_it_out_anew_changes_no_bit(stage):
    first = now = saved(3, stage)[0]
    for world_size in (2, 4, 3):
        now = saved(world_size, stage, steps=0, begin=load(now))[0]
        alike(now[1], first[1])
        assert all(torch.equal(now[0][key], value) for key, value in first[0].items())


def test_the_step_count_of_a_parameter_without_dimensions_stays_a_number():
    """Its shape is that of the count, which must not become an element in the parameter's type."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def work(comm):
        model = Scaled()
        opt = adamw(model)
        one = Rig(comm, model, opt, spec="zero1")
        for _ in range(2):
            (model.scale * (1.0 + comm.rank)).backward()
            opt.step()
            opt.zero_grad()
            opt.load_state_dict(opt.state_dict())
        return opt.state_dict()["state"][0]["step"], one.engine.ex.step

    for count, made in threads.run(2, work):
        assert (count.dtype, count.shape, float(count), made) == (torch.float32, (), 2.0, 2)


def test_a_state_that_is_there_before_is_taken_up():
    """Loaded, or made by an optimizer's constructor, before `prepare`."""
    model, state = saved(2, "replicated")[0]

    def optimizer(net):
        net.load_state_dict(model)
        opt = adamw(net)
        opt.load_state_dict(copy.deepcopy(state))
        return opt

    equal(optimizer=optimizer)

    def whole(one):
        return {id(key) for key in one.optimizer.state} & {id(p) for p in one.model.parameters()}

    for stage in STAGES:
        assert not any(trained(2, stage, optimizer=optimizer, end=whole)), "the whole state is still there"


def test_other_buckets_for_the_same_parameters():
    def step(one, x, y):
        if one.engine.ex.step == 3:
            one.engine.recut(4096)
        plain(one, x, y)

    equal(step=step)


# -------------------------------------------------------------------------------------------------------- 16 bits


def narrow():
    return mlp().bfloat16()


def step16(one, x, y):
    plain(one, x.bfloat16(), y)


@stages
def test_16_bit_parameters_have_a_master_in_fp32(stage):
    """Steps too small for bf16 add up, on any number of workers alike."""

    def tiny(model):
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    batches = data(40)
    ends = [same(trained(w, stage, make=narrow, optimizer=tiny, step=step16, batches=batches)) for w in (1, 2, 3)]
    start = weights(narrow())
    moved = [(end - start).abs().mean() for end in ends]
    lost = (same(trained(2, "replicated", make=narrow, optimizer=tiny, step=step16, batches=batches)) - start).abs()
    assert all(m > 2 * lost.mean() for m in moved)
    assert all((end == ends[0]).float().mean() > 0.8 for end in ends), "rounding of sums aside"


@stages
def test_a_master_is_saved_and_loaded(stage):
    batches, how = data(8), {"make": narrow, "step": step16}
    half = saved(2, stage, **how)[0]
    first = half[1]["state"][0]
    assert first["master"].dtype == first["exp_avg"].dtype == torch.float32
    straight = same(trained(2, stage, batches=batches, **how))
    assert torch.equal(same(trained(2, stage, batches=batches[4:], begin=load(half), **how)), straight)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_master_follows_what_is_written_into_the_parameter(stage):
    def step(one, x, y):
        step16(one, x, y)
        if one.engine.ex.step == 1:  # what the later ones publish is the master
            with torch.no_grad():
                one.model[0].weight.clamp_(-0.1, 0.1)
                one.model[2].bias.data = torch.zeros(16, dtype=torch.bfloat16)

    def still(model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    got = same(trained(2, stage, make=narrow, optimizer=still, step=step))
    want = narrow()
    want[0].weight.data.clamp_(-0.1, 0.1)
    want[2].bias.data.zero_()
    assert torch.equal(got, weights(want))


BYTES = {"zero1": (4, 12), "zero2": (2, 14), "zero3": (0, 16)}
LAYERS = 24  # and as many buckets, each with its bytes of gradients in 16 bits:
BUCKET = 2 / LAYERS


def _memory(rank):
    """By stage, bytes for each parameter: the most at the start, in a backward, in a step; between two steps with the
    gradients and without.
    """
    import paceline

    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(LAYERS))).bfloat16()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with LiveTensors(model.parameters()) as live:
            model, opt = paceline.prepare(model, opt, method=stage, bucket_mb=0.033)
            peaks = [live.peak]
            for _ in range(2):
                loss = model(torch.randn(1, 128, dtype=torch.bfloat16)).square().mean()
                live.peak = 0
                loss.backward()
                peaks[1:] = [live.peak]
                del loss
                live.peak = 0
                opt.step()
                peaks += [live.peak, live.bytes()]
                opt.zero_grad()
            found[stage] = [x / sum(p.numel() for p in model.parameters()) for x in (*peaks, live.bytes())]
    return found


@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3), slow(4)])
def test_memory_is_as_the_paper_says(world_size):
    """Beside it: a few buckets that are on their way, never all of them, from the start on."""
    for worker in processes.values(processes.run(world_size, _memory, env={"PACELINE_COLLECTIVES": "flat"})):
        for stage, (start, backward, step, rest, without) in worker.items():
            fixed, shared = BYTES[stage]
            ahead = BUCKET if stage == "zero3" else 0  # what the next step begins with is on its way
            assert rest == pytest.approx(fixed + shared / world_size + ahead, rel=0.03), stage
            assert without == pytest.approx(rest if stage == "zero1" else rest - 2 / world_size, rel=0.03), stage
            assert start < max(2, fixed + (2 if stage == "zero3" else 0) / world_size + 4 / world_size) + 3 * BUCKET, (
                stage
            )
            assert backward < rest + 20 * BUCKET, stage  # of five, the gradients and what comes from the others
            assert step < rest + 4 / world_size + 6 * BUCKET, stage


# ---------------------------------------------------------------------------------------- parameters that come and go


class Blocks(nn.Module):
    """Layers of one shape; which of them are used, and whether they are computed twice, can be changed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.last = nn.Linear(6, 3)
        self.used, self.again = [0, 1, 2, 3, 4], False

    def forward(self, x):
        for i in self.used:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = x.tanh()
        return self.last(x)


blocks = built(Blocks)


def lent(one):
    return [sharded.unsharded for sharded in one.engine.method.layout.unsharding.buckets.values()]


def test_parameters_are_there_only_while_they_are_needed():
    seen = []

    def begin(one):
        for layer in one.model.layers:
            layer.register_forward_hook(lambda *_: seen.append(sum(lent(one))))
            layer.weight.register_hook(lambda _: seen.append(sum(lent(one))))

    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        assert not any(lent(one)), "backward has used all of them"
        one.optimizer.step()
        one.optimizer.zero_grad()
        with torch.no_grad():
            one.model(x)

    trained(2, "zero3", make=blocks, begin=begin, step=step, bucket_mb=0.00015)
    assert 1 <= min(seen) <= max(seen) <= 3


def test_what_comes_next_is_asked_for_ahead_until_the_path_changes():
    ahead = []

    def step(one, x, y):
        orders = one.engine.method.layout.unsharding.order
        if one.engine.ex.step == 3:
            one.model.used = [0, 2, 1, 4]
        before = list(orders[True].last)
        cross_entropy(one.model(x), y).backward()
        if one.comm.rank == 0:
            ahead.append((before, orders[True].now == before))
        one.optimizer.step()
        one.optimizer.zero_grad()

    got = same(trained(2, "zero3", make=blocks, step=step, bucket_mb=0.00015))
    assert [kept for _, kept in ahead] == [False, True, True, False, True, True]

    def plainly(one, x, y):
        one.model.used = [0, 2, 1, 4] if one.engine.ex.step >= 3 else one.model.used
        plain(one, x, y)

    assert torch.equal(got, same(trained(2, "replicated", make=blocks, step=plainly, bucket_mb=0.00015)))


def test_another_way_through_the_model_throws_the_last_one_away():
    order = UnshardOrder()
    assert [order.next(i) for i in (0, 1, 2)] == [None, None, None]
    order.over()
    assert [order.next(i) for i in (0, 1, 2)] == [1, 2, None]
    order.over()
    assert [order.next(i) for i in (0, 2, 1)] == [1, None, None]
    order.over()
    assert [order.next(i) for i in (0, 2, 1)] == [2, 1, None]


def test_the_first_one_is_asked_for_when_the_last_step_ends():
    coming = []

    def step(one, x, y):
        unsharding = one.engine.method.layout.unsharding
        coming.append(
            [i for i, sharded in unsharding.buckets.items() if sharded.gathering] == unsharding.order[True].last[:1]
        )
        plain(one, x, y)

    def end(one):
        one.engine.settle()
        return [sharded.gathering for sharded in one.engine.method.layout.unsharding.buckets.values()]

    left = trained(2, "zero3", make=blocks, step=step, end=end, bucket_mb=0.00015)
    assert all(coming)
    assert not any(any(worker) for worker in left), "something is under way at the end"


class Adapted(nn.Module):
    """A frozen trunk with a trained layer in front and behind."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)
        self.trunk = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.trunk.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.trunk:
            x = layer(x).tanh()
        return self.last(x)


@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_parameters_are_shared_out_too(world_size):
    def held(one):
        trunk = one.model.trunk.parameters()
        frozen = [sharded for i, sharded in one.engine.method.layout.unsharding.buckets.items() if i < 0]
        assert all(p.untyped_storage().nbytes() < p.nbytes for p in trunk), "it is whole"
        return sum(sharded.shard.nbytes + sharded.full.untyped_storage().nbytes() for sharded in frozen)

    whole = sum(p.nbytes for p in Adapted().trunk.parameters())
    for mine in trained(world_size, "zero3", make=built(Adapted), end=held):
        assert mine == pytest.approx(whole / world_size, rel=0.03)
    equal(world_size, stages=["zero3"], make=built(Adapted))


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_that_is_thawed_leaves_the_frozen_ones(world_size):
    def step(one, x, y):
        if one.engine.ex.step == 2:
            one.model.trunk[1].requires_grad_(True)
        if one.engine.ex.step == 4 and world_size > 1:
            one.engine.recut(4096)
        plain(one, x, y)
        if one.engine.method.layout.name == "zero3" and world_size == 1:
            assert not one.engine.method.layout.unsharding.buckets, "there is nobody to share them with"
        elif one.engine.method.layout.name == "zero3":
            [lent] = one.engine.method.layout.unsharding.buckets_of(one.model.trunk[0].parameters())
            assert lent < 0

    equal(world_size, make=built(Adapted), step=step)


def test_layers_that_are_computed_again_in_backward():
    def begin(one):
        one.model.again = True

    equal(stages=["zero3"], make=blocks, begin=begin, bucket_mb=0.00015)


def test_workers_on_different_ways_are_told():
    def step(one, x, y):
        one.model.used = [0, 1, 2] if one.comm.rank else [0, 2, 1]
        plain(one, x, y)

    with pytest.raises(PacelineError, match=r"other parameters|same order"):
        trained(2, "zero3", make=blocks, step=step, bucket_mb=0.00015)


def test_attention_uses_its_output_layer_without_calling_it():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])

    equal(stages=["zero3"], make=built(Attends))


def test_a_parameter_used_without_its_module():
    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.first(x) + nn.functional.linear(x, self.other.weight)

    equal(stages=["zero3"], make=built(Borrows), bucket_mb=1e-5)


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(6, 3))
    model.compile()
    with pytest.raises(MethodError, match="compile"):
        trained(2, "zero3", make=lambda: model)


# -------------------------------------------------------------------------------------------------------- who may


def _lamb(params, lr=0.01):
    class Lamb(torch.optim.SGD):
        pass

    return Lamb(params, lr=lr)


class Trust(torch.optim.SGD):
    """By another name, and a layer's norm in it all the same."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * p.norm(), alpha=group["lr"])


class Signed(torch.optim.Optimizer):
    """Nobody here knows it, and it is elementwise."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                    p.sub_(p.grad.sign(), alpha=group["lr"])


@stages
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", [_lamb, Trust, torch.optim.Muon, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_optimizers_that_see_whole_layers_are_refused(stage, world_size, make):
    matrices = built(lambda: nn.Linear(6, 3, bias=False))
    with pytest.raises(MethodError, match="does not go together with the optimizer"):
        trained(world_size, stage, make=matrices, optimizer=lambda m: make(m.parameters(), lr=0.01))


def test_an_unknown_optimizer_that_is_elementwise_is_taken():
    equal(optimizer=lambda model: Signed(model.parameters()))


def test_an_optimizer_sees_no_group_without_parameters():
    """Which a worker that owns nothing of a group would have, and a user's own optimizer need not expect."""
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen.extend(len(group["params"]) for group in self.param_groups)
            return super().step(closure)

    def optimizer(model):
        return Looking([{"params": [p]} for p in model.parameters()], lr=0.1)

    trained(3, "zero1", optimizer=optimizer)
    assert seen
    assert all(seen)


@stages
@pytest.mark.parametrize(
    "name", [n for n in [*registry.parts("sync"), "priority"] if n not in ("every_step", "any_batch")]
)
def test_syncs_and_orders_that_need_the_whole_are_refused(stage, name):
    with pytest.raises(MethodError, match=r"whole (parameters|gradients)"):
        method(f"{name}+{stage}")


# -------------------------------------------------------------------------------------------------------- processes


def _job(rank, stage, seed=0):
    import paceline

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    opt = adamw(model)
    model, opt = paceline.prepare(model, opt, method=stage, bucket_mb=0.0005)
    for x, y in data(10, size=12):
        share = slice(rank * 12 // paceline.world_size(), (rank + 1) * 12 // paceline.world_size())
        cross_entropy(model(x[share]), y[share]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return torch.cat([v.flatten() for v in model.state_dict().values()])


@functools.cache
def _replicated(world_size, *env):
    return same(processes.values(processes.run(world_size, _job, "replicated", env=dict(env))))


@stages
@pytest.mark.parametrize(
    ("world_size", "env"), [(2, {}), slow(3, {"PACELINE_COLLECTIVES": "flat"})], ids=["memory", "gloo"]
)
def test_between_processes(stage, world_size, env):
    got = same(processes.values(processes.run(world_size, _job, stage, env=env)))
    close(got, _replicated(world_size, *env.items()), tol=1e-6)
