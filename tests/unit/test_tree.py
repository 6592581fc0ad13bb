"""The architecture, as the tree shows it."""

from __future__ import annotations

import re
from pathlib import Path

from paceline import registry

SRC = Path(__file__).parents[2] / "src" / "paceline"
DATA_PATH = ("parts", "comm", "bucket", "pipeline", "exchange", "hooks", "engine")
files = {path.relative_to(SRC): path.read_text() for path in SRC.rglob("*.py")}


def test_the_data_path_can_be_read_in_one_sitting():
    assert sum(len(files[Path(f"{name}.py")].splitlines()) for name in DATA_PATH) < 1400


def test_the_engine_names_no_method():
    for name in ("engine.py", "pipeline.py", "exchange.py", "hooks.py", "bucket.py", "comm.py"):
        words = set(re.findall(r"[a-z0-9_]+", files[Path(name)].lower()))
        named = {part for part in registry.parts() if part in words} - {"exact", "backward", "half", "even", "fixed"}
        assert not named, f"{name} names {named}"


def test_one_file_a_method_and_a_short_one():
    for folder in ("reducers", "syncs", "layouts", "orders", "balances"):
        for path, text in files.items():
            if path.parts[0] == folder and not path.name.startswith("_"):
                assert len(text.splitlines()) < 150, path
                assert text.count("@register") == 1, path


def test_who_may_speak_torch_distributed():
    allowed = {"comm.py", "launch.py"}
    for path, text in files.items():
        if path.parts[0] not in ("membership", "race", "lab", "cli") and path.name not in allowed:
            assert not re.search(r"^\s*(import|from) torch\.distributed", text, re.M), path


def test_only_hooks_registers_hooks():
    for path, text in files.items():
        if path.name != "hooks.py":
            assert not re.search(r"register_(post_accumulate_grad_|forward_|full_backward_)?(pre_)?hook\(", text), path


def test_nothing_unsafe():
    for path, text in files.items():
        assert not re.search(
            r"\bpickle\b|weights_only\s*=\s*False|shell\s*=\s*True|(?<![.\w])eval\(|_object\(|yaml\.load", text
        ), path


def test_every_part_is_documented():
    for name, cls in registry.parts().items():
        assert cls.__doc__, name
        assert not cls.__doc__.startswith(f"{cls.__name__}("), f"{name} has only the dataclass's docstring"
        for knob in cls.knobs():
            assert knob.effect, f"{name}.{knob.name}"
        if cls.axis == "reducer":
            assert cls.formula, name
