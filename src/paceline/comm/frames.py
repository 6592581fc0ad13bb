"""The frames of the store: what travels between the process that serves it and those that use it.

[Note: frame] A frame is a head of 10 bytes, the length of all that follows it (u32), a number (u32), a code (u8) and
how many fields there are (u8), and then the fields, each a length (u32) and so many bytes. All numbers are big-endian.
An answer has the number of its request, so that answers may come in any order. A frame that is longer than its reader
allows at that point is refused before it has been read, and so is one whose lengths do not add up: no input makes a
reader take more memory than that.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = struct.Struct("!IIBB")
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!q")
_REST = _HEAD.size - _LENGTH.size  # bytes of the head that the length counts

LONGEST = 64 << 20  # bytes of a frame, between two that know each other
LONGEST_GREETING = 4096  # and between two that do not, yet
MOST_FIELDS = 255
_MOST_JOINED = 1 << 16


class Code(enum.IntEnum):
    """What a frame asks for, or answers."""

    HELLO = 1
    SET = 2
    GET = 3
    CHECK = 4
    ADD = 5
    COMPARE_SET = 6
    DELETE = 7
    COLLECT = 8
    FIRST_OF = 9
    WILL = 10
    COUNT_KEYS = 11
    DONE = 64
    LATE = 65
    REFUSED = 66


class Frame(NamedTuple):
    """One request or answer: [Note: frame]."""

    number: int
    code: Code
    fields: tuple[bytes, ...] = ()


class FrameError(ValueError):
    """The bytes are no frame, or one that is not allowed here."""


def pack(number: int, code: Code, fields: Sequence[bytes] = ()) -> bytes:
    """The bytes of a frame. Many fields are packed as one: see `joined`."""
    parts = [part for field in fields for part in (_LENGTH.pack(len(field)), field)]
    body = b"".join(parts)
    if len(fields) > MOST_FIELDS or len(body) > LONGEST - _HEAD.size:
        raise FrameError(f"{len(fields)} fields with {len(body)} bytes are too much for a frame")
    return _HEAD.pack(len(body) + _REST, number, code, len(fields)) + body


def parse(data: bytes | bytearray | memoryview, longest: int = LONGEST) -> tuple[Frame, int] | None:
    """The first frame of the data and how many bytes it takes; None if the rest of it has not come yet."""
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length < _REST or end > longest:
        raise FrameError(f"a frame of {length} bytes where {_REST} to {longest - _LENGTH.size} are allowed")
    if len(data) < end:
        return None
    _, number, code, count = _HEAD.unpack_from(data)
    if code not in _CODES:
        raise FrameError(f"there is no code {code}")
    return Frame(number, Code(code), _fields(bytes(data[_HEAD.size : end]), count)), end


def _fields(body: bytes, count: int | None) -> tuple[bytes, ...]:
    """So many fields, or as many as there are. Their lengths must add up to that of the body."""
    fields: list[bytes] = []
    at = 0
    while at < len(body) if count is None else len(fields) < count:
        if len(fields) == _MOST_JOINED:
            raise FrameError(f"more than {_MOST_JOINED} values in a field")
        if at + _LENGTH.size > len(body):
            raise FrameError("a field is missing")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if length > len(body) - at:
            raise FrameError(f"a field of {length} bytes where {len(body) - at} are left")
        fields.append(body[at : at + length])
        at += length
    if at < len(body):
        raise FrameError(f"{len(body) - at} bytes behind the last field")
    return tuple(fields)


def joined(values: Sequence[bytes]) -> bytes:
    """Any number of values as one field."""
    return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))


def split(field: bytes) -> tuple[bytes, ...]:
    """The values that were `joined`."""
    return _fields(field, None)


def number(value: int) -> bytes:
    """A number as a field."""
    return _NUMBER.pack(value)


def number_of(field: bytes) -> int:
    """The number that a field holds."""
    if len(field) != _NUMBER.size:
        raise FrameError(f"a number of {len(field)} bytes")
    return int(_NUMBER.unpack(field)[0])


_CODES = frozenset(Code)
