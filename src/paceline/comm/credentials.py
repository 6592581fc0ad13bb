"""Who may use a job's store: the secret, the job's random name, and the greeting that proves both.

[Note: greeting] The server speaks first: a nonce. The client answers with a nonce of its own, the name of its job,
who it is, and an HMAC-SHA256 of all of it under the job's secret. The server's answer carries such an HMAC too, so that
each knows that the other has the secret, which never travels; and neither proof is of any use for another connection.
Nothing else is read from a connection before that. A job without a secret uses an empty one: its random name then keeps
other jobs out, but nobody who means harm.

The secret comes from a file (PACELINE_SECRET_FILE, readable by its owner alone) or a variable (PACELINE_SECRET), never
from the command line, which every user of a host can read.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.comm.frames import Code, Frame, FrameError, pack
from paceline.errors import MismatchError, UsageError, plain

JOB = "PACELINE_JOB"  # the name of the job
SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"
NONCE = 32  # bytes
_VERSION = b"paceline store 1"
_LONGEST_SECRET = 4096  # bytes
_SHORTEST_SECRET = 16
_SHOWN = 300  # characters of a text from elsewhere


def read_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """The job's secret; empty if there is none."""
    path, text = env.get(SECRET_FILE), env.get(SECRET)
    if path and text:
        raise UsageError(f"{SECRET_FILE} and {SECRET} are both set", do="set one of them")
    found = _from_file(Path(path)) if path else os.fsencode((text or "").strip())
    if not _SHORTEST_SECRET <= len(found) <= _LONGEST_SECRET and (found or path):
        raise UsageError(
            f"the secret in {SECRET_FILE if path else SECRET} has {len(found)} bytes",
            why=f"{_SHORTEST_SECRET} to {_LONGEST_SECRET} are allowed",
            do="make one: head -c 32 /dev/urandom | base64 > secret; chmod 600 secret",
        )
    return found


def _from_file(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{SECRET_FILE}={path} is not a file", do="name a file with the secret in it")
            if found.st_mode & 0o077:
                raise UsageError(
                    f"{SECRET_FILE}={path} can be read by others",
                    why=f"its mode is {stat.S_IMODE(found.st_mode):04o}",
                    do=f"chmod 600 {path}, and make a new secret if others may have seen this one",
                )
            return file.read(_LONGEST_SECRET + 2).strip()
    except OSError as error:
        raise UsageError(f"{SECRET_FILE}={path} cannot be read", why=error.strerror or "") from None


@dataclass(frozen=True)
class Credentials:
    """What a process shows to a store, and what the store compares it with.

    job: the random name of the job. The launcher of another host does not know it yet: it shows what it was asked to
    start (`terms`), and is told the name if that is the same.
    """

    job: str = ""
    secret: bytes = field(default=b"", repr=False)
    terms: str = ""

    @classmethod
    def new(cls, secret: bytes, terms: str = "") -> Credentials:
        """Those of a job that begins."""
        return cls(secrets.token_hex(16), secret, terms)

    def variables(self) -> dict[str, str]:
        """The environment by which a process that this one starts is let in, too."""
        return {JOB: self.job, SECRET: os.fsdecode(self.secret), SECRET_FILE: ""}

    # ------------------------------------------------------------------------------------------ the client's side

    def hello(self, challenge: bytes, nonce: bytes, who: str) -> bytes:
        """The client's greeting. who: shown if the server has to say something about it."""
        says = [nonce, self.job.encode(), self.terms.encode(), who.encode()]
        return pack(0, Code.HELLO, [*says, self._proof(b"client", challenge, *says)])

    def check_welcome(self, answer: Frame, challenge: bytes, nonce: bytes, where: str) -> dict[str, Any]:
        """What the server tells its clients, once it has proved that it has the secret."""
        if answer.code == Code.REFUSED and len(answer.fields) == 1:
            what, why, do = ([*plain(answer.fields[0].decode(errors="replace"))[:_SHOWN].split("\n"), "", "", ""])[:3]
            raise MismatchError(f"{where} refused this process: {what}", why=why, do=do)
        if answer.code != Code.DONE or len(answer.fields) != 2:
            raise FrameError("it answered with something else")
        proof, note = answer.fields
        if not hmac.compare_digest(proof, self._proof(b"server", nonce, challenge, note)):
            raise MismatchError(
                f"the process that listens at {where} is not the store of this job",
                why="it does not have the job's secret",
                do=f"give every host the same {SECRET_FILE}, and see what listens at that port",
            )
        told = json.loads(note)
        return told if isinstance(told, dict) else {}

    # ------------------------------------------------------------------------------------------ the server's side

    def refusal(self, frame: Frame, challenge: bytes) -> str:
        """Why a greeting is refused, in up to three lines (what, why, what to do); empty if it is accepted."""
        if frame.code != Code.HELLO or len(frame.fields) != 5 or len(frame.fields[0]) != NONCE:
            return "it is not a process of Paceline"
        *says, proof = frame.fields
        if not hmac.compare_digest(proof, self._proof(b"client", challenge, *says)):
            return f"wrong secret\nthe secrets of the two differ\ngive every host the same {SECRET_FILE}"
        job, terms = (said.decode(errors="replace") for said in says[1:3])
        if job:
            other = "it belongs to another job\nthe names of the jobs differ\ngive each job a port of its own"
            return "" if hmac.compare_digest(job.encode(), self.job.encode()) else other
        if self.terms and terms != self.terms:
            return f"it was started for something else\n{_difference(terms, self.terms)}\nrun the same on every host"
        return "" if self.terms or not self.job else "it does not say which job it belongs to"

    def welcome(self, frame: Frame, challenge: bytes, note: Mapping[str, Any]) -> bytes:
        """The server's answer to a greeting that it accepts."""
        told = json.dumps({"job": self.job, **note}).encode()
        return pack(frame.number, Code.DONE, [self._proof(b"server", frame.fields[0], challenge, told), told])

    def _proof(self, side: bytes, *says: bytes) -> bytes:
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in (_VERSION, side, *says))
        return hmac.digest(self.secret, framed, "sha256")


def _difference(theirs: str, ours: str) -> str:
    """The first of the terms that differs. Each is a JSON object of texts."""
    try:
        says, want = json.loads(theirs), json.loads(ours)
        for name, text in want.items():
            if says.get(name) != text:
                return f"{name}: {str(says.get(name))[:80]!r} there, {str(text)[:80]!r} here"
    except (ValueError, AttributeError, RecursionError):
        pass
    return "it says something that cannot be read"
