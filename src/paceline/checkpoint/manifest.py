"""The manifest: what is in a checkpoint, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.bucket import memory
from paceline.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1
_MOST_BYTES = 1 << 30  # of a manifest: more is not one
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Value = tuple[str, Any]  # of what is a single number or word: its dtype ("" if it is no tensor) and itself


class File(msgspec.Struct, frozen=True):
    """One worker's."""

    name: str
    bytes: int
    sha256: str


class Stretch(NamedTuple):
    """Elements start to stop of a tensor are in this file."""

    file: int
    start: int
    stop: int


class Entry(msgspec.Struct, omit_defaults=True):
    """A tensor: elements in the order they have in memory, complex ones as pairs."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # none: row by row
    pieces: list[Stretch] = []

    @classmethod
    def of(cls, x: Tensor) -> Entry:
        dense = not x.is_contiguous() and memory(x).untyped_storage()._cdata == x.untyped_storage()._cdata
        strides = tuple(x.stride()) if dense and not x.is_complex() else None
        return cls(dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape), strides=strides)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"the manifest names a type {self.dtype!r} that torch does not have")
        return found

    @property
    def real(self) -> torch.dtype:
        """What its elements are saved as."""
        dtype = self.torch_dtype
        return dtype.to_real() if dtype.is_complex else dtype

    @property
    def length(self) -> int:
        return torch.Size(self.shape).numel() * (2 if self.torch_dtype.is_complex else 1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Its elements as a tensor."""
        if self.torch_dtype.is_complex:
            return torch.view_as_complex(flat.reshape(*self.shape, 2))
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


class Group(msgspec.Struct):
    """A parameter group of an optimizer."""

    params: list[str]
    settings: dict[str, Any]


class OptimizerEntry(msgspec.Struct):
    kind: str
    groups: list[Group]


class Manifest(msgspec.Struct):
    format: Literal["paceline checkpoint"]
    version: int
    serial: int  # the newest of a folder has the highest
    step: int
    world: int
    method: list[dict[str, Any]]  # for each optimizer
    paceline: str
    torch: str
    files: list[File]
    tensors: dict[str, Entry]
    values: dict[str, Value]
    ties: dict[str, str]  # other names of parameters
    optimizers: list[OptimizerEntry]
    extra: dict[str, Any]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class _Head(msgspec.Struct):
    format: str
    version: int


def read(folder: Path) -> Manifest:
    """Of a checkpoint, checked as far as it goes by itself."""
    path = folder / NAME
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link", why="what a checkpoint is made of lies in its folder")
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} is too large for a manifest", why=f"it has {path.stat().st_size} bytes")
        text = path.read_bytes()
        head = msgspec.json.decode(text, type=_Head)
        if head.format == "paceline checkpoint" and head.version > VERSION:
            raise CheckpointError(
                f"{folder} was saved by a newer Paceline",
                why=f"its format is {head.version}, this one reads up to {VERSION}",
                do="install a newer one",
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint",
            why=f"{path.name} cannot be read: {error.strerror}",
            do="give a folder that paceline.save wrote",
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest", why=str(error), do="load an earlier checkpoint") from None
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    for file in manifest.files:
        if not _PLAIN.fullmatch(file.name):
            raise CheckpointError(f"{path} names the file {file.name!r}", why="it would not lie in the checkpoint")
    for key, entry in manifest.tensors.items():
        stop = 0
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            if piece.start != stop or piece.stop < piece.start or not 0 <= piece.file < len(manifest.files):
                break
            stop = piece.stop
        else:
            if stop == entry.length and _in_place(entry):
                continue
        raise CheckpointError(f"{path} does not say where all of {key} is", do="load an earlier checkpoint")


def _in_place(entry: Entry) -> bool:
    """Its strides name each of its elements once."""
    if entry.strides is None:
        return all(n >= 0 for n in entry.shape)
    if len(entry.strides) != len(entry.shape) or min((*entry.shape, *entry.strides), default=1) < 1:
        return False
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(entry.strides, entry.shape, strict=True) if n > 1):
        if stride != size:
            return False
        size *= n
    return True
