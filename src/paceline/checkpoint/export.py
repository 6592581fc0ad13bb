"""A checkpoint as one plain safetensors file, with the keys of the unwrapped model."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.checkpoint import names
from paceline.checkpoint.reader import Checkpoint, whole
from paceline.checkpoint.tensors import Spec, TensorFile
from paceline.shards.whole import MASTER

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(saved: Checkpoint, out: Path, *, dtype: str | None = None, repeat_ties: bool = False) -> list[str]:
    """Write the model's parameters and buffers, one tensor in memory at a time; the names that were written.

    dtype: of what is floating-point; fp32 is taken from the masters where there are any. None: as in the model.
    repeat_ties: a parameter with several names is there under each of them, not only under its first.
    """
    masters = _masters(saved)
    wide = DTYPES[dtype] if dtype else None
    entries = {}
    for name in _names(saved, repeat_ties):
        first = saved.manifest.ties.get(name, name)
        entry = saved.manifest.tensors[names.MODEL + first]
        real = entry.torch_dtype.is_floating_point and wide is not None
        key = masters.get(first, names.MODEL + first) if real else names.MODEL + first
        entries[Spec(name, wide if real and wide else entry.torch_dtype, entry.shape)] = key
    ties = {} if repeat_ties else saved.manifest.ties
    metadata = {"format": "pt", **({"ties": json.dumps(ties)} if ties else {})}
    with _draft(out) as path, TensorFile(path, entries, metadata) as file:
        for spec, key in entries.items():
            file.put(whole(saved, key).to(spec.dtype))
    return [spec.name for spec in entries]


def _names(saved: Checkpoint, repeat_ties: bool) -> list[str]:
    own = [key.removeprefix(names.MODEL) for key in saved.manifest.tensors if key.startswith(names.MODEL)]
    return own + list(saved.manifest.ties) if repeat_ties else own


def _masters(saved: Checkpoint) -> dict[str, str]:
    """The fp32 master of a parameter, by the parameter's name."""
    found = [key.split("/", 2) for key in saved.manifest.tensors if key.startswith("optimizer/")]
    end = f"/{MASTER}"
    return {rest.removesuffix(end): "/".join((o, i, rest)) for o, i, rest in found if rest.endswith(end)}


@contextlib.contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """The whole file or none."""
    path = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        yield path
        path.replace(out)
    finally:
        path.unlink(missing_ok=True)
