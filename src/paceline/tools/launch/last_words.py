"""What a worker's stderr says about its end: the error itself, not the last of the lines that follow it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import plain

_LONGEST = 500
_RANK = re.compile(r"^\[rank\d+\]: ")  # torch puts it before every line of a traceback
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration|Group)(?=:|\(|$| )")
_OURS = re.compile(r"^(?:paceline: |paceline\.errors\.\w+: )")
_ADVICE = re.compile(r"^  (why|at|do): +(.*)")
_ABORTED = re.compile(r"^\s*what\(\):\s*(.+)|^(Fatal Python error: .+)|^(.*\bAssertion .* failed.*)")
_NOISE = re.compile(
    r"^\s*frame #\d+:|^Exception raised from |^\s*warnings\.warn\(|resource_tracker|^\[?[IW]\d{4} |^\[W\d"
    r"|^terminate called |^\s*[\^~]+\s*$|^Current thread |^Thread 0x|^Extension modules: |^\s+File \"|^\(most recent "
)


class LastWords(NamedTuple):
    """An error as a worker said it: what happened, why, and what to do, as far as it said so."""

    what: str = ""
    why: str = ""
    do: str = ""


def last_words(output: Sequence[str]) -> LastWords:
    """The error in the last lines of a worker's stderr.

    That is the last one of ours, the last exception that Python printed, or what an abort in C++ was about; without any
    of them the last line that is not about something else.
    """
    lines = [line for raw in output if (line := _RANK.sub("", plain(raw)).rstrip())]
    for i in reversed(range(len(lines))):
        advice = _advice(lines[i + 1 : i + 4])
        if _OURS.match(lines[i]) and advice:
            what = _OURS.sub("", lines[i])
            return LastWords(what[:_LONGEST], advice.get("why", "")[:_LONGEST], advice.get("do", "")[:_LONGEST])
        if _EXCEPTION.match(lines[i]):
            return LastWords(lines[i][:_LONGEST])
        if found := _ABORTED.match(lines[i]):
            return LastWords(next(text for text in found.groups() if text)[:_LONGEST])
    left = [line.strip() for line in lines if not _NOISE.search(line)]
    return LastWords(left[-1][:_LONGEST] if left else "")


def _advice(lines: Sequence[str]) -> dict[str, str]:
    found = [_ADVICE.match(line) for line in lines]
    return {match[1]: match[2] for match in found if match}
