"""A command's progress: on a terminal a spinner at once, else a plain line after two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

Report = Callable[[str], None]

PATIENCE = 2.0  # seconds that something takes before a line says what it is, where there is no terminal


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Report]:
    """Prints what is being done on standard error, until the block ends.

    Args:
        doing: What begins now, such as ``loading PyTorch``.

    Yields:
        ``report(doing)``: what is being done from then on. Of the steps between two looks, two seconds apart, a plain
        line names the last one only.
    """
    if sys.stderr.isatty():
        with _spinner(doing) as report:
            yield report
    else:
        lines = _Lines(doing)
        try:
            yield lines.report
        finally:
            lines.end()


@contextlib.contextmanager
def _spinner(doing: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots", Text(doing))
    # Standard output stays where it was: it may be a file.
    with Live(spinner, console=Console(stderr=True), transient=True, redirect_stdout=False):
        yield lambda doing: spinner.update(text=Text(doing))


class _Lines:
    """A thread that says what is being done whenever that has lasted."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorwire-progress", daemon=True)
        self._thread.start()

    def report(self, doing: str) -> None:
        """From now on this is being done."""
        self._doing = doing

    def end(self) -> None:
        """Says nothing more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        shown = ""
        while not self._over.wait(PATIENCE):
            if (doing := self._doing) != shown:
                shown = doing
                with contextlib.suppress(OSError):  # nobody reads it
                    print(f"tensorwire: {doing} ...", file=sys.stderr, flush=True)
