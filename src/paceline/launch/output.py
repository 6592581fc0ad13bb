"""What workers print: passed on with their rank before it, kept in files, and the last line of each remembered."""

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
from typing import IO

from paceline.launch.worker import Worker

_HOLD_S = 0.1
_WORDS_S = 1.5  # less than its neighbours wait before they look for a cause themselves


class Output:
    """Where the workers' lines go: to this process's own streams, and to a file for each worker with
    `log_dir`.

    Worker 0's output passes as it is, so that a job reads (and can be piped) as the plain script does; the
    lines of every other worker begin with its rank. A single worker without log file simply inherits the
    streams.
    """

    def __init__(self, *, log_dir: Path | None = None, out: IO[bytes] | None, err: IO[bytes] | None) -> None:
        self.log_dir, self.out, self.err = log_dir, out, err
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, list[_Stream]] = {}
        self._open: dict[IO[bytes], bool] = {}  # is worker 0 in the middle of a line on it?
        self._held: dict[IO[bytes], tuple[float, bytes]] = {}  # what others say meanwhile, and since when it waits
        self._gone: set[IO[bytes]] = set()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="worker output", daemon=True)

    @classmethod
    def passed(cls, log_dir: Path | None = None, *, to_stderr: bool = False) -> Output:
        """The usual: stdout to stdout, stderr to stderr (or both to stderr: stdout is for a result)."""
        err = sys.stderr.buffer
        return cls(log_dir=log_dir, out=err if to_stderr else sys.stdout.buffer, err=err)

    @classmethod
    def kept(cls, log_dir: Path) -> Output:
        """To the log files only."""
        return cls(log_dir=log_dir, out=None, err=None)

    def inherits(self, world: int) -> bool:
        return world == 1 and self.log_dir is None and self.out is sys.stdout.buffer

    def add(self, worker: Worker) -> None:
        log = (self.log_dir / f"worker-{worker.rank}.log").open("wb", buffering=0) if self.log_dir else None
        for pipe, sink in ((worker.process.stdout, self.out), (worker.process.stderr, self.err)):
            if pipe is not None:
                stream = _Stream(worker.rank, pipe, sink, log)
                self._streams.setdefault(worker.rank, []).append(stream)
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def start(self) -> None:
        self._thread.start()

    def last_line(self, rank: int) -> str:
        """The last line of an ended worker's stderr: in Python, the exception that ended it."""
        if rank not in self._streams:
            return ""
        stream = self._streams[rank][1]
        # It has ended, but its words may still be in the pipe: this process may just be importing torch, with the GIL.
        stream.over.wait(_WORDS_S)
        lines = [line.strip() for line in stream.tail]
        return next((line.decode(errors="replace") for line in reversed(lines) if line), "")[:500]

    def finish(self) -> None:
        """Every worker has ended: pass on what is still in the pipes, even if grandchildren hold them open."""
        self._stop.set()
        self._thread.join()
        for stream in (s for streams in self._streams.values() for s in streams):
            stream.pipe.close()
            if stream.log:
                stream.log.close()
        self._selector.close()

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
            if not self._lost:
                print(f"paceline: a log file is incomplete: {error}", file=sys.stderr)
            self._lost, stream.log = True, None

    def _show(self, stream: _Stream, text: bytes) -> None:
        sink = stream.sink
        if sink is None or not text:
            return
        if stream.prefix and self._open.get(sink):
            since, held = self._held.get(sink, (time.monotonic(), b""))
            self._held[sink] = since, held + text
            return
        self._write(sink, text)
        self._open[sink] = not text.endswith((b"\n", b"\r"))
        if not self._open[sink]:
            self._write(sink, self._held.pop(sink, (0.0, b""))[1])

    def _release(self, before: float) -> None:
        """A line that worker 0 began and does not finish (a prompt, a progress bar) does not keep the others
        waiting.
        """
        for sink, (since, text) in list(self._held.items()):
            if since < before:
                self._write(sink, b"\n" + text)
                self._open[sink] = False
                del self._held[sink]

    def _write(self, sink: IO[bytes], text: bytes) -> None:
        if sink in self._gone or not text:
            return
        try:
            sink.write(text)
            sink.flush()
        except (OSError, ValueError):  # the reader is gone (`| head`): the workers go on
            self._gone.add(sink)


class _Stream:
    """One worker's stdout or stderr on its way to ours."""

    _LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=[^\n]))")  # progress bars end their lines with \r
    _COLOURS = (36, 33, 35, 32, 34, 31)

    def __init__(self, rank: int, pipe: IO[bytes], sink: IO[bytes] | None, log: IO[bytes] | None) -> None:
        self.pipe, self.sink, self.log = pipe, sink, log
        self.tail: deque[bytes] = deque(maxlen=5)
        self.over = threading.Event()
        self.prefix = b"" if rank == 0 else f"[{rank}] ".encode()
        if self.prefix and sink is not None and sink.isatty() and not os.environ.get("NO_COLOR"):
            self.prefix = b"\x1b[%dm[%d]\x1b[0m " % (self._COLOURS[rank % len(self._COLOURS)], rank)
        self._partial = b""

    def feed(self, chunk: bytes) -> bytes:
        """What to show now. An empty chunk is the end."""
        self._partial += chunk
        if not chunk and self._partial:
            self._partial += b"\n"
        lines = self._LINE.findall(self._partial)
        self._partial = self._partial[sum(map(len, lines)) :]
        if len(self._partial) > 1 << 16:  # no line is that long: somebody writes bytes
            lines, self._partial = [*lines, self._partial + b"\n"], b""
        self.tail.extend(lines)
        return b"".join(self.prefix + line for line in lines) if self.prefix else chunk
