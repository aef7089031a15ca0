"""TensorBoard's event file of one worker. A thread writes it, so no step waits for a disk."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tensorwire.errors import ArgumentError

WRITE_SECONDS = 1.0
# Reports that wait to be written; where a disk is slower than that, the oldest are dropped.
MOST_WAITING = 100_000


class EventFile:
    """Writes to ``folder/worker-RANK``. Raises `ArgumentError` without TensorBoard, or if it cannot write there."""

    def __init__(self, folder: str, rank: int) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ArgumentError(
                f"event files in {folder} need the package tensorboard: pip install tensorboard, or leave out "
                "--tensorboard and TENSORWIRE_TENSORBOARD"
            ) from None
        place = Path(folder) / f"worker-{rank}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._writer = Writer(str(place))
        except OSError as error:
            raise ArgumentError(f"cannot write event files to {place}: {error.strerror}") from None
        self._waiting: deque[tuple[int, float, Mapping[str, float]]] = deque(maxlen=MOST_WAITING)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tensorwire-tensorboard", daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Returns at once."""
        self._waiting.append((step, time.time(), values))

    def close(self) -> None:
        """Writes what still waits. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                self._writer.close()

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(WRITE_SECONDS)
            try:
                self._write()
            except OSError as error:  # a full disk ends the file, not the training
                logging.getLogger("tensorwire").warning("TensorBoard's file ends here: %s", error)
                return

    def _write(self) -> None:
        while self._waiting:
            step, when, values = self._waiting.popleft()
            for name, value in values.items():
                self._writer.add_scalar(name, value, step=step, wall_time=when)
        self._writer.flush()
