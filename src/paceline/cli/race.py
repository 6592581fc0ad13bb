"""`paceline race`: methods and peers side by side on one task and one link."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.errors import PeerError, UsageError
from paceline.tasks import TASKS

METHODS = "floor,torch:ddp,torch:fp16,torch:powersgd,exact,half"


def race(
    task: Annotated[
        str, typer.Argument(metavar="[TASK|SCRIPT]", help=f"{', '.join(TASKS)}, or a script of your own.")
    ] = "text",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Of the script.", show_default=False)
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="Who races: methods and peers.", metavar="A,B,...")
    ] = METHODS,
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, max=64, help="Workers of each contender.")] = 2,
    link: Annotated[str, typer.Option("--link", help="Between the hosts: 100mbit, 1gbit, ..., unlimited.")] = "100mbit",
    hosts: Annotated[
        int | None, typer.Option("--hosts", help="Hosts to spread the workers over.", show_default="one each")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that count, for each contender.")] = 30,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before those.")] = 3,
    turn: Annotated[int, typer.Option("--turn", min=2, help="Steps until the next one's turn.")] = 5,
    target: Annotated[
        str | None, typer.Option("--target", help="Run until loss=2.0, or accuracy=0.85, or --steps.")
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="METHOD.KNOB=VALUE", help="A knob of one contender; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the built-in tasks.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each worker.")] = 1,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", min=1, help="Seconds for a turn.", show_default="10 x the slowest"),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result here; - is stdout.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots here.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a timeline here, for Perfetto.")
    ] = None,
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", min=1, help="How many of each one's last steps it has.")
    ] = 50,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep logs and events in this folder.")
    ] = None,
) -> None:
    """Race methods and peers side by side on one task and one link.

    Every contender is the same script in worker processes of its own. They take turns of a few steps, so that
    whatever else this machine does hits all of them alike.
    """
    # Here, not above: they import torch, and --help must not wait for that.
    from paceline import files
    from paceline.race import course, field, report, result, score, show
    from paceline.race.network import network
    from paceline.trace import chrome

    if task.startswith("-"):  # nothing but script arguments was given
        task, arguments = "text", [task, *(arguments or [])]
    goal = score.Target.parse(target) if target else None
    rules = course.Rules(
        steps=steps,
        warmup=warmup,
        turn=turn,
        target=goal,
        threads=threads,
        deadline_s=deadline,
        trace_steps=trace_steps if trace else 0,
    )
    contenders = field.contenders(methods, knobs or [], field.command(task, seed, arguments or []))
    if html is not None:
        report.check_plots()
    to_stdout = str(json) == "-"
    for path in (None if to_stdout else json, html, trace):
        if path is not None:
            files.check_writable(path)
    with network(link, workers, hosts) as links:
        directory = _folder(keep)
        with show.Progress(Console(stderr=True), contenders, rules) as watch:
            complete = course.run(contenders, rules, links, directory, watch)
    entries = [contender.entry(workers) for contender in contenders]
    rows = score.rows(entries, link=links.label, warmup=warmup, target=goal)
    notes = show.notes(rows, links, goal)
    found = result.describe(
        rows, sys.argv[1:], task=task, workers=workers, link=links.label, kind=links.kind, threads=threads
    )
    if to_stdout:
        print(result.encode(found), end="")
    elif json is not None:
        files.write(json, result.encode(found))
    out = Console(stderr=to_stdout)
    out.print(show.table(rows, goal))
    for line in notes:
        out.print(line, style="dim", highlight=False, markup=False)
    traces = {contender.method: contender.traces() for contender in contenders} if trace else {}
    if trace is not None:
        files.write(trace, chrome.document(traces))
    if html is not None:
        files.write(html, report.page(found, entries, notes, warmup=warmup, target=goal, traces=traces))
    if keep is None and not any(row.error for row in rows):
        shutil.rmtree(directory, ignore_errors=True)  # where somebody failed, its log is there to be read
    if not complete:
        raise typer.Exit(130)  # as a shell says it of Ctrl-C
    if all(row.step_ms_median is None for row in rows):
        raise typer.Exit(PeerError.exit_code)


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
