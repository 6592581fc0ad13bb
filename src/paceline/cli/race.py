"""`paceline race`: methods and peers side by side on one task and one link."""

from __future__ import annotations

import json as json_text
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.errors import MethodError, UsageError, nearest
from paceline.method import method as make_method
from paceline.race import course, report, result, score, show
from paceline.race.course import TASKS, Contender, Rules
from paceline.race.network import network
from paceline.race.peers import PEERS
from paceline.race.score import SINGLE, Target

METHODS = "floor,torch:ddp,torch:fp16,torch:powersgd,exact,half"


def race(
    task: Annotated[
        str, typer.Argument(help=f"{', '.join(TASKS)}, or the path of a script of your own")
    ] = "text",
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="of the script")] = None,
    methods: Annotated[str, typer.Option(help="who races: methods of ours and peers, with commas")] = METHODS,
    workers: Annotated[int, typer.Option(min=2, max=64, help="for each contender")] = 2,
    link: Annotated[
        str, typer.Option(help="between the hosts: 100mbit, 1gbit, ..., or unlimited")
    ] = "100mbit",
    hosts: Annotated[int | None, typer.Option(help="to spread the workers over  [default: one each]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="that count, for each contender")] = 30,
    warmup: Annotated[int, typer.Option(min=0, help="steps before those")] = 3,
    turn: Annotated[
        int, typer.Option(min=2, help="steps a contender runs before it is the next one's turn")
    ] = 5,
    target: Annotated[
        str | None, typer.Option(help="stop where it is reached: loss=2.0 or accuracy=0.85")
    ] = None,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", metavar="METHOD.KNOB=VALUE", help="a knob of one contender")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the built-in tasks")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="of every worker")] = 1,
    deadline: Annotated[
        float | None, typer.Option(min=1, help="seconds for a turn  [default: ten times the slowest other]")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the result here; - is the standard output")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots here")] = None,
    keep: Annotated[Path | None, typer.Option(help="keep logs and events in this folder")] = None,
) -> None:
    """Run methods and peers side by side on one task and one link.

    Every contender is the same script in its own worker processes. They take turns of a few steps, so that whatever else
    this machine does hits all of them alike.
    """
    if task.startswith("-"):  # nothing but script arguments was given
        task, arguments = "text", [task, *(arguments or [])]
    rules = Rules(
        steps=steps,
        warmup=warmup,
        turn=turn,
        target=Target.parse(target) if target else None,
        threads=threads,
        deadline_s=deadline,
    )
    _check_script(task)
    field = contenders(methods, knobs or [], course.task_command(task, seed, arguments or []))
    if html is not None:
        report.check_plots()
    to_stdout = json is not None and str(json) == "-"
    for path in (None if to_stdout else json, html):
        if path is not None:
            result.check_writable(path)
    out, progress = Console(stderr=to_stdout), Console(stderr=True)
    directory = _folder(keep)
    with network(link, workers, hosts) as links:
        with show.Progress(progress, field, rules) as watch:
            complete = course.run(field, rules, links, directory, watch)
        entries = [contender.entry(workers) for contender in field]
        rows = score.rows(entries, link=links.label, warmup=warmup, target=rules.target)
        notes = show.notes(rows, links, rules.target)
        found = result.describe(
            rows, sys.argv[1:], task=task, workers=workers, link=links.label, kind=links.kind, threads=threads
        )
    if json is not None:
        print(result.encode(found), end="") if to_stdout else result.write(json, result.encode(found))
    out.print(show.table(rows, rules.target))
    for line in notes:
        out.print(line, style="dim", highlight=False, markup=False)
    if html is not None:
        result.write(html, report.page(found, entries, notes, warmup=warmup, target=rules.target))
    if keep is None and not any(row.error for row in rows):
        shutil.rmtree(directory, ignore_errors=True)  # where somebody failed, its log is there to be read
    if not complete:
        raise typer.Exit(130)  # as a shell says it of Ctrl-C
    if all(row.step_ms_median is None for row in rows):
        raise typer.Exit(4)


def contenders(methods: str, knobs: Sequence[str], command: Sequence[str]) -> list[Contender]:
    """Who races, checked before anything is started. One worker alone always does: speedup is measured against it."""
    names = [SINGLE, *(name for word in methods.split(",") if (name := word.strip()) and name != SINGLE)]
    if len(names) == 1:
        raise UsageError("--methods names nobody", do="name some: --methods floor,torch:ddp,exact")
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--methods names {double} twice", do="name every contender once")
    chosen = _knobs(knobs, names)
    for name in names[1:]:
        if name in PEERS:
            if chosen[name]:
                raise MethodError(f"{name} takes no knobs", why=f"--set gives it {sorted(chosen[name])[0]!r}")
        elif name.startswith("torch:"):
            raise MethodError(f"there is no peer {name!r}", do=nearest(name, PEERS))
        else:
            make_method(name, **chosen[name])  # raises here rather than in every worker
    return [Contender(name, command, chosen[name]) for name in names]


def _knobs(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`powersgd.rank=4` -> {"powersgd": {"rank": 4}}. A method's own name may have dots in it no more than a knob's."""
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        key, equals, text = setting.partition("=")
        name, dot, knob = key.partition(".")
        if not (equals and dot and knob) or name not in chosen:
            raise UsageError(
                f"--set {setting} does not say whose knob it is",
                why=f"contenders are {', '.join(names)}",
                do="write it as METHOD.KNOB=VALUE, with a METHOD that races: --set powersgd.rank=4",
            )
        try:
            chosen[name][knob] = json_text.loads(text)
        except ValueError:
            chosen[name][knob] = text  # a word: --set half.dtype=bf16
    return chosen


def _check_script(task: str) -> None:
    if task not in TASKS and not Path(task).is_file():
        raise UsageError(
            f"{task!r} is neither a task nor a script",
            do=f"{nearest(task, TASKS)}; or give the path of a .py file",
        )


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="paceline-race-"))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(
            f"--keep {keep} is not an empty folder",
            why="events of two races in one file cannot be told apart",
        )
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()
