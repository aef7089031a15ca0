"""``tensorwire run --trace FILE``: gathers the processes' traces in one file when the job has ended."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tensorwire.errors import ArgumentError
from tensorwire.observe.files import check_file
from tensorwire.trace.chrome import write_chrome
from tensorwire.trace.parts import read_trace


class TraceFile:
    """Where a job's trace goes. Raises `ArgumentError` for a path that cannot be written."""

    def __init__(self, path: str) -> None:
        check_file(path, option="--trace")
        self._path = Path(path)
        self._own: str | None = None
        self._folder = ""

    def folder(self, environment: Mapping[str, str]) -> str:
        """Where each process leaves its own trace: in ``TENSORWIRE_TRACE``, or in a folder that goes with us."""
        if not self._folder:
            self._folder = environment.get("TENSORWIRE_TRACE", "")
        if not self._folder:
            try:
                self._folder = self._own = tempfile.mkdtemp(prefix="tensorwire-trace-")
            except OSError as error:
                raise ArgumentError(f"--trace needs a temporary folder: {error.strerror}: set TMPDIR") from None
        return self._folder

    def finish(self) -> str:
        """Writes what there is; says in words how that went."""
        try:
            records = read_trace(self._folder, torn=True) if self._folder else {}
            if not records:
                return f"there is no trace: no process lived to write its own, and {self._path} is not made"
            write_chrome(self._path, records)
        except OSError as error:
            return f"the trace could not be written to {self._path}: {error.strerror}"
        finally:
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
        return f"the trace is in {self._path}: look at it with tensorwire trace {self._path}, or at ui.perfetto.dev"
