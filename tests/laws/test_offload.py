"""store=cpu: state on the host, stepped on a guess. That the steps are those of the other layouts is in test_zero.py;
here is what only a guess can get wrong.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import threads
from paceline.errors import UsageError
from paceline.kernels import adam
from paceline.stores.away import Away, AwayPiece
from rig import Rig, close, data, mlp, weights

STAGES = ["zero1", "zero2", "zero3"]


def fused(model):
    """Of torch's Adams the one whose bits the host's has."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def plain(one, x, y, backward=None):
    loss = cross_entropy(one.model(x.to(next(one.model.parameters()).dtype)).float(), y)
    (loss if backward is None else backward(loss)).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def trained(stage, knobs, *, world=1, dtype=torch.float32, step=plain, batches=None, end=None):
    def work(comm):
        model = mlp().to(dtype)
        one = Rig(comm, model, fused(model), spec=stage, knobs=knobs)
        for i, (x, y) in enumerate(batches or data(6)):
            one.number = i
            step(one, *one.take(x, y))
        if end is not None:
            return end(one)
        return torch.cat([v.flatten() for v in model.state_dict().values()]).float()

    return threads.run(world, work)[0]


@pytest.fixture
def guesses(monkeypatch):
    """How often a bucket was stepped on a guess, stepped when asked, and undone."""
    seen: Counter[str] = Counter()
    begin, undoing = Away._begin, adam.undoing

    def begun(self, *args, guess):
        seen["guessed" if guess else "asked"] += 1
        return begin(self, *args, guess=guess)

    def undone(*args, **kwargs):
        seen["undone"] += 1
        return undoing(*args, **kwargs)

    monkeypatch.setattr(Away, "_begin", begun)
    monkeypatch.setattr(adam, "undoing", undone)
    return seen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_loop_is_all_guesses(stage, dtype, guesses):
    close(trained(stage, {"store": "cpu"}, dtype=dtype), trained(stage, {}, dtype=dtype), tol=1e-6)
    assert guesses["guessed"] >= 6
    assert guesses["asked"] == guesses["undone"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:paceline")
def test_a_step_that_is_given_up_is_undone(dtype, guesses):
    """The last bucket's gradients are not finite: by then the others are stepped."""

    def step(one, x, y):
        def backward(loss):
            return loss + (one.model[0].weight * torch.inf).sum()

        plain(one, x, y, backward if one.number == 3 else None)

    tol = 1e-6 if dtype == torch.float32 else 1e-2
    how = {"world": 2, "step": step, "dtype": dtype}
    close(trained("zero2", {"store": "cpu"}, **how), trained("zero2", {}, **how), tol)
    assert guesses["undone"] >= 1
    assert guesses["asked"] == 0


def test_who_clips_is_not_second_guessed(guesses):
    def step(one, x, y):
        cross_entropy(one.model(x), y).backward()
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.05 if one.number < 4 else 1e9)
        one.optimizer.step()
        one.optimizer.zero_grad()

    close(trained("zero2", {"store": "cpu"}, step=step), trained("zero2", {}, step=step), tol=1e-6)
    buckets = guesses["undone"]  # each was undone once, in the first step
    assert buckets >= 2
    assert guesses["asked"] == 5 * buckets  # all but the last step
    assert guesses["guessed"] == 2 * buckets  # the first and the last


@pytest.mark.parametrize("divides", ["scaler", "optimizer"])
def test_under_a_loss_scaler_nothing_is_guessed(divides, guesses):
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
    assert guesses["guessed"] == guesses["undone"] == 0
    close(got, threads.run(1, lambda comm: work(comm, {}))[0], tol=1e-6)


def test_whoever_does_not_want_guesses_gets_none(guesses):
    trained("zero2", {"store": "cpu", "guess": False})
    assert guesses["guessed"] == guesses["undone"] == 0


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
    """Somebody saves there. What was guessed is undone, and done again when it is asked for."""
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
            (b.index, isinstance(piece, AwayPiece))
            for b in one.engine.buckets
            for piece in one.engine.method.layout.pieces[b.index]
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


# ------------------------------------------------------------------------------------------------------ one step late


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_late_step_is_used_one_step_later(stage, world):
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

    late, got = trained(stage, {"store": "cpu", "late": True}, world=world, end=end)
    close(got, want, tol=1e-5)
    close(late, torch.cat([p.detach().flatten() for p in front.parameters()]), tol=1e-5)


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_late_step_that_is_given_up_was_never_begun(guesses):
    batches = data(6)
    batches[3][0][0] = torch.inf
    without = [*batches[:3], *batches[4:]]

    def end(one):
        one.engine.settle()
        return torch.cat([p.flatten() for p in one.model.state_dict().values()])

    how = {"world": 2, "end": end}
    got = trained("zero2", {"store": "cpu", "late": True}, batches=batches, **how)
    assert guesses["guessed"] == guesses["undone"] == 0
    assert torch.equal(got, trained("zero2", {"store": "cpu", "late": True}, batches=without, **how))


def test_a_late_step_is_saved_with_the_rest():
    def end(one):
        saved = one.optimizer.state_dict()["state"]
        return saved[0]["step"], torch.cat([p.detach().flatten() for p in one.model.parameters()])

    step, got = trained("zero2", {"store": "cpu", "late": True}, end=end)
    assert step == 6
    settled = trained(
        "zero2", {"store": "cpu", "late": True}, end=lambda one: (one.engine.settle(), weights(one.model))[1]
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

    late, settled = trained(stage, {"store": "cpu", "late": True}, end=end)
    assert not late.any()
    assert 0 < settled.abs().max() < 0.1
