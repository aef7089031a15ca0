"""One process of a job: its control connection, its devices, and its channels to the others."""

from __future__ import annotations

import sys
import threading
from functools import partial

import msgspec

from tensorwire.control.client import Client
from tensorwire.control.frames import Cause
from tensorwire.control.names import member_name
from tensorwire.control.reach import Card, Route, connect, stays_here, whereabouts
from tensorwire.device import Channel, Device, ShmDevice, TcpDevice, VerbsDevice
from tensorwire.device.verbs.ports import has_active_port
from tensorwire.errors import (
    AlreadyPublished,
    ArgumentError,
    JobEnded,
    OutOfMemory,
    PeerLost,
    TensorwireError,
    VerbsUnavailable,
    WaitTimeout,
)
from tensorwire.observe import spans

DEVICES = ("auto", "shm", "tcp", "verbs")
FRAMEWORKS = ("torch",)
# After a peer is lost, how long the coordinator may take to say why.
CAUSE_SECONDS = 5.0


class Member:
    """Joins the job at ``address`` as ``role index`` and opens its devices.

    ``device`` is ``auto`` (shm where a peer's memory really can be mapped, verbs over a network where a first write
    really arrived, else tcp), ``shm``, ``tcp`` or ``verbs``; ``host`` is the interface that tcp listens on, and whose
    RDMA port is preferred; ``timeout`` is how many seconds the coordinator may take for each answer while we join.

    Raises `ArgumentError`, `PeerLost`, `AuthenticationError`, `JobEnded`, or `VerbsUnavailable` (``verbs`` only).
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        role: str,
        index: int,
        *,
        device: str = "auto",
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        if device not in DEVICES:
            raise ArgumentError(f"device is one of {', '.join(DEVICES)}, not {device!r}")
        self.role, self.index = role, index
        self.client = Client(address, secret, role, index, timeout=timeout)
        self.devices: dict[str, Device] = {}
        self.routes: dict[str, Route] = {}  # by which device each member was reached, and why
        self.host = host
        self.where = whereabouts()
        self._no_verbs = "no active RDMA port here"
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        try:
            if spans.enabled:
                spans.clock = self.client.clock()
            card = self._open_devices(device, host)
            self.client.on_end(self._ended)
            self.client.publish(f"card/{self.name}", msgspec.msgpack.encode(card))
        except BaseException:
            self.close(goodbye=False)
            raise

    def _open_devices(self, device: str, host: str) -> Card:
        shm = probe = tcp = None
        beat, lost_after = self.client.welcome.beat, self.client.welcome.lost_after  # the devices keep the job's time
        if device in ("auto", "shm"):
            self.devices["shm"] = ShmDevice(beat, lost_after)
            self._probe = self.devices["shm"].allocate(8)
            shm, probe = self.devices["shm"].address, self._probe.remote("read").pack()
        if device in ("auto", "tcp"):
            self.devices["tcp"] = TcpDevice(host, heartbeat=beat, lost_after=lost_after)
            tcp = self.devices["tcp"].address
        verbs, verbs_probe = self._open_verbs(device, host)
        frameworks = tuple(f for f in FRAMEWORKS if f in sys.modules)
        return Card(self.where, shm, probe, tcp, frameworks, verbs, verbs_probe, host)

    def _open_verbs(self, device: str, host: str) -> tuple[bytes | None, bytes | None]:
        """Address and probe. ``auto`` goes on without, and does not even load the library where it can be of no use."""
        if device not in ("auto", "verbs") or (device == "auto" and (stays_here(host) or not has_active_port())):
            return None, None
        try:
            opened = self.devices["verbs"] = VerbsDevice(host=host, heartbeat=self.client.welcome.beat)
            self._verbs_probe = opened.allocate(8)
            return opened.address, self._verbs_probe.remote("write").pack()
        except (VerbsUnavailable, OutOfMemory) as error:
            if device == "verbs":
                raise
            if "verbs" in self.devices:
                self.devices.pop("verbs").close()
            self._no_verbs = str(error)
            return None, None

    @property
    def name(self) -> str:
        """``worker 0``."""
        return self.client.name

    def channel(self, role: str, index: int) -> Channel:
        """A channel to another member, over the best device that reaches it; made once.

        Raises `WaitTimeout` if it has not joined, `PeerLost` if no device reaches it.
        """
        name = member_name(role, index)
        with self._lock:
            if name not in self._channels:
                self._channels[name] = self._connect(name)
            return self._channels[name]

    def _connect(self, name: str) -> Channel:
        try:
            channel, self.routes[name] = connect(
                self.devices, self.where, self.card(name), agree=partial(self._agree, name), no_verbs=self._no_verbs
            )
        except PeerLost as error:
            raise PeerLost(f"no device reaches {name}: {error}") from None
        return channel

    def _agree(self, name: str, found: str) -> str:
        """Whoever tried verbs first decides for both: '' to use it, else why not."""
        pair = sorted((self.name, name))
        key = f"verbs/{'/'.join(pair)}"
        try:
            self.client.publish(key, msgspec.msgpack.encode(found), to=pair)
            return found
        except AlreadyPublished:
            return msgspec.msgpack.decode(self.client.lookup(key), type=str)

    def card(self, name: str, timeout: float = 60.0) -> Card:
        """Another member's entry. Raises `WaitTimeout` if it has not joined."""
        try:
            return msgspec.msgpack.decode(self.client.lookup(f"card/{name}", timeout), type=Card)
        except WaitTimeout:
            raise WaitTimeout(f"{name} has not joined the job within {timeout:g} s") from None

    def explain(self, error: TensorwireError) -> TensorwireError:
        """The job's own cause where ``error`` only says that a peer is gone."""
        if isinstance(error, PeerLost) and self.client.ended.wait(CAUSE_SECONDS):
            return self.client.error()
        return error

    def fail(self, what: str, traceback: str = "", *, settle: float = 0.0) -> None:
        """Ends the job: this process did ``what``; after ``settle`` seconds, unless somebody has a better account."""
        self.client.fail(Cause(self.name, what, traceback, settle))

    def _ended(self, cause: Cause | None) -> None:
        if cause is not None:
            for device in list(self.devices.values()):
                device.abort(f"the job ended: {cause}")

    def check(self) -> None:
        """Raises `JobEnded` if the job has failed."""
        if self.client.ended.is_set() and self.client.cause is not None:
            raise JobEnded(str(self.client.cause))

    def close(self, *, goodbye: bool = True) -> None:
        """Leaves the job and closes the devices. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.client.close(goodbye=goodbye)
        for device in self.devices.values():
            device.close()
