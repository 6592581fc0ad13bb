"""`paceline run`: start a script's workers on this host, alone or as one of several."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.text import Text

from paceline.comm.environment import EVENTS, TRACE, TRACE_STEPS
from paceline.errors import MethodError, UsageError
from paceline.telemetry import files
from paceline.tools.launch import (
    MOST_WORKERS,
    PORT,
    JobSpec,
    LaunchSite,
    LocalJob,
    WorkerOutput,
    cores,
    forwarding_signals,
    launch,
)
from paceline.tools.launch.script import module_command, script_command

_PEERS = ("torch:", "floor")  # what `race` compares with: no methods of ours, but a script may be run as one of them
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class OutputChoice(StrEnum):
    """Whose output `paceline run` shows."""

    main = "main"
    all = "all"


def run(
    script: Annotated[
        str, typer.Argument(help="The Python script; with -m, a module.", metavar="SCRIPT", show_default=False)
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Its arguments, passed on untouched.", metavar="ARGS", show_default=False),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Workers on this host; 1 if not given.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, run as python -m does.")] = False,
    method: Annotated[
        str | None,
        typer.Option("--method", help="How to synchronise, instead of what the script says."),
    ] = None,
    knobs: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="A knob of the method; may be repeated.", metavar="KNOB=VALUE"),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help="All hosts, the same list on each of them.", metavar="A,B,..."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help=f"Where the first of several hosts listens; {PORT} if not given."),
    ] = None,
    events: Annotated[
        Path | None, typer.Option("--events", help="Write the workers' telemetry here.", metavar="DIR")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a timeline of the last steps here, for Perfetto.", metavar="FILE"),
    ] = None,
    trace_steps: Annotated[int, typer.Option("--trace-steps", min=1, help="How many steps those are.")] = 50,
    output: Annotated[
        OutputChoice | None,
        typer.Option("--output", help="Whose output is shown: worker 0's or all.", show_default="main"),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Write each worker's output here, too.", metavar="DIR")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how it ended as JSON; the workers' output goes to stderr.")
    ] = False,
) -> None:
    """Run a script on several workers, which find each other by themselves.

    On several hosts give the same command to each of them, with --hosts. Worker 0's output is passed on as
    it is. That of the others is shown with --output all, each line after its worker's rank, and the last
    lines of a worker that fails are shown always. A worker that fails ends the job, and the exit code is
    that worker's: 2 usage, 3 data or checkpoint, 4 a worker was killed or lost.

    Started by torchrun or Slurm (RANK and WORLD_SIZE are set), without --workers: becomes the script, as
    one worker of theirs.
    """
    command = [*(module_command(script) if module else script_command(script)), *(args or [])]
    env = _method_env(method, knobs or [])
    if events:
        env[EVENTS] = str(files.check_folder(events, "--events"))
    if trace:
        files.check_writable(trace)
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        ours = {"--workers": workers, "--hosts": hosts, "--output": output, "--log-dir": log_dir, "--trace": trace}
        _become(command, env, ours | {"--json": as_json or None})
    workers = _checked_workers(1 if workers is None else workers)
    rendezvous = LaunchSite()
    if hosts is not None:
        rendezvous = LaunchSite.among(hosts.split(","), PORT if port is None else port)
    if port is not None and rendezvous.hosts == 1:
        raise UsageError("--port is for several hosts", why="on one host any free port is taken", do="leave it out")
    ranks = range(rendezvous.index * workers, (rendezvous.index + 1) * workers)
    if events:
        files.check_folder(events, "--events", [f"worker-{rank}.jsonl" for rank in ranks])
    logs = files.check_folder(log_dir, "--log-dir", [f"worker-{rank}.log" for rank in ranks]) if log_dir else None
    shown = WorkerOutput.passed(logs, shown=(output or OutputChoice.main).value, to_stderr=as_json)
    with _traced(trace, trace_steps) as more, forwarding_signals() as forward_to:
        spec = JobSpec(argv=command, workers=workers, env=env | more, rendezvous=rendezvous)
        with launch(spec, shown) as job:
            forward_to(job)
            code = job.wait() or 0
    _tell_end(job, logs)
    if as_json:
        print(json.dumps(job.summary()))
    raise typer.Exit(code)


# ------------------------------------------------------------------------------------------------ checks


def _checked_workers(workers: int) -> int:
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"--workers {workers} is not in 1..{MOST_WORKERS}", do="count the workers of one host")
    if workers > cores():
        _note(f"{workers} workers share {cores()} cores: each will be slower than alone")
    return workers


def _become(command: list[str], env: dict[str, str], ours: dict[str, Any]) -> None:
    """Turn this process, which another launcher has started, into the script. Signals and exit code pass through."""
    for option, value in ours.items():
        if value is not None:
            raise UsageError(
                f"{option} cannot be used here",
                why="RANK and WORLD_SIZE are set: another launcher has already started this process as one worker",
                do=f"leave {option} out, or unset RANK and WORLD_SIZE",
            )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **env})


# ------------------------------------------------------------------------------------------------ the timeline


@contextlib.contextmanager
def _traced(to: Path | None, steps: int) -> Iterator[dict[str, str]]:
    """Collect the workers' timelines into one file. Yields the variables that make the workers write them."""
    if to is None:
        yield {}
        return
    from paceline.telemetry import chrome, tape

    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as directory:
        yield {TRACE: directory, TRACE_STEPS: str(steps)}
        traces = tape.read(Path(directory))
    if not any(trace.spans for trace in traces):
        _note("no timeline: no worker left one. Does the loop run over paceline's loader?")
        return
    files.write(to, chrome.document({"": traces}))
    _note(f"the timeline is in {to}; open it in https://ui.perfetto.dev")


# ------------------------------------------------------------------------------------------------ the method


def _method_env(name: str | None, settings: list[str]) -> dict[str, str]:
    """The variables that tell the workers of --method and --set, checked where the method is known."""
    texts: dict[str, str] = {}
    for setting in settings:
        knob, equals, text = setting.partition("=")
        if not (knob and equals):
            raise UsageError(f"--set {setting!r} is not KNOB=VALUE", do="write --set rank=4")
        if knob in texts:
            raise UsageError(f"--set {knob} is given twice", do="give it once")
        texts[knob] = text
    knobs = parse_knobs(name, texts)
    if name is not None and not name.startswith(_PEERS):
        from paceline.method import method

        method(name, **{knob: value for knob, value in knobs.items() if knob not in from_outside()})
    env = {"PACELINE_METHOD": name or "", "PACELINE_SET": json.dumps(knobs) if knobs else ""}
    return {variable: value for variable, value in env.items() if value}


def from_outside() -> set[str]:
    """The arguments of `prepare` that --set may give, besides the knobs of a method."""
    from paceline.session.settings import Settings

    return set(Settings.__dataclass_fields__) - {"weight"}


def parse_knobs(name: str | None, texts: dict[str, str]) -> dict[str, Any]:
    """The knobs of a method from the texts of the command line, each as the type it has.

    Without a method they are for the one that the script names, which checks them.
    """
    if name is None or name.startswith(_PEERS):
        return {knob: _guess(text) for knob, text in texts.items()}
    from paceline import registry
    from paceline.knobs import kinds

    known: dict[str, Any] = {}
    for cls in (registry.find(part.strip()) for part in name.split("+")):
        for knob, kind in kinds(cls).items():
            known[knob] = known[f"{cls.name}.{knob}"] = kind
    known |= dict.fromkeys(from_outside() - known.keys())
    # An unknown knob stays text: `method` refuses it, and says which known one is nearest.
    return {knob: _parse(knob, text, known[knob]) if knob in known else text for knob, text in texts.items()}


def _parse(knob: str, text: str, kind: Any) -> Any:
    from paceline.core.parts import Part

    if kind is None:  # an argument of `prepare`, which checks it
        return _guess(text)
    wrong = MethodError(f"--set {knob}={text}: {text!r} is not {_called(kind)}")
    if kind is str:
        return text
    if isinstance(kind, type) and issubclass(kind, Part):
        raise MethodError(
            f"--set {knob} is a part of its own, which the command line cannot make",
            do="write paceline.Method(...) in the script",
        )
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == text), text)
    if kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise wrong
        return text.lower() in _TRUE
    try:
        value = kind(text) if kind in (int, float) else json.loads(text)
    except (ValueError, RecursionError):
        raise wrong from None
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    return value


def _called(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, "JSON")


def _guess(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# ------------------------------------------------------------------------------------------------ messages


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"paceline: {text}", style="yellow"), soft_wrap=True)


def _tell_end(job: LocalJob, logs: Path | None) -> None:
    """Print why the job ended, unless it ended well or its only worker has just said so itself."""
    if job.stopped_by is not None:
        ended = "the workers ended by themselves" if job.exit_code == 0 else "the workers were ended"
        _note(f"stopped by signal {job.stopped_by}: {ended}")
        return
    cause = job.cause
    alone = job.spec.world_size == 1
    if cause is None or (alone and (job.workers[0].code or 0) > 0):  # a script's own traceback says it better
        return
    step = "" if cause.step is None or " step " in cause.what else f" (step {cause.step})"
    console = Console(stderr=True, highlight=False)
    console.print(Text(f"paceline: {cause.what}{step}", style="bold red"), soft_wrap=True)
    if cause.why:
        console.print(Text(f"  why: {cause.why}"), soft_wrap=True)
    if cause.do:
        console.print(Text(f"  do:  {cause.do}"), soft_wrap=True)
    elif cause.worker is not None:
        where = f"{logs}/worker-{cause.worker}.log" if logs else f"the output of worker {cause.worker} above"
        if not logs and job.output.hides(cause.worker):
            where += ", or all of it with --output all"
        console.print(Text(f"  do:  read {where}"), soft_wrap=True)
