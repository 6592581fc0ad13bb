"""The architecture, as the tree shows it: who may import whom, and what stands where."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import registry

SRC = Path(__file__).parents[2] / "src" / "paceline"
FAMILIES = ("reducers", "syncs", "sharding", "orders", "balances", "memberships")
files = {path.relative_to(SRC): path.read_text() for path in sorted(SRC.rglob("*.py"))}
trees = {path: ast.parse(text) for path, text in files.items()}
modules = {".".join(("paceline", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports: at its top, inside functions and for type checkers alike."""
    for node in ast.walk(trees[path]):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in modules else node.module


def room(module: str) -> str:
    """The folder a module stands in; a module at the root is a room of its own."""
    return module.split(".")[1] if "." in module else module


def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        found[room(module)] |= {room(name) for name in imports(path) if name.split(".")[0] == "paceline"}
    return {here: there - {here} for here, there in found.items()}


def test_at_the_root_is_only_what_a_user_imports():
    root = {path.name for path in files if len(path.parts) == 1}
    assert root == {"__init__.py", "_version.py", "api.py", "method.py", "registry.py", "knobs.py", "errors.py"}


def test_the_step_knows_no_tool_and_no_concrete_part():
    assert arrows()["core"] <= {"comm", "telemetry", "errors", "knobs"}


def test_the_wire_knows_nothing_above_it():
    assert arrows()["comm"] <= {"errors"}


def test_tools_are_imported_by_nobody():
    assert [here for here, there in arrows().items() if "tools" in there] == []


def test_no_folder_imports_in_a_circle():
    left = arrows()
    while free := [here for here, there in left.items() if not there & left.keys()]:
        for here in free:
            del left[here]
    assert left == {}, "these import each other"


def test_who_may_speak_torch_distributed():
    """The wire does; and whoever starts processes or runs torch's own methods."""
    allowed = {"comm", "integrations", "tools"}
    for module, path in modules.items():
        spoken = {name for name in imports(path) if name.startswith("torch.distributed")}
        assert not spoken or room(module) in allowed, f"{path} imports {spoken}"


@pytest.mark.parametrize("room_", ["core", "comm"])
def test_the_step_names_no_method(room_):
    plain = {"exact", "backward", "half", "even", "fixed", "measured"}  # words that are English too
    for path, text in files.items():
        if path.parts[0] == room_:
            named = set(re.findall(r"[a-z0-9_]+", text.lower())) & set(registry.parts())
            assert not named - plain, f"{path} names {named - plain}"


def test_one_file_a_method_and_a_short_one():
    for path, text in files.items():
        if path.parts[0] in FAMILIES and "@register" in text:
            assert text.count("@register") == 1, path
            assert len(text.splitlines()) < 150, path
            assert path.stem in registry.parts(), f"{path} is not called as its method"


def test_only_hooks_registers_hooks():
    for path, text in files.items():
        if path.name != "hooks.py":
            assert not re.search(r"register_(post_accumulate_grad_|forward_|full_backward_)?(pre_)?hook\(", text), path


def test_one_word_one_thing():
    """No public class name stands for two things."""
    names = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_docstrings_stand_alone():
    """An editor shows each by itself: it begins with a capital and is a sentence, not the end of the one above."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                assert not text or not text.startswith("..."), f"{path}: {text}"


def test_benches_import_what_is_there():
    """They are run by hand, and rarely: a name that has gone would be noticed months later."""
    for path in sorted((SRC.parents[1] / "bench").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = importlib.import_module(node.module)
                gone = [name.name for name in node.names if f"{node.module}.{name.name}" not in modules]
                assert [name for name in gone if not hasattr(module, name)] == [], path


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
