"""The fate of every push. Counters always keep totals; with ``TENSORWIRE_FATES``, files keep each fate.

The variable names a folder, in which each server and worker of a machine writes JSON lines: first `Begun`, then a
server one `Fate` per push to one of its buckets, and whom it `GaveUp`, and a worker how many it has `Produced`; last
`Ended`. A process that fails or is killed leaves a file without an end. A worker's counts lie in a file that it maps,
too, and outlive it. File names begin with the job's, so several jobs may share a folder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tensorwire.control.frames import Welcome
from tensorwire.control.names import member_name
from tensorwire.control.settings import MOST_MEMBERS
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters

_LINES = 1000  # that are written together
Members = Annotated[int, msgspec.Meta(ge=0, le=MOST_MEMBERS)]


class Begun(msgspec.Struct, frozen=True, tag="begun", omit_defaults=True):
    """A log's first line: ``process``, such as ``worker 0``, takes part in ``store``.

    So do all ``workers`` and ``servers`` of ``job``. ``incarnation``: which process of that name it is. ``ahead``: of a
    server, how many pushes of one worker to one of its buckets may be on their way.
    """

    job: str
    store: str
    process: str
    workers: Members
    servers: Members
    incarnation: int = 0
    ahead: int = 1


class Fate(msgspec.Struct, frozen=True, tag="fate", omit_defaults=True):
    """What became of ``worker``'s push of a shard's ``bucket`` in its round ``round``.

    ``incarnation``: which process of that rank it was.

    ``fate``: ``applied`` by itself or ``merged`` with others, both into ``version`` of the bucket, with ``weight``; or
    ``discarded``, for ``reason``. ``staleness``: updates of the bucket between the version that it came of and its own.
    """

    store: str
    shard: int
    bucket: int
    worker: int
    round: int
    fate: str
    version: int = 0
    weight: float = 1.0
    staleness: int = 0
    reason: str = ""
    incarnation: int = 0


class Sent(NamedTuple):
    """A push, by where it came from: ``worker``, which process of that rank it was, and its ``round``."""

    worker: int
    incarnation: int
    round: int


class Produced(msgspec.Struct, frozen=True, tag="produced", omit_defaults=True):
    """``worker`` has sent ``pushes`` to a shard in all. ``incarnation``: which process of that rank it was."""

    store: str
    shard: int
    worker: int
    pushes: int
    incarnation: int = 0


class GaveUp(msgspec.Struct, frozen=True, tag="gave up"):
    """The worker of that rank and incarnation is lost: what of it has not come to a shard never will."""

    store: str
    shard: int
    worker: int
    incarnation: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last line of the log of ``process``: nothing is missing in it."""

    store: str
    process: str


Line = Begun | Fate | Produced | GaveUp | Ended


class Counting(msgspec.Struct, frozen=True):
    """What begins a file of counts: those of ``worker`` by shard, 8 bytes each, follow at `COUNTS`."""

    job: str
    store: str
    worker: int
    incarnation: int
    shards: int


COUNTS = 4096  # where they lie


class FateLog:
    """The lines of ``process`` about one store of a job; nothing, where no folder is named. Any thread may call.

    ``shard``: of a server's log, which is about one of its shards. ``ahead``: as for `Begun`.

    Raises `ArgumentError` where the folder cannot be written to.
    """

    def __init__(self, welcome: Welcome, store: str, process: str, shard: int | None = None, *, ahead: int = 1) -> None:
        self._lines: list[Line] = []
        self._lock = threading.Lock()
        self._end = Ended(store, process)
        self._welcome, self._store = welcome, store
        about = process if shard is None else f"shard {shard}"
        number = f".{welcome.incarnation}" if welcome.incarnation else ""
        self._name = f"{welcome.job}-{store.replace('/', '-')}-{about.replace(' ', '-')}{number}"
        self._file = _open(f"{self._name}.jsonl")
        if self._file is not None:
            job = (welcome.job, store, process, welcome.workers, welcome.servers)
            self._lines.append(Begun(*job, welcome.incarnation, ahead))
            self._write(self._file)

    def counts(self, worker: int, shards: int) -> npt.NDArray[np.uint64]:
        """Zeros, a number for each shard, which outlive this process where there is a file.

        Raises `ArgumentError` where the folder cannot be written to.
        """
        file = None if self._file is None else _open(f"{self._name}.counts", "w+b")
        if file is None:
            return np.zeros(shards, np.uint64)
        head = Counting(self._welcome.job, self._store, worker, self._welcome.incarnation, shards)
        with file:
            file.write(msgspec.json.encode(head).ljust(COUNTS) + bytes(8 * shards))
            file.flush()
            return np.memmap(file, np.uint64, "r+", COUNTS, (shards,))

    def add(self, *lines: Line) -> None:
        """Keeps lines; soon they are in the file."""
        if self._file is None:
            return
        with self._lock:
            self._lines += lines
            if len(self._lines) >= _LINES:
                self._write(self._file)

    def close(self) -> None:
        """Writes what is left, and the end. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._lines.append(self._end)
                self._write(self._file)
                self._file.close()
            self._file = None

    @property
    def wanted(self) -> bool:
        """Whether lines go to a file."""
        return self._file is not None

    def _write(self, file: BinaryIO) -> None:
        file.write(msgspec.json.Encoder().encode_lines(self._lines))
        file.flush()
        self._lines.clear()


def _open(name: str, mode: str = "wb") -> BinaryIO | None:
    folder = os.environ.get("TENSORWIRE_FATES")
    if not folder:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, (Path(folder) / name).open(mode))
    except OSError as error:
        raise ArgumentError(f"TENSORWIRE_FATES: cannot write to {folder}: {error.strerror}") from None


class Fates:
    """The fates of all pushes to one shard of a store."""

    def __init__(self, welcome: Welcome, store: str, shard: int, *, ahead: int = 1) -> None:
        self._store, self._shard = store, shard
        self._log = FateLog(welcome, store, member_name("server", shard % welcome.servers), shard, ahead=ahead)

    def gave_up(self, worker: int, incarnation: int) -> None:
        """A worker is lost, and what it has not sent never comes."""
        self._log.add(GaveUp(self._store, self._shard, worker, incarnation))

    def closed(
        self,
        bucket: int,
        version: int,
        pushes: Sequence[Sent],
        weights: Sequence[float],
        staleness: Sequence[int],
        *,
        alone: bool,
    ) -> None:
        """These pushes, by worker and round, led to ``version``; ``alone``: a mode in which each does so by itself."""
        fate = "applied" if alone else "merged"
        counters.add(**{fate: len(pushes)})
        if self._log.wanted:
            self.log(bucket, version, pushes, fate, weights, staleness)

    @property
    def wanted(self) -> bool:
        """Whether they go to a file."""
        return self._log.wanted

    def log(
        self,
        bucket: int,
        version: int,
        pushes: Sequence[Sent],
        fate: str,
        weights: Sequence[float],
        staleness: Sequence[int],
    ) -> None:
        """Writes what became of these pushes, without counting them."""
        self._log.add(
            *(
                Fate(
                    self._store, self._shard, bucket, p.worker, p.round, fate, version, weight, stale, "", p.incarnation
                )
                for p, weight, stale in zip(pushes, weights, staleness, strict=True)
            )
        )

    def merged(self, bucket: int, pushes: Sequence[Sent], version: int, weight: float) -> None:
        """These pushes led to ``version`` together."""
        alike = len(pushes)
        self.closed(bucket, version, pushes, [weight] * alike, [0] * alike, alone=False)

    def discarded(self, bucket: int, pushes: Sequence[Sent], reason: str, staleness: int = 0) -> None:
        """These pushes change nothing."""
        counters.add(discarded=len(pushes))
        if self._log.wanted:
            said = partial(Fate, self._store, self._shard, bucket, fate="discarded", staleness=staleness, reason=reason)
            self._log.add(*(said(worker=p.worker, round=p.round, incarnation=p.incarnation) for p in pushes))

    def close(self) -> None:
        """Writes what is left."""
        self._log.close()
