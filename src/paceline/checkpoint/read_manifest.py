"""Reading a manifest: whatever stands in that file, it is a checkpoint that can be loaded, or it is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from paceline.checkpoint import manifest, names
from paceline.checkpoint.holdings import number
from paceline.checkpoint.manifest import Manifest, TensorEntry
from paceline.checkpoint.regular_files import open_regular
from paceline.checkpoint.tensors import CODES
from paceline.errors import CheckpointError

_TAIL = len(manifest.tail(b""))
_CHECKSUM = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n')
_HEAD = re.compile(rb'\{\s*"format":\s*"paceline checkpoint",\s*"version":\s*(\d{1,9})\b')
_RUN = re.compile(r"[0-9a-f]{16}")
_TYPES = {str(dtype).removeprefix("torch.") for dtype in (*CODES, torch.complex32, torch.complex128)}
_DO = "load an earlier checkpoint, or copy this one again"


def read(folder: Path) -> tuple[Manifest, str]:
    """Read the manifest of a checkpoint and check all that can be checked without the files. Gives its sha256 too."""
    path = folder / manifest.NAME
    try:
        with open_regular(path) as file:
            checksum = _checksum(path, file)
            body = file.read(os.fstat(file.fileno()).st_size - _TAIL)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint",
            why=f"{path.name} cannot be read: {error.strerror}",
            do="give a folder that paceline.save wrote",
        ) from None
    if hashlib.sha256(body).hexdigest() != checksum:
        raise CheckpointError(f"{path} is not the manifest that was written", why="its sha256 is another", do=_DO)
    try:
        text = json.loads(body + b"}", object_pairs_hook=_unequal, parse_constant=_no_number, parse_float=_finite)
        if isinstance(text, dict) and text.get("version") != manifest.VERSION:
            raise _other_version(path, text.get("version"))
        book = msgspec.convert(text, Manifest)
        wrong = next(_mistakes(book), None)
    except (ValueError, RecursionError) as error:  # those of JSON and of msgspec are ValueErrors
        raise CheckpointError(f"{path} is not a manifest", why=str(error)[:200], do=_DO) from None
    if wrong is not None:
        raise CheckpointError(f"{path} is not a manifest that can be loaded", why=wrong, do=_DO)
    return book, checksum


def _checksum(path: Path, file: BinaryIO) -> str:
    """Give the checksum that stands at the end of a manifest, before all of it is read."""
    size = os.fstat(file.fileno()).st_size
    if size > manifest.MOST_BYTES:
        raise CheckpointError(f"{path} is too large for a manifest", why=f"it has {size} bytes", do=_DO)
    head = _HEAD.match(file.read(200))
    file.seek(max(size - _TAIL, 0))
    found = _CHECKSUM.fullmatch(file.read(_TAIL))
    file.seek(0)
    if found is not None:
        return found[1].decode()
    if head is not None and int(head[1]) != manifest.VERSION:
        raise _other_version(path, int(head[1]))
    raise CheckpointError(
        f"{path} is not a manifest", why="it does not end as one, with the sha256 of all before it", do=_DO
    )


def _other_version(path: Path, version: Any) -> CheckpointError:
    newer = isinstance(version, int) and version > manifest.VERSION
    return CheckpointError(
        f"{path.parent} was saved by {'a newer' if newer else 'another'} Paceline",
        why=f"its format is {version!r}, and this one reads {manifest.VERSION}",
        do="install a newer one" if newer else "load it with the Paceline that saved it, and export the weights",
    )


def _unequal(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} stands in it, which is no JSON")


def _finite(word: str) -> float:
    if (found := float(word)) in (float("inf"), float("-inf")):
        raise ValueError(f"{word[:20]} stands in it, which is too large a number")
    return found


# ------------------------------------------------------------------------------------------- what stands in it


def _mistakes(book: Manifest) -> Iterator[str]:
    """Say what cannot be true. A manifest whose checksum is right can still have been written to do harm."""
    if not _RUN.fullmatch(book.run):
        yield f"it names the run {book.run[:80]!r}"
    names_due = [
        f"{kind}-{rank:05d}.safetensors" for rank in range(len(book.files) // 2) for kind in ("model", "state")
    ]
    if len(book.files) != 2 * book.world_size or not book.world_size:
        yield f"it names {len(book.files)} files of {book.world_size} workers, and each writes two"
    for file, due in zip(book.files, names_due, strict=True):
        if file.name != due:
            yield f"it names the file {file.name[:80]!r} in place of {due}"
    if len(book.made) != len(book.method):
        yield "it does not say for each prepared optimizer how many steps it has made"
    yield from _lost_tensors(book)
    for key in (*book.tensors, *book.values):
        if not names.known(key, book.world_size, len(book.optimizers), len(book.method)):
            yield f"it has {key[:80]!r}, and no such thing is saved"
    for key, value in book.values.items():
        if not _is_value(value):
            yield f"{key[:80]!r} is no number and no word"
    for name, first in book.ties.items():
        if names.MODEL + first not in book.tensors or names.MODEL + name in book.tensors:
            yield f"{name[:80]!r} is another name of {first[:80]!r}, which is not in it"
    for optimizer in book.optimizers:
        for group in optimizer.groups:
            for key, setting in group.settings.items():
                if key == "params" or not _is_setting(setting):
                    yield f"{key[:80]!r} is no setting of an optimizer"


def _lost_tensors(book: Manifest) -> Iterator[str]:
    needed: dict[int, int] = defaultdict(int)  # by the file's number: bytes
    for key, entry in book.tensors.items():
        if entry.dtype not in _TYPES:
            yield f"{key[:80]!r} is of the type {entry.dtype[:40]!r}, which is never saved"
        stop = 0
        for stretch in sorted(entry.stretches, key=lambda stretch: stretch.start):
            if stretch.start != stop or stretch.stop < stretch.start or stretch.file >= len(book.files):
                yield f"it does not say where all of {key[:80]!r} is"
            stop = stretch.stop
            needed[stretch.file] += (stretch.stop - stretch.start) * entry.real.itemsize
        if stop != entry.length or not _in_place(entry):
            yield f"it does not say where all of {key[:80]!r} is"
    for i, size in needed.items():
        if size > book.files[i].bytes:
            yield f"{book.files[i].name} would have to be larger than it is"


def _in_place(entry: TensorEntry) -> bool:
    """Say whether the strides of a tensor name each of its elements once."""
    if entry.strides is None:
        return True
    if len(entry.strides) != len(entry.shape) or min((*entry.shape, *entry.strides), default=1) < 1:
        return False
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(entry.strides, entry.shape, strict=True) if n > 1):
        if stride != size:
            return False
        size *= n
    return True


def _is_value(value: Any) -> bool:
    try:
        number(value)
    except (CheckpointError, ValueError, TypeError, ArithmeticError, RuntimeError):
        return False
    return True


def _is_setting(setting: Any) -> bool:
    """Say whether it is what a save makes of a setting: a value with its type, or a list of such."""
    if not isinstance(setting, list):
        return False
    if setting and isinstance(setting[0], str):
        return len(setting) == 2 and not isinstance(setting[1], (list, dict)) and _is_value(tuple(setting))
    return all(_is_setting(one) for one in setting)
