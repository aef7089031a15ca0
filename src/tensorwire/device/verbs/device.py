"""The verbs device: the NICs of both ends carry out one-sided operations, over reliable-connected queue pairs."""

from __future__ import annotations

import contextlib
import operator
import secrets
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

from tensorwire._native import Liveness, Memory, Monitor
from tensorwire.addresses import address_text
from tensorwire.device.acceptor import Acceptor, close_socket
from tensorwire.device.checks import check_fillable, check_signal, check_sizes, check_value, check_word
from tensorwire.device.contract import Capabilities, Channel, Completion, Failed, Signal
from tensorwire.device.ip_device import IpAddress, IpDevice
from tensorwire.device.operands import explain
from tensorwire.device.region import Access, Region, RemoteRegion, RemoteView, View
from tensorwire.device.verbs import cuda
from tensorwire.device.verbs.connection import MOST_LANES, Connection, QueuePairSettings
from tensorwire.device.verbs.nic import Nic
from tensorwire.device.verbs.port_selection import select_port
from tensorwire.device.verbs.ports import scan_ports
from tensorwire.device.verbs.queue_pair import QueuePair, Signals
from tensorwire.errors import ArgumentError, RegionClosed, RemoteAccessError

_PURPOSE = b"verbs"
_TERMS = struct.Struct("<Q")  # after the purpose: the initiator's device
_NOTHING, _NOWHERE = (0, 0, 0), (0, 0)
_END, _LARGEST_KEY = 2**64, 2**32 - 1
NEVER_REPORTS = 7  # retries: some NICs take this for "forever"


class VerbsAddress(IpAddress, frozen=True):
    """Says that it is one of verbs."""

    kind: Literal["verbs"]


class VerbsDevice(IpDevice):
    """Transfers over InfiniBand or RoCE, through the PyPI package ``ibverbs``. docs/verbs.md explains the settings.

    Args:
        port: The RDMA port, such as ``mlx5_0`` or ``mlx5_0:1``; None: chosen, as ``tensorwire doctor`` shows.
        interface: The IP address that accepts set-up connections; by default only from this machine.
        gid_index: The index of the port's GID; None: chosen.
        queue_pairs: The number of queue pairs, and so of ``lanes``, per channel.
        completion_queues: The number of completion queues that all queue pairs share.
        signals: ``"immediate"`` wakes a waiter that sleeps. With ``"write"``, a plain write, and ``"tail"``, the last 8
            bytes of the payload's own write where the word lies after it, waiters poll.
        retries: How many times a NIC repeats an unanswered packet before the peer is lost, 0 to 7. With 7, some NICs
            never report a loss.
        timeout_exponent: How long it waits for each answer: at least 4.096 us times 2 to the power of this, 1 to 31.
        heartbeat: Seconds after which an idle channel asks whether the peer's NIC answers, 0.001 to 3600.

    Raises:
        VerbsUnavailable: This machine or process cannot do RDMA now; the message names the obstacle.
        ArgumentError: A setting is out of range, or it cannot listen on ``interface``.
    """

    name = "verbs"
    capabilities = Capabilities(maps=False, shares_registered=True, refuses_whole=False, sparse=False)

    def __init__(
        self,
        port: str | None = None,
        *,
        interface: str = "127.0.0.1",
        gid_index: int | None = None,
        queue_pairs: int = 1,
        completion_queues: int = 1,
        signals: Signals = "immediate",
        retries: int = 6,
        timeout_exponent: int = 14,
        heartbeat: float = 1.0,
    ) -> None:
        super().__init__()
        _check_settings(queue_pairs, completion_queues, signals, retries, timeout_exponent, heartbeat)
        choice = select_port(scan_ports(), port=port, gid_index=gid_index, near=interface)
        self._settings = QueuePairSettings(queue_pairs, signals, timeout_exponent, retries)
        self._token = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # held until a connection has really ended
        self._connections: set[Connection] = set()  # both ways
        self._exposed: dict[int, tuple[Region, Any]] = {}
        listener = self._listen(interface)
        try:
            self._nic = Nic(
                choice,
                self.liveness,
                completion_queues=completion_queues,
                naps=signals != "immediate",
                heartbeat=heartbeat,
                tick=self._tick,
                failed=self.abort,
            )
        except BaseException:
            close_socket(listener)
            raise
        self._monitor = Monitor()
        self._address = VerbsAddress(interface, listener.getsockname()[1], self._token, "verbs")
        self._acceptor = Acceptor(listener, self._token, self._greet, "tensorwire-verbs-setup")

    @classmethod
    def for_job(cls, *, interface: str, heartbeat: float, lost_after: float) -> VerbsDevice:
        return cls(interface=interface, heartbeat=heartbeat)  # retries and timeout_exponent say when a peer is lost

    @classmethod
    def check_available(cls) -> None:
        select_port(scan_ports())

    def _purpose(self) -> bytes:
        return _PURPOSE + _TERMS.pack(self._address.device)

    def _open(self, sock: socket.socket, where: VerbsAddress) -> Channel:
        liveness = Liveness(self.liveness, address_text(where.interface, where.port))
        connection = Connection(self._nic, self._settings, sock, liveness, where.device)
        try:
            connection.open()
            with self._lock:
                self._check_open()  # close() came meanwhile, and has not seen this connection
                self._connections.add(connection)
                self._monitor.watch(sock.fileno(), liveness)
        except BaseException:
            liveness.close("it was not set up")
            connection.destroy()
            raise
        return VerbsChannel(self, connection)

    def _drop(self, connection: Connection) -> None:
        """Ends a connection that this process opened, with its channel's."""
        with self._ending:
            with self._lock:
                known = connection in self._connections
                self._connections.discard(connection)
            if known:
                connection.liveness.close("the channel was closed")
                self._monitor.forget(connection.descriptor)
                connection.close()

    def _greet(self, sock: socket.socket, purpose: bytes) -> None:
        (device,) = _TERMS.unpack(purpose[len(_PURPOSE) :])
        liveness = Liveness(self.liveness, address_text(*sock.getpeername()[:2]), inbound=True)
        connection = Connection(self._nic, self._settings, sock, liveness, device, inbound=True)
        with self._lock:
            self._check_open()
            self._connections.add(connection)
        self._monitor.watch(sock.fileno(), liveness)
        try:
            connection.serve()
        finally:
            self._monitor.forget(sock.fileno())
            liveness.lose("its process closed the connection or died")
            connection.destroy()
            with self._lock:
                self._connections.discard(connection)

    def _tick(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            if not connection.liveness.lost:
                connection.heartbeat()

    # ---- memory

    def register(self, buffer: Any) -> Region:
        """Makes existing memory a region, as for every device, or a CUDA tensor; docs/verbs.md says how.

        Args:
            buffer: Contiguous memory with the buffer protocol or DLPack on the CPU, or a contiguous CUDA tensor.

        Returns:
            The region.

        Raises:
            ArgumentError: The memory is not contiguous, holds Python objects, or is no memory at all.
            OutOfMemory: The memory cannot be registered.
        """
        if getattr(buffer, "is_cuda", False):
            self._check_open()
            region = cast(Region, cuda.register(self, buffer))  # one, as far as channels go
            with self._regions_lock:
                self._regions.add(region)
            return region
        return super().register(buffer)

    def _find_memory(self, nbytes: int, reserve: bool) -> Memory:
        return self._nic.registrar.allocate(nbytes, reserve)

    def _adopt(self, memory: Memory, buffer: Any = None) -> Region:
        region = VerbsRegion(self, memory, self._withdraw)
        region.mr = self._nic.registrar.cover(region, buffer)
        region.lkey = region.mr.lkey
        return self._keep(region)

    def _bind(self, memory: Memory) -> None:
        memory.bind(self.liveness, self._nic.sleepers)

    def _expose(self, region: Region, access: Access) -> int:
        with self._lock:
            if region.closed:
                raise RegionClosed("the region was closed")
            if access not in region.keys:
                narrow = self._nic.registrar.expose(region, access)
                region.keys[access] = narrow.rkey
                self._exposed[narrow.rkey] = (region, narrow)
            return region.keys[access]

    def _withdraw(self, region: Region) -> None:
        if self.liveness.forked:  # the keys are the parent's
            return
        with self._lock:
            for key in region.keys.values():
                found = self._exposed.pop(key, None)
                if found is not None:
                    self._nic.registrar.withdraw(found[1])

    # ---- the end

    def _expel(self, peer: int) -> None:
        """Ends every connection with that device."""
        with self._lock:
            connections = [connection for connection in self._connections if connection.peer == peer]
        for connection in connections:
            connection.lose("another connection to it was lost")
            connection.destroy()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.lose(reason)

    def close(self) -> None:
        if self.liveness.forked:  # the parent's: a lock may be held forever
            return
        self.liveness.close("the device was closed")
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            if connection.inbound:
                connection.destroy()
            else:
                self._drop(connection)
        with self._ending:  # nobody else is in the middle of it
            pass
        self._close_regions()
        self._acceptor.close()
        self._monitor.close()
        self._nic.close()
        self.callbacks.close()


class VerbsRegion(Region):
    """Registered memory. ``lkey``: the key of this process's own queue pairs for it."""

    mr: Any
    lkey: int

    def __init__(self, device: VerbsDevice, memory: Memory, withdraw: Callable[[Region], None]) -> None:
        super().__init__(device, memory, withdraw)
        self._nic = device._nic
        self.start = self.address  # at hand: every transfer asks

    def remote(self, access: Access = "write") -> RemoteRegion:
        shown = super().remote(access)
        return RemoteRegion(shown.device, shown.key, shown.length, shown.access, self.address)

    def _wait(self, offset: int, at_least: int, seconds: float, liveness: Liveness | None = None) -> int:
        return self._nic.wait(self, offset, at_least, seconds, liveness)


class VerbsChannel(Channel):
    """A channel over one or more queue pairs; operations on it use the first, its ``lanes`` one each."""

    def __init__(self, device: VerbsDevice, connection: Connection, lane: int = 0) -> None:
        super().__init__(device, connection.liveness)
        self._connection = connection
        self._pair: QueuePair = connection.lanes[lane]
        self._pair.callbacks = device.callbacks
        self._pair.why_lost = lambda: device.why_lost(self)
        self._all: tuple[VerbsChannel, ...] = (self,)
        if lane == 0:
            others = (VerbsChannel(device, connection, other) for other in range(1, len(connection.lanes)))
            self._all = (self, *others)

    @property
    def lanes(self) -> Sequence[Channel]:
        return self._all

    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        try:
            nbytes, region = local.nbytes, local.region
            if nbytes != remote.nbytes:
                check_sizes(nbytes, remote.nbytes)
            word = None if signal is None else _word(*signal)
            there = _place(remote.region, remote.offset, nbytes)
            here = self._local(region, local.offset, nbytes)
            return self._pair.write(here, there, word, fence, region)
        except RemoteAccessError as error:
            self._check_alive()
            return Failed(error)
        except (TypeError, AttributeError) as error:
            raise explain(error, "write", local=local, remote=remote, signal=signal) from None

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        try:
            word = _word(target, value)
        except RemoteAccessError as error:
            self._check_alive()
            return Failed(error)
        except (TypeError, AttributeError) as error:
            raise explain(error, "signal", remote=target, values=(value,)) from None
        if self.liveness.lost:
            self._check_alive()
        return self._pair.write(_NOTHING, _NOWHERE, word, fence, None)

    def read(self, local: View, remote: RemoteView) -> Completion:
        try:
            region = local.region
            check_sizes(remote.nbytes, local.nbytes)
            check_fillable(local)
            there = _place(remote.region, remote.offset, remote.nbytes, "read")
            return self._pair.read(self._local(region, local.offset, local.nbytes), there, region)
        except RemoteAccessError as error:
            return Failed(error)
        except (TypeError, AttributeError) as error:
            raise explain(error, "read", local=local, remote=remote) from None

    def _local(self, region: Any, offset: int, nbytes: int) -> tuple[int, int, int]:
        """Address, bytes and key of what the NIC is to read or fill."""
        if self.liveness.lost:
            self._check_alive()
        if region.closed:
            raise RegionClosed("the local region was closed")
        if region.device is not self.device:
            raise ArgumentError("verbs moves memory of its own device: allocate() or register() it there")
        return region.start + offset, nbytes, region.lkey

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        try:
            check_word(target)
            return self._atomic(target, operator.index(value) % 2**64, None, timeout)
        except (TypeError, AttributeError) as error:
            raise explain(error, "fetch_add", remote=target, values=(value,)) from None

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        try:
            check_word(target)
            check_value(expected, value)
            return self._atomic(target, expected, value, timeout)
        except (TypeError, AttributeError) as error:
            raise explain(error, "compare_swap", remote=target, values=(expected, value)) from None

    def _atomic(self, target: RemoteView, first: int, second: int | None, timeout: float) -> int:
        self._check_alive()
        address, key, _ = _word(target, 0)
        operation = self._pair.atomic((address, key), first, second)
        operation.wait(timeout)
        return operation.result

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        self._pair.begin_batch()
        try:
            yield
        finally:
            self._pair.end_batch()

    def settle(self, timeout: float = 60.0) -> None:
        self._check_lost()
        device = self.device
        assert isinstance(device, VerbsDevice)
        self._connection.destroy()
        # What the peer had posted on a channel of its own may still arrive. A peer that lives learns of it.
        device._expel(self._connection.peer)

    def close(self) -> None:
        device = self.device
        assert isinstance(device, VerbsDevice)
        if self.liveness.forked:
            return
        device._drop(self._connection)


def _place(region: RemoteRegion, offset: int, nbytes: int, access: Access = "write") -> tuple[int, int]:
    """Address and key. Raises `RemoteAccessError` for what the target's NIC would refuse, where that is known here."""
    address = region.address + offset
    if region.access != access == "write":
        raise _refused("the region is read-only for this key")
    if address + nbytes > _END:
        raise _refused("out of the region's range")
    if region.key > _LARGEST_KEY:
        raise _refused("no open region has that key")
    return address, region.key


def _word(view: RemoteView, value: int) -> tuple[int, int, int]:
    """Address, key and value of a signal. Raises `ArgumentError` as well."""
    offset = view.offset
    if view.nbytes != 8 or offset % 8 or not 0 <= operator.index(value) < _END:
        check_signal((view, value))
    address, key = _place(view.region, offset, 8)
    if address % 8:
        raise _refused("the word is not 8-byte aligned")
    return address, key, value


def _refused(why: str) -> RemoteAccessError:
    return RemoteAccessError(f"verbs: the target refused: {why}")


def _check_settings(
    queue_pairs: int, completion_queues: int, signals: str, retries: int, exponent: int, heartbeat: float
) -> None:
    if not 1 <= queue_pairs <= MOST_LANES or not 1 <= completion_queues <= MOST_LANES:
        raise ArgumentError(f"verbs: 1 to {MOST_LANES} queue pairs a peer and completion queues")
    if signals not in ("immediate", "write", "tail"):
        raise ArgumentError(f"verbs: signals are immediate, write or tail, not {signals!r}")
    if not 0 <= retries <= NEVER_REPORTS or not 1 <= exponent <= 31 or not 0.001 <= heartbeat <= 3600:
        raise ArgumentError("verbs: retries 0 to 7, timeout_exponent 1 to 31, heartbeat 0.001 to 3600 seconds")
    if retries == NEVER_REPORTS:
        warnings.warn(
            "verbs: with 7 retries some NICs, and Soft-RoCE, never report a peer that is gone: use 6 or fewer",
            stacklevel=3,
        )
