"""Channels over memory that this process has mapped: every operation is plain loads and stores."""

from __future__ import annotations

from tensorwire._native import Memory, put, put_signal
from tensorwire.device.contract import DONE, Channel, Completion, Failed, Signal, check_sizes, check_word
from tensorwire.device.region import RemoteRegion, RemoteView, View
from tensorwire.errors import RegionClosed, RemoteAccessError
from tensorwire.observe import counters


class MappedChannel(Channel):
    """A subclass says, in ``_find``, where a peer's region lies."""

    def _find(self, region: RemoteRegion) -> Memory:
        raise NotImplementedError

    def _resolve(self, view: RemoteView, *, write: bool) -> Memory:
        memory = self._find(view.region)
        if memory.closed:
            raise RemoteAccessError(f"{self.device.name}: the target refused: the region was closed")
        if view.offset + view.nbytes > memory.nbytes:
            raise RemoteAccessError(f"{self.device.name}: the target refused: out of the region's range")
        if write and (view.region.access != "write" or not memory.writable):
            raise RemoteAccessError(f"{self.device.name}: the target refused: the region is read-only for this key")
        return memory

    def write(self, source: View, target: RemoteView, signal: Signal | None = None) -> Completion:
        check_sizes(source.nbytes, target.nbytes)
        if source.region.closed:
            raise RegionClosed("the source region was closed")
        if signal is not None:
            check_word(signal[0])
        self._check_alive()
        try:
            to = self._resolve(target, write=True)
            word = self._resolve(signal[0], write=True) if signal is not None else None
        except RemoteAccessError as error:
            return Failed(error)
        counters.messages += 1
        counters.bytes += source.nbytes
        counters.copies += 1
        counters.copied_bytes += source.nbytes
        if signal is None or word is None:
            put(source.region, source.offset, to, target.offset, source.nbytes)
        else:
            put_signal(
                source.region, source.offset, to, target.offset, source.nbytes, word, signal[0].offset, signal[1]
            )
        return DONE

    def signal(self, target: RemoteView, value: int) -> Completion:
        check_word(target)
        self._check_alive()
        try:
            memory = self._resolve(target, write=True)
        except RemoteAccessError as error:
            return Failed(error)
        counters.messages += 1
        memory.store(target.offset, value)
        return DONE

    def read(self, target: View, source: RemoteView) -> Completion:
        check_sizes(source.nbytes, target.nbytes)
        if target.region.closed:
            raise RegionClosed("the target region was closed")
        self._check_alive()
        try:
            memory = self._resolve(source, write=False)
        except RemoteAccessError as error:
            return Failed(error)
        counters.messages += 1
        counters.bytes += source.nbytes
        counters.copies += 1
        counters.copied_bytes += source.nbytes
        put(memory, source.offset, target.region, target.offset, source.nbytes)
        return DONE

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        check_word(target)
        self._check_alive()
        counters.messages += 1
        return self._resolve(target, write=True).fetch_add(target.offset, value % 2**64)

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        check_word(target)
        self._check_alive()
        counters.messages += 1
        return self._resolve(target, write=True).compare_swap(target.offset, expected, value)

    def map(self, target: RemoteView) -> Memory | None:
        self._check_alive()
        return self._resolve(target, write=target.region.access == "write")
