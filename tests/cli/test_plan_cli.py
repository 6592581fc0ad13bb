"""`paceline plan`: what it prints, and what it says to nonsense."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from paceline.tools.cli import main as command_line
from paceline.tools.cli import plan as command

Call = Callable[..., tuple[int, str, str]]
ROOM = ["--device", "80GiB", "--host", "1TiB", "--disk", "4TB"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["paceline", "plan", *words])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_the_table_fits_a_terminal_and_says_what_to_take(call: Call) -> None:
    code, out, _ = call("--memory", "--model", "7B", "--workers", "8", *ROOM)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "replicated  device       104.31       –       –  lacks device" in out
    assert "Take zero1, store device." in out
    assert "Without activations" in out


def test_nothing_fits(call: Call) -> None:
    code, out, _ = call("--memory", "--model", "999B", *ROOM)
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "None of them fits" in out


def test_json_has_every_part_in_bytes(call: Call) -> None:
    words = ["--model", "gpt:12,768,50257,1024", "--batch", "4", "--workers", "4", "--hosts", "2", "--json"]
    code, out, _ = call("--memory", *words, *ROOM)
    found = json.loads(out)
    assert code == 0
    assert found["room"] == {"device": 80 * 2**30, "host": 2**39, "disk": 2 * 10**12}  # two workers to a host
    assert found["job"]["parameters"] == 124_439_808
    assert found["job"]["activations"] > 10**9
    assert len(found["rows"]) == 15
    assert found["advice"] == {"layout": "replicated", "store": "device"}
    first = found["rows"][0]
    assert first["parts"]["moments"] == {"device": 8 * 124_439_808, "host": 0, "disk": 0}
    assert first["total"]["device"] == sum(part["device"] for part in first["parts"].values())


def test_only_what_was_asked_for(call: Call) -> None:
    code, out, _ = call("--memory", "--layout", "zero2,zero3", "--store", "cpu", "--json", *ROOM)
    assert code == 0
    assert [(row["layout"], row["store"]) for row in json.loads(out)["rows"]] == [("zero2", "cpu"), ("zero3", "cpu")]


def test_without_a_device_it_is_the_hosts_memory(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_free_device", lambda: None)
    code, out, _ = call("--memory", "--workers", "2", "--host", "8GiB", "--disk", "8GiB", "--json")
    assert code == 0
    assert json.loads(out)["room"] == {"device": 4 * 2**30, "host": 0, "disk": 4 * 2**30}
    assert "No GPU here" in call("--memory", "--host", "8GiB")[1]


def test_what_is_there_is_measured(call: Call) -> None:
    code, out, _ = call("--memory", "--json")
    assert code == 0
    assert json.loads(out)["room"]["device"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to plan"),
        (["--memory", "--model", "huge"], "--model huge"),
        (["--memory", "--dtype", "bf17"], "did you mean 'bf16'"),
        (["--memory", "--optimizer", "adam"], "did you mean 'adamw'"),
        (["--memory", "--layout", "zero4"], "--layout zero4"),
        (["--memory", "--store", "tape"], "--store tape"),
        (["--memory", "--device", "80"], "--device 80 is no size"),
        (["--memory", "--model", "7B", "--batch", "8", *ROOM], "without the shape"),
        (["--memory", "--workers", "0"], "--workers"),
        (["--memory", "--folder", "/nowhere/at/all", "--host", "8GiB"], "is not a folder"),
        (["--memory", "--folder", "/" + "a" * 300, "--host", "8GiB"], "File name too long"),
    ],
)
def test_nonsense_is_usage(call: Call, words: list[str], said: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert said in err
