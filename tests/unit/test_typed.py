"""What an editor and a type checker see of `prepare`, and what a mistake in its arguments is called."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.core.parts import Layout, Sync
from paceline.errors import MethodError
from paceline.registry import parts

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

class Net(nn.Linear): ...

model = Net(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
data: TensorDataset = TensorDataset(torch.ones(4, 2))
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data)
a, b = paceline.prepare(model, optimizer, method="powersgd", rank=4)
reveal_type(a)
reveal_type(b)
a, b, c = paceline.prepare(model, optimizer, loader, accumulate=2)
reveal_type(c)
for batch in c:
    reveal_type(batch)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
batches: list[int] = [1]
f, g, d, e = paceline.prepare(model, optimizer, batches, torch.amp.GradScaler())
reveal_type(d)
reveal_type(e)
paceline.prepare(model, optimizer, guard="maybe")
"""


def test_prepare_gives_back_what_went_in(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Beside the package, as `make lint` checks it: what that has just found out lies in its cache.
    run = [sys.executable, "-m", "mypy", "--no-error-summary", "src", str(script)]
    out = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    revealed = [line.split('"')[1] for line in out.splitlines() if "Revealed type" in line]
    assert revealed == [
        "script.Net",
        "torch.optim.adamw.AdamW",
        "paceline.data.loader.Loader[tuple[torch._tensor.Tensor, ...]]",
        "tuple[torch._tensor.Tensor, ...]",
        "paceline.data.loader.Loader[int]",
        "torch.amp.grad_scaler.GradScaler",
    ], out
    errors = [line for line in out.splitlines() if ": error:" in line]
    assert len(errors) == 1, out
    assert "prepare" in errors[0]


@pytest.mark.parametrize("typo", ["acumulate", "bucketmb", "time_out"])
def test_a_typo_in_an_argument_of_its_own_is_not_called_a_knob(typo):
    model = nn.Linear(2, 2)
    with pytest.raises(MethodError) as error:
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **{typo: 1})
    assert f"prepare has no argument {typo!r}" in str(error.value)
    assert "did you mean" in str(error.value)


def test_a_wrong_knob_names_the_knobs():
    model = nn.Linear(2, 2)
    with pytest.raises(MethodError, match=r"powersgd has no knob 'rnk'[\s\S]*rank"):
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), method="powersgd", rnk=4)


def test_what_is_overridden_is_declared():
    """A part that overrides what the engine calls only where it is declared would silently do nothing."""
    for name, cls in parts().items():
        if issubclass(cls, Sync):
            assert cls.acts_before_step == (cls.before_step is not Sync.before_step), name
            assert cls.acts_after_step == (cls.on_step is not Sync.on_step), name
        if issubclass(cls, Layout):
            assert cls.publishes == (cls.publish is not Layout.publish), name


def test_importing_paceline_imports_no_race_no_peer_and_no_server():
    code = """
        import sys, paceline
        assert "torch" not in sys.modules
        import torch
        model = torch.nn.Linear(2, 2)
        paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), method="powersgd")
        wrong = [m for m in sys.modules if m.startswith(("paceline.tools", "paceline.integrations", "paceline.server"))]
        assert not wrong, wrong
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
