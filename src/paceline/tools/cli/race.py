"""`paceline race`: methods and peers side by side on one task and one link."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paceline.errors import PeerError, UsageError
from paceline.tools.tasks import TASKS

if TYPE_CHECKING:
    from paceline.tools.race.report import RaceReport

METHODS = "floor,torch:ddp,torch:fp16,torch:powersgd,exact,half"


def race(
    task: Annotated[
        str, typer.Argument(metavar="[TASK|SCRIPT]", help=f"{', '.join(TASKS)}, or a script of your own.")
    ] = "text",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Of the script.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, run as python -m does.")] = False,
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
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=1, help="Seconds for a turn.", show_default="10 x the slowest"),
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
    # Imported here because they import torch, and --help must not wait for that.
    from paceline.tools.race import result, runner, score, table
    from paceline.tools.race.contenders import parse_contenders, task_command
    from paceline.tools.race.network import open_network
    from paceline.tools.race.progress import RaceProgress
    from paceline.tools.race.report import RaceReport

    if task.startswith("-"):  # nothing but script arguments was given
        task, arguments = "text", [task, *(arguments or [])]
    goal = score.Target.parse(target) if target else None
    rules = runner.RaceRules(
        steps=steps,
        warmup=warmup,
        turn=turn,
        target=goal,
        threads=threads,
        timeout_s=timeout,
        trace_steps=trace_steps if trace else 0,
    )
    contenders = parse_contenders(methods, knobs or [], task_command(task, arguments or [], seed=seed, module=module))
    files = _ResultFiles(json, html, trace)
    files.check()
    kept = None if keep is None else _kept(keep)
    with open_network(link, workers, hosts) as links:
        directory = kept or Path(tempfile.mkdtemp(prefix="paceline-race-"))
        with RaceProgress(Console(stderr=True), contenders, rules) as watch:
            complete = runner.run(contenders, rules, links, directory, watch)
    records = [contender.record(workers) for contender in contenders]
    rows = score.rows(records, link=links.label, warmup=warmup, target=goal)
    setting = result.RaceSetting(task=task, workers=workers, link=links.label, link_kind=links.kind, threads=threads)
    files.write(
        RaceReport(
            result=result.describe(rows, setting, sys.argv[1:]),
            records=records,
            notes=table.notes(rows, links, goal),
            warmup=warmup,
            target=goal,
            traces={contender.method: contender.traces() for contender in contenders} if trace else {},
        )
    )
    if keep is None and not any(row.error for row in rows):
        shutil.rmtree(directory, ignore_errors=True)  # where a contender failed, its log is kept to be read
    if not complete:
        raise typer.Exit(130)  # the exit code of a shell after Ctrl-C
    if all(row.step_ms_median is None for row in rows):
        raise typer.Exit(PeerError.exit_code)


@dataclass(frozen=True)
class _ResultFiles:
    """Where the result of a race goes, besides the table in the terminal."""

    json: Path | None
    html: Path | None
    trace: Path | None

    @property
    def json_on_stdout(self) -> bool:
        return str(self.json) == "-"

    def check(self) -> None:
        """Raise if a file could not be written, before the race rather than after it."""
        from paceline.telemetry import files
        from paceline.tools.race import report

        if self.html is not None:
            report.check_plots()
        options = {"--json": None if self.json_on_stdout else self.json, "--html": self.html, "--trace": self.trace}
        taken: dict[Path, str] = {}
        for option, path in options.items():
            if path is None:
                continue
            files.check_writable(path)
            other = taken.setdefault(path.resolve(), option)
            if other != option:
                raise UsageError(f"{other} and {option} are the same file, {path}", do="give each a file of its own")

    def write(self, shown: RaceReport) -> None:
        """Print the table, and write every file that was asked for."""
        from paceline.telemetry import chrome, files
        from paceline.tools.race import report, result, table

        if self.json_on_stdout:
            print(result.encode(shown.result), end="")
        elif self.json is not None:
            files.write(self.json, result.encode(shown.result))
        out = Console(stderr=self.json_on_stdout)
        out.print(table.table(shown.result.rows, shown.target))
        for line in shown.notes:
            out.print(line, style="dim", highlight=False, markup=False)
        if self.trace is not None:
            files.write(self.trace, chrome.document(shown.traces))
        if self.html is not None:
            files.write(self.html, report.page(shown))


def _kept(keep: Path) -> Path:
    """The folder that logs and events are kept in, which must be empty."""
    from paceline.telemetry import files

    folder = files.check_folder(keep, "--keep")
    if any(folder.iterdir()):
        raise UsageError(
            f"--keep {keep} is not an empty folder",
            why="events of two races in one file cannot be told apart",
        )
    return folder
