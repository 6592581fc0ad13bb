"""Reading stretches of tensors: from a checkpoint, or from a plain safetensors file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint import names
from paceline.checkpoint.manifest import TensorEntry
from paceline.checkpoint.read_manifest import read
from paceline.checkpoint.regular_files import open_regular
from paceline.checkpoint.tensors import CODES
from paceline.errors import CheckpointError

_PLACES = 1000  # of a plain file, that workers compare


class TensorSource(Protocol):
    """Where tensors come from."""

    path: Path

    def entry(self, key: str) -> TensorEntry | None:
        """Describe a tensor. None: there is no such tensor."""

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Read the elements from start to stop, flat, into memory that must not be written to."""


def whole(source: TensorSource, key: str) -> Tensor:
    """Read all of a tensor, in its shape."""
    entry = source.entry(key)
    assert entry is not None
    return entry.shaped(source.read(key, 0, entry.length))


class Checkpoint:
    """A folder that paceline.save wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest, self.checksum = read(path)
        self._open: dict[int, Any] = {}

    def check_file(self, i: int) -> None:
        """Check that a file is the one that was written."""
        file = self.manifest.files[i]
        path = self.path / file.name
        with _named(path), open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes:
                _broken(path, f"it has {size} bytes, and {file.bytes} were written")
            if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                _broken(path, "its sha256 is not that of what was written")

    def entry(self, key: str) -> TensorEntry | None:
        return self.manifest.tensors.get(key)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        entry = self.manifest.tensors[key]
        stretches = [p for p in entry.stretches if p.start < stop and start < p.stop]
        parts = [
            self._slice(p.file, key, max(start, p.start) - p.start, min(stop, p.stop) - p.start) for p in stretches
        ]
        found = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=entry.real), *parts])
        if found.dtype != entry.real or found.numel() != stop - start:
            _broken(self.path, f"{key} is not in its files as the manifest says")
        return found

    def _slice(self, i: int, key: str, start: int, stop: int) -> Tensor:
        path = self.path / self.manifest.files[i].name
        with _named(path):
            if i not in self._open:
                self._open[i] = safe_open(path, framework="pt")
            return self._open[i].get_slice(key)[start:stop]  # type: ignore[no-any-return]


class PlainFile:
    """A safetensors file with a model's weights, as `paceline export` and many others write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        with _named(path):
            self._file = safe_open(path, framework="pt")
        self._names = set(self._file.keys())

    def fingerprint(self) -> str:
        """Give a checksum of a thousand places in the file, because hosts may have other files under the same name."""
        digest = hashlib.sha256()
        with _named(self.path), self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for i in range(_PLACES):
                file.seek(size * i // _PLACES)
                digest.update(file.read(4096))
        digest.update(str(size).encode())
        return digest.hexdigest()

    def entry(self, key: str) -> TensorEntry | None:
        if (name := key.removeprefix(names.MODEL)) not in self._names:
            return None
        x = self._file.get_slice(name)
        dtype = {code: dtype for dtype, code in CODES.items()}.get(x.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{name} in {self.path} has the type {x.get_dtype()}, which is not known here")
        return TensorEntry(dtype=str(dtype).removeprefix("torch."), shape=tuple(x.get_shape()))

    def read(self, key: str, start: int, stop: int) -> Tensor:
        entry, x = self.entry(key), self._file.get_slice(key.removeprefix(names.MODEL))
        assert entry is not None
        if not entry.shape or not entry.length:
            return _flat(x[...])[start:stop]
        row = entry.length // entry.shape[0]
        first = start // row
        with _named(self.path):
            rows = _flat(x[first : -(-stop // row)])
        return rows[start - first * row : stop - first * row]


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name this file in every error of the context."""
    try:
        yield
    except OSError as error:
        _broken(path, error.strerror or str(error))
    except SafetensorError as error:
        _broken(path, str(error))


def _broken(path: Path, why: str) -> None:
    raise CheckpointError(
        f"{path} cannot be used", why=why, do="load an earlier checkpoint, or copy it again"
    ) from None
