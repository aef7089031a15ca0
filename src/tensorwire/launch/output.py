"""The output of a job's processes, line by line, each with the name of its process.

Every process has a pipe for each of its two streams. One thread's event loop reads them all and writes whole lines. It
never drops output: a slow reader slows the job down, as it would a script alone, and if the reader exits, processes get
its ``BrokenPipeError``. On a terminal rich keeps a picture of the job (`launch.table`) below the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import selectors
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorwire.launch.output_lines import OutputLines, last_state

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

READ_BYTES = 1 << 16
REFRESH_SECONDS = 0.5
# Lines above a picture are collected, for each time the picture is drawn anew.
COLLECT_SECONDS = 0.2
COLLECT_BYTES = 1 << 18
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


@dataclass(eq=False)
class _Stream:
    """One process's standard output or error: ``fd`` is what we read, ``target`` is 1 or 2."""

    name: str
    fd: int
    target: int
    lines: OutputLines


class ProcessOutput:
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
        self._streams: list[_Stream] = []
        self._broken: set[int] = set()
        self._thread: threading.Thread | None = None
        if prefix:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(_stop)
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
            self._call_in_loop(self._add, _Stream(name, reader, target, OutputLines(prefix)))
            writers.append(writer)
        return writers[0], writers[1]

    def print_line(self, text: str) -> None:
        """The launcher's own words on standard error, after everything that was printed before."""
        data = (text + "\n").encode("utf-8", "replace")
        if self._thread is None:
            self._write(2, data)
        else:
            self._call_in_loop(self._drain)
            self._call_in_loop(self._write, 2, data)

    def show_cursor(self, *, shown: bool) -> None:
        """Where a picture hides the terminal's cursor, shows it to others for a while."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                os.write(1, b"\x1b[?25h" if shown else b"\x1b[?25l")

    def freeze(self) -> None:
        """The job has ended: the picture stays as it is now."""
        if self._thread is not None:
            self._call_in_loop(self._stop_picture)

    def close(self, timeout: float | None = None) -> None:
        """Returns when everything that was printed is shown; or, where nobody reads it, after ``timeout``. Idempotent.

        The processes should have ended: what those print that live on is shown to nobody.
        """
        if self._thread is not None:
            self._call_in_loop(self._loop.stop)
            self._thread.join(timeout)

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self.watched:
                self._start_picture()
            self._tick()
            self._loop.run_forever()
            self._drain()
        finally:  # whatever went wrong: no process may wait for a reader that is not there
            for stream in list(self._streams):
                self._remove(stream)
            self._stop_picture()
            self._loop.close()

    def _tick(self) -> None:
        """What is shown again and again: the picture, or the state of progress bars."""
        self._loop.call_later(REFRESH_SECONDS, self._tick)
        if self._live is not None:
            self._draw()
            return
        for stream in self._streams:
            self._write(stream.target, stream.lines.progress(self._loop.time()))

    def _add(self, stream: _Stream) -> None:
        self._streams.append(stream)
        self._loop.add_reader(stream.fd, self._read, stream)

    def _read(self, stream: _Stream) -> bool:
        """Whether there was something."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._write(stream.target, stream.lines.take(data))
        if not data or stream.target in self._broken:
            self._remove(stream)
        return bool(data)

    def _remove(self, stream: _Stream) -> None:
        self._write(stream.target, stream.lines.flush())
        self._streams.remove(stream)
        self._loop.remove_reader(stream.fd)
        os.close(stream.fd)

    def _drain(self) -> None:
        """All that is in the pipes by now, and no more: somebody may go on printing."""
        for stream in list(self._streams):
            left = 1 << 20  # a pipe holds no more, unless root made it
            while left > 0 and stream in self._streams and self._read(stream):
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
            if not self._above:
                self._loop.call_later(COLLECT_SECONDS, self._draw)
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

    def _draw(self) -> None:
        """The lines that came meanwhile, and the picture anew below them."""
        if self._live is None:
            return
        assert self._console is not None
        data, self._above = b"".join(self._above), []
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
            get_renderable=self._picture_now,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _picture_now(self) -> RenderableType:
        assert self._picture is not None
        rests = {s.name: last_state(s.lines.rest) for s in self._streams if s.lines.rest}
        return self._picture({name: rest.decode("utf-8", "replace") for name, rest in rests.items()})

    def _stop_picture(self) -> None:
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


def _stop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Something went wrong: reports it, and reads nothing more."""
    loop.default_exception_handler(context)
    loop.stop()


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
