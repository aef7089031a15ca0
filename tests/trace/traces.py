"""Traces made by hand."""

from __future__ import annotations

from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.parts import ProcessTrace


def record(process: str, spans: list[Span], clock: Clock | None = None) -> ProcessTrace:
    """One process's trace."""
    return ProcessTrace(process, {"fact": 1}, {"bytes": 2}, spans, clock or Clock(), "machine")


def job(steps: int = 6, *, begin: float = 1000.0) -> dict[str, ProcessTrace]:
    """Two workers and a server: steps of 10 s, of which worker 1 computes 6 and worker 0 4; transfers overlap."""
    workers: dict[str, list[Span]] = {"worker-0": [], "worker-1": []}
    server: list[Span] = []
    for n in range(steps):
        number, t = n + 2, begin + 10 * n
        for name, computing in (("worker-0", 4), ("worker-1", 6)):
            workers[name] += [
                Span("compute", number, t, t + computing),
                Span("transfer", number, t + 1, t + 2, "server 0, bucket 0"),
                Span("transfer", number, t + 1.5, t + 3, "server 0, bucket 1"),
                Span("push", number, t + computing, t + computing + 1),
                Span("wait", number, t + computing + 1, t + 10),
            ]
        server += [Span("update", number, t + 7, t + 8), Span("update", number, t + 8.5, t + 9)]
    return {**{name: record(name, spans) for name, spans in workers.items()}, "server-0": record("server-0", server)}
