"""Points in a step at which tests make a process fail.

Without a listener, a point costs one comparison: ``failpoints.listener is not None``.
"""

from __future__ import annotations

from collections.abc import Callable

# Called with the role of the process, its index, the step, and the state that the step has reached; it may raise.
listener: Callable[[str, int, int, str], object] | None = None


def reach(role: str, index: int, step: int, state: str) -> None:
    """Process ``index`` of a ``role`` has reached a ``state`` of its step."""
    if listener is not None:
        listener(role, index, step, state)


def fail_at(role: str, index: int, step: int, state: str, error: BaseException) -> None:
    """Raises ``error`` once, the first time that the place is reached."""

    def fail(*place: object) -> None:
        global listener
        if place == (role, index, step, state):
            listener = None
            raise error

    global listener
    listener = fail
