"""store=cpu: state on the host, stepped ahead of `step()`. Here is what only a step ahead can get wrong; that the steps
are those of the other layouts is in test_zero.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from marks import slow
from paceline.errors import MethodError, StoreError, UsageError
from paceline.kernels import adam
from paceline.method import method
from paceline.offload import placement
from paceline.offload.copies import CopyStreams
from paceline.offload.disk import DiskSpeed
from paceline.offload.memory_model import FreeMemory, Placement
from paceline.offload.offloaded import OffloadedBucket, OffloadedShard
from paceline.sharding import turns
from rig import Rig, built, close, data, mlp, sgd, weights

STAGES = ["zero1", "zero2", "zero3"]


def fused(model):
    """Of torch's Adams the one whose bits the host's has."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def plain(one, x, y, backward=None):
    loss = cross_entropy(one.model(x.to(next(one.model.parameters()).dtype)).float(), y)
    (loss if backward is None else backward(loss)).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def _deep():
    middle = [layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 3))


deep = built(_deep)


def trained(stage, knobs, *, world_size=1, dtype=torch.float32, make=mlp, step=plain, batches=None, end=None):
    def work(comm):
        model = make().to(dtype)
        one = Rig(comm, model, fused(model), spec=stage, knobs=knobs)
        for i, (x, y) in enumerate(batches or data(6)):
            one.number = i
            step(one, *one.take(x, y))
        if end is not None:
            return end(one)
        return torch.cat([v.flatten() for v in model.state_dict().values()]).float()

    return threads.run(world_size, work)[0]


@pytest.fixture
def counts(monkeypatch):
    """How often a bucket was handed over to be stepped ahead, was stepped so and used, stepped when asked, undone."""
    seen: Counter[str] = Counter()
    begin, request, undoing = OffloadedBucket._begin, OffloadedBucket.request, adam.undoing

    def begun(self, *args, ahead):
        seen["ahead" if ahead else "asked"] += 1
        return begin(self, *args, ahead=ahead)

    def requested(self, steps):
        before = self._job
        request(self, steps)
        seen["used"] += before is not None and self._job is before

    def undone(*args, **kwargs):
        seen["undone"] += 1
        return undoing(*args, **kwargs)

    monkeypatch.setattr(OffloadedBucket, "_begin", begun)
    monkeypatch.setattr(OffloadedBucket, "request", requested)
    monkeypatch.setattr(adam, "undoing", undone)
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_loop_is_stepped_ahead_after_its_first_step(stage, dtype, counts):
    close(trained(stage, {"store": "cpu"}, dtype=dtype), trained(stage, {}, dtype=dtype), tol=1e-6)
    assert counts["used"] == 5 * counts["asked"] > 0  # all but the first step
    assert counts["undone"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:paceline")
def test_a_step_that_is_given_up_is_undone(dtype, counts):
    """The last bucket's gradients are not finite: by then the others are stepped."""

    def step(one, x, y):
        def backward(loss):
            return loss + (one.model[0].weight * torch.inf).sum()

        plain(one, x, y, backward if one.number == 3 else None)

    tol = 1e-6 if dtype == torch.float32 else 1e-2
    how = {"world_size": 2, "step": step, "dtype": dtype}
    close(trained("zero2", {"store": "cpu"}, **how), trained("zero2", {}, **how), tol)
    assert counts["undone"] >= 1
    assert counts["used"] == 4 * counts["asked"] > 0  # all but the first step


def test_while_a_clip_binds_no_bucket_is_stepped_ahead(counts):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.05 if one.number < 4 else 1e9)
        one.optimizer.step()
        one.optimizer.zero_grad()

    close(trained("zero2", {"store": "cpu"}, step=step), trained("zero2", {}, step=step), tol=1e-6)
    buckets = counts["asked"] // 5  # all but the last step
    assert buckets >= 2
    assert counts["used"] == buckets  # the last
    assert counts["undone"] == 0


@pytest.mark.parametrize("divides", ["scaler", "optimizer"])
def test_under_a_loss_scaler_nothing_is_stepped_ahead(divides, counts):
    """A fused optimizer divides by the scale itself, and skips a step itself."""

    def work(comm, knobs):
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**60)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=divides == "optimizer")
        one = Rig(comm, model, opt, spec="zero2", knobs=knobs, scaler=scaler)
        for i, (x, y) in enumerate(data(4)):
            x, y = one.take(x * torch.inf if i == 1 else x, y)
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return torch.cat([v.flatten() for v in model.state_dict().values()])

    got = threads.run(1, lambda comm: work(comm, {"store": "cpu"}))[0]
    assert counts["ahead"] == counts["undone"] == 0
    close(got, threads.run(1, lambda comm: work(comm, {}))[0], tol=1e-6)


def test_on_step_never_steps_ahead(counts):
    trained("zero2", {"store": "cpu", "step": "on_step"})
    assert counts["ahead"] == counts["undone"] == 0


@pytest.mark.parametrize("behind", [False, True], ids=["torch knows", "behind its back"])
@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_parameter_that_is_written_into(stage, behind):
    def step(one, x, y):
        if one.number == 3:
            with torch.no_grad():
                for p in one.model.parameters():
                    (p.data if behind else p).mul_(0.5)
        plain(one, x, y)

    close(trained(stage, {"store": "cpu"}, step=step), trained(stage, {}, step=step), tol=1e-6)


def test_between_backward_and_step_the_state_is_that_of_before():
    """The state is saved there. What was stepped ahead is undone, and done again when it is asked for."""
    saved = []

    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        if one.number == 4:
            saved.append(one.optimizer.state_dict()["state"][0]["exp_avg"].clone())
        one.optimizer.step()
        one.optimizer.zero_grad()

    close(trained("zero2", {"store": "cpu"}, step=step), trained("zero2", {}, step=step), tol=1e-6)
    close(*saved, tol=1e-6)


def test_moments_that_are_loaded():
    def end(one):
        state = one.optimizer.state_dict()
        one.optimizer.load_state_dict(state)
        for x, y in data(3, seed=5):
            plain(one, *one.take(x, y))
        return torch.cat([v.flatten() for v in one.model.state_dict().values()])

    def on(one):
        for x, y in data(3, seed=5):
            plain(one, *one.take(x, y))
        return torch.cat([v.flatten() for v in one.model.state_dict().values()])

    assert torch.equal(trained("zero2", {"store": "cpu"}, end=end), trained("zero2", {"store": "cpu"}, end=on))


def test_what_the_next_forward_needs_first_stays_on_the_device():
    def end(one):
        where = [
            (b.index, isinstance(shard, OffloadedShard))
            for b in one.engine.buckets
            for shard in one.engine.method.layout.bucket_shards[b.index]
        ]
        return where, torch.cat([v.flatten() for v in one.model.state_dict().values()])

    n = sum(p.numel() for p in mlp().parameters())
    where, got = trained("zero2", {"store": "cpu", "device_gb": 12e-9 * n / 2}, end=end)
    away = [flag for _, flag in sorted(where)]
    assert away == sorted(away, reverse=True)
    assert {True, False} == set(away)
    close(got, trained("zero2", {}), tol=1e-6)
    where, _ = trained("zero2", {"store": "cpu", "device_gb": 1.0}, end=end)
    assert not any(flag for _, flag in where)


def test_values_are_not_clipped():
    refused = []

    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        try:
            nn.utils.clip_grad_value_(one.model.parameters(), 0.1)
        except UsageError as error:
            refused.append(error)

    trained("zero2", {"store": "cpu"}, step=step, batches=data(1))
    assert "has left the device" in str(refused[0])


def test_an_error_on_the_host_comes_out_of_step(monkeypatch):
    def broken(*args, **kwargs):
        raise MemoryError("no more")

    monkeypatch.setattr(adam, "stepping", broken)
    with pytest.raises(MemoryError, match="no more"):
        trained("zero2", {"store": "cpu"})


# ------------------------------------------------------------------------------------------------------ in turns


@pytest.mark.parametrize(
    ("stage", "kind", "knobs"),
    [
        ("zero1", torch.optim.AdamW, {}),
        ("zero2", torch.optim.AdamW, {"store": "cpu", "device_gb": 2e-6}),
        ("zero2", torch.optim.SGD, {"store": "cpu", "device_gb": 2e-6}),
        ("zero3", torch.optim.AdamW, {}),
    ],
)
def test_bucket_by_bucket_is_all_at_once(stage, kind, knobs, monkeypatch):
    def run(at_once):
        called = Counter()
        monkeypatch.setattr(turns, "AT_ONCE", at_once)

        def work(comm):
            model = mlp().bfloat16()
            opt = kind([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.02}], lr=0.05)
            opt.register_step_pre_hook(lambda *_: called.update(["before"]))
            opt.register_step_post_hook(lambda *_: called.update(["after"]))
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
            one = Rig(comm, model, opt, spec=stage, knobs=knobs)
            for x, y in data(5):
                plain(one, *one.take(x, y))
                scheduler.step()
            return torch.cat([v.flatten() for v in model.state_dict().values()]), opt.state_dict()["state"]

        return threads.run(1, work)[0], called

    (want, wanted_state), called = run(1 << 30)
    assert called == {"before": 5, "after": 5}
    (got, state), called = run(1)
    assert called == {"before": 5, "after": 5}, "hooks on the step are called once"
    assert torch.equal(got, want)
    for i, known in wanted_state.items():
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(state[i][key])) for key, x in known.items())


def test_gradients_in_fp32_are_those_of_one_turn(monkeypatch):
    wide = []

    def end(one):
        layout = one.engine.method.layout
        real = layout._take

        def take(shards):
            real(shards)
            every = [shard for some in layout.bucket_shards.values() for shard in some]
            wide.append(sum(shard.param.grad is not None for shard in every))

        layout._take = take
        plain(one, *one.take(*data(1)[0]))
        return len(layout.bucket_shards), max(len(some) for some in layout.bucket_shards.values())

    monkeypatch.setattr(turns, "AT_ONCE", 1)
    buckets, most = trained("zero2", {}, dtype=torch.bfloat16, end=end)
    assert buckets > 2
    assert len(wide) == buckets
    assert max(wide) == most


def test_an_optimizer_that_counts_its_steps_is_called_once(monkeypatch):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    def work(comm):
        model = mlp().bfloat16()
        opt = Counting(model.parameters(), lr=0.1)
        one = Rig(comm, model, opt, spec="zero2")
        for x, y in data(3):
            plain(one, *one.take(x, y))
        return opt.param_groups[0]["k"]

    monkeypatch.setattr(turns, "AT_ONCE", 1)
    assert threads.run(1, work) == [3]


# ------------------------------------------------------------------------------------------------------ exact undoing


def _skipped(how, factor):
    """A loop in which one step has a loss so many times larger, and is given up."""

    def step(one, x, y):
        if one.number != 6:
            plain(one, x, y)
            return
        if how == "zero_grad":
            (cross_entropy(one.model(x), y) * factor).backward()
            one.optimizer.zero_grad()
        else:  # the last bucket's gradients are not finite: by then the others are stepped
            hook = one.model[0].weight.register_hook(lambda grad: grad * torch.inf)
            plain(one, x, y, lambda loss: loss * factor)
            hook.remove()

    return step


@pytest.mark.parametrize("factor", [1.0, slow(8.0), slow(1e6), 1e8])
@pytest.mark.parametrize("how", ["zero_grad", "not finite"])
@pytest.mark.parametrize(("stage", "world_size"), [slow("zero2", 1), ("zero3", 2)])
@pytest.mark.filterwarnings("ignore:paceline")
def test_a_step_with_a_huge_loss_that_is_given_up_leaves_no_trace(stage, world_size, how, factor, counts):
    """Undoing Adam would subtract a huge number from small moments: such a bucket waits for `step`."""
    same = {"world_size": world_size, "make": deep, "step": _skipped(how, factor), "batches": data(12)}
    want = trained(stage, {"store": "cpu", "step": "on_step"}, **same)
    counts.clear()
    got = trained(stage, {"store": "cpu"}, **same)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert counts["undone"] if factor < 10 else not counts["undone"]
    assert counts["used"] >= 8, "ordinary steps are made ahead"


def _clipped(most):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        nn.utils.clip_grad_norm_(one.model.parameters(), most(one.number))
        one.optimizer.step()
        one.optimizer.zero_grad()

    return step


def test_a_clip_that_does_not_bind_keeps_buckets_ahead(counts):
    trained("zero2", {"store": "cpu"}, step=_clipped(lambda i: 1e9))
    assert counts["undone"] == 0
    assert counts["used"] == 5 * counts["asked"] > 0  # all but the first step, in which none is ahead


def test_a_clip_that_binds_stops_steps_ahead_only_while_it_binds(counts):
    """It binds in steps 2 and 3 of 8: those two are made in `step`, and so is the one after, which it might bind in."""
    seen = []

    def step(one, x, y):
        before = counts["used"]
        _clipped(lambda i: 0.05 if i in (2, 3) else 1e9)(one, x, y)
        seen.append(counts["used"] > before)

    trained("zero2", {"store": "cpu"}, step=step, batches=data(8))
    assert seen == [False, True, False, False, False, True, True, True]
    assert counts["undone"] > 0  # step 2


# ------------------------------------------------------------------------------------------------------ streamed

STREAM = {"store": "cpu", "step": "stream"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world_size", "dtype"), [slow(1, torch.bfloat16), (3, torch.float32)], ids=str)
def test_streamed_gradients(stage, world_size, dtype, counts):
    def end(one):
        buckets = one.engine.method.layout.offload.buckets.values()
        assert not any(b.g.numel() or b._own.numel() for b in buckets), "a gradient is kept"
        return torch.cat([v.flatten() for v in one.model.state_dict().values()]).float()

    how = {"world_size": world_size, "dtype": dtype, "make": deep}  # more buckets than vectors that take turns
    got = trained(stage, STREAM, end=end, **how)
    assert counts["asked"] == counts["undone"] == 0
    assert torch.equal(got, trained(stage, {"store": "cpu"}, **how))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passing_with_gradients_zeroed_either_way(set_to_none):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=set_to_none)

    assert torch.equal(trained("zero2", STREAM, step=step), trained("zero2", {"store": "cpu"}, step=step))


@pytest.mark.parametrize("world_size", [1, 2])
def test_passing_with_parameters_that_are_not_always_used(world_size):
    """Whether these are stepped is known only at the end: their gradients are kept until then."""

    def step(one, x, y):
        h = one.model[:2](x)
        out = one.model[4](h) if (one.number + one.comm.rank) % 2 else one.model[2:](h)
        cross_entropy(out, y).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()

    how = {"step": step, "world_size": world_size}
    assert torch.equal(trained("zero2", STREAM, **how), trained("zero2", {"store": "cpu"}, **how))


@pytest.mark.parametrize("stage", STAGES)
def test_passing_follows_parameters_that_are_written_into(stage):
    def step(one, x, y):
        if one.number == 3:
            one.model.load_state_dict({key: 0.5 * value for key, value in one.model.state_dict().items()})
        plain(one, x, y)

    close(trained(stage, STREAM, step=step), trained(stage, {}, step=step), tol=1e-6)


def clip(one):
    nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)


def again(one):
    cross_entropy(one.model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long)).backward()


def look(one):
    one.optimizer.state_dict()


def own(one):
    one.model[2].weight.grad = torch.ones(16, 16)
    one.optimizer.step()


def write(one):
    one.model[2].weight.data.mul_(0.5)
    one.optimizer.step()


def change(one):
    one.optimizer.param_groups[0]["lr"] = 1.0
    one.optimizer.step()


def forget(one):
    one.model[2].weight.grad = None
    one.optimizer.step()


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (clip, "a gradient is multiplied"),
        (again, "a second backward before the step"),
        (look, "the optimizer's state is looked at"),
        (own, "between backward and step"),
        (write, "parameters are changed"),
        (change, "the optimizer's settings"),
        (forget, "which gradients there are, changed"),
    ],
)
def test_what_would_have_to_be_undone_is_refused(do, said):
    def end(one):
        x, y = one.take(*data(1)[0])
        before = weights(one.model)
        cross_entropy(one.model(x), y).backward()
        with pytest.raises(UsageError, match=said) as refused:
            do(one)
        assert "step='ahead'" in refused.value.do
        if do is not write:
            assert torch.equal(weights(one.model), before)
        return do

    assert trained("zero2", STREAM, end=end) is do


@pytest.mark.parametrize("do", [clip, look])
def test_who_was_refused_may_go_on(do):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        with contextlib.suppress(UsageError):
            if one.number == 3:
                do(one)
        one.optimizer.step()
        one.optimizer.zero_grad()

    assert torch.equal(trained("zero2", STREAM, step=step), trained("zero2", STREAM))


def test_norms_of_gradients_that_have_passed():
    def end(one):
        x, y = one.take(*data(1)[0])
        cross_entropy(one.model(x), y).backward()
        return nn.utils.get_total_norm([p.grad for p in one.model.parameters()])

    close(trained("zero2", STREAM, end=end), trained("zero2", {}, end=end), tol=1e-5)


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_step_that_is_given_up_when_others_were_stepped_is_the_end():
    def end(one):
        x, y = one.take(*data(1)[0])
        before = weights(one.model)
        (cross_entropy(one.model(x), y) + (one.model[0].weight * torch.inf).sum()).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert torch.equal(weights(one.model), before)
        with pytest.raises(StoreError, match=r"the step was not made[\s\S]*half-made step"):
            plain(one, x, y)
        assert torch.equal(weights(one.model), before)
        return True

    assert trained("zero2", STREAM, end=end)


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_step_of_which_nothing_is_finite_is_skipped():
    def step(one, x, y):
        plain(one, x, y, (lambda loss: loss * torch.nan) if one.number == 3 else None)

    how = {"step": step, "make": deep}
    assert torch.equal(trained("zero2", STREAM, **how), trained("zero2", {"store": "cpu"}, **how))


def test_a_gradient_that_is_not_finite_is_not_stepped_though_the_guard_is_off():
    def work(comm):
        model = mlp()
        one = Rig(comm, model, fused(model), spec="zero2", knobs=STREAM, guard="off")
        plain(one, *one.take(*data(1)[0]))
        with pytest.raises(StoreError, match="is not finite"):
            plain(one, *one.take(*data(1)[0]), lambda loss: loss * torch.nan)
        return weights(model).isfinite().all()

    assert threads.run(1, work)[0]


def test_who_does_not_go_together_with_passing_gradients(tmp_path):
    with pytest.raises(MethodError, match="step=stream does not go together with this optimizer"):
        threads.run(1, lambda comm: Rig(comm, m := mlp(), sgd(m), spec="zero2", knobs=STREAM))

    def scaled(comm):
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0)
        one = Rig(comm, model, fused(model), spec="zero2", knobs=STREAM, scaler=scaler)
        scaler.scale(cross_entropy(model(one.take(*data(1)[0])[0]), data(1)[0][1])).backward()

    with pytest.raises(MethodError, match="GradScaler"):
        threads.run(1, scaled)


# ------------------------------------------------------------------------------------------------------ chosen


def small(monkeypatch, device, host, disk):
    """As if this were a device with so many bytes free in each place, for every number of the model."""
    n = sum(p.numel() for p in deep().parameters())
    sizes = [int(x * n) for x in (device, host, disk)]
    monkeypatch.setattr(
        placement, "measured", lambda device, folder: FreeMemory(sizes[0], sizes[1], sizes[2] if folder else 0)
    )
    monkeypatch.setattr(placement, "BUCKET", 4)
    monkeypatch.setattr(placement, "speed", lambda folder: DiskSpeed(read=3.4e9, write=2.5e9))


def kinds(one):
    layout = one.engine.method.layout
    of = layout.offload.buckets if layout.offload else {}
    where = [type(of[b.index].vectors).__name__ if b.index in of else "device" for b in one.engine.buckets]
    return where, torch.cat([v.flatten() for v in one.model.state_dict().values()]).float()


@pytest.mark.parametrize(("stage", "world_size"), [("zero2", 1), ("zero3", 3)])
def test_without_a_device_of_its_own_all_stays(stage, world_size):
    how = {"world_size": world_size, "dtype": torch.bfloat16}
    assert torch.equal(trained(stage, {"store": "auto"}, **how), trained(stage, {}, **how))


@pytest.mark.parametrize("when", ["ahead", "stream"])
@pytest.mark.parametrize(
    ("room", "places"),
    [
        ((99, 99, 99), {"device"}),
        ((16, 99, 99), {"device", "InMemory"}),
        ((8, 8, 99), {"device", "InMemory", "OnDisk"}),
    ],
)
def test_what_fits_stays_and_the_rest_goes_on(room, places, when, monkeypatch, tmp_path, capsys):
    small(monkeypatch, *room)
    knobs = {"store": "auto", "path": str(tmp_path), "step": when}
    how = {"make": deep, "dtype": torch.bfloat16, "batches": data(3)}
    where, got = trained("zero2", knobs, end=kinds, **how)
    assert set(where) == places
    assert where == sorted(where, key=["OnDisk", "InMemory", "device"].index), "what is stepped first goes farthest"
    assert "; free: " in capsys.readouterr().err
    close(got, trained("zero2", {}, **how), tol=1e-2)


def test_the_file_has_room_for_what_goes_there_and_not_for_what_is_too_large_for_it(monkeypatch, tmp_path):
    small(monkeypatch, 0, 0, 0)
    make = built(
        lambda: nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 256), nn.Linear(256, 8192), nn.Linear(8192, 3))
    )
    chosen = Placement(device=0, host=0, disk=100_000, largest=100_000)
    monkeypatch.setattr(placement, "choose", lambda *_: (chosen, None))

    def end(one):
        return kinds(one)[0], one.engine.method.layout.offload.pool.disk.size

    where, size = trained("zero2", {"store": "auto", "path": str(tmp_path)}, make=make, batches=data(1), end=end)
    assert set(where) == {"OnDisk", "InMemory"}
    assert size < 2 * 12 * chosen.disk


def test_what_a_step_needs_on_the_device_has_its_room(monkeypatch):
    """Gradients come there in backward, and Adam makes its moments in the first step: their room is not for new
    parameters that could wait. What is there already is not counted again.
    """
    half = sum(p.numel() for p in deep().parameters()) // 2
    promised = []

    def step(one, x, y):
        offload = one.engine.method.layout.offload
        n = sum(b.own.stop - b.own.start for b in offload.staying)
        one.optimizer.zero_grad()
        one.model(x).square().mean().backward()
        before = offload.streams.promised() / n
        one.optimizer.step()
        after = offload.streams.promised() / n
        one.optimizer.zero_grad()
        promised.append((before, after, offload.streams.promised() / n))

    trained("zero2", {"store": "cpu", "device_gb": 12e-9 * half}, make=deep, step=step, batches=data(2))
    assert promised == [(8, 0, 4), (0, 0, 4)]
    streams = CopyStreams(torch.device("cpu"))
    streams.cuda = True
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1600))
    for what in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, what, lambda device: 0)
    assert streams.has_room()
    streams.promised = lambda: 950
    assert not streams.has_room()


def test_what_was_said_wins(monkeypatch, tmp_path):
    small(monkeypatch, 99, 99, 99)
    n = sum(p.numel() for p in deep().parameters())
    auto = {"store": "auto", "path": str(tmp_path)}
    assert set(trained("zero2", auto | {"device_gb": 0.0}, make=deep, batches=data(1), end=kinds)[0]) == {"InMemory"}
    assert set(
        trained("zero2", auto | {"device_gb": 0.0, "host_gb": 0.0}, make=deep, batches=data(1), end=kinds)[0]
    ) == {"OnDisk"}
    assert set(trained("zero2", auto | {"device_gb": 6e-9 * n}, make=deep, batches=data(1), end=kinds)[0]) == {
        "InMemory",
        "device",
    }


def test_what_fits_nowhere_is_named_before_the_first_step(monkeypatch, tmp_path):
    small(monkeypatch, 9, 5, 1)
    with pytest.raises(StoreError, match=r"does not fit[\s\S]*free: [\s\S]*paceline plan --memory"):
        trained("zero2", {"store": "auto", "path": str(tmp_path)}, make=deep, dtype=torch.bfloat16, batches=[])
    small(monkeypatch, 9, 8, 1)
    with pytest.raises(StoreError, match=r"does not fit[\s\S]*step='stream', which does not keep"):
        trained("zero2", {"store": "auto", "path": str(tmp_path)}, make=deep, dtype=torch.bfloat16, batches=[])
    small(monkeypatch, 5, 5, 0)
    with pytest.raises(StoreError, match=r"give path, a folder"):
        trained("zero2", {"store": "auto"}, make=deep, dtype=torch.bfloat16, batches=[])
    with pytest.raises(MethodError, match="wrong type"):
        method("zero2", store="auto", device_gb="much")


# ------------------------------------------------------------------------------------------------------ one step late


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_late_step_is_used_one_step_later(stage, world_size):
    """Gradients are those of weights that are one step behind. At the end all steps are made."""
    front, back = mlp(), mlp()
    optimizer, behind = fused(back), [p.detach().clone() for p in back.parameters()]
    for x, y in data(6):
        cross_entropy(front(x), y).backward()
        for p, q in zip(front.parameters(), back.parameters(), strict=True):
            q.grad, p.grad = p.grad, None
        optimizer.step()
        with torch.no_grad():
            for p, late, q in zip(front.parameters(), behind, back.parameters(), strict=True):
                p.copy_(late)
                late.copy_(q)
    want = torch.cat([p.detach().flatten() for p in back.parameters()])

    def end(one):
        late = torch.cat([p.flatten() for p in one.model.state_dict().values()])
        one.engine.settle()
        return late, torch.cat([p.flatten() for p in one.model.state_dict().values()])

    late, got = trained(stage, {"store": "cpu", "step": "late"}, world_size=world_size, end=end)
    close(got, want, tol=1e-5)
    close(late, torch.cat([p.detach().flatten() for p in front.parameters()]), tol=1e-5)


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_late_step_that_is_given_up_was_never_begun(counts):
    batches = data(6)
    batches[3][0][0] = torch.inf
    without = [*batches[:3], *batches[4:]]

    def end(one):
        one.engine.settle()
        return torch.cat([p.flatten() for p in one.model.state_dict().values()])

    how = {"world_size": 2, "end": end}
    got = trained("zero2", {"store": "cpu", "step": "late"}, batches=batches, **how)
    assert counts["ahead"] == counts["undone"] == 0
    assert torch.equal(got, trained("zero2", {"store": "cpu", "step": "late"}, batches=without, **how))


def test_a_late_step_is_saved_with_the_rest():
    def end(one):
        saved = one.optimizer.state_dict()["state"]
        return saved[0]["step"], torch.cat([p.detach().flatten() for p in one.model.parameters()])

    step, got = trained("zero2", {"store": "cpu", "step": "late"}, end=end)
    assert step == 6
    settled = trained(
        "zero2", {"store": "cpu", "step": "late"}, end=lambda one: (one.engine.settle(), weights(one.model))[1]
    )
    assert torch.equal(got, settled)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_what_is_written_into_a_parameter_outlives_a_step_that_was_late(stage):
    def end(one):
        with torch.no_grad():
            for p in one.model.parameters():
                p.zero_()
        plain(one, *one.take(*data(1, seed=9)[0]))
        late = weights(one.model)
        one.engine.settle()
        return late, weights(one.model)

    late, settled = trained(stage, {"store": "cpu", "step": "late"}, end=end)
    assert not late.any()
    assert 0 < settled.abs().max() < 0.1
