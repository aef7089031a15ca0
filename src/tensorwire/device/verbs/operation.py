"""An operation posted on a queue pair under one number, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorwire.device.contract import Completion
from tensorwire.errors import PeerLost, WaitTimeout

if TYPE_CHECKING:
    from tensorwire.device.verbs.queue_pair import QueuePair


class Operation(Completion):
    """What was posted at once, under one number. It holds its memory until it is done."""

    number = 0
    error: Exception | None = None
    is_atomic = False
    result = 0  # of an atomic: what the word was
    tokens: tuple[int, ...] = ()
    whole: Operation | None = None  # the first part, of an operation in several

    def __init__(self, pair: QueuePair, requests: list[Any], kept: object, credits: int = 0) -> None:
        self._pair = pair
        self.requests = requests
        self.kept = kept
        self.credits = credits

    def fail(self, error: Exception, nothing: Any) -> None:
        """It fails in its turn, and the request ``nothing`` goes instead: its place in the order is kept."""
        self.error, self.credits = error, 0
        self.requests = [nothing]

    @property
    def done(self) -> bool:
        pair = self._pair
        if pair.done < self.number:
            pair.nic.drain()
        return pair.done >= self.number or pair.destroy_if_lost()

    def wait(self, timeout: float = 60.0) -> None:
        pair = self._pair
        if pair.done < self.number:
            outcome = pair.wait(self.number, timeout)
            if outcome == 1:
                raise WaitTimeout(
                    f"verbs: no acknowledgement within {timeout:g} s; the transfer goes on: do not reuse its memory"
                )
            if outcome == 2 and pair.done < self.number:
                pair.destroy_if_lost()
                raise PeerLost(pair.why_lost())
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        self._pair.call_when_done(self, lambda: call(self))
