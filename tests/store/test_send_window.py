"""Who sends first, and what becomes of errors, with transfers that are done when the test says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorwire.device import Completion
from tensorwire.errors import PeerLost, RemoteAccessError, StepInterrupted, WaitTimeout
from tensorwire.store.send_window import SendWindow
from tensorwire.testing.patience import patient


class Transfer(Completion):
    """Done once ``arrive()`` was called."""

    def __init__(self, done: bool = False) -> None:
        self._done = done
        self._call: Callable[[Completion], object] | None = None

    @property
    def done(self) -> bool:
        return self._done

    def wait(self, timeout: float = 60.0) -> None:
        assert self._done

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        self._call = call

    def arrive(self) -> None:
        self._done = True
        assert self._call is not None
        self._call(self)


class Link:
    """What was sent, by urgency, and its transfers."""

    def __init__(self, ahead: int) -> None:
        self.send_window = SendWindow(ahead)
        self.sent: list[int] = []
        self.transfers: list[Transfer] = []
        self.broken = False

    def submit(self, urgency: int, nbytes: int = 10, *, at_once: bool = False) -> None:
        def send() -> Completion:
            if self.broken:
                raise PeerLost("gone")
            self.sent.append(urgency)
            self.transfers.append(Transfer(at_once))
            return self.transfers[-1]

        self.send_window.submit((urgency, 0), nbytes, send)


def test_the_most_urgent_overtakes_all_that_was_not_handed_over() -> None:
    link = Link(ahead=20)
    for urgency in (9, 8, 7, 6, 1):
        link.submit(urgency)
    assert link.sent == [9, 8]
    link.transfers[0].arrive()
    assert link.sent == [9, 8, 1]
    link.submit(2)
    link.transfers[1].arrive()
    link.transfers[2].arrive()
    assert link.sent == [9, 8, 1, 2, 6]


def test_among_equals_the_first_goes_first_and_a_large_one_holds_up_the_rest() -> None:
    link = Link(ahead=20)
    for nbytes in (10, 100, 10, 10):
        link.submit(5, nbytes)
    assert len(link.sent) == 2
    link.transfers[0].arrive()
    assert len(link.sent) == 2
    link.transfers[1].arrive()
    assert len(link.sent) == 4


def test_what_is_done_at_once_takes_no_stack() -> None:
    link = Link(ahead=10)
    link.submit(0)
    for urgency in range(1, 2000):
        link.submit(urgency, at_once=True)
    link.transfers[0].arrive()
    assert link.sent == list(range(2000))


def test_flush_waits_until_everything_has_arrived() -> None:
    link = Link(ahead=10)
    link.send_window.flush(0)
    link.submit(1)
    link.submit(2)
    with pytest.raises(WaitTimeout):
        link.send_window.flush(0)
    link.transfers[0].arrive()
    with pytest.raises(WaitTimeout):
        link.send_window.flush(0)
    link.transfers[1].arrive()
    link.send_window.flush(0)


def test_an_error_comes_out_of_the_next_call_and_nothing_more_is_sent() -> None:
    link = Link(ahead=10)
    link.submit(1)
    link.submit(2)
    link.broken = True
    link.transfers[0].arrive()
    assert isinstance(link.send_window.error, PeerLost)
    for call in (lambda: link.submit(3), lambda: link.send_window.flush(0)):
        with pytest.raises(PeerLost, match="gone"):
            call()
    assert link.sent == [1]


@pytest.mark.parametrize("error", [MemoryError("no memory"), PeerLost("gone")])
def test_whatever_ends_a_send_in_a_thread_of_the_device_is_kept(error: Exception) -> None:
    window, first = SendWindow(10), Transfer()

    def fail() -> Completion:
        raise error

    window.submit((1, 0), 10, lambda: first)
    window.submit((2, 0), 10, fail)
    first.arrive()
    with pytest.raises(type(error)):
        window.flush(patient(0.5))


def test_a_transfer_that_fails_is_kept() -> None:
    class Refused(Transfer):
        def wait(self, timeout: float = 60.0) -> None:
            raise RemoteAccessError("refused")

    window, first = SendWindow(10), Refused()
    window.submit((1, 0), 10, lambda: first)
    first.arrive()
    with pytest.raises(RemoteAccessError):
        window.flush(patient(0.5))


class Interrupted(Transfer):
    """The thread that asks how it ended is interrupted."""

    def wait(self, timeout: float = 60.0) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["send", "wait"])
def test_an_interrupt_of_the_thread_that_submits_comes_out_of_it_once(where: str) -> None:
    def send() -> Completion:
        if where == "send":
            raise KeyboardInterrupt
        return Interrupted(done=True)

    window = SendWindow(10)
    with pytest.raises(KeyboardInterrupt):
        window.submit((1, 0), 10, send)
    for again in (lambda: window.flush(patient(0.5)), lambda: window.submit((1, 0), 10, Transfer)):
        with pytest.raises(StepInterrupted, match="interrupted by KeyboardInterrupt"):  # nobody has interrupted these
            again()
