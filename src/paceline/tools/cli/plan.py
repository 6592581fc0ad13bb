"""`paceline plan`: what a run will take, before anything is started."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.errors import UsageError, nearest
from paceline.offload.memory_model import USABLE
from paceline.tools.plan import memory as arithmetic
from paceline.tools.plan import model as models
from paceline.tools.plan.memory import LAYOUTS, MOMENTS, STORES, WIDTH, Bytes, Job, PlanRow


def plan(
    memory: Annotated[bool, typer.Option("--memory", help="Plan memory.", show_default=False)] = False,
    model: Annotated[
        str, typer.Option("--model", help="Parameters: 124M, 7B; or gpt:layers,width,vocab,sequence.")
    ] = "gpt:12,768,50257,1024",
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="All of them.")] = 1,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="They are spread over.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of the parameters: {', '.join(WIDTH)}.")] = "bf16",
    optimizer: Annotated[str, typer.Option("--optimizer", help=f"{', '.join(MOMENTS)}.")] = "adamw",
    layout: Annotated[str, typer.Option("--layout", help="One or several, with commas.")] = ",".join(LAYOUTS),
    store: Annotated[str, typer.Option("--store", help="One or several, with commas.")] = ",".join(STORES),
    device: Annotated[
        str | None, typer.Option("--device", metavar="SIZE", help="Memory of a device.", show_default="measured")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="SIZE", help="Memory of a host.", show_default="what is free here")
    ] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="SIZE", help="Disk of a host.", show_default="what is free here")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="On that disk.")] = Path(),
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Of a worker, to estimate a gpt's activations.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Activations are computed again in backward.")
    ] = False,
    activations: Annotated[
        str | None, typer.Option("--activations", metavar="SIZE", help="Of a worker, where you know them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say which layouts and stores a model fits with, and what lies where.

    Nothing is started. Exit code 0 if one fits, 1 if none does.
    """
    if not memory:
        raise UsageError("nothing to plan", why="--memory is what can be planned so far", do="say plan --memory")
    _known("--dtype", [dtype], WIDTH)
    _known("--optimizer", [optimizer], MOMENTS)
    layouts, stores = layout.split(","), store.split(",")
    _known("--layout", layouts, LAYOUTS)
    _known("--store", stores, STORES)
    what = models.model(model)
    job = Job(
        parameters=what.parameters,
        largest=what.largest,
        inner=what.inner,
        workers=workers,
        dtype=dtype,
        optimizer=optimizer,
        activations=_activations(what, dtype, batch, checkpointing, activations),
    )
    each = -(-workers // hosts)  # workers of a host
    room, notes = _room(device, host, disk, folder, each)
    found = arithmetic.rows(job, room, layouts, stores)
    advice = arithmetic.best(found)
    if advice is None:  # gradients that are streamed take less
        streamed = replace(job, keeps_gradients=False)
        rows = arithmetic.rows(streamed, room, layouts, stores)
        if (advice := arithmetic.best(rows)) is not None:
            job, found = streamed, rows
            notes.append("With step=stream: gradients are not kept on the host, see docs/offload.md.")
    made = MemoryPlan(job, room, each, found, advice)
    if as_json:
        print(json.dumps(_document(made)))
    else:
        _show(Console(highlight=False), made, notes)
    raise typer.Exit(0 if advice else 1)


@dataclass(frozen=True)
class MemoryPlan:
    """What `paceline plan --memory` has found out."""

    job: Job
    room: Bytes  # of one worker
    each: int  # workers of a host
    rows: list[PlanRow]
    advice: PlanRow | None  # the row to take; None: none fits


def _known(option: str, words: list[str], known: Any) -> None:
    for word in words:
        if word not in known:
            raise UsageError(f"{option} {word} is not known", why=nearest(word, known))


def _activations(what: models.Model, dtype: str, batch: int | None, checkpointing: bool, said: str | None) -> int:
    if said is not None:
        return models.size("--activations", said)
    if batch is None:
        return 0
    if what.gpt is None:
        raise UsageError(
            "--batch without the shape of the model",
            why="activations follow from layers and widths, not from the number of parameters",
            do="give --model gpt:layers,width,vocab,sequence, or --activations as measured",
        )
    return what.gpt.activations(batch, checkpointing=checkpointing) * WIDTH[dtype] // 2


def _room(device: str | None, host: str | None, disk: str | None, folder: Path, each: int) -> tuple[Bytes, list[str]]:
    """Give the memory of one worker, measured where the user has not said it, and notes about it.

    each: workers of a host.
    """
    of_host = models.size("--host", host) if host is not None else _free_memory()
    of_disk = models.size("--disk", disk) if disk is not None else _free_disk(folder)
    of_device = models.size("--device", device) if device is not None else _free_device()
    if of_device is None:
        note = "No GPU here and no --device: workers compute in their host's memory, and a store `cpu` gains nothing."
        return Bytes(of_host // each, 0, of_disk // each), [note]
    return Bytes(of_device, of_host // each, of_disk // each), []


def _free_disk(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(
            f"--folder {folder} is not a folder that can be looked at",
            why=f"{error.strerror}; free space is looked up there",
            do="give a folder that exists, or the space itself: --disk 100GB",
        ) from None


def _free_memory() -> int:
    from paceline.offload.free_memory import free_host_memory

    return free_host_memory()


def _free_device() -> int | None:
    import torch

    return torch.cuda.mem_get_info(0)[0] if torch.cuda.is_available() else None


def _document(plan: MemoryPlan) -> dict[str, Any]:
    """Give the plan as JSON. All bytes are those of one worker."""
    return {
        "job": asdict(plan.job),
        "room": plan.room._asdict(),
        "usable": USABLE,
        "rows": [
            {
                "layout": row.layout,
                "store": row.store,
                "fits": row.fits,
                "total": row.total._asdict(),
                "lacks": row.lacks._asdict(),
                "parts": {name: part._asdict() for name, part in row.parts.items()},
            }
            for row in plan.rows
        ],
        "advice": {"layout": plan.advice.layout, "store": plan.advice.store} if plan.advice else None,
    }


def _show(console: Console, plan: MemoryPlan, notes: list[str]) -> None:
    job, advice = plan.job, plan.advice
    console.print(
        f"{job.parameters / 1e9:,.3f} B parameters in {job.dtype}, {job.optimizer}, {job.workers} "
        f"{'worker' if job.workers == 1 else 'workers'}, {plan.each} a host"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layout", "store"):
        table.add_column(name, style="cyan", no_wrap=True)
    for name in Bytes._fields:
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_row("", "there is", *map(_gib, plan.room), "GiB, for each worker", style="dim")
    for row in plan.rows:
        verdict = Text("fits", style="green") if row.fits else Text(f"lacks {', '.join(_lacking(row))}", style="red")
        table.add_row(row.layout, row.store, *map(_gib, row.total), verdict)
    console.print(table)
    console.print()
    if advice is not None:
        console.print(Text.assemble("Take ", (f"{advice.layout}, store {advice.store}", "bold"), ". On each worker:"))
        console.print(_where(advice))
        console.print()
        stream = "" if job.keeps_gradients or advice.store == "device" else " --set step=stream"
        console.print(Text(f"paceline run --method {_options(advice)}{stream} ...", style="cyan"))
    else:
        console.print(Text("None of them fits: more workers, a smaller batch, or a larger disk.", style="bold red"))
    notes = [*notes, *([] if job.activations else ["Without activations: give --batch or --activations."])]
    notes.append(f"Sizes in GiB; {USABLE:.0%} of what there is may be used.")
    for note in notes:
        console.print(Text(note, style="dim"))


def _where(row: PlanRow) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column("")
    for name in Bytes._fields:
        table.add_column(name, justify="right")
    for name, part in row.parts.items():
        if any(part):
            table.add_row(name, *map(_gib, part))
    table.add_row("together", *map(_gib, row.total), style="bold")
    return table


def _options(row: PlanRow) -> str:
    """Give the options of `paceline run` for a row.

    Sizes are rounded down: what does not fit in one place goes on to the next.
    """
    if row.store == "device":
        return row.layout
    state = Bytes(*map(sum, zip(row.parts["master"], row.parts["moments"], strict=True)))
    words = [row.layout, f"--set store={'nvme' if state.disk else 'cpu'}"]
    words += [f"--set device_gb={state.device // 10**8 / 10:g}"] if state.device else []
    if state.disk:
        words += [f"--set host_gb={state.host // 10**8 / 10:g}"] if state.host else []
        words += ["--set path=FOLDER"]
    if row.store.endswith("+params"):
        words += [f"--set params={'nvme' if state.disk else 'cpu'}"]
    return " ".join(words)


def _lacking(row: PlanRow) -> list[str]:
    return [name for name, n in row.lacks._asdict().items() if n]


def _gib(n: int) -> str:
    return f"{n / 2**30:,.2f}" if n else "–"
