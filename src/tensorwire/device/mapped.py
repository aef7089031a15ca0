"""Channels over memory that this process has mapped: every operation is plain loads and stores."""

from __future__ import annotations

from tensorwire._native import Life, Memory, Path, put, put_signal
from tensorwire.device.contract import (
    DONE,
    Channel,
    Completion,
    Device,
    Failed,
    Signal,
    check_fillable,
    check_signal,
    check_sizes,
    check_value,
    check_word,
)
from tensorwire.device.region import RemoteRegion, RemoteView, View
from tensorwire.errors import RegionClosed, RemoteAccessError
from tensorwire.observe import counters


class MappedChannel(Channel):
    """A subclass says, in ``_find``, where a peer's region lies."""

    def __init__(self, device: Device, life: Life) -> None:
        super().__init__(device, life)
        self._path = Path(life, device.life, self, DONE)
        # The short way is native: a Python function around it would take as long as a small write itself.
        self.write = self._path.write  # type: ignore[method-assign]
        self.signal = self._path.signal  # type: ignore[method-assign]

    def _find(self, region: RemoteRegion) -> Memory:
        raise NotImplementedError

    def _resolve(self, view: RemoteView, *, write: bool, word: bool = False) -> Memory:
        memory = self._find(view.region)
        if memory.closed:
            raise self._refused("no open region has that key")
        if view.offset + view.nbytes > memory.nbytes:
            raise self._refused("out of the region's range")
        if write and (view.region.access != "write" or not memory.writable):
            raise self._refused("the region is read-only for this key")
        if word and (memory.address + view.offset) % 8:
            raise self._refused("the word is not 8-byte aligned")
        self._path.remember(view, memory, write)
        return memory

    def _refused(self, why: str) -> RemoteAccessError:
        return RemoteAccessError(f"{self.device.name}: the target refused: {why}")

    # Every operation is over when it returns: there is nothing that a fence could wait for.

    def write(
        self, source: View, target: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        return self._write(source, target, signal)

    def _write(self, source: View, target: RemoteView, signal: Signal | None) -> Completion:
        check_sizes(source.nbytes, target.nbytes)
        check_signal(signal)
        self._check_alive()
        if source.region.closed:
            raise RegionClosed("the source region was closed")
        try:
            to = self._resolve(target, write=True)
            word = self._resolve(signal[0], write=True, word=True) if signal is not None else None
        except RemoteAccessError as error:
            return Failed(error)
        _count(source.nbytes)
        if signal is None or word is None:
            put(source.region, source.offset, to, target.offset, source.nbytes)
        else:
            put_signal(
                source.region, source.offset, to, target.offset, source.nbytes, word, signal[0].offset, signal[1]
            )
        return DONE

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        return self._signal(target, value)

    def _signal(self, target: RemoteView, value: int) -> Completion:
        check_signal((target, value))
        self._check_alive()
        try:
            memory = self._resolve(target, write=True, word=True)
        except RemoteAccessError as error:
            return Failed(error)
        counters.add(messages=1)
        memory.store(target.offset, value)
        return DONE

    def read(self, target: View, source: RemoteView) -> Completion:
        if self._path.read(target, source):
            return DONE
        check_sizes(source.nbytes, target.nbytes)
        check_fillable(target)
        self._check_alive()
        if target.region.closed:
            raise RegionClosed("the target region was closed")
        try:
            memory = self._resolve(source, write=False)
        except RemoteAccessError as error:
            return Failed(error)
        _count(source.nbytes)
        put(memory, source.offset, target.region, target.offset, source.nbytes)
        return DONE

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        return self._word(target).fetch_add(target.offset, value % 2**64)

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        check_value(expected, value)
        return self._word(target).compare_swap(target.offset, expected, value)

    def _word(self, target: RemoteView) -> Memory:
        check_word(target)
        self._check_alive()
        memory = self._resolve(target, write=True, word=True)
        counters.add(messages=1)
        return memory

    def map(self, target: RemoteView) -> Memory | None:
        self._check_alive()
        return self._resolve(target, write=target.region.access == "write")


def _count(nbytes: int) -> None:
    counters.add(messages=1, bytes=nbytes, copies=1, copied_bytes=nbytes)
