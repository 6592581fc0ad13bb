"""A checkpoint as one plain safetensors file, with the keys of the unwrapped model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint import names
from paceline.checkpoint.reader import Checkpoint, whole
from paceline.checkpoint.tensors import TensorFile, TensorSpec
from paceline.core.shard import MASTER
from paceline.errors import CheckpointError
from paceline.telemetry.files import replacing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(saved: Checkpoint, out: Path, *, dtype: str | None = None, repeat_ties: bool = False) -> list[str]:
    """Write the model's parameters and buffers, one tensor in memory at a time. Gives the names that were written.

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
        entries[TensorSpec(name, wide if real and wide else entry.torch_dtype, entry.shape)] = key
    ties = {} if repeat_ties else saved.manifest.ties
    metadata = {"format": "pt", **({"ties": json.dumps(ties)} if ties else {})}
    with replacing(out) as path, TensorFile(path, entries, metadata) as file:
        for spec, key in entries.items():
            file.put(_converted(whole(saved, key), spec))
    return [spec.name for spec in entries]


def _names(saved: Checkpoint, repeat_ties: bool) -> list[str]:
    own = [key.removeprefix(names.MODEL) for key in saved.manifest.tensors if key.startswith(names.MODEL)]
    return own + list(saved.manifest.ties) if repeat_ties else own


def _masters(saved: Checkpoint) -> dict[str, str]:
    """Give the keys of the fp32 masters, by the parameter's name."""
    found = [key.split("/", 2) for key in saved.manifest.tensors if key.startswith("optimizer/")]
    end = f"/{MASTER}"
    return {rest.removesuffix(end): "/".join((o, i, rest)) for o, i, rest in found if rest.endswith(end)}


def _converted(x: Tensor, spec: TensorSpec) -> Tensor:
    y = x.to(spec.dtype)
    if y.dtype != x.dtype and y.is_floating_point() and bool((y.isinf() & x.isfinite()).any()):
        raise CheckpointError(
            f"{spec.name} cannot be converted",
            why=f"it has numbers up to {x.abs().max():.3g}, too large for {str(y.dtype).removeprefix('torch.')}",
            do="export it as fp32 or bf16",
        )
    return y
