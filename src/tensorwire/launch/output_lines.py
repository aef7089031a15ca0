"""The lines that one process prints, each whole and with its name in front. A line that is redrawn again and again is
printed now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

# A line longer than this is cut: memory is bounded.
LINE_BYTES = 1 << 20
# Where there is no terminal, how often a progress bar that rewrites its line becomes a line.
PROGRESS_SECONDS = 10.0


def last_state(line: bytes) -> bytes:
    """What a terminal shows in the end of a line that carriage returns rewrote."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


@dataclass
class OutputLines:
    """One process's standard output or error, with ``prefix`` before each line."""

    prefix: bytes
    rest: bytes = b""  # of a line that is not finished
    printed: bytes = b""  # of it, what has been printed already
    shown: float | None = None  # when that was, or when its first state came

    def take(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
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
        return self._lines(rest) if rest and rest != self.printed else b""

    def progress(self, now: float) -> bytes:
        """The present state of a line that is rewritten again and again, if it is time to show it."""
        if not self.rest.startswith(b"\r"):
            return b""
        self.shown = now if self.shown is None else self.shown
        if now - self.shown < PROGRESS_SECONDS:
            return b""
        self.shown, printed, self.printed = now, self.printed, self.rest
        return self._lines(self.rest) if self.rest != printed else b""

    def _lines(self, whole: bytes) -> bytes:
        if b"\r" in whole:
            whole = b"\n".join(last_state(line) for line in whole.split(b"\n"))
        return self.prefix + whole.replace(b"\n", b"\n" + self.prefix) + b"\n"
