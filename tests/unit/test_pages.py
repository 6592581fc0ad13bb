"""Every method has a page, and its tables are those of the code and of bench/results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from paceline import registry

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("pages", ROOT / "bench" / "pages.py")
assert spec is not None
assert spec.loader is not None
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

PARTS = registry.parts().items()
METHODS = [name for name, cls in PARTS if cls.axis == "reducer" or (cls.axis in ("sync", "layout") and cls.paper)]
METHODS += ["priority", "measured"]


@pytest.mark.parametrize("name", METHODS)
def test_a_page_is_there_and_up_to_date(name):
    path = pages.PAGES / f"{name}.md"
    assert path.exists(), f"write docs/methods/{name}.md"
    text = path.read_text()
    assert text == pages.page(name, text), "run: python bench/pages.py"
    assert f"]({name}.md)" in (pages.PAGES / "README.md").read_text()


def test_the_tables_say_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    cells = [
        {"task": "text", "workers": 2, "method": m, "link": link, "seconds": s, "steps": 10.0}
        for m, s in (("exact", 50.0), ("sign", 12.5))
        for link in pages.LINKS
    ]
    book = {"seconds_to_target": cells, "targets": {"text": "eval_loss=2.9"}}
    (tmp_path / "results" / "time_to_accuracy.json").write_text(json.dumps(book))
    text = pages.page("sign", "# sign\n")
    assert "| sign | 10 | 12.5 | 12.5 | 12.5 | 12.5 |" in text
    assert "| exact | 10 | 50.0 |" in text
    assert "text, 2 workers, to eval_loss=2.9" in text
