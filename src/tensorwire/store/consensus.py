"""The operation that all workers of a round agree on, and the message if they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorwire.errors import TensorwireError
from tensorwire.store.step_header import StepOperation

_LOADED = {StepOperation.ASSIGN: "parameters", StepOperation.LOAD: "state"}


class Disagreement(TensorwireError):
    """The workers do not do the same thing in one round: ``worker`` did ``what``.

    One of them may have failed: how it ended says more.
    """

    def __init__(self, worker: int, what: str) -> None:
        super().__init__(f"worker {worker} {what}")
        self.worker, self.what = worker, what


class Finished(Disagreement):
    """Worker ``worker`` is done, while others are not."""


def agreed(operations: Mapping[int, StepOperation], idle: Sequence[int], updates: int) -> StepOperation:
    """What the workers of a round all do. ``idle`` ones wait at the end of ``job.uneven()``; ``updates``: steps so far.

    Raises `Finished` or `Disagreement`.
    """
    if set(operations.values()) == {StepOperation.UPDATE, StepOperation.SKIP}:
        return StepOperation.SKIP
    first, *others = operations.values()
    finished = [w for w, operation in operations.items() if operation is StepOperation.FINISH]
    going = [w for w in operations if w not in finished]
    if finished and going:
        raise Finished(
            finished[0],
            f"finished after step {updates}, worker {going[0]} goes on with step {updates + 1}: give every worker the "
            "same number of steps, or put the loop into `with job.uneven():`",
        )
    if finished and idle:
        raise Finished(
            finished[0],
            f"finished, worker {idle[0]} waits for it at the end of `with job.uneven():`: put the loop of every worker "
            "into such a block",
        )
    kind = next((o for o in _LOADED if o in operations.values()), None)
    if kind is None or (not idle and all(o is first for o in others)):
        return first
    loaded = next(w for w, o in operations.items() if o is kind)
    other = next((w for w, o in operations.items() if o is not kind), idle[0] if idle else loaded)
    raise Disagreement(
        loaded,
        f"loaded {_LOADED[kind]} before step {updates + 1} and worker {other} did not: "
        "call load_state_dict on every worker",
    )


def check_alike(options: Mapping[int, tuple[float, ...]], updates: int) -> None:
    """Raises `Disagreement` where workers that each update parameters of their own no longer have the same ones."""
    (first, mine), *others = options.items()
    for worker, theirs in others:
        if theirs != mine:
            raise Disagreement(
                worker,
                f"has other parameters or another optimizer state than worker {first} in step {updates + 1}: change or "
                "load the same on every worker, or call optimizer.write_parameters() on all after it",
            )
