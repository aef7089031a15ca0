"""Waits for what does not come, and tells what the waiting cost: ``ROLE DEVICE``.

Processes in a ring, each connected to the next one. A round waits COUNT milliseconds; its ``seconds`` are the CPU time
of all threads of the process meanwhile. Then a signal goes round, so that it was a wait that works.
"""

from __future__ import annotations

import contextlib
import sys
import time

from tensorwire.bench.actors.lines import Lines
from tensorwire.bench.actors.transfer import SECONDS, End, make_device
from tensorwire.errors import WaitTimeout


def main(role: str, kind: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    with make_device(kind) as device:
        end = End(lines, device, 8)
        for run in lines.runs():
            before = time.process_time()
            with contextlib.suppress(WaitTimeout):
                end.inbox.wait(end.word, run.round + 1, run.count / 1e3)
            spent = time.process_time() - before
            end.channel.signal(end.there_word, run.round + 1).wait(SECONDS)
            end.inbox.wait(end.word, run.round + 1, SECONDS)
            lines.answer(spent)


if __name__ == "__main__":
    main(*sys.argv[1:])
