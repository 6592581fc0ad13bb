"""Why a job ended: the record that the launcher and the workers share through the store."""

from __future__ import annotations

import json
import re
import traceback
from dataclasses import asdict, dataclass

from paceline import errors
from paceline.errors import MismatchError, PacelineError, PeerError, PeerTimeoutError, plain

CAUSE = "cause"  # the store's key for the first cause
SAID = "said"  # and for what the workers want to be shown while they wait; the launcher shows it if there is one
_KINDS = {cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
_RAISED = {cls.__name__: cls for cls in (PeerTimeoutError, MismatchError)}  # the same class on every worker
_LONGEST = 2000  # characters of a text


def of_worker(rank: int, what: str) -> str:
    """What a worker says, with its rank, unless it says that itself."""
    return what if re.search(rf"\bworker {rank}\b", what) else f"worker {rank}: {what}"


@dataclass(frozen=True)
class Cause:
    """What ended the job. `worker` is the rank of the worker at fault, where that is known."""

    worker: int | None
    what: str
    why: str = ""
    do: str = ""
    step: int | None = None  # none: it was in no step, or that is not known
    kind: str = ""  # the name of the error's class

    @classmethod
    def of(cls, error: BaseException, *, rank: int, step: int | None, batch: str) -> Cause:
        """The cause that a worker gives when it fails. batch: what its batch was made of."""
        kind = type(error).__name__
        if isinstance(error, PeerError):
            return cls(error.worker, error.what, error.why, error.do, step, kind)
        if isinstance(error, PacelineError):
            return cls(rank, of_worker(rank, error.what), error.why, error.do, step, kind)
        when = "" if step is None else f" in step {step}"
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        frames = traceback.extract_tb(error.__traceback__)
        why = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        why += f"; its batch was made of {batch}" if batch else ""
        return cls(rank, f"worker {rank} failed{when}: {kind}{': ' if said else ''}{said}", why, "", step, kind)

    @property
    def exit_code(self) -> int:
        """The exit code of the command line where no worker has one of its own: that of the error's class."""
        kind = _KINDS.get(self.kind)
        return kind.exit_code if kind is not None and issubclass(kind, PacelineError) else PeerError.exit_code

    def error(self) -> PeerError:
        """What the workers raise that read it."""
        error = _RAISED.get(self.kind, PeerError)(self.what, why=self.why, do=self.do, worker=self.worker)
        error.posted = True
        return error

    def encode(self) -> str:
        texts = {name: text[:_LONGEST] if isinstance(text, str) else text for name, text in asdict(self).items()}
        return json.dumps(texts)

    @classmethod
    def decode(cls, text: str) -> Cause:
        """Read a cause from the store. The text may be anything: whoever reaches the port can write it."""
        try:
            found = json.loads(text)
            worker, step = found.get("worker"), found.get("step")
            what, why, do, kind = (str(found.get(key) or "")[:_LONGEST] for key in ("what", "why", "do", "kind"))
        except (ValueError, AttributeError, RecursionError):
            return cls(None, "a worker failed", why="what it wrote about it cannot be read")
        return cls(
            worker=worker if type(worker) is int else None,
            what=plain(what) or "a worker failed",
            why=plain(why),
            do=plain(do),
            step=step if type(step) is int else None,
            kind=kind if kind in _KINDS else "",
        )
