"""`paceline export`: a checkpoint as one plain safetensors file."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.telemetry.files import check_writable


class ExportDtype(StrEnum):
    """The types that floating-point tensors can be converted to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export(
    folder: Annotated[Path, typer.Argument(help="What was given to paceline.save, or one checkpoint in it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    dtype: Annotated[
        ExportDtype | None,
        typer.Option("--dtype", help="Convert; fp32 is taken from the masters of 16-bit parameters."),
    ] = None,
    repeat_ties: Annotated[
        bool, typer.Option("--repeat-ties", help="Write tied weights under every name, for a strict load_state_dict.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Write a checkpoint's model as plain safetensors, with the keys of the unwrapped model.

    It runs in one process on any machine, with the memory of one tensor. Every file that it reads is checked first.
    """
    from paceline.checkpoint.export import export as write
    from paceline.checkpoint.folders import newest
    from paceline.comm.single import SingleComm

    check_writable(out)
    saved = newest(folder, SingleComm())
    names = write(saved, out, dtype=dtype.value if dtype else None, repeat_ties=repeat_ties)
    ties = {} if repeat_ties else saved.manifest.ties
    if as_json:
        facts = {"checkpoint": str(saved.path), "step": saved.manifest.step, "out": str(out)}
        print(json.dumps({**facts, "bytes": out.stat().st_size, "tensors": names, "ties": ties}, ensure_ascii=False))
        return
    print(f"{out}: {len(names)} tensors, {out.stat().st_size} bytes, step {saved.manifest.step} ({saved.path})")
    for other, name in ties.items():
        print(f"  {other} is {name}: written once, under the latter name")
