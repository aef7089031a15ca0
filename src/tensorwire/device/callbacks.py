"""Python callbacks for events from native threads: a transfer completed, a peer was lost."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable

from tensorwire._native import Notices


class Callbacks:
    """Calls that wait for a notice of their own, run by one thread that begins with the first of them."""

    def __init__(self) -> None:
        self.notices = Notices()
        self._calls: dict[int, Callable[[], object]] = {}
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, call: Callable[[], object]) -> int:
        """A token; ``call`` runs once it is posted. Give it to one poster, or to several: the first one counts."""
        with self._lock:
            token = next(self._tokens)
            self._calls[token] = call
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensorwire-callbacks", daemon=True)
                self._thread.start()
        return token

    def run_orphan(self, token: int) -> None:
        """For a thread that posts while ``close`` may be at work: runs the call here if its thread ended without it."""
        thread = self._thread
        if not self._closed or thread is threading.current_thread():
            return
        if thread is not None:
            thread.join(30.0)
        call = self._calls.pop(token, None)
        if call is not None:
            call()

    def _run(self) -> None:
        while token := self.notices.take():
            call = self._calls.pop(token, None)
            if call is None:
                continue
            try:
                call()
            except BaseException as error:  # the next callback is not to suffer for this one
                sys.unraisablehook(_Unraisable(error, call))
            del call  # and neither is memory that it holds

    def close(self) -> None:
        """Runs what has been posted; the thread ends. Idempotent."""
        self._closed = True
        self.notices.close()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(30.0)


class _Unraisable:
    """What ``sys.unraisablehook`` takes."""

    def __init__(self, error: BaseException, call: object) -> None:
        self.exc_type: type[BaseException] = type(error)
        self.exc_value: BaseException | None = error
        self.exc_traceback = error.__traceback__
        self.err_msg: str | None = "a callback of a transfer failed"
        self.object = call
