"""safetensors files, written tensor by tensor, so that only one tensor is in memory at a time.

Eight bytes say how long the header is; the header, in JSON, says of every tensor its type, its shape and where its
bytes are; then come the bytes, back to back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.telemetry.files import create

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGN = 8


class TensorSpec(NamedTuple):
    """What the header of a file says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class TensorFile:
    """A file being written. Its tensors are put one by one, in the order of `specs`."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._left = list(specs)
        self._sha256, self.nbytes = hashlib.sha256(), 0
        self._hashing = ThreadPoolExecutor(1)  # while the same bytes are written
        self._header = _header(self._left, metadata or {})
        self._file = create(path)

    def put(self, x: Tensor) -> None:
        """Write the next tensor. Only its elements count: it may be on any device and in any shape."""
        spec = self._left.pop(0)
        assert (x.dtype, x.numel() * x.element_size()) == (spec.dtype, spec.nbytes), spec
        flat = x.detach().reshape(-1).cpu()
        if flat.numel():
            self._write(flat.view(torch.uint8).numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        hashed = self._hashing.submit(self._sha256.update, data)
        try:
            self._file.write(data)
        finally:
            hashed.result()
        self.nbytes += len(data)

    def sha256(self) -> str:
        """Give the sha256 of what was written."""
        return self._sha256.hexdigest()

    def __enter__(self) -> TensorFile:
        try:
            self._write(len(self._header).to_bytes(8, "little") + self._header)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                assert not self._left, f"{self._left[0].name} was not put"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._hashing.shutdown()
            self._file.close()


def _header(specs: list[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in specs:
        if dtype not in CODES:
            raise CheckpointError(
                f"{name} cannot be saved", why=f"safetensors has no type for {dtype}", do="convert it, or leave it out"
            )
        start, end = end, end + TensorSpec(name, dtype, shape).nbytes
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGN)
