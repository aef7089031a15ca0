"""Python callbacks for events from native threads: a transfer completed, a peer was lost."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable

from tensorwire._native import Notices

_NOBODYS = 0  # a token that only wakes the thread


class Callbacks:
    """Calls that wait for a notice of their own. One thread runs them, from the first until ``close`` finds none left;
    a call that comes later still has another one."""

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
                thread = threading.Thread(target=self._run, name="tensorwire-callbacks", daemon=True)
                thread.start()
                self._thread = thread
        return token

    def _run(self) -> None:
        while self._is_needed():
            call = self._calls.pop(self.notices.take(), None)
            if call is None:
                continue
            try:
                call()
            except BaseException as error:  # the next callback is not to suffer for this one
                sys.unraisablehook(_Unraisable(error, call))
            del call  # and neither is memory that it holds

    def _is_needed(self) -> bool:
        with self._lock:
            if self._closed and not self._calls:
                self._thread = None
                return False
            return True

    def close(self) -> None:
        """Returns when every call has run, also those whose token is posted only now; the thread ends. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self.notices.post(_NOBODYS)
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
