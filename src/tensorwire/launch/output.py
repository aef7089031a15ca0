"""What the processes of a job print, line by line, each with the name of who printed it.

Every process has a pipe for each of its two streams; one thread here reads them all and writes whole lines. It never
drops output: a reader that is slow slows the job down, as it would without us, and one that has gone is gone for the
job's processes, too. On a terminal a picture of the job (`launch.table`) stays below the lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

READ_BYTES = 1 << 16
# A line longer than this is cut: memory is bounded.
LINE_BYTES = 1 << 20
# Where there is no terminal, how often a progress bar that rewrites its line becomes a line.
PROGRESS_SECONDS = 10.0
REFRESH_SECONDS = 0.5
# Lines above a picture are collected, for each time the picture is drawn anew.
COLLECT_SECONDS = 0.2
COLLECT_BYTES = 1 << 18
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def last_state(line: bytes) -> bytes:
    """What a terminal shows in the end of a line that carriage returns rewrote."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


@dataclass
class _Stream:
    """One process's standard output or error."""

    name: str
    fd: int  # what we read
    target: int  # 1 or 2
    prefix: bytes
    rest: bytes = b""  # of a line that is not finished
    told: bytes = b""  # of it, what has been shown already
    shown: float | None = None  # when that was, or when its first state came

    def take(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, with the name before each."""
        whole, newline, rest = (self.rest + data).rpartition(b"\n")
        if b"\r" in rest:
            state = last_state(rest)
            rest = b"\r" + state + (b"\r" if rest.endswith(b"\r") else b"")
        self.rest = rest
        if len(rest) > LINE_BYTES:
            whole, newline, self.rest = whole + newline + rest, b"\n", b""
        return self._lines(whole) if newline else b""

    def flush(self) -> bytes:
        """The unfinished line, as a line, unless it has been shown."""
        rest, self.rest = self.rest, b""
        return self._lines(rest) if rest and rest != self.told else b""

    def progress(self, now: float) -> bytes:
        """The present state of a line that is rewritten again and again, if it is time to show it."""
        if not self.rest.startswith(b"\r"):
            return b""
        self.shown = now if self.shown is None else self.shown
        if now - self.shown < PROGRESS_SECONDS:
            return b""
        self.shown, told, self.told = now, self.told, self.rest
        return self._lines(self.rest) if self.rest != told else b""

    def _lines(self, whole: bytes) -> bytes:
        if b"\r" in whole:
            whole = b"\n".join(last_state(line) for line in whole.split(b"\n"))
        return self.prefix + whole.replace(b"\n", b"\n" + self.prefix) + b"\n"


class Output:
    """Reads what a job's processes print, from the moment it is made until `close`.

    ``names``: all that will ever print. ``prefix`` False: the processes keep our own streams, and there is no thread.
    ``picture``: what to show below the lines, on a terminal: called with each process's unfinished line.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        prefix: bool = True,
        picture: Callable[[dict[str, str]], RenderableType] | None = None,
    ) -> None:
        self._names = list(names)
        self._width = max((len(name) for name in names), default=0)
        self._picture = picture
        self._console = _terminal() if prefix and sys.stdout.isatty() else None
        self._live: Live | None = None
        self._above: list[bytes] = []  # what is to be shown above the picture
        self._drawn = 0.0  # when it was
        self._streams: dict[int, _Stream] = {}
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: set[int] = set()
        if prefix:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="tensorwire-output", daemon=True)
            self._thread.start()

    @property
    def watched(self) -> bool:
        """Whether there is a terminal that a picture can be shown on."""
        return self._picture is not None and self._console is not None and not self._console.is_dumb_terminal

    # ---- what the launcher calls

    def open(self, name: str) -> tuple[int, int] | tuple[None, None]:
        """Standard output and error for a process; ours to close once it has been started. None: it keeps ours."""
        if self._thread is None:
            return None, None
        prefix = self._prefix(name)
        writers = []
        for target in (1, 2):
            reader, writer = os.pipe()  # neither is inherited but where Popen says so
            os.set_blocking(reader, False)
            stream = _Stream(name, reader, target, prefix)
            self._tell(lambda s=stream: self._add(s))  # type: ignore[misc]
            writers.append(writer)
        return writers[0], writers[1]

    def say(self, text: str) -> None:
        """The launcher's own words on standard error, after everything that was printed before."""
        data = (text + "\n").encode("utf-8", "replace")
        if self._thread is None:
            self._write(2, data)
            return

        def speak() -> None:
            self._drain()
            self._write(2, data)

        self._tell(speak)

    def show_cursor(self, *, shown: bool) -> None:
        """Where a picture hides the terminal's cursor, shows it to others for a while."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                os.write(1, b"\x1b[?25h" if shown else b"\x1b[?25l")

    def freeze(self) -> None:
        """The job has ended: the picture stays as it is now."""
        if self._thread is not None:
            self._tell(self._stop_picture)

    def close(self, timeout: float | None = None) -> None:
        """Returns when everything that was printed is shown; or, where nobody reads it, after ``timeout``. Idempotent.

        The processes should have ended: what those print that live on is shown to nobody.
        """
        if self._thread is None:
            return

        def end() -> None:
            self._closing = True

        self._tell(end)
        self._thread.join(timeout)

    def _tell(self, call: Callable[[], None]) -> None:
        self._news.put(call)
        with contextlib.suppress(OSError):  # closed before
            os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self.watched:
                self._start_picture()
            while not self._closing:
                self._look_around()
                self._hear()
                self._show_progress()
            self._drain()
        finally:  # whatever went wrong: no process may wait for a reader that is not there
            for stream in list(self._streams.values()):
                self._remove(stream)
            self._stop_picture()
            self._selector.close()
            os.close(self._wake)

    def _look_around(self) -> None:
        patience = COLLECT_SECONDS if self._above else REFRESH_SECONDS if self._live or self._progress() else None
        for key, _ in self._selector.select(patience):
            if key.fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._read(self._streams[key.fd])

    def _progress(self) -> bool:
        """Whether somebody draws a progress bar."""
        return any(s.rest.startswith(b"\r") for s in self._streams.values())

    def _hear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()

    def _add(self, stream: _Stream) -> None:
        self._streams[stream.fd] = stream
        self._selector.register(stream.fd, selectors.EVENT_READ)

    def _read(self, stream: _Stream) -> bool:
        """Whether there was something."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._write(stream.target, stream.take(data) if data else stream.flush())
        if not data or stream.target in self._broken:
            self._remove(stream)
        return bool(data)

    def _remove(self, stream: _Stream) -> None:
        if self._streams.pop(stream.fd, None) is not None:
            self._write(stream.target, stream.flush())
            self._selector.unregister(stream.fd)
            os.close(stream.fd)

    def _drain(self) -> None:
        """All that is in the pipes by now, and no more: somebody may go on printing."""
        for stream in list(self._streams.values()):
            left = 1 << 20  # a pipe holds no more, unless root made it
            while left > 0 and stream.fd in self._streams and self._read(stream):
                left -= READ_BYTES

    # ---- what people see

    def _prefix(self, name: str) -> bytes:
        text = f"{name:<{self._width}} |"
        if self._console is None or self._console.no_color:
            return f"{text} ".encode()
        colour = _COLOURS[self._names.index(name) % len(_COLOURS)] if name in self._names else _COLOURS[0]
        return f"\x1b[{colour}m{text}\x1b[0m ".encode()

    def _write(self, target: int, data: bytes) -> None:
        if not data or target in self._broken:
            return
        if self._live is not None and (target == 1 or sys.stderr.isatty()):
            self._above.append(data)
            if sum(map(len, self._above)) > COLLECT_BYTES:
                self._draw()
            return
        try:
            _write_all(target, data)
        except OSError:
            self._give_up(target)

    def _give_up(self, target: int) -> None:
        """Nobody reads it any more; nothing that is buffered must fail once more at exit."""
        self._broken.add(target)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)

    def _show_progress(self) -> None:
        now = time.monotonic()
        if self._live is not None:
            if now - self._drawn >= (COLLECT_SECONDS if self._above else REFRESH_SECONDS):
                self._draw()
            return
        for stream in list(self._streams.values()):
            self._write(stream.target, stream.progress(now))

    def _draw(self) -> None:
        """The lines that came meanwhile, and the picture anew below them."""
        assert self._live is not None
        assert self._console is not None
        data, self._above = b"".join(self._above), []
        self._drawn = time.monotonic()
        try:
            if data:
                self._console.print(_Raw(data.decode("utf-8", "replace")), soft_wrap=True, end="")
            else:
                self._live.refresh()
        except OSError:
            self._live = None
            self._give_up(1)

    def _start_picture(self) -> None:
        from rich.live import Live

        self._live = Live(
            console=self._console,
            get_renderable=self._look,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _look(self) -> RenderableType:
        assert self._picture is not None
        unfinished = {s.name: last_state(s.rest).decode("utf-8", "replace") for s in self._streams.values() if s.rest}
        return self._picture(unfinished)

    def _stop_picture(self) -> None:
        if self._live is not None:
            self._draw()
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()


class _Raw:
    """Text that goes to the terminal as it is: a process's own colours are its own business."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: object, options: object) -> object:
        from rich.segment import Segment

        yield Segment(self._text)


def _terminal() -> Console:
    from rich.console import Console

    # Any text can be shown: what the terminal cannot is replaced.
    encoding = sys.stdout.encoding or "utf-8"
    file = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding=encoding, errors="replace", newline="")
    return Console(file=file, highlight=False)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody made our terminal non-blocking
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_WRITE)
                selector.select()
