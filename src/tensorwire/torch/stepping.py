"""The course of an optimizer's steps: pushing to all its stores, then waiting for them.

A step interrupted while it pushes cannot continue: its gradients may have changed since. A step interrupted while it
waits continues with the next call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.launch import Worker
from tensorwire.observe import ranges, spans
from tensorwire.observe.spans import clock
from tensorwire.store.course import Course
from tensorwire.store.step_header import LEFT_OUT
from tensorwire.torch.overlap import Overlap
from tensorwire.torch.part import Part
from tensorwire.torch.sparse_rows import SparseRows
from tensorwire.torch.state import SavedState


class Stepping:
    """The steps of one optimizer. ``clip``: the largest norm in force; 0: none is asked for.

    Attributes:
        overlap: Where gradients are pushed from inside of backward.
        grad_norm: The norm of the last step that asked for one.
    """

    def __init__(self, worker: Worker, course: Course, saved: SavedState, clip: Callable[[], float]) -> None:
        self._worker, self._course, self._saved, self._clip = worker, course, saved, clip
        self.parts: list[Part] = []
        self.rows: list[SparseRows] = []
        self.overlap: Overlap | None = None
        self.grad_norm: float | None = None
        self._pid = os.getpid()
        self._pushed = 0  # steps whose gradients have all left
        self._waiting = False  # for the version that comes of the last of them
        self._left_out = False  # it was, because its norm is not finite

    @property
    def _name(self) -> str:
        return f"step {self._pushed + 1}"

    def push(self, skip: bool, check_norm: bool, state: Mapping[Any, Any], scaled: bool) -> None:
        """Every bucket of this step is on its way. What is wrong on this worker is found before the first of them."""
        if self.overlap is not None:
            self.overlap.settle()
        if self.joining:
            self._take_part()
            return
        if not any(part.is_open for part in self.parts):
            self._check()
        gradients = [[part.gradient(i) for i in range(len(part.params))] for part in self.parts]
        rows = [each.gradient() for each in self.rows]
        if self.rows and scaled:
            raise Unsupported("sparse gradients go without a GradScaler: use bfloat16, which needs no scaling")
        self._set(state)
        for part in self.parts:
            part.check_options()
            if not part.is_open:
                part.client.ready()
        norm = self._clip()  # refused before anything leaves
        with self._course.unit(self._name):
            if self.overlap is not None:
                self.overlap.forget()
            for part, mine in zip(self.parts, gradients, strict=True):
                if skip:
                    part.skip_round()
                    continue
                if not part.is_open:
                    part.open_round(norm)
                if self.overlap is None:
                    part.push(part.unsent(), mine)
                else:
                    self.overlap.push(part, part.unsent(), mine)
            for each, found in zip(self.rows, rows, strict=True):
                each.push(found)
            self._pushed, self._waiting, self._check_norm, self._left_out = self._pushed + 1, True, check_norm, False

    @property
    def joining(self) -> bool:
        """Whether this worker takes part in no rounds yet."""
        return any(part.client.joining for part in self.parts)

    def _take_part(self) -> None:
        """The first step of a worker that joins: it has shown that it can compute, and others may wait for it now.

        Its gradients are of values that the others do not have any more, and go nowhere.
        """
        for part in self.parts:
            part.take_part()
        for rows in self.rows:
            rows.written = False
            rows.show()
        if self._saved.pending:
            self._saved.loaded()
        self._pushed, self._left_out = self.parts[0].client.updates, False

    def _set(self, state: Mapping[Any, Any]) -> None:
        """Values and state that the user has set become the servers'."""
        stores: list[Part | SparseRows] = [*self.parts, *self.rows]
        for each in stores:
            if each.written:
                each.assign()
        if self._saved.pending:
            with self._course.unit("loading the optimizer's state"):
                for part in self.parts:
                    part.load_state(partial(self._saved.items, part.share))
                for rows in self.rows:
                    rows.load_state(state.get(rows.param, {}))
                self._saved.loaded()

    def open(self) -> bool:
        """Begins the rounds of a step from inside of backward; False if that has to wait for ``step()``."""
        if self.joining:
            return False
        if self._saved.pending or any(part.written for part in self.parts):
            return False  # values that were loaded become the store's first, and not in the middle of backward
        if os.getpid() != self._pid:
            raise ArgumentError("this optimizer belongs to the parent process: a forked child cannot push gradients")
        self._check()
        for part in self.parts:
            part.client.ready()
        norm = self._clip()
        with self._course.unit(self._name):
            for part in self.parts:
                part.open_round(norm)
        return True

    def _check(self) -> None:
        for part in self.parts:
            part.options()
            part.shown.check(part.written)
        for rows in self.rows:
            rows.check()

    def pull(self) -> bool:
        """Waits for the version that comes of what was pushed, or leaves that to the next forward.

        Returns whether the step was left out. It may be called again where it was interrupted.
        """
        if not self._waiting:
            return self._left_out
        pushed = clock()
        if any(part.asks_norm for part in self.parts):  # as the round began: the option may have changed
            self._agree_on_norm()
            spans.add("wait", self.parts[0].client.step, pushed, clock())
        for part in self.parts:
            part.close_round()
            if self.overlap is None or self._left_out:
                part.wait()
            else:
                self.overlap.postpone(part)
        for rows in self.rows:
            rows.show()
        self._waiting = False
        return self._left_out

    def _agree_on_norm(self) -> None:
        """The step is left out if the norm is NaN or inf, and somebody minds."""
        if self.overlap is not None:
            self.overlap.sent()  # servers tell the norm after that, so that an error there is met here
        total = sum(part.client.norm2() for part in self.parts)
        left_out = self._check_norm and total != LEFT_OUT and not math.isfinite(total)
        self.grad_norm = math.inf if total == LEFT_OUT else total**0.5
        with self._course.unit(f"the norm of step {self._pushed}"):
            for part in self.parts:
                part.clip(LEFT_OUT if left_out else total)
            self._left_out = left_out

    def leave(self) -> None:
        """Before the stores finish: no worker waits for this one's norm."""
        if not self._course.broken:
            self.complete()

    def complete(self) -> None:
        """Waits for what a step has pushed that was interrupted since. Raises as ``pull``, or `JobEnded`."""
        if self._waiting:
            with self._worker.member.explained(), ranges.named(ranges.WAIT):
                self.pull()
