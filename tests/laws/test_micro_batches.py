"""Micro-batches: the same training in smaller parts, found where memory does not suffice, on whichever worker."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import threads
from marks import slow
from paceline.data.loader import Loader
from paceline.data.micro_batches import MicroBatchSize, parts
from paceline.data.redeals import Redeals
from paceline.errors import DataError, UsageError
from rig import Rig, built, close, same, sgd, weights

SAMPLES, BATCH, EPOCHS = 60, 12, 2
TOO_MUCH = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB is free."


class Tight(nn.Module):
    """A small net on a device with room for `most` samples: in its forward, or in its backward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.most, self.where = 1000, "forward"

    def forward(self, x):
        hidden = self.net[:3](x)
        if torch.is_grad_enabled() and len(x) > self.room(x):
            if self.where == "forward":
                raise torch.OutOfMemoryError(TOO_MUCH)
            hidden.register_hook(self.no_room)  # the last layer's gradients are there by then, the first's are not
        return self.net[3:](hidden)

    def room(self, x):
        return self.most

    def no_room(self, grad):
        raise torch.OutOfMemoryError(TOO_MUCH)


tight = built(Tight)


def samples(n=SAMPLES):
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))


class Job:
    """One worker: a model, its optimizer, and a loader that deals micro-batches."""

    def __init__(self, comm, spec="exact", *, micro_batch="auto", model=tight, batch=BATCH, data=None, **rig):
        self.model = model()
        self.opt = sgd(self.model)
        self.rig = Rig(comm, self.model, self.opt, spec=spec, micro_batch=micro_batch, **rig)
        self.engine = self.rig.engine
        size = MicroBatchSize(micro_batch, first=int(self.engine.method.layout.shards_parameters))
        accumulate = rig.get("accumulate", 1)
        self.loader = Loader(
            DataLoader(data or samples(), batch, shuffle=True),
            group=self.engine.group,
            balance=self.engine.method.balance,
            recorder=self.rig.recorder,
            seed=5,
            on_batch=self.engine.take_batch,
            size=size,
            redeals=Redeals(
                self.engine.redeal,
                size,
                self.engine.group,
                self.rig.recorder,
                accumulate=accumulate,
                together=self.engine.method.sync.due(0),
                others=lambda: 0,
            )
            if micro_batch == "auto"
            else None,
        )
        self.dealt = []  # samples of every micro-batch

    def train(self, epochs=EPOCHS):
        """A loop that catches the error by itself, and goes on with the next batch."""
        for _ in range(epochs):
            for x, y in self.loader:
                self.dealt.append(len(x))
                try:
                    cross_entropy(self.model(x), y).backward()
                except torch.OutOfMemoryError:
                    continue
                self.opt.step()
                self.opt.zero_grad()
        self.engine.settle()
        return weights(self.model)


def trained(world_size, spec="exact", *, who=(), most=2, where="forward", epochs=EPOCHS, **job):
    def work(comm):
        one = Job(comm, spec, **job)
        if comm.rank in who:
            one.model.most, one.model.where = most, where
        return one.train(epochs)

    with warnings.catch_warnings(action="ignore"):
        return threads.run(world_size, work, timeout_s=20)


def plain(batch=BATCH, epochs=EPOCHS, order=None):
    """One process, the whole batch: the loader's order, without cuts."""
    return trained(1, micro_batch=None, batch=batch, epochs=epochs)[0]


TOGETHER = [
    ("exact", {}),
    ("powersgd", {"rank": 2}),
    slow("topk", {"ratio": 0.5}),
    ("zero1", {}),
    slow("zero2", {}),
    ("zero3", {}),
    ("zero3", {"store": "cpu"}),
    ("priority", {}),
    slow("delayed", {"staleness": 0}),
]


# ------------------------------------------------------------------------------------------------ a size that is given


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_micro_batches_are_one_batch(world_size, micro_batch):
    close(same(trained(world_size, micro_batch=micro_batch)), plain())


@pytest.mark.parametrize(("spec", "knobs"), [*TOGETHER, ("local_sgd", {"every": 2})])
def test_under_every_kind_of_method(spec, knobs):
    cut = trained(3, spec, knobs=knobs, micro_batch=3)
    for a, b in zip(cut, trained(3, spec, knobs=knobs, micro_batch=None), strict=True):
        close(a, b, 1e-5)


def test_with_accumulation_a_step_is_of_several_batches():
    cut = trained(2, micro_batch=4, accumulate=2, batch=10)
    close(same(cut), same(trained(2, micro_batch=None, accumulate=2, batch=10)))


def test_the_last_batch_may_be_smaller_than_the_workers():
    """Of 25 samples the last batch has one: two workers borrow theirs."""
    data = samples(25)
    close(same(trained(3, micro_batch=2, data=data)), trained(1, micro_batch=None, data=data)[0])


def test_parts_are_even_and_as_many_on_every_worker():
    assert parts([12, 12], 5) == [[4, 4]] * 3
    assert parts([7, 2, 0], 3) == [[3, 1, 0], [2, 1, 0], [2, 0, 0]]
    assert parts([7, 2, 0], 3, first=1) == [[1, 1, 0], [3, 1, 0], [3, 0, 0]]
    assert parts([2, 1], None) == [[2, 1]]


def test_stepping_by_a_count_of_ones_own_is_refused():
    def work(comm):
        one = Job(comm, micro_batch=4)
        for i, (x, y) in enumerate(one.loader):
            cross_entropy(one.model(x), y).backward()
            if i % 3 == 2:
                one.opt.step()

    with pytest.raises(UsageError, match="in the middle of the next one"):
        threads.run(2, work)


# ------------------------------------------------------------------------------------------------ a size that is found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1, 2)], ids=["first", "second", "all"])
@pytest.mark.parametrize(("spec", "knobs"), TOGETHER)
def test_what_does_not_fit_is_dealt_again(spec, knobs, who, where):
    found = trained(3, spec, knobs=knobs, who=who, where=where)
    for a, b in zip(found, trained(3, spec, knobs=knobs), strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_alone_too(where):
    close(trained(1, who=(0,), where=where)[0], plain())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_gradients_are_not_exchanged_the_worker_cuts_alone(where):
    def work(comm):
        one = Job(comm, "local_sgd", knobs={"every": 2})
        if comm.rank == 1:
            one.model.most, one.model.where = 2, where
        return one.train(), max(one.dealt[len(one.dealt) // 2 :])

    with warnings.catch_warnings(action="ignore"):
        found = threads.run(3, work)
    assert [most for _, most in found] == [4, 2, 4]
    for (a, _), b in zip(found, trained(3, "local_sgd", knobs={"every": 2}), strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_in_a_window_all_its_batches_are_dealt_again(where):
    """Only the second batch of each window is too large, on one worker."""

    class Sometimes(Tight):
        def room(self, x):
            return 2 if float(x.detach()[0, 0]) > 0.5 else 1000

    def work(comm):
        one = Job(comm, accumulate=2, model=built(Sometimes))
        one.model.where = where
        return one.train()

    with warnings.catch_warnings(action="ignore"):
        found = threads.run(2, work)
    close(same(found), same(trained(2, accumulate=2, micro_batch=None)))


def test_in_a_window_after_others_that_fitted_all_its_batches_are_cut():
    def work(comm):
        one = Job(comm, accumulate=2)
        one.train(1)
        one.model.most = 2
        return one.train(1)

    with warnings.catch_warnings(action="ignore"):
        found = threads.run(2, work)
    close(same(found), same(trained(2, accumulate=2, micro_batch=None)))


def test_a_loss_scaler_moves_with_the_steps_that_count():
    def work(most):
        def run(comm):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
            one = Job(comm, scaler=scaler)
            one.model.most = most if comm.rank == 1 else 1000
            for x, y in one.loader:
                try:
                    scaler.scale(cross_entropy(one.model(x), y)).backward()
                except torch.OutOfMemoryError:
                    continue
                scaler.step(one.opt)
                scaler.update()
                one.opt.zero_grad()
            return weights(one.model), scaler.get_scale(), int(scaler._growth_tracker)

        with warnings.catch_warnings(action="ignore"):
            return threads.run(2, run)

    found, whole = work(2), work(1000)
    close(same([w for w, _, _ in found]), same([w for w, _, _ in whole]))
    assert [rest for _, *rest in found] == [rest for _, *rest in whole]


def test_it_stays_found():
    def work(comm):
        one = Job(comm)
        one.model.most = 2
        one.train()
        return one.dealt

    with warnings.catch_warnings(action="ignore"):
        for dealt in threads.run(3, work):
            assert dealt == [4] + [2] * (2 * SAMPLES // BATCH * EPOCHS)


class Longer(Tight):
    """Some batches have longer samples, of which fewer fit."""

    def room(self, x):
        return 1 if (x[:, 0].abs() > 2.3).any() else 4


def test_a_batch_of_longer_samples_is_cut_finer_by_itself():
    def work(comm):
        one = Job(comm, model=built(Longer))
        return one.train(), one.dealt, one.loader.size.most

    with warnings.catch_warnings(action="ignore"):
        found = threads.run(3, work)
    close(same([w for w, _, _ in found]), plain())
    for _, dealt, most in found:
        assert most is None
        assert 1 in dealt
        assert dealt.count(4) > SAMPLES // BATCH  # the others stayed whole


def test_a_larger_size_is_tried_again():
    size = MicroBatchSize("auto")
    assert size.too_large(0, 0, 16) == 8
    assert [k for k in range(110) if size.fitted(whole=False)] == [99]
    assert size.of(110) == 16
    assert [k for k in range(110, 300) if size.fitted(whole=False)] == [299]
    assert size.of(300) == 32
    size.too_large(300, 300, 32)  # at once: it never fitted
    assert size.of(500) == 16


def test_after_some_exceptions_all_batches_are_cut():
    size = MicroBatchSize("auto")
    size.fitted(whole=True)
    for k in (5, 10, 15):
        size.too_large(k, k, 8)
        assert (size.of(k), size.of(k + 1)) == (4, None)
        size.fitted(whole=False)
    size.too_large(20, 20, 8)
    assert size.of(20) == size.of(21) == 4


def test_one_sample_that_does_not_fit_a_worker_with_shards_of_the_parameters():
    """It does not know yet what the others gather."""

    def work(comm):
        one = Job(comm, "zero3")
        one.model.most = 0 if comm.rank else 1000
        one.train()

    with warnings.catch_warnings(action="ignore"), pytest.raises(DataError, match="one sample does not fit"):
        threads.run(2, work, timeout_s=10)


@pytest.mark.parametrize("who", [(1,), (0, 1)])
def test_one_sample_that_does_not_fit_is_said_everywhere(who):
    def work(comm):
        one = Job(comm)
        one.model.most = 0 if comm.rank in who else 1000
        with pytest.raises(DataError, match="one sample does not fit into the memory of worker") as said:
            one.train()
        return str(said.value)

    with warnings.catch_warnings(action="ignore"):
        for rank, said in enumerate(threads.run(2, work)):
            assert ("Tried to allocate 2.00 GiB" in said and "512.00 MiB is free" in said) == (rank in who)


def test_every_sample_once_and_a_state_saved_after_it_resumes():
    def begun(comm):
        one = Job(comm)
        one.model.most = 2
        seen, states = [], None
        for x, y in one.loader:
            try:
                cross_entropy(one.model(x), y).backward()
            except torch.OutOfMemoryError:
                continue
            one.opt.step()
            one.opt.zero_grad()
            seen += one.loader.current.indices
            if len(seen) == 8:  # two batches, and the loop is left in the middle of an epoch
                states = one.loader.state_dict()
                break
        return seen, states

    def resumed(comm, state):
        one = Job(comm)
        one.loader.load_state_dict(state)
        seen = []
        for x, y in one.loader:  # its end checks that each sample was handed out once
            cross_entropy(one.model(x), y).backward()
            one.opt.step()
            one.opt.zero_grad()
            seen += one.loader.current.indices
        return seen

    with warnings.catch_warnings(action="ignore"):
        first = threads.run(3, begun)
    assert all(state["batches"] == 2 for _, state in first)
    rest = threads.run(2, lambda comm: resumed(comm, first[0][1]))
    assert sorted(i for seen in [*(seen for seen, _ in first), *rest] for i in seen) == list(range(SAMPLES))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_buffers_and_random_streams_are_as_before(where):
    """In a world of one, where threads do not share the streams: dropout and BatchNorm go as without the attempt."""

    class Noisy(Tight):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)

        def forward(self, x):
            return super().forward(self.drop(self.norm(x)))

    make = built(Noisy)

    def work(most):
        def run(comm):
            torch.manual_seed(9)
            one = Job(comm, model=make)
            one.model.most, one.model.where = most, where
            if most == 1000:
                one.loader.size.most = 6  # as it is found in the other run
            one.train(1)
            return torch.cat([weights(one.model), one.model.norm.running_mean, one.model.norm.running_var])

        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
            return threads.run(1, run)[0]

    assert torch.equal(work(6), work(1000))


def test_nothing_of_the_attempt_stays_alive():
    refs = []

    class Watched(Tight):
        def forward(self, x):
            return super().forward(x * 1.0)

    def work(comm):
        one = Job(comm, model=built(Watched))
        one.model.most, one.model.where = 4, "backward"
        for x, y in one.loader:
            hidden = x * 1.0
            hidden.requires_grad_()
            refs.append(weakref.ref(hidden))
            try:
                loss = cross_entropy(one.model(hidden), y)
                loss.backward()
            except torch.OutOfMemoryError:
                del loss, hidden
            gc.collect()
            return refs[-1]() is None
        return None

    with warnings.catch_warnings(action="ignore"):
        assert threads.run(1, work) == [True]
