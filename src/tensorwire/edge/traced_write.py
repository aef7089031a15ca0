"""The span of one transfer of an edge in a trace."""

from __future__ import annotations

from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.observe import spans
from tensorwire.observe.spans import clock


def write_traced(
    channel: Channel, source: View, target: RemoteView, signal: tuple[RemoteView, int] | None, step: int, label: str
) -> Completion:
    """``channel.write``; where a trace is made, it says from when to when bytes of ``step`` move."""
    if not spans.enabled:
        return channel.write(source, target, signal)
    start = clock()
    completion = channel.write(source, target, signal)
    completion.on_done(lambda _: spans.add("transfer", step, start, clock(), label))
    return completion
