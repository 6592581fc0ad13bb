"""Parameter servers: the paper's rules in float64 against the server, against thread-workers and real processes."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from marks import slow
from paceline import registry
from paceline.core.consensus import consensus_weights
from paceline.core.state import State
from paceline.errors import MethodError, UsageError
from paceline.method import Method, method
from paceline.server.messages import MessageCode, ServerMessage
from paceline.server.requests import BeginNote, RequestHandler
from paceline.server.server import ParameterShard, PullResult, PushTerms, Server, ServerSpec, WorkerGone
from paceline.syncs.parameter_server import ParameterServer
from paceline.telemetry.events import Note
from processes import run, values
from rig import Complex, Rig, alone, built, close, data, loop, mlp, same, train, weights

GROUP = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def sgd(model):
    return torch.optim.SGD(model.parameters(), **SGD)


def adamw(model):
    """Two groups with options of their own."""
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}], lr=1e-2)


def spec_of(**knobs):
    return Method(sync=ParameterServer(**knobs))


# ---------------------------------------------------------------------------------------------------- the server alone


def server(world_size, consistency, n=6, delay=0, scale="none", group=GROUP, optimizer="SGD"):
    shards = [ParameterShard("a", 0, 0, n // 2), ParameterShard("b", 0, n // 2, n)]
    spec = ServerSpec(world_size, consistency, delay, scale, optimizer, [dict(group)], shards)
    return Server(spec, torch.linspace(-1, 1, n))


class Momentum:
    """SGD with momentum and weight decay, as written down, in float64."""

    def __init__(self, w, lr=0.1, momentum=0.9, weight_decay=0.01):
        self.w, self.v = w.double(), None
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def step(self, g, share=1.0):
        g = g.double() + self.weight_decay * self.w
        self.v = g if self.v is None else self.momentum * self.v + g
        self.w = self.w - self.lr * share * self.v


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", ["none", "age"])
@pytest.mark.parametrize(("consistency", "delay"), [("sequential", 0), ("bounded", 0), ("bounded", 2), ("eventual", 0)])
def test_any_order_of_events_goes_as_the_paper_says(world_size, consistency, delay, scale):
    """A logical clock: in every turn some worker that may go on does. Its reading has every update older than c − τ."""
    dice, g = random.Random(world_size), torch.Generator().manual_seed(world_size)
    s = server(world_size, consistency, delay=delay, scale=scale)
    oracle = Momentum(s.weights.clone())
    clock, waiting, read, version, rounds = [0] * world_size, set(), [0] * world_size, 0, {}
    slack = {"sequential": 0, "bounded": delay, "eventual": 10**9}[consistency]
    for _ in range(60 * world_size):
        worker = dice.choice([*range(world_size), 0, 0])  # worker 0 is the fast one
        if worker not in waiting:
            grad = torch.randn(6, generator=g)
            s.push(worker, grad, PushTerms([dict(GROUP)]))
            clock[worker] += 1
            waiting.add(worker)
            if consistency == "sequential":
                rounds.setdefault(clock[worker], {})[worker] = grad.double()
                if len(rounds[clock[worker]]) == world_size:
                    oracle.step(sum(rounds.pop(clock[worker]).values()) / world_size)
                    version += 1
            else:
                age = (version - read[worker]) // world_size if scale == "age" else 0
                oracle.step(grad, 1 / world_size / (1 + age))
                version += 1
        answer = s.pull(worker)
        if min(clock) < clock[worker] - slack:
            assert answer is None
            continue
        assert isinstance(answer, PullResult)
        assert answer.version == version
        close(answer.weights.double(), oracle.w, 1e-5)
        waiting.discard(worker)
        read[worker] = version
    assert version > 12
    if consistency == "bounded":
        assert max(clock) - min(clock) <= delay + 1
    if consistency == "eventual" and world_size > 1:
        assert max(clock) - min(clock) > 3, "nobody went ahead: the test shows nothing"


def test_a_push_without_a_gradient_moves_the_clock_alone():
    for consistency in ("sequential", "eventual"):
        s, terms = server(2, consistency), PushTerms([dict(GROUP)])
        before = s.weights.clone()
        s.push(0, None, terms)
        s.push(1, None, terms)
        assert torch.equal(s.pull(0).weights, before)
        assert s.clocks == [1, 1]
    s = server(2, "sequential")
    oracle = Momentum(s.weights.clone())
    s.push(1, torch.ones(6), PushTerms([dict(GROUP)]))
    s.push(0, None, PushTerms([dict(GROUP)]))
    oracle.step(torch.full((6,), 0.5))
    close(s.pull(0).weights.double(), oracle.w)


def test_what_nobody_used_stays_and_what_one_used_does_not():
    s = server(2, "sequential")
    before = s.weights.clone()
    s.push(0, torch.zeros(6), PushTerms([dict(GROUP)], absent=[0, 1]))
    s.push(1, torch.zeros(6), PushTerms([dict(GROUP)], absent=[0]))
    after = s.pull(0).weights
    assert torch.equal(after[:3], before[:3])
    close(after[3:], before[3:] * (1 - 0.1 * 0.01))  # weight decay alone


def test_a_worker_that_is_gone_is_named_and_one_that_had_settled_is_not():
    terms = PushTerms([dict(GROUP)])
    s = server(3, "eventual")
    s.push(2, torch.ones(6), terms)
    s.leave(2)
    answer = s.pull(0)
    assert isinstance(answer, WorkerGone)
    assert answer.worker == 2
    s = server(3, "sequential")
    for r in range(3):
        s.push(r, torch.ones(6), terms)
        s.pull(r, settles=True) if r == 2 else None
    s.pull(2, settles=True)
    s.leave(2)
    assert isinstance(s.pull(0, settles=True), PullResult), "it had settled: the others may still read"
    s.push(0, torch.ones(6), terms)
    answer = s.pull(0)
    assert isinstance(answer, WorkerGone)
    assert "left after 1 steps" in answer.what


def test_what_fails_at_a_server_is_told_to_everybody():
    handler = RequestHandler()
    x = torch.zeros(6)
    assert handler.ask(0, ServerMessage(MessageCode.BEGIN, note=b"no JSON", x=x)) is None
    assert handler.ask(1, ServerMessage(MessageCode.PULL)).code == MessageCode.FAILED
    import msgspec

    handler, spec = RequestHandler(), server(1, "sequential").spec
    handler.ask(0, ServerMessage(MessageCode.BEGIN, note=msgspec.json.encode(BeginNote(spec)), x=x))
    handler.ask(0, ServerMessage(MessageCode.PUSH, note=b'{"groups": []}', x=x[:5]))
    answer = handler.ask(0, ServerMessage(MessageCode.PULL))
    assert answer.code == MessageCode.FAILED
    assert answer.note


# ---------------------------------------------------------------------------------------------------- thread-workers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_sequential_is_one_process_with_the_whole_batch(world_size, servers, optimizer):
    batches = data(10)
    results = train(world_size, batches, optimizer, spec=spec_of(servers=servers))
    close(same(results), alone(batches, optimizer), 5e-6)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("before", [True, False])
def test_learning_rates_travel_with_the_push_and_step_hooks_run(world_size, before):
    batches = data(9)

    def go(model, opt, take=lambda *x: x, prepare=lambda: None):
        hooks = []
        opt.register_step_pre_hook(lambda *_: hooks.append("pre"))
        opt.register_step_post_hook(lambda *_: hooks.append(next(model.parameters()).sum().item()))
        if not before:
            prepare()
        schedule = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.3)
        if before:
            prepare()
        for x, y in batches:
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
        return weights(model), hooks

    def work(comm):
        model = mlp()
        opt = sgd(model)
        held = []
        made = lambda: held.append(Rig(comm, model, opt, spec=spec_of(servers=2)))  # noqa: E731
        return go(model, opt, lambda *x: held[0].take(*x), made)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = threads.run(world_size, work)
    model = mlp()
    want, hooks = go(model, sgd(model))
    close(same([w for w, _ in results]), want)
    for _, seen in results:
        assert seen[::2] == hooks[::2] == ["pre"] * 9
        assert seen[1::2] == pytest.approx(hooks[1::2], abs=1e-5), "after the step the new weights are there"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("knobs", [{"consistency": "bounded", "delay": 1}, {"consistency": "eventual", "scale": "age"}])
def test_each_push_is_an_update_replayed_in_float64(world_size, knobs, monkeypatch):
    """Threads come in any order: what came is written down, and the paper's formula gives the same weights."""
    pushed = []
    real = Server.push

    def push(self, worker, grad, terms):
        pushed.append((grad.clone(), (self.version - self.read[worker]) // world_size if knobs.get("scale") else 0))
        real(self, worker, grad, terms)

    monkeypatch.setattr(Server, "push", push)

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of(**knobs))
        loop(data(8), model, opt, rig.take)
        with consensus_weights(rig.engine):
            inside = weights(model)
        ranges = rig.engine.method.sync._client.ranges
        return inside, ranges.weights(State())[: ranges.n]

    results = threads.run(world_size, work)
    same([inside for inside, _ in results])
    assert len(pushed) == 8 * world_size
    rig = threads.run(1, lambda comm: Rig(comm, m := mlp(), sgd(m), spec=spec_of(), accumulate=2))[0]
    from paceline.server.ranges import KeyRanges

    oracle = Momentum(KeyRanges(rig.engine.ex, 1).weights(State()))
    for grad, age in pushed:
        oracle.step(grad, 1 / world_size / (1 + age))
    close(results[0][1].double(), oracle.w, 1e-5)


def test_eventual_waits_for_nobody_and_the_staleness_is_told():
    """Worker 0 does nothing until worker 1 is through."""
    import threading

    through, notes = threading.Event(), {}

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of(consistency="eventual"))
        notes[comm.rank] = said = []
        rig.recorder.emit = said.append
        batches = data(12)
        loop(batches[:1], model, opt, rig.take)
        if comm.rank == 0:
            assert through.wait(20)
        loop(batches[1:], model, opt, rig.take)
        through.set()
        rig.engine.method.sync.settle(rig.engine.ex)
        return weights(model)

    same(threads.run(2, work))
    [text] = [e.text for e in notes[0] if isinstance(e, Note)]
    assert any(f"{missed}: 1" in text for missed in (10, 11, 12)), text  # worker 0's second push


def test_bytes_are_the_formula():
    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of(servers=2))
        for x, y in data(3):
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return rig.recorder.sent, sum(p.numel() for p in model.parameters())

    for sent, n in threads.run(2, work):
        assert 3 * 4 * n <= sent <= 3 * 4 * (n + 8)  # each bucket begins at an even place


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("servers", [(1, 1), (2, 3)])
def test_what_the_servers_remember_is_saved_and_loaded_bit_equal(optimizer, servers):
    """Halfway through everything moves, to another number of servers and another cut into buckets."""
    batches = data(12)

    def straight(comm):
        model = mlp()
        opt = optimizer(model)
        return loop(batches, model, opt, Rig(comm, model, opt, spec=spec_of(servers=servers[0])).take)

    def moved(comm):
        model = mlp()
        opt = optimizer(model)
        one = Rig(comm, model, opt, spec=spec_of(servers=servers[0]))
        loop(batches[:6], model, opt, one.take)
        one.engine.method.sync.settle(one.engine.ex)
        saved = one.engine.method.sync.state.save(one.engine.buckets)
        assert bool(saved) == (comm.rank == 0)
        gathered = threading_gather(comm, saved)
        again = mlp(1)
        opt = optimizer(again)
        two = Rig(type(comm)(comm.room, comm.rank, "later"), again, opt, spec=spec_of(servers=servers[1]), bucket_mb=1)
        again.load_state_dict(model.state_dict())
        two.engine.method.sync.state.load(State.merge(gathered), two.engine.buckets)
        loop(batches[6:], again, opt, two.take)
        two.engine.method.sync.settle(two.engine.ex)
        return weights(again), two.engine.method.sync.state.get("version")

    want = same(threads.run(3, straight))
    got = threads.run(3, moved)
    assert torch.equal(same([w for w, _ in got]), want)
    assert got[0][1] == 12


@pytest.mark.parametrize("at", ["the next step", "the end"])
def test_weights_that_were_written_at_a_worker_are_refused(at):
    """The servers hold the weights, and the next pull would overwrite them without a word."""

    def work(comm):
        model = mlp()
        opt = sgd(model)
        one = Rig(comm, model, opt, spec=spec_of())
        for p in model.parameters():
            p.data.mul_(0.5)  # before the first step the servers have no weights
        loop(data(2), model, opt, one.take)
        one.engine.settle()
        loop(data(1), model, opt, one.take)
        model[2].weight.data.clamp_(-0.01, 0.01)
        if at == "the end":
            one.engine.settle()
        else:
            loop(data(1), model, opt, one.take)

    with pytest.raises(UsageError, match=r"weights of 2\.weight were written at the worker"):
        threads.run(2, work)


def threading_gather(comm, value):
    key = ("saved", comm.name)
    comm.room.post(key, comm.rank, "", value)
    return comm.room.meet(key, "saves")


def test_a_seeded_rerun_is_bit_equal():
    runs = [same(train(3, data(8), adamw, spec=spec_of(servers=2))) for _ in range(2)]
    assert torch.equal(*runs)


def test_a_gradient_that_is_not_finite_is_left_out_and_everybody_goes_on():
    batches = data(9)
    batches[4][0][:] = torch.where(torch.arange(12)[:, None] // 4 == 1, torch.nan, batches[4][0])

    def work(comm, knobs, settings):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of(**knobs), **settings)
        loop(batches, model, opt, rig.take)
        with consensus_weights(rig.engine):
            return weights(model), rig.engine.ex.step

    for knobs in ({}, {"consistency": "eventual"}):
        with pytest.warns(UserWarning, match="not finite"):
            results = threads.run(3, lambda comm, knobs=knobs: work(comm, knobs, {}))
        assert same([w for w, _ in results]).isfinite().all()
        assert {step for _, step in results} == {9}
    results = threads.run(3, lambda comm: work(comm, {}, {"guard": "off"}))
    assert same([w for w, _ in results]).isfinite().all()


def test_a_step_without_a_push_reads_the_weights_and_keeps_the_gradients():
    batches = data(4)
    batches[2][0][4:8] = torch.nan  # worker 1's share

    def work(comm):
        model = mlp()
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of())
        seen = []
        for x, y in batches:
            x, y = rig.take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            assert all(p.grad is not None for p in model.parameters())
            seen.append(weights(model))
            opt.zero_grad()
        return torch.stack(seen)

    with pytest.warns(UserWarning, match="not finite"):
        assert same(threads.run(3, work)).isfinite().all()


class Partly(nn.Module):
    """A part that nobody uses beside one that is."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("make", [Partly, Complex])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.filterwarnings("ignore:paceline. .* parameters got no gradient")
def test_odd_parameters_go_as_in_one_process(make, optimizer):
    build, batches = built(make), data(7)

    def go(model, opt, take=lambda *x: x):
        for x, y in batches:
            x, y = take(x, y)
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        return torch.cat(
            [torch.view_as_real(p).flatten() if p.is_complex() else p.flatten() for p in model.parameters()]
        )

    def work(comm):
        model = build()
        opt = optimizer(model)
        return go(model, opt, Rig(comm, model, opt, spec=spec_of(servers=3)).take).detach()

    model = build()
    close(same(threads.run(2, work)), go(model, optimizer(model)).detach(), 1e-5)


def test_narrow_weights_are_kept_in_fp32_by_the_servers_and_in_checkpoints():
    """Steps too small for bf16 add up."""

    def work(comm):
        model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        rig = Rig(comm, model, opt, spec=spec_of())
        for _ in range(20):
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            opt.step()
            opt.zero_grad()
        rig.engine.method.sync.settle(rig.engine.ex)
        return model.weight.float().detach(), rig.engine.method.sync.state.save(rig.engine.buckets)

    results = threads.run(2, work)
    assert same([w for w, _ in results]).allclose(torch.tensor(0.98), atol=4e-3)
    assert results[0][1]["weight", "weights"].allclose(torch.tensor(0.98), atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_are_one_push(world_size):
    batches = data(8)
    got = same(train(world_size, batches, sgd, spec=spec_of(), accumulate=2))
    whole = [
        (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]
    close(got, alone(whole, sgd), 5e-6)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"servers": 0}, "servers=0 is out of range"),
        ({"servers": 1.0}, "servers is a int"),
        ({"delay": -1}, "delay=-1 is out of range"),
        ({"consistency": "bound"}, "consistency='bound' is not a choice\n.*did you mean 'bounded'"),
        ({"scale": "old"}, "scale='old' is not a choice"),
    ],
)
def test_a_knob_out_of_range_is_named(knobs, words):
    with pytest.raises(MethodError, match=words):
        method("parameter_server", **knobs)


def test_what_it_does_not_go_with_is_refused_by_name():
    with pytest.raises(MethodError, match="needs exact mean"):
        method("parameter_server+topk")

    class Own(torch.optim.SGD):
        pass

    for make, words in ((torch.optim.Adagrad, "Adagrad"), (Own, "does not go together with Own")):
        with pytest.raises(MethodError, match=words):
            train(2, data(2), lambda model, make=make: make(model.parameters(), lr=0.1), spec="parameter_server")
    with pytest.raises(MethodError, match="servers=999 for"):
        train(2, data(2), sgd, spec=spec_of(servers=999))


def test_parameters_that_come_later_are_refused():
    def work(comm):
        model = mlp()
        model[0].requires_grad_(False)
        opt = sgd(model)
        rig = Rig(comm, model, opt, spec=spec_of())
        loop(data(2), model, opt, rig.take)
        model[0].requires_grad_(True)
        loop(data(2), model, opt, rig.take)

    with pytest.raises(UsageError, match="after the first step"):
        threads.run(2, work)


def test_it_is_registered_as_keeping_its_own_pace():
    assert registry.find("parameter_server").is_async


# ---------------------------------------------------------------------------------------------------- real processes


def job(rank, optimizer, knobs):
    import psutil

    import paceline
    from paceline.session.session import current

    model = mlp()
    model, opt = paceline.prepare(model, optimizer(model), method="parameter_server", timeout=30.0, **knobs)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
    world_size = paceline.world_size()
    for x, y in data(8):
        size = len(x) // world_size
        x, y = x[rank * size :][:size], y[rank * size :][:size]
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    own = weights(model)
    with paceline.consensus():
        inside = weights(model)
    [engine] = current().engines
    saved = engine.method.sync.state.save(engine.buckets)
    servers = [p.pid for p in psutil.Process().children(recursive=True)]
    return own, inside, servers, saved.get("version", -1), engine.optimizer.state_dict()["state"] == {}


def gone(pids, within_s=5.0):
    """Have all these processes ended?"""
    import psutil

    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], within_s)
    return not alive


@pytest.mark.parametrize(
    ("world_size", "optimizer", "knobs"),
    [
        (2, sgd, {}),
        slow(3, adamw, {"servers": 2}),
        slow(4, sgd, {"consistency": "bounded", "delay": 1}),
    ],
)
def test_processes_go_as_one_and_leave_nothing_behind(world_size, optimizer, knobs):
    results = values(run(world_size, job, optimizer, knobs))
    servers = [pid for _, _, pids, _, _ in results for pid in pids]
    assert len(servers) == knobs.get("servers", 1)
    assert gone(servers), "a server outlives its worker"
    inside = same([inside for _, inside, *_ in results])
    model = mlp()
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 4, gamma=0.5)
    for x, y in data(8):
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    if "consistency" in knobs:
        assert inside.isfinite().all()
        assert not torch.equal(inside, weights(mlp()))
        assert results[0][3] == 8 * world_size  # every push was an update
    else:
        close(same([own for own, *_ in results]), weights(model), 5e-6)
        assert torch.equal(inside, results[0][0])
        assert results[0][3] == 8
    assert all(empty for *_, empty in results), "the worker's own optimizer must have nothing to remember"
