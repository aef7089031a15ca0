"""How a program of the benchmark is driven: lines on its standard input and output.

It prints one line that its partner needs, reads the partner's, sets up, and prints ``ready``. Then, for each line
``run ROUND WARM COUNT [WORD]``, the partners do WARM operations that nobody times and COUNT that the initiator times,
check what has arrived, and answer with one line of JSON. One that works meanwhile does so until it is told ``stop``,
and answers then. A program ends with its input. ``c/lines.h`` is the
same in C. Programs of other projects import this file alone, so it needs nothing but numpy.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

LEAVE = "leave"  # the word of a last round, in which programs leave their job, and write their traces
STOP = "stop"  # the line that ends the round of a program that works meanwhile
_BLOCK = 4096
_PIECES = 16  # blocks that are compared at once
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Run:
    """One round."""

    round: int
    warm: int
    count: int
    word: str = ""  # what to do instead of the program's own work


class Lines:
    """This program's side of the conversation. What else it prints goes to standard error."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the benchmark may be killed while we wait
        self._in = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - what is not read yet, ``select`` sees
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def hello(self, ours: str = "-") -> str:
        """Gives our line to the next program of the ring, and returns that program's own line."""
        self._send(ours)
        return self._receive()

    def runs(self) -> Iterator[Run]:
        """Says that this program is ready; then its rounds, until the benchmark is done."""
        self._send("ready")
        while True:
            _, round, warm, count, *word = self._receive().split()
            yield Run(int(round), int(warm), int(count), *word)

    def others_work(self, seconds: float = 0.0) -> bool:
        """Whether this program is to go on, because the others have not answered yet; up to ``seconds`` later."""
        if not select.select([self._in], [], [], seconds)[0]:
            return True
        self._receive()
        return False

    def answer(self, seconds: float = 0.0, **counts: float) -> None:
        """The round's timed seconds, and what was counted meanwhile."""
        self._send(json.dumps({"seconds": seconds, **counts}))

    def _send(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def _receive(self) -> str:
        line = self._in.readline().decode()
        if not line:
            sys.stdout.flush()
            os._exit(0)  # some libraries crash while an interpreter ends; nothing is left that needs it
        return line.strip()


def _block(round: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(hashlib.shake_128(str(round).encode()).digest(_BLOCK), np.uint8)


def pattern(round: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes that are others in each round: what is stale, missing or torn shows."""
    return np.tile(_block(round), -(-nbytes // _BLOCK))[:nbytes]


def _pieces(values: np.ndarray[Any, Any], size: int) -> Iterator[np.ndarray[Any, Any]]:
    # Large temporary arrays would come from the kernel and go back to it, which disturbs what is timed afterwards.
    return (values[at : at + size] for at in range(0, values.size, size))


def fill(memory: Any, round: int) -> None:
    """Puts the round's bytes into ``memory``."""
    whole = pattern(round, _PIECES * _BLOCK)
    for piece in _pieces(np.frombuffer(memory, np.uint8), whole.size):
        piece[:] = whole[: piece.size]


def repeats(values: np.ndarray[Any, Any], block: np.ndarray[Any, Any]) -> bool:
    """Whether ``values`` are ``block`` again and again."""
    whole = np.tile(block, _PIECES)
    return all(np.array_equal(piece, whole[: piece.size]) for piece in _pieces(values, whole.size))


def check(memory: Any, round: int) -> None:
    """Raises `SystemExit` unless ``memory`` holds the round's bytes."""
    if not repeats(np.frombuffer(memory, np.uint8), _block(round)):
        raise SystemExit("the bytes that arrived are wrong")


def timed(run: Run, repeat: Callable[[int], object], warm: Callable[[int], object] | None = None) -> float:
    """``repeat(n)`` does n operations: ``warm`` or else itself those that warm up, then those that are timed.

    Returns the seconds of the latter.
    """
    (warm or repeat)(run.warm)
    start = time.perf_counter()
    repeat(run.count)
    return time.perf_counter() - start
