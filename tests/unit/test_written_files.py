"""Files that a command leaves: never through a link that was planted, refused in time, whole or not there."""

from __future__ import annotations

import os
import secrets

import pytest

from paceline.checkpoint.tensors import TensorFile
from paceline.errors import UsageError
from paceline.telemetry import files


def test_a_link_planted_at_the_draft_is_not_followed(tmp_path, monkeypatch):
    """The names of drafts cannot be known; and where one is known all the same, it is not opened."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    out = tmp_path / "out.json"
    (tmp_path / f".out.json.{os.getpid()}").symlink_to(mine)
    files.write(out, "new")
    assert (out.read_text(), mine.read_text()) == ("new", "precious")
    monkeypatch.setattr(secrets, "token_hex", lambda n: "known")
    for write in (lambda: files.write(out, "newer"), lambda: TensorFile(tmp_path / ".unfinished-known", [])):
        (tmp_path / ".unfinished-known").symlink_to(mine)
        with pytest.raises(FileExistsError):
            write()
    assert (out.read_text(), mine.read_text()) == ("new", "precious")


def test_names_differ_each_time(tmp_path):
    seen = set()
    for _ in range(5):
        with files.replacing(tmp_path / "out") as draft:
            seen.add(draft.name)
            assert draft.parent == tmp_path
            files.create(draft).close()
    assert len(seen) == 5


def test_a_link_at_the_name_itself_is_replaced(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "out").symlink_to(tmp_path / "mine")
    files.write(tmp_path / "out", "new")
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "mine").read_text() == "precious"


def test_nothing_is_left_of_what_fails(tmp_path):
    (tmp_path / "out").write_text("old")

    def fails():
        with files.replacing(tmp_path / "out") as draft:
            files.create(draft).close()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"


@pytest.mark.parametrize("name", ["", "no/out", "x" * 5000, "x" * 300, "a\0b", "pipe", "file/out", "folder", "loop"])
def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="cannot be written"):
        files.check_writable(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_a_device_is_not_replaced():
    with pytest.raises(UsageError, match="device"):
        files.check_writable(files.Path("/dev/null"))


def test_a_long_name_that_fits_can_be_written(tmp_path):
    out = tmp_path / ("x" * 250)
    files.check_writable(out)
    files.write(out, "new")
    assert out.read_text() == "new"
    files.check_writable(out)
