"""A reader of versions: a process that is no part of the job, and gets whole states of the parameters from it.

The three steps of taking a version over, stage, verify, commit, are in `Reader.stage` and `Staged.commit`: whatever can
fail does so before a module changes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from tensorwire.control import Member
from tensorwire.errors import ArgumentError, ChecksumMismatch, JobEnded, ProtocolError, WaitTimeout
from tensorwire.store.versions.handover import PUBLISHER
from tensorwire.store.versions.listing import Listing, ReaderState, list_versions, topic
from tensorwire.store.versions.loader import Loader
from tensorwire.store.versions.read_spans import Selection
from tensorwire.store.versions.recording import Load
from tensorwire.store.versions.selection import select
from tensorwire.store.versions.sources import Bytes, Files, OpenVersion, Source, Wanted
from tensorwire.store.versions.staging import Pairs, Staged, copy_into, match, views, whole_file
from tensorwire.store.versions.version_files import MODEL
from tensorwire.store.versions.version_layout import Version, VersionLayout

_LOOKS = (0.0005, 0.02)  # seconds between looks whether there is a newer version: at first, and at most
_CAUSE_SECONDS = 1.0  # that the job's end may come after the end of its versions


class Reader:
    """Reads versions of what an optimizer, or a `KeyValue`, with ``publish=`` has. `connect` makes one.

    Use it from one thread at a time. A context manager.

    Attributes:
        version (Version | None): What was committed last; None: nothing was, so that nobody should use the module.
        lock (threading.RLock): Held while a version is committed: code that uses the module in another thread holds it
            meanwhile.
        seconds (dict[str, float]): How long the phases of the last version took: ``pause``, which is the commit,
            ``read``, ``verify`` and ``convert``.
    """

    def __init__(self, member: Member, store: str, layout: VersionLayout, source: Source) -> None:
        self._member, self._store, self._layout, self._source = member, store, layout, source
        self.version: Version | None = None
        self.lock = threading.RLock()
        self.seconds: dict[str, float] = {}
        self._selections: dict[object, Selection] = {}
        self._arena: Bytes | None = None
        self._staged: Staged | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The name by which the training knows this reader."""
        return self._member.name

    @property
    def route(self) -> str:
        """The device by which this reader reads: ``shm`` where it maps buffers, ``tcp`` or ``verbs`` elsewhere."""
        return self._source.device

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor of a version, by name."""
        return {name: (held.dtype, held.shape) for name, held in self._layout.held.items()}

    @property
    def path(self) -> Path:
        """The newest version's file, for programs that read safetensors. Its bytes never change.

        The name goes with the next versions, and what has opened it keeps it.

        Raises:
            ArgumentError: There is no version yet, or the files are on another machine.
        """
        if not isinstance(self._source, Files):
            raise ArgumentError(f"this reader reads over {self.route} and has no files: pull() reads tensors")
        counter = self.newest()
        if not counter:
            raise ArgumentError("there is no version yet: wait() for one")
        return self._source.folder / str(counter) / MODEL

    def newest(self) -> int:
        """The counter of the newest version; 0: there is none yet."""
        self._check_open()
        with self._explained():
            return self._source.newest()

    def wait(self, min_version: int = 1, timeout: float = 600.0) -> int:
        """Waits for a version.

        Args:
            min_version: The counter that it has at least.
            timeout: Seconds to wait.

        Returns:
            The newest version's counter.

        Raises:
            WaitTimeout: There is none in time; it may still come.
            JobEnded: The job ended.
        """
        end = time.monotonic() + timeout
        seconds, most = _LOOKS
        while (found := self.newest()) < min_version:
            if self._member.client.ended.wait(seconds):
                raise self._member.client.error()
            if time.monotonic() >= end:
                raise WaitTimeout(
                    f"version {min_version} was not published within {timeout:g} s: {found} is the newest"
                )
            seconds = min(1.5 * seconds, most)
        return found

    def ask(self) -> None:
        """Asks the training for a version: worker 0 makes one after its next ``step()``, whatever ``publish=`` says.

        Of keys and rows, at its next ``publish(if_asked=True)``.
        """
        self._check_open()
        self._member.client.tell(PUBLISHER, topic(self._store, "ask"), b"")

    def listing(self) -> Listing:
        """The versions in snapshot buffers, and all readers of them.

        Raises:
            PeerLost: The publisher does not answer.
            JobEnded: The job ended.
        """
        self._check_open()
        return list_versions(self._member, self._store)

    def pull(
        self,
        min_version: int | None = None,
        *,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Sequence[slice]] | None = None,
        rows: Mapping[str, Any] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        timeout: float = 600.0,
    ) -> tuple[Version, dict[str, torch.Tensor]]:
        """Reads tensors of one version, or parts of them, and nothing else.

        Args:
            min_version: The counter that the version has at least. None: one more than that of the last version that
                was committed, or the newest.
            names: Which tensors; None: those in ``into``, or in ``slices`` and ``rows``, or all.
            slices: By name: a slice of step 1 for each of the first dimensions.
            rows: By name: numbers of rows, such as those of a table, as a list or an array of one dimension. What is
                read of ``tensor`` is then ``tensor[numbers]``.
            into: By name: contiguous tensors on the CPU of the dtype and shape of what is read.
            timeout: Seconds to wait for the version.

        Returns:
            The version, and the tensors by name: those of ``into``, or new ones.

        Raises:
            ArgumentError: There is no such tensor, or slices, rows or ``into`` do not fit. Nothing was read.
            VersionExpired: This process was stopped for too long while it read.
            WaitTimeout: There is no such version in time.
            JobEnded: The job ended.
        """
        if into is not None and names is None:
            names = [*into]
        selection = self._select(names, slices, rows)
        if into is None:
            memory = np.empty(selection.nbytes, np.uint8)
            return self._read([(selection, memory)], min_version, timeout, keep=False), views(memory, selection)
        return self._read(self._fit(selection, slices, rows, into), min_version, timeout), dict(into)

    def _read(self, wanted: Wanted, min_version: int | None, timeout: float, *, keep: bool = True) -> Version:
        with contextlib.closing(self._open(min_version, timeout)) as opened, self._explained():
            opened.read(wanted, keep=keep)
            return opened.manifest.version

    def stage(
        self,
        min_version: int | None = None,
        *,
        module: torch.nn.Module | None = None,
        strict: bool = True,
        timeout: float = 600.0,
    ) -> Staged:
        """Brings a version here and checks it, so that ``commit`` cannot fail any more.

        Args:
            min_version: As for `pull`.
            module: What the version is for: then names and shapes are checked, too, and dtypes converted.
            strict: Whether the version has to have all of the module's parameters and persistent buffers.
            timeout: Seconds to wait for the version.

        Returns:
            The version, until the next one is staged.

        Raises:
            ArgumentError: The module has other names or shapes.
            ChecksumMismatch: What was read is not what was published; the message names the bucket.
            VersionExpired, WaitTimeout, JobEnded: As for `pull`.
        """
        if self._staged is not None:
            self._staged.close()
        if module is not None:
            match(module, self._layout.held, strict=strict)  # before anything is read
        opened = self._open(min_version, timeout)
        start = time.perf_counter()
        try:
            with self._explained():
                memory = self._read_whole(opened) if opened.data is None else opened.data
            read = time.perf_counter()
            self._verify(opened, memory)
        except BaseException:
            opened.close()
            raise
        self.seconds = {"read": read - start, "verify": time.perf_counter() - read}
        self._staged = Staged(opened, views(memory, self._whole_file()), self._layout.held, self._take)
        if module is not None:
            start = time.perf_counter()
            self._staged.convert_for(module, strict=strict)
            self.seconds["convert"] = time.perf_counter() - start
        return self._staged

    def load_into(
        self, module: torch.nn.Module, min_version: int | None = None, *, strict: bool = True, timeout: float = 600.0
    ) -> Version:
        """Stages a version and commits it into ``module``. Errors are those of `stage`.

        Args:
            module: The model.
            min_version: As for `pull`.
            strict: As for `stage`.
            timeout: Seconds to wait for the version.

        Returns:
            The version that the module has now.
        """
        staged = self.stage(min_version, module=module, strict=strict, timeout=timeout)
        try:
            return staged.commit(module)
        finally:
            staged.close()

    def follow(self, module: torch.nn.Module, every: float = 0.0, *, strict: bool = True) -> Iterator[Version]:
        """Loads each newer version into ``module``, and yields its name, until the job ends.

        Where versions come faster than they are used, those in between are left out.

        Args:
            module: The model.
            every: Seconds from one version to the next at least.
            strict: As for `stage`.

        Raises:
            ArgumentError, ChecksumMismatch: As for `stage`.
            JobEnded: The job failed.
        """
        while True:
            began = time.monotonic()
            try:
                version = self.load_into(module, strict=strict, timeout=threading.TIMEOUT_MAX)
            except JobEnded:
                if self._member.client.cause is None:
                    return
                raise
            yield version
            if (
                self._member.client.ended.wait(max(0.0, began + every - time.monotonic()))
                and not self._member.client.cause
            ):
                return

    def loader(self, load: Load) -> Loader:
        """Turns a consumer's own loading code into a list of reads.

        It is run once, now, with tensors that have no values, and changes nothing. What it only copies, such as
        slices, or some tensors one after another, is read straight into place by ``loader.load()``, and nothing else
        of the version is. Operators that compute (dtypes, scales), and copies whose pieces are a few bytes each, run
        again on each version.

        ``load`` must not depend on values, nor on anything that differs from one version to the next: what it does to
        tensors is repeated, and its other code is not. It must not reach for a tensor's memory, as ``.numpy()`` does,
        and its destinations must stay where they are.

        Args:
            load: Takes the tensors of a version by name, and copies what it wants of them into tensors of its own, as
                by ``copy_`` or ``load_state_dict``.

        Returns:
            What brings versions.

        Raises:
            ArgumentError: ``load`` asks for values, or copies nothing.
        """
        self._check_open()
        return Loader(self._layout.held, load, self._bring)

    # ---- how

    def _bring(self, wanted: Wanted, finish: Callable[[], None], min_version: int | None, timeout: float) -> Version:
        """Reads straight into destinations, and then finishes there."""
        least = self._next(min_version)
        self.wait(least, timeout)  # without the lock
        with self.lock, torch.no_grad():
            start = time.perf_counter()
            self.version = None  # until all of it is there
            version = self._read(wanted, least, timeout)
            read = time.perf_counter()
            finish()
            self.seconds = {"read": read - start, "convert": time.perf_counter() - read}
            self.seconds["pause"] = time.perf_counter() - start
            self.version = version
        self._report(version)
        return version

    def _take(self, version: Version, pairs: Pairs) -> None:
        with self.lock, torch.no_grad():
            start = time.perf_counter()
            for target, value in pairs:
                copy_into(target, value)
            self.seconds["pause"] = time.perf_counter() - start
            self.version = version
        self._report(version)

    def _report(self, version: Version) -> None:
        state = ReaderState("", "", str(version), version.counter, version.step, self.seconds)
        self._member.client.tell(PUBLISHER, topic(self._store, "report"), msgspec.msgpack.encode(state))

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Inside it an error that only says that the publisher is gone becomes the cause of the job's end."""
        return self._member.explained(_CAUSE_SECONDS)

    def _check_open(self) -> None:
        if self._closed:
            raise ArgumentError("this reader was closed: connect() makes another one")

    def _next(self, min_version: int | None) -> int:
        if min_version is not None:
            return min_version
        return 1 if self.version is None else self.version.counter + 1

    def _open(self, min_version: int | None, timeout: float) -> OpenVersion:
        least = self._next(min_version)
        self.wait(least, timeout)
        with self._explained():
            opened = self._source.open()
        if opened.manifest.counter >= least:
            return opened
        opened.close()
        raise ProtocolError(
            f"version {opened.manifest.counter} came when {least} had been there: versions never go back"
        )

    def _select(
        self, names: Iterable[str] | None, slices: Mapping[str, Sequence[slice]] | None, rows: Mapping[str, Any] | None
    ) -> Selection:
        chosen = None if names is None else tuple(names)
        if rows:  # others each time
            return select(self._layout.held, chosen, slices, rows)
        key = chosen, None if slices is None else repr(sorted(slices.items(), key=lambda item: item[0]))
        if key not in self._selections:
            self._selections[key] = select(self._layout.held, chosen, slices)
        return self._selections[key]

    def _fit(
        self,
        selection: Selection,
        slices: Mapping[str, Sequence[slice]] | None,
        rows: Mapping[str, Any] | None,
        into: Mapping[str, torch.Tensor],
    ) -> list[tuple[Selection, Bytes]]:
        """By tensor, what is read into it."""
        wanted = []
        for name, chosen in selection.tensors.items():
            tensor = into.get(name)
            if tensor is None:
                raise ArgumentError(f"into has no tensor for {name!r}")
            dtype: torch.dtype = getattr(torch, chosen.dtype)
            if tensor.dtype != dtype or tuple(tensor.shape) != chosen.shape:
                raise ArgumentError(
                    f"into[{name!r}] is {tensor.dtype} {list(tensor.shape)}, and what is read is {dtype} "
                    f"{list(chosen.shape)}"
                )
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ArgumentError(f"into[{name!r}] must be contiguous, and on the CPU")
            of_it = [{name: given[name]} if given and name in given else None for given in (slices, rows)]
            part = self._select([name], *of_it)
            wanted.append((part, tensor.detach().reshape(-1).view(torch.uint8).numpy()))
        return wanted

    def _whole_file(self) -> Selection:
        """All tensors, each as far from the first one as in the file."""
        if "file" not in self._selections:
            self._selections["file"] = whole_file(self._layout)
        return self._selections["file"]

    def _read_whole(self, opened: OpenVersion) -> Bytes:
        """All that follows the header, in this process's memory; the version itself is given back."""
        if self._arena is None:
            self._arena = np.empty(self._layout.nbytes - self._layout.data, np.uint8)
        opened.read([(self._whole_file(), self._arena)])
        opened.close()
        return self._arena

    def _verify(self, opened: OpenVersion, memory: Bytes) -> None:
        for number, (places, expected) in enumerate(zip(self._layout.buckets, opened.manifest.checksums, strict=True)):
            checksum = xxhash.xxh3_64()
            for place in places:
                at = place.file - self._layout.data
                checksum.update(memory[at : at + place.nbytes].data)
            if checksum.intdigest() != expected:
                first = [*self._layout.held][places[0].tensor]
                raise ChecksumMismatch(
                    f"bucket {number} of version {opened.manifest.version}, which begins with {first!r}, has another "
                    "checksum than was published: stage it again"
                )

    def close(self) -> None:
        """Leaves the job's readers. Tensors stay as they are. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._staged is not None:
                self._staged.close()
            self._source.close()
            self._member.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
