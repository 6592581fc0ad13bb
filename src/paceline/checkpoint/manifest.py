"""The manifest: what is in a checkpoint, and where.

It is JSON, and its last member is the sha256 of all that stands before it. What follows that number is always the same
four bytes. So no byte of it can change unseen.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.core.bucket import memory
from paceline.errors import CheckpointError

NAME = "manifest.json"
VERSION = 2
MOST_BYTES = 1 << 28  # a larger file is no manifest
MOST = 1 << 53  # the largest count: every reader of JSON has it exactly

Scalar = bool | int | float | str | None
Value = tuple[str, Scalar]  # a single number or word: its dtype ("" if it is no tensor), and itself
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Counts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]  # a tensor has no more dimensions


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of one worker."""

    name: str
    bytes: Count
    sha256: str


class Stretch(NamedTuple):
    """A stretch of a tensor: the elements from start to stop are in the file with this number."""

    file: Count
    start: Count
    stop: Count


class TensorEntry(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, rename={"stretches": "pieces"}):
    """A tensor, whose elements are saved in the order they have in memory, complex ones as pairs."""

    dtype: str
    shape: Counts
    strides: Counts | None = None  # none: row by row
    stretches: list[Stretch] = []

    @classmethod
    def of(cls, x: Tensor) -> TensorEntry:
        """Describe a tensor."""
        dense = not x.is_contiguous() and memory(x).untyped_storage()._cdata == x.untyped_storage()._cdata
        strides = tuple(x.stride()) if dense and not x.is_complex() else None
        return cls(dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape), strides=strides)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's type."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"the manifest names a type {self.dtype!r} that torch does not have")
        return found

    @property
    def real(self) -> torch.dtype:
        """The type its elements are saved in."""
        dtype = self.torch_dtype
        return dtype.to_real() if dtype.is_complex else dtype

    @property
    def length(self) -> int:
        """The number of elements that are saved."""
        return math.prod(self.shape) * (2 if self.torch_dtype.is_complex else 1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Give the tensor that these elements are."""
        if self.torch_dtype.is_complex:
            return torch.view_as_complex(flat.reshape(*self.shape, 2))
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


class GroupEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A parameter group of an optimizer."""

    params: list[str]
    settings: dict[str, Any]  # a Value, or a list of such


class OptimizerEntry(msgspec.Struct, forbid_unknown_fields=True):
    """An optimizer: the name of its class, and its parameter groups."""

    kind: str
    groups: list[GroupEntry]


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """All that a checkpoint says of itself."""

    format: Literal["paceline checkpoint"]
    version: int
    run: str  # the same in all checkpoints of a run; `keep` removes no other
    serial: Count  # the newest of a folder has the highest
    step: Count
    made: list[Count]  # for each prepared optimizer, how many steps it has made
    world_size: Count
    method: list[dict[str, Any]]  # for each prepared optimizer
    paceline: str
    torch: str
    not_finite: list[str]  # keys of what holds NaN or infinity, at most ten; a good checkpoint has none
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    values: dict[str, Value]
    ties: dict[str, str]  # other names of parameters
    optimizers: list[OptimizerEntry]
    extra: dict[str, Any]

    def encode(self) -> bytes:
        """Give the manifest as JSON, with its checksum at the end."""
        body = msgspec.json.format(msgspec.json.encode(self), indent=1).removesuffix(b"\n}")
        return body + tail(body)


def tail(body: bytes) -> bytes:
    """Give the last member of a manifest, the checksum of all before it."""
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
