"""`paceline methods`: list and describe the parts of methods, from what the parts say about themselves."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.core.parts import Part


def methods(
    name: Annotated[str | None, typer.Argument(help="Only this one, in full.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the parts a method is made of, or describe one of them.

    A method is one part for each of six questions about a step. Name one or several: --method powersgd,
    --method local_sgd+qsgd. What is not named is the plain answer. A wrapper wraps what is named after it:
    --method warmup+topk.
    """
    from paceline import registry

    if name is None:
        described = [describe(cls) for cls in registry.parts().values()]
        if as_json:
            print(json.dumps(described, ensure_ascii=False))
        else:
            _print_all(described)
    else:
        one = describe(registry.find(name))
        if as_json:
            print(json.dumps(one, ensure_ascii=False))
        else:
            _print_one(one)


def describe(cls: type[Part]) -> dict[str, Any]:
    """Everything that a part says about itself, as data."""
    from paceline.core.parts import Part

    summary, _, details = (inspect.getdoc(cls) or "").partition("\n")
    return {
        "name": cls.name,
        "axis": cls.axis,
        "summary": summary,
        "details": details.strip(),
        "paper": cls.paper,
        "bytes_a_step": cls.formula,
        "knobs": [
            {
                "name": knob.name,
                "kind": knob.kind,
                "default": knob.default.config() if isinstance(knob.default, Part) else knob.default,
                "unit": knob.unit,
                "range": knob.range,
                "effect": knob.effect,
            }
            for knob in cls.knobs()
        ],
        "gives": sorted(fact.value for fact in cls.gives),
        "needs": {fact.value: why for fact, why in cls.needs.items()},
        "refuses": {fact.value: why for fact, why in cls.refuses.items()},
    }


def _print_all(described: list[dict[str, Any]]) -> None:
    from paceline.core.parts import AXES

    console = Console(highlight=False)
    # All tables have the same width, so that their columns line up.
    width = max(len(part["name"]) for part in described)
    for axis, base in AXES.items():
        question = (inspect.getdoc(base) or "").partition("?")[0]
        console.print(Text.assemble((axis, "bold"), f"  {question}?"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", width=width, no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(style="dim", justify="right")
        for part in described:
            if part["axis"] == axis:
                table.add_row(part["name"], Text(part["summary"]), Text(part["bytes_a_step"]))
        console.print(Padding(table, (0, 0, 1, 2)))
    console.print(
        Text(
            "Right: payload bytes one worker sends a step, for n elements of s bytes and W workers.\n"
            "More: paceline methods NAME",
            style="dim",
        )
    )


def _print_one(part: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(Text.assemble((part["name"], "bold cyan"), f"  {part['axis']}"))
    console.print(Padding(Text(part["summary"]), (0, 0, 1, 2)))
    if part["details"]:
        # The line breaks of a docstring are those of a source file, and this terminal has another width.
        paragraphs = [" ".join(text.split()) for text in part["details"].split("\n\n")]
        console.print(Padding(Text("\n\n".join(paragraphs)), (0, 0, 1, 2)))
    rows = [
        ("paper", part["paper"]),
        ("bytes a step", part["bytes_a_step"]),
        ("gives", ", ".join(part["gives"])),
    ]
    rows += [(f"needs {fact}", why) for fact, why in part["needs"].items()]
    rows += [(f"refuses {fact}", why) for fact, why in part["refuses"].items()]
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", max_width=24)
    facts.add_column()
    for label, text in rows:
        if text:
            facts.add_row(Text(label), Text(text))
    if facts.row_count:
        console.print(Padding(facts, (0, 0, 1, 2)))
    if not part["knobs"]:
        console.print(Text("  It has no knobs.", style="dim"))
    for knob in part["knobs"]:
        default = json.dumps(knob["default"], ensure_ascii=False)
        allowed = f", {knob['range']}" if knob["range"] else ""
        unit = f" {knob['unit']}" if knob["unit"] else ""
        first = (
            ("  --set ", "dim"),
            (f"{knob['name']}={default}", "cyan"),
            f"{unit}  ({knob['kind']}{allowed})",
        )
        console.print(Text.assemble(*first))
        console.print(Padding(Text(knob["effect"]), (0, 0, 0, 10)))
