"""The output of the workers: shown, hidden or written to files, with the last lines of each worker remembered."""

from __future__ import annotations

import math
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Literal

from paceline.errors import plain
from paceline.tools.launch.last_words import LastWords, last_words
from paceline.tools.launch.supervisor import LaunchedWorker

Shown = Literal["main", "all"]

_HOLD_S = 0.1
_LAST_WORDS_S = 1.5  # shorter than the time after which other workers look for a cause themselves
_LAST_LINES = 40  # of a hidden worker that fails: enough for a long traceback
_TAIL, _LONG = 200, 2000  # lines of stderr, and bytes of each, in which the reason of a failure is looked for
# What a terminal would obey: all escape codes but colours, and control characters but those that end a line, and tabs.
_ORDERS = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\)|\x1b(?!\[[0-?]*m)[ -/]*[0-~]?"
    rb"|\xc2[\x80-\x9f]|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_COLOUR, _NO_COLOUR = re.compile(rb"\x1b\[[0-?]*m"), b"\x1b[0m"


class WorkerOutput:
    """Where the workers' lines go: to this process's own streams, and with `log_dir` to a file for each worker.

    Worker 0's output is passed on unchanged, so that a job reads (and can be piped) as the plain script does.
    The lines of the other workers begin with their rank and lose all escape codes but colours, because what moves
    the cursor is meant for a screen of one's own; they are shown if `shown` is "all". If it is "main", they are
    hidden, unless their worker fails: then its last lines are shown when the job has ended. A log file has everything.

    A single worker without a log file simply inherits the streams.
    """

    def __init__(
        self,
        *,
        out: IO[bytes] | None,
        err: IO[bytes] | None,
        log_dir: Path | None = None,
        shown: Shown = "all",
    ) -> None:
        self.out, self.err, self.log_dir, self.shown = out, err, log_dir, shown
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, LaunchedWorker] = {}
        self._streams: dict[int, list[_Stream]] = {}
        self._mid_line: dict[IO[bytes], bool] = {}  # whether worker 0 is in the middle of a line on that sink
        self._held: dict[IO[bytes], tuple[float, bytes]] = {}  # what others wrote meanwhile, and since when it waits
        self._closed_sinks: set[IO[bytes]] = set()
        self._log_is_incomplete = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="worker output", daemon=True)

    @classmethod
    def passed(cls, log_dir: Path | None = None, *, shown: Shown = "all", to_stderr: bool = False) -> WorkerOutput:
        """Output to this process's own streams; with `to_stderr` all to stderr, because stdout is for a result."""
        err = sys.stderr.buffer
        return cls(out=err if to_stderr else sys.stdout.buffer, err=err, log_dir=log_dir, shown=shown)

    @classmethod
    def kept(cls, log_dir: Path) -> WorkerOutput:
        """Output to the log files only."""
        return cls(out=None, err=None, log_dir=log_dir)

    def inherits(self, world_size: int) -> bool:
        """Whether the workers write to this process's streams themselves."""
        return world_size == 1 and self.log_dir is None and self.out is sys.stdout.buffer

    def hides(self, rank: int) -> bool:
        """Whether the lines of that worker are shown only if it fails."""
        return self.shown == "main" and rank != 0

    def add(self, worker: LaunchedWorker) -> None:
        """Take over the pipes of a worker that has just been started."""
        rank = worker.rank
        log = (self.log_dir / f"worker-{rank}.log").open("wb", buffering=0) if self.log_dir else None
        hidden = deque[bytes](maxlen=_LAST_LINES) if self.hides(rank) else None
        self._workers[rank] = worker
        for pipe, sink in ((worker.process.stdout, self.out), (worker.process.stderr, self.err)):
            if pipe is not None:
                stream = _Stream(rank, pipe, sink, log=log, hidden=hidden)
                self._streams.setdefault(rank, []).append(stream)
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def start(self) -> None:
        """Begin to read the workers' pipes."""
        self._thread.start()

    def tell(self, line: str) -> None:
        """Show a line of the launcher's own."""
        if self.err is not None:
            self._write(self.err, f"paceline: {plain(line)}\n".encode())

    def last_words(self, rank: int) -> LastWords:
        """What the stderr of an ended worker says about its end."""
        if rank not in self._streams:
            return LastWords()
        stream = self._streams[rank][1]
        # They may still be in the pipe: the thread that reads it waits while this process imports torch.
        stream.over.wait(_LAST_WORDS_S)
        return last_words([line[:_LONG].decode(errors="replace") for line in list(stream.tail)])

    def finish(self) -> None:
        """Pass on what is still in the pipes once every worker has ended, even if grandchildren hold them open."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._show_hidden_failures()
        for stream in (s for streams in self._streams.values() for s in streams):
            stream.pipe.close()
            if stream.log:
                stream.log.close()
        self._selector.close()

    def _show_hidden_failures(self) -> None:
        """Show the last lines of every hidden worker that failed, which are the reason more often than not."""
        if self.err is None:
            return
        for rank, worker in self._workers.items():
            lines = self._streams[rank][0].hidden if worker.failed and rank in self._streams else None
            if lines and self._mid_line.get(self.err):
                self._write(self.err, b"\n")
                self._mid_line[self.err] = False
            for line in lines or ():
                self._write(self.err, line)

    def _pump(self) -> None:
        quiet = 0
        while self._selector.get_map() and quiet < 3:
            ready = self._selector.select(timeout=_HOLD_S)
            self._release(time.monotonic() - _HOLD_S)
            quiet = quiet + 1 if self._stop.is_set() and not ready else 0
            for key, _ in ready:
                stream: _Stream = key.data
                chunk = os.read(key.fd, 1 << 16)
                self._log(stream, chunk)
                self._show(stream, stream.feed(chunk))
                if not chunk:
                    self._selector.unregister(stream.pipe)
                    stream.over.set()
        self._release(math.inf)

    def _log(self, stream: _Stream, chunk: bytes) -> None:
        if stream.log is None or not chunk:
            return
        try:
            stream.log.write(chunk)
        except OSError as error:  # a full disk must not end the training
            if not self._log_is_incomplete:
                print(f"paceline: a log file is incomplete: {error}", file=sys.stderr)
            self._log_is_incomplete = True
            stream.log = None

    def _show(self, stream: _Stream, text: bytes) -> None:
        sink = stream.sink
        if sink is None or not text:
            return
        if stream.hidden is not None:
            stream.hidden.extend(text.splitlines(keepends=True))
            return
        if stream.prefix and self._mid_line.get(sink):
            since, held = self._held.get(sink, (time.monotonic(), b""))
            self._held[sink] = since, held + text
            return
        self._write(sink, text)
        self._mid_line[sink] = not text.endswith((b"\n", b"\r"))
        if not self._mid_line[sink]:
            self._write(sink, self._held.pop(sink, (0.0, b""))[1])

    def _release(self, before: float) -> None:
        """Write the lines of other workers that have waited since `before` for worker 0 to finish its line.

        Worker 0 may never finish it: it may be a prompt or a progress bar.
        """
        for sink, (since, text) in list(self._held.items()):
            if since < before:
                self._write(sink, b"\n" + text)
                self._mid_line[sink] = False
                del self._held[sink]

    def _write(self, sink: IO[bytes], text: bytes) -> None:
        if sink in self._closed_sinks or not text:
            return
        try:
            sink.write(text)
            sink.flush()
        except (OSError, ValueError):  # the reader has gone (`| head`), and the workers go on
            self._closed_sinks.add(sink)


class _Stream:
    """One worker's stdout or stderr, on its way to a sink, a log file, or the lines kept of a hidden worker."""

    _LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=[^\n]))")  # progress bars end their lines with \r
    _COLOURS = (36, 33, 35, 32, 34, 31)

    def __init__(
        self,
        rank: int,
        pipe: IO[bytes],
        sink: IO[bytes] | None,
        *,
        log: IO[bytes] | None = None,
        hidden: deque[bytes] | None = None,  # shared by the two streams of a worker, so their lines keep their order
    ) -> None:
        self.pipe, self.sink, self.log, self.hidden = pipe, sink, log, hidden
        self.tail: deque[bytes] = deque(maxlen=_TAIL)
        self.over = threading.Event()
        self.prefix = b"" if rank == 0 else f"[{rank}] ".encode()
        if self.prefix and sink is not None and sink.isatty() and not os.environ.get("NO_COLOR"):
            self.prefix = b"\x1b[%dm[%d]\x1b[0m " % (self._COLOURS[rank % len(self._COLOURS)], rank)
        self._partial = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take in what the worker wrote, and return what can be shown now. An empty chunk is the end."""
        self._partial += chunk
        if not chunk and self._partial:
            self._partial += b"\n"
        lines = self._LINE.findall(self._partial)
        self._partial = self._partial[sum(map(len, lines)) :]
        if len(self._partial) > 1 << 16:  # no line of text is that long: the worker writes binary data
            lines.append(self._partial + b"\n")
            self._partial = b""
        self.tail.extend(lines)
        return b"".join(self.prefix + _harmless(line) for line in lines) if self.prefix else chunk


def _harmless(line: bytes) -> bytes:
    """The line without orders to the terminal; colours stay, and end with the line."""
    line = _ORDERS.sub(b"", line)
    if not _COLOUR.search(line):
        return line
    text = line.rstrip(b"\r\n")
    return text + _NO_COLOUR + line[len(text) :]
