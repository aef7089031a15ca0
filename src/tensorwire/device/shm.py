"""The shm device: peers on this machine map each other's memory.

Regions are sealed memfds, passed over a Unix socket to processes of the same user that hold the device's address.
Nothing has a name in the file system, so nothing outlives the processes.

After the handshake both sides send the number of the peer's word (u32; 0: no page) and the milliseconds between beats
(u32), with the descriptor of their page of words: a memfd of 64 KiB, sealed against shrinking. A request for a region's
descriptor has 9 bytes: key (u64) and 1 for write or 0 for read. The answer is one byte: 0 with the descriptor
(read-only for a read), 1 unknown key, 3 read-only for this key.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading

from tensorwire._native import Liveness, Memory, open_socket
from tensorwire.device import handshake
from tensorwire.device.acceptor import Acceptor, close_socket
from tensorwire.device.contract import Capabilities, Channel, Device
from tensorwire.device.mapped import MappedChannel
from tensorwire.device.peer_monitor import PeerMonitor, ProcessHandle, Watchers
from tensorwire.device.region import Access, Region, RemoteRegion, in_words
from tensorwire.errors import (
    ArgumentError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    RemoteAccessError,
    Unsupported,
    WaitTimeout,
)

_ASK = struct.Struct("<QB")  # key, 1: for writing
_NAME, _TOKEN = 16, 32
_SCARCE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # lack of something, not a fault of the peer


class ShmDevice(Device):
    """Transfers between processes of one user on one machine, through memory that they map.

    Args:
        heartbeat: Seconds between two signs of life of this process, 0.001 to 3600.
        lost_after: Seconds of silence after which a peer that was stopped is lost; at least twice ``heartbeat``. A peer
            that is killed is lost at once.

    Raises:
        ArgumentError: A number is out of range.
    """

    name = "shm"
    capabilities = Capabilities(maps=True, shares_registered=False)

    def __init__(self, heartbeat: float = 1.0, lost_after: float = 10.0) -> None:
        super().__init__()
        self._watchers = Watchers(heartbeat, lost_after)
        self._name = secrets.token_bytes(_NAME)
        self._token = secrets.token_bytes(_TOKEN)
        self._exposed: dict[int, tuple[Region, Access]] = {}
        self._channels: set[ShmChannel] = set()
        self._lock = threading.Lock()
        self._ending = threading.RLock()  # held until a channel has really ended
        listener = socket.socket(fileno=open_socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(b"\0tensorwire-" + self._name.hex().encode())
        listener.listen(128)
        self._acceptor = Acceptor(listener, self._token, self._greet, "tensorwire-shm", inspect=_peer_of)

    @classmethod
    def for_job(cls, *, interface: str, heartbeat: float, lost_after: float) -> ShmDevice:
        return cls(heartbeat, lost_after)

    @property
    def address(self) -> bytes:
        return self._name + self._token

    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        self._check_open()
        if len(address) != _NAME + _TOKEN:
            raise ArgumentError("not the address of a shm device")
        return handshake.persist(lambda left: self._dial(address, left), timeout)

    def _dial(self, address: bytes, timeout: float) -> Channel:
        sock = socket.socket(fileno=open_socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            # Blocking: a Unix socket with Python's timeout does not wait for room in a full backlog.
            seconds = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            sock.connect(b"\0tensorwire-" + address[:_NAME].hex().encode())
            sock.settimeout(timeout)
            pid = _peer_of(sock)
            process = ProcessHandle(pid)  # before the handshake, whose end shows that the process lived until now
            try:
                handshake.initiate(sock, address[_NAME:], b"shm")
                return self._open(sock, pid, process)
            except BaseException:
                process.close()
                raise
        except OSError as error:
            close_socket(sock)
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"shm: cannot reach that device: {error}") from None
        except BaseException:
            close_socket(sock)
            raise

    def _open(self, sock: socket.socket, pid: int, process: ProcessHandle) -> Channel:
        liveness = Liveness(self.liveness, _in_words(pid))
        peer_monitor = PeerMonitor(self._watchers, sock, liveness)
        with self._lock:
            if self.liveness.lost:  # close() came meanwhile, and has not seen this channel
                peer_monitor.close()
            self._check_open()
            channel = ShmChannel(self, sock, liveness, peer_monitor, process)
            self._channels.add(channel)
        return channel

    def _greet(self, sock: socket.socket, _: bytes) -> None:
        pid = _peer_of(sock)
        liveness = Liveness(self.liveness, _in_words(pid), inbound=True)
        peer_monitor = PeerMonitor(self._watchers, sock, liveness)
        try:
            sock.settimeout(None)
            while True:
                key, write = _ASK.unpack(handshake.receive_exactly(sock, _ASK.size))
                self._answer(sock, key, bool(write))
        finally:
            peer_monitor.close()
            liveness.lose("its process closed the connection or died")

    def _answer(self, sock: socket.socket, key: int, write: bool) -> None:
        found = self._exposed.get(key)
        if found is None or found[0].closed:
            sock.sendall(b"\x01")
        elif write and found[1] != "write":
            sock.sendall(b"\x03")
        elif write:
            socket.send_fds(sock, [b"\x00"], [found[0].fd])
        else:
            # Opened anew: the peer's descriptor itself cannot write.
            fd = os.open(f"/proc/self/fd/{found[0].fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(sock, [b"\x00"], [fd])
            finally:
                os.close(fd)

    def _expose(self, region: Region, access: Access) -> int:
        if region.fd < 0:
            raise Unsupported("shm shows peers only memory from allocate(): copy there, or use it as a source")
        if access not in region.keys:
            region.keys[access] = secrets.randbits(64)
            self._exposed[region.keys[access]] = (region, access)
        return region.keys[access]

    def _withdraw(self, region: Region) -> None:
        for key in region.keys.values():
            self._exposed.pop(key, None)

    def close(self) -> None:
        if self.liveness.forked:  # the parent's: a lock may be held forever
            return
        self.liveness.close("the device was closed")
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        with self._ending:  # nobody else is in the middle of it
            pass
        self._close_regions()
        self._acceptor.close()
        self._watchers.close()
        self.callbacks.close()


class ShmChannel(MappedChannel):
    """A channel to a process of this machine."""

    def __init__(
        self,
        device: ShmDevice,
        sock: socket.socket,
        liveness: Liveness,
        peer_monitor: PeerMonitor,
        process: ProcessHandle,
    ) -> None:
        super().__init__(device, liveness)
        self._sock = sock
        self._peer_monitor = peer_monitor
        self._process = process
        self._mapped: dict[tuple[int, Access], Memory] = {}
        self._lock = threading.Lock()

    def _find(self, region: RemoteRegion) -> Memory:
        memory = self._mapped.get((region.key, region.access))
        return memory if memory is not None and not memory.closed else self._map(region)

    def _map(self, region: RemoteRegion) -> Memory:
        write = region.access == "write"
        with self._lock:
            self._check_alive()
            # What was closed meanwhile is unmapped, else a long job would collect mappings.
            self._mapped = {key: memory for key, memory in self._mapped.items() if not memory.closed}
            found = self._mapped.get((region.key, region.access))
            if found is not None:
                return found
            try:
                fd = self._ask(region.key, write)
            except OSError as error:
                # What comes later would be taken for the answer to another question.
                self.liveness.lose(f"it did not say where its region is: {error}")
                raise PeerLost(self.device.why_lost(self)) from None
            try:
                memory = Memory.map(fd, write)
            except OSError as error:
                if error.errno in _SCARCE:
                    raise _scarce(error) from None
                raise ProtocolError(f"shm: the peer's region cannot be mapped: {error.args[1]}") from None
            finally:
                os.close(fd)
            memory.bind(self.device.liveness, None)
            self._mapped[region.key, region.access] = memory
            return memory

    def forget(self, region: RemoteRegion) -> None:
        with self._lock:
            self._mapped.pop((region.key, region.access), None)

    def _ask(self, key: int, write: bool) -> int:
        self._sock.sendall(_ASK.pack(key, write))
        status, fds, flags, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if status == b"\x00" and len(fds) == 1:
            return fds[0]
        for fd in fds:
            os.close(fd)
        if not status:
            raise ConnectionError("it closed the connection")
        if not fds and flags & socket.MSG_CTRUNC:  # the kernel throws away a descriptor that has no room here
            raise _scarce(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        raise self._refused(
            "the region is read-only for this key" if status == b"\x03" else "no open region has that key"
        )

    def settle(self, timeout: float = 60.0) -> None:
        self._check_lost()
        if not self._process.gone(timeout):
            raise WaitTimeout(f"shm: {self.peer} has not ended within {timeout:g} s: it may still write to this memory")

    def close(self) -> None:
        device = self.device
        assert isinstance(device, ShmDevice)
        if self.liveness.forked:
            return
        with device._ending:
            with device._lock:
                known = self in device._channels
                device._channels.discard(self)
            if known:
                self._end()

    def _end(self) -> None:
        self.liveness.close("the channel was closed")
        self._peer_monitor.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends a question that is waiting for its answer
        with self._lock:
            self._mapped = {}
            close_socket(self._sock)
            self._process.close()


def _scarce(error: OSError) -> OutOfMemory:
    if error.errno == errno.EMFILE:
        return OutOfMemory(f"shm: the peer's region cannot be mapped: {in_words(error)}")
    return OutOfMemory(
        f"shm: the peer's region cannot be mapped: {error.args[1]}. Each mapped region takes a descriptor and address "
        "space: see ulimit -n and ulimit -v"
    )


def _peer_of(sock: socket.socket) -> int:
    """The process at the other end; 0 if it lives in another pid namespace. Raises `RemoteAccessError`."""
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise RemoteAccessError("shm: the other process belongs to another user")
    return int(pid)


def _in_words(pid: int) -> str:
    return f"process {pid}" if pid else "a process of another container"
