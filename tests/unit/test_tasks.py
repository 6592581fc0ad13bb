"""The built-in jobs: their data is the same every time, and they learn."""

from __future__ import annotations

import argparse
import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import paceline
import processes
from marks import slow
from paceline.errors import DataError
from paceline.telemetry import events as telemetry
from paceline.tools.tasks import TASKS, digits, fashion, loop, text

# ------------------------------------------------------------------------------------------------ text


def test_text_is_the_same_every_time_and_split_by_file() -> None:
    train, held_out = text.corpus(2_000_000)
    again, held_again = text.corpus(2_000_000)
    assert torch.equal(train, again)
    assert torch.equal(held_out, held_again)
    assert 2_000_000 <= len(train) + len(held_out) < 3_000_000
    whole = bytes(train.tolist())
    files = text.library()
    assert files[text.HELD_OUT_EVERY - 1].read_bytes() not in whole
    assert files[0].read_bytes() in whole


def test_the_whole_text_is_megabytes_of_which_a_twentieth_is_held_out() -> None:
    train, held_out = text.corpus()
    assert 4_000_000 < len(train) + len(held_out) < text.MOST + 1_000_000
    assert 0.01 < len(held_out) / (len(train) + len(held_out)) < 0.1


def test_text_does_not_depend_on_the_order_of_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = text.library()
    plain = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(plain(self, pattern))))
    assert text.library() == usual
    assert not [path for path in usual if "site-packages" in path.parts]


def test_a_python_without_sources_is_a_data_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="0 bytes of source"):
        text.corpus()


def test_a_windows_target_is_the_next_byte() -> None:
    windows = text.ByteWindows(torch.arange(1000, dtype=torch.int64).to(torch.uint8))
    x, y = windows[1]
    assert len(windows) == 7
    assert x.shape == y.shape == (text.CONTEXT,)
    assert x[0] == text.CONTEXT
    assert torch.equal(x[1:], y[:-1])
    assert all(len(windows[i][1]) == text.CONTEXT for i in range(len(windows)))


def test_the_model_has_two_million_parameters_and_shares_its_embedding() -> None:
    model = text.ByteGPT()
    assert 1_800_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert model.head.weight is model.byte.weight


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = text.ByteGPT(layers=1, width=24, heads=2).eval()
    x = torch.randint(256, (1, text.CONTEXT))
    changed = x.clone()
    changed[0, 64:] = 0
    before, after = model(x), model(changed)
    assert torch.allclose(before[0, :64], after[0, :64], atol=1e-5)
    assert not torch.allclose(before[0, 64:], after[0, 64:], atol=1e-3)


def test_an_untrained_model_guesses_almost_evenly() -> None:
    torch.manual_seed(0)
    windows = text.ByteWindows(text.corpus(2_000_000)[1])
    loss, accuracy = text.evaluate(text.ByteGPT(), windows).values()
    assert 5.0 < loss < 5.7  # ln 256 is 5.55; the shared embedding favours the byte it has just seen
    assert 0 <= accuracy < 0.4


# ------------------------------------------------------------------------------------------------ fashion


def write_idx(path: Path, values: Tensor) -> None:
    head = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    path.write_bytes(gzip.compress(head + bytes(values.flatten().tolist())))


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """A data set of the right form and the wrong size."""
    for part, count in (("train", 600), ("t10k", 100)):
        labels = torch.arange(count) % 10
        images = (labels.view(-1, 1, 1) * 25).expand(count, 28, 28)  # as dark as its label says
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


def test_missing_images_name_the_package_and_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fashion, "PACKAGED", tmp_path / "nowhere")
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(DataError) as caught:
        fashion.find_data(None)
    assert "nowhere" in str(caught.value)
    assert "dataset-fashion-mnist" in caught.value.do
    assert "--data" in caught.value.do


def test_where_images_are_looked_for(monkeypatch: pytest.MonkeyPatch, clothes: Path) -> None:
    assert fashion.find_data(str(clothes)) == clothes
    monkeypatch.setenv("PACELINE_DATA", str(clothes))
    assert fashion.find_data(None) == clothes
    with pytest.raises(DataError, match="elsewhere"):
        fashion.find_data(str(clothes / "elsewhere"))  # what is asked for is not silently replaced


def test_images_are_read_as_they_were_written(clothes: Path) -> None:
    train = fashion.images(clothes, "train")
    x, y = train[7]
    assert x.shape == (784,)
    assert y == 7
    assert x[0] == pytest.approx((7 * 25 / 255 - 0.286) / 0.353)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc"),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x03abc"),
        gzip.compress(b"\0\0\x08\x01\0\0\0\x03abc")[:-9],
    ],
    ids=["nothing", "not gzip", "empty", "too short", "of floats", "cut off"],
)
def test_a_broken_file_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a gzipped IDX file"):
        fashion.read_idx(path)


def test_images_without_their_labels_are_refused(clothes: Path) -> None:
    write_idx(clothes / "train-labels-idx1-ubyte.gz", torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(DataError, match="5 labels"):
        fashion.images(clothes, "train")


# ------------------------------------------------------------------------------------------------ the loop


def test_batches_go_over_as_many_epochs_as_it_takes() -> None:
    assert list(loop.batches("ab", 5)) == [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")]


def test_batches_end_when_the_loader_has_run_dry() -> None:
    epochs = iter([[1, 2], [3], []])

    class Loader:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(next(epochs))

    assert [batch for _, batch in loop.batches(Loader(), 100)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("decay", "warmup", "want"),
    [
        (False, 1, [1, 1, 1, 1, 1]),
        (True, 1, [1, 0.8, 0.6, 0.4, 0.2]),
        (False, 2, [0.5, 1, 1, 1, 1]),
        (True, 2, [0.5, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_asked(decay: bool, warmup: int, want: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = loop.lr_schedule(optimizer, argparse.Namespace(steps=5, lr_decay=decay, lr_warmup=warmup))
    seen = []
    for _ in want:
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(want)


def test_every_held_out_sample_has_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline, "world_size", lambda: 3, raising=False)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(paceline, "rank", lambda rank=rank: rank, raising=False)
        shares += list(loop.own_samples(10))
    assert sorted(shares) == list(range(10))


def test_totals_over_unequal_shares_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three workers with 4, 3 and 3 samples; this one has 4, of which 2 are right, the others have 3 and 0.
    monkeypatch.setattr(paceline, "mean", lambda own: (own + torch.tensor([3.0, 6.0])) / 3, raising=False)
    assert loop.mean_over_workers(2.0, count=4) == [pytest.approx(0.5)]


@pytest.mark.parametrize("task", [task if task == "digits" else slow(task) for task in TASKS])
def test_a_task_runs_and_learns_as_a_plain_script(task: str, clothes: Path) -> None:
    steps, every = {"text": (6, 3), "fashion": (20, 10), "digits": (40, 20)}[task]
    # By its path, with no launcher and no installed command: as anybody would start a script.
    script = Path(loop.__file__).with_name(f"{task}.py")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    env |= {"OMP_NUM_THREADS": "1", "PACELINE_DATA": str(clothes)}
    done = subprocess.run(
        [sys.executable, str(script), "--steps", str(steps), "--eval-every", str(every), "--seed", "1"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [str(every), str(2 * every)]
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines]  # type: ignore[index]
    assert losses[1] < losses[0]
    assert "accuracy" in lines[-1]


def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["digits.py", "--steps", "0"])
    with pytest.raises(SystemExit) as left:
        digits.main()
    assert left.value.code == 2
    assert "0 is not 1 or more" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ evaluations


def digits_job(rank: int, words: list[str]) -> None:
    """What a worker of the task does when it is given these words."""
    sys.argv = ["digits", "--steps", "40", "--eval-every", "10", *words]
    digits.main()


def accuracies(folder: Path, *words: str) -> list[tuple[int, float]]:
    """(step, accuracy) as worker 0 of two reports them."""
    env = {"PACELINE_EVENTS": str(folder), "PACELINE_METHOD": "local_sgd"}
    processes.values(processes.run(2, digits_job, list(words), env=env))
    events = telemetry.read(folder / "worker-0.jsonl")
    found = [e for e in events if isinstance(e, telemetry.Metric) and e.name == "accuracy"]
    return [(e.step, round(e.value or 0.0, 9)) for e in found]


def test_what_is_evaluated_later_is_what_was_there_then(tmp_path: Path) -> None:
    now = accuracies(tmp_path / "now")
    later = accuracies(tmp_path / "later", "--eval-later", "--slow-worker", "1")
    assert [step for step, _ in now] == [9, 19, 29, 39]
    assert len({value for _, value in now}) > 1
    assert later == now


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="scikit-learn"):
        digits.digits()
