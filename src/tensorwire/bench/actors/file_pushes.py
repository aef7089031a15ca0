"""Pushes to one key, by its worker and by files: ``server|worker INDEX DEVICE NBYTES TENSORS READERS HOST``.

Words: ``push`` is a push that is waited for, ``file`` a write and an fsync.
"""

from __future__ import annotations

import sys

import numpy as np

import tensorwire as tw
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, timed
from tensorwire.bench.actors.version import repeated
from tensorwire.files import PushFile


def main(role: str, index: str, device: str, nbytes: str, tensors: str, readers: str, host: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    if role == "server":
        store_job.serve(lines, 0, device, 1, 1, host)
        for _ in lines.runs():
            lines.answer()
        return
    store_job.join(lines, 0, device, 1, 1)
    job = tw.init()
    kv = tw.store.KeyValue(tw.store.Async(), "sum", publish=True)
    ones, pushes = np.ones(int(nbytes) // 4, "f4"), 0
    kv.init("w", np.zeros_like(ones))
    kv.publish()
    file = tw.files.connect(job.name).open("push/w", "wb")
    assert isinstance(file, PushFile)

    def write() -> None:
        file.pwrite(ones, 0)
        file.fsync()

    ways = {"push": lambda: kv.push("w", ones).wait(), "file": write}
    for run in lines.runs():
        lines.answer(seconds=timed(run, repeated(ways[run.word])))
        pushes += run.warm + run.count
        found = kv.pull("w").wait()
        if not (found == pushes).all():
            raise SystemExit(f"{pushes} pushes led to {found.min()} to {found.max()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
