"""Models built on the meta device are filled: with the numbers of any other, and as a whole in no place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import processes
from marks import slow
from paceline.errors import UsageError
from paceline.registry import parts
from paceline.sharding import meta
from rig import data, same

LAYOUTS = list(parts("layout"))


class Net(nn.Module):
    """Attention, a norm, statistics, a tie and a frozen layer: all that torch's own modules fill in their own ways."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.seen = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.frozen.weight
        self.again = nn.Linear(6, 8, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        h = self.norm(h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0])
        return self.last(self.tied(self.frozen(self.seen(h))) + self.again(x))


def _train(model, rank, method, **how):
    import paceline

    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, opt = paceline.prepare(model, opt, method=method, bucket_mb=0.0005, **how)
    start = torch.cat([v.flatten() for v in model.state_dict().values()])
    for x, y in data(3):
        mine = slice(rank * 12 // paceline.world_size(), (rank + 1) * 12 // paceline.world_size())
        cross_entropy(model(x[mine]), y[mine]).backward()
        opt.step()
        opt.zero_grad()
    return start, torch.cat([v.flatten() for v in model.state_dict().values()])


def _job(rank, method, device, seed=5):
    torch.manual_seed(seed + (rank if device == "meta" else 0))  # worker 0's counts
    with torch.device(device):
        model = Net()
    return _train(model, rank, method)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [slow(1, "zero3"), *((2, n) if n in ("replicated", "zero3") else slow(2, n) for n in LAYOUTS)],
)
def test_the_numbers_are_those_of_a_model_built_with_memory(layout, world_size):
    want = processes.values(processes.run(world_size, _job, layout, "cpu"))
    got = processes.values(processes.run(world_size, _job, layout, "meta"))
    for k in (0, 1):
        assert torch.equal(same([g[k] for g in got]), same([w[k] for w in want])), "start" if k == 0 else "end"


def _from_file(rank, method, folder):
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = Net()
        model.mine = nn.Parameter(torch.zeros(3))  # nobody but the file can fill it
    return _train(model, rank, method, weights=folder)[0]


@pytest.mark.parametrize(("layout", "plain"), [slow("replicated", True), ("zero3", True), slow("zero3", False)])
def test_from_a_checkpoint_or_a_file(tmp_path, layout, plain):
    import paceline
    from paceline.checkpoint.export import export
    from paceline.checkpoint.reader import Checkpoint

    torch.manual_seed(0)
    model = Net()
    model.mine = nn.Parameter(torch.rand(3))
    path = paceline.save(tmp_path, model, step=0)
    if plain:
        export(Checkpoint(path), tmp_path / "plain.safetensors")
        path = tmp_path / "plain.safetensors"
    got = same(processes.values(processes.run(2, _from_file, layout, str(path))))
    assert torch.equal(got, torch.cat([v.flatten() for v in model.state_dict().values()]))


# ------------------------------------------------------------------------------------------------ memory


def _peak(rank):
    """The most bytes of tensors that were alive at once while `prepare` filled a model, and those of the model."""
    from torch.profiler import ProfilerActivity, profile

    import paceline

    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(32)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        paceline.prepare(model, opt, method="zero3", bucket_mb=0.5)
    live = peak = 0
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return float(peak), float(live), float(sum(p.numel() * 4 for p in model.parameters()))


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_no_worker_ever_holds_the_whole_model(world_size):
    for peak, live, whole in processes.values(processes.run(world_size, _peak)):
        assert live == pytest.approx(whole / world_size, rel=0.1)
        assert peak < whole / world_size + 2**20, "its shards, and a bucket or a module"


# ------------------------------------------------------------------------------------------------ what is refused


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_what_nobody_can_fill_is_named_before_anything_starts():
    with torch.device("meta"):
        model = nn.Sequential(Bare(), nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"0\.scale is on the meta device") as error:
        meta.check([model], weights=False)
    assert "0.scale, 0.mask" in error.value.why
    with pytest.raises(UsageError, match=r"0\.mask is on the meta device"):
        meta.check([model], weights=True)


def test_a_reset_that_leaves_something_out_is_named():
    from paceline.core.shard import Owned

    class Forgets(nn.Linear):
        def reset_parameters(self):
            nn.init.zeros_(self.bias)

    model = nn.Sequential(Forgets(2, 2, device="meta"))
    blank = meta.Blank([model], torch.device("cpu"))
    with pytest.raises(UsageError, match=r"0\.weight was on the meta device"):
        blank.fill(0, Owned([]))


def test_parameters_stay_who_they_are():
    model = nn.Linear(2, 2, device="meta")
    model.weight.decays = False
    before = [id(p) for p in model.parameters()]
    state = torch.get_rng_state()
    from paceline.core.shard import Owned

    meta.Blank([model], torch.device("cpu")).fill(0, Owned([]))
    assert [id(p) for p in model.parameters()] == before
    assert model.weight.decays is False
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
