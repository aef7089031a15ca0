"""Channels over memory that this process has mapped: every operation is plain loads and stores."""

from __future__ import annotations

from tensorwire._native import Liveness, Memory, Path, put, put_signal
from tensorwire.device.checks import check_fillable, check_signal, check_sizes, check_value, check_word
from tensorwire.device.contract import DONE, Channel, Completion, Device, Failed, Signal
from tensorwire.device.operands import explain
from tensorwire.device.region import RemoteRegion, RemoteView, View
from tensorwire.errors import RegionClosed, RemoteAccessError
from tensorwire.observe import counters


class MappedChannel(Channel):
    """A subclass says, in ``_find``, where a peer's region lies."""

    def __init__(self, device: Device, liveness: Liveness) -> None:
        super().__init__(device, liveness)
        self._path = Path(liveness, device.liveness, self, DONE)
        # The short way is native: a Python function around it would take as long as a small write itself.
        self.write = self._path.write  # type: ignore[method-assign]
        self.signal = self._path.signal  # type: ignore[method-assign]

    def _find(self, region: RemoteRegion) -> Memory:
        raise NotImplementedError

    def forget(self, region: RemoteRegion) -> None:
        """Nothing of this process goes to that region any more: it need not stay mapped."""

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
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        return self._write(local, remote, signal)

    def _write(self, local: View, remote: RemoteView, signal: Signal | None) -> Completion:
        try:
            return self._write_slowly(local, remote, signal)
        except (TypeError, AttributeError) as error:
            raise explain(error, "write", local=local, remote=remote, signal=signal) from None

    def _write_slowly(self, local: View, remote: RemoteView, signal: Signal | None) -> Completion:
        check_sizes(local.nbytes, remote.nbytes)
        check_signal(signal)
        self._check_alive()
        if local.region.closed:
            raise RegionClosed("the source region was closed")
        try:
            to = self._resolve(remote, write=True)
            word = self._resolve(signal[0], write=True, word=True) if signal is not None else None
        except RemoteAccessError as error:
            return Failed(error)
        _count(local.nbytes)
        if signal is None or word is None:
            put(local.region, local.offset, to, remote.offset, local.nbytes)
        else:
            put_signal(local.region, local.offset, to, remote.offset, local.nbytes, word, signal[0].offset, signal[1])
        return DONE

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        return self._signal(target, value)

    def _signal(self, target: RemoteView, value: int) -> Completion:
        try:
            return self._signal_slowly(target, value)
        except (TypeError, AttributeError) as error:
            raise explain(error, "signal", remote=target, values=(value,)) from None

    def _signal_slowly(self, target: RemoteView, value: int) -> Completion:
        check_signal((target, value))
        self._check_alive()
        try:
            memory = self._resolve(target, write=True, word=True)
        except RemoteAccessError as error:
            return Failed(error)
        counters.add(messages=1)
        memory.store(target.offset, value)
        return DONE

    def read(self, local: View, remote: RemoteView) -> Completion:
        try:
            if self._path.read(local, remote):
                return DONE
            return self._read(local, remote)
        except (TypeError, AttributeError) as error:
            raise explain(error, "read", local=local, remote=remote) from None

    def _read(self, local: View, remote: RemoteView) -> Completion:
        check_sizes(remote.nbytes, local.nbytes)
        check_fillable(local)
        self._check_alive()
        if local.region.closed:
            raise RegionClosed("the target region was closed")
        try:
            memory = self._resolve(remote, write=False)
        except RemoteAccessError as error:
            return Failed(error)
        _count(remote.nbytes)
        put(memory, remote.offset, local.region, local.offset, remote.nbytes)
        return DONE

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        try:
            return self._word(target).fetch_add(target.offset, value % 2**64)
        except (TypeError, AttributeError) as error:
            raise explain(error, "fetch_add", remote=target, values=(value,)) from None

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        try:
            check_value(expected, value)
            return self._word(target).compare_swap(target.offset, expected, value)
        except (TypeError, AttributeError) as error:
            raise explain(error, "compare_swap", remote=target, values=(expected, value)) from None

    def _word(self, target: RemoteView) -> Memory:
        check_word(target)
        self._check_alive()
        memory = self._resolve(target, write=True, word=True)
        counters.add(messages=1)
        return memory

    def map(self, target: RemoteView) -> Memory | None:
        self._check_alive()
        try:
            return self._resolve(target, write=target.region.access == "write")
        except (TypeError, AttributeError) as error:
            raise explain(error, "map", remote=target) from None


def unmap(channel: Channel, *regions: RemoteRegion) -> None:
    """Lets go of regions that this process is done with, wherever they are mapped; views of them stay as they are."""
    if isinstance(channel, MappedChannel):
        for region in regions:
            channel.forget(region)


def _count(nbytes: int) -> None:
    counters.add(messages=1, bytes=nbytes, copies=1, copied_bytes=nbytes)
