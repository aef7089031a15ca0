"""One process of a job: its control connection, its devices, and its channels to the others."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from tensorwire.control.client import Client
from tensorwire.control.frames import Cause
from tensorwire.control.names import member_name
from tensorwire.device import Channel, Device, RemoteRegion, ShmDevice, TcpDevice
from tensorwire.errors import (
    ArgumentError,
    AuthenticationError,
    JobEnded,
    PeerLost,
    RemoteAccessError,
    TensorwireError,
    WaitTimeout,
)

DEVICES = ("auto", "shm", "tcp")
FRAMEWORKS = ("torch",)
# After a peer is lost, how long the coordinator may take to say why.
CAUSE_SECONDS = 5.0


class Card(msgspec.Struct, frozen=True):
    """A member's entry in the address book."""

    machine: str
    shm: bytes | None
    probe: bytes | None
    tcp: bytes | None
    frameworks: tuple[str, ...] = ()  # that its process has loaded: servers load them meanwhile


def machine_id() -> str:
    """Equal for processes that can share memory through a Unix socket: one boot, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


class Member:
    """Joins the job at ``address`` as ``role index`` and opens its devices.

    ``device`` is ``auto`` (shm where a peer's memory really can be mapped, else tcp), ``shm`` or ``tcp``; ``host`` is
    the interface that tcp listens on; ``patience``: seconds to wait for a coordinator that has not started yet.
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
        patience: float = 0.0,
    ) -> None:
        if device not in DEVICES:
            raise ArgumentError(f"device is one of {', '.join(DEVICES)}, not {device!r}")
        self.role, self.index = role, index
        self.client = Client(address, secret, role, index, patience=patience)
        self.devices: dict[str, Device] = {}
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        try:
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
        return Card(machine_id(), shm, probe, tcp, tuple(f for f in FRAMEWORKS if f in sys.modules))

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
                self._channels[name] = self._connect(name, self.card(name))
            return self._channels[name]

    def card(self, name: str, timeout: float = 60.0) -> Card:
        """Another member's entry. Raises `WaitTimeout` if it has not joined."""
        try:
            return msgspec.msgpack.decode(self.client.lookup(f"card/{name}", timeout), type=Card)
        except WaitTimeout:
            raise WaitTimeout(f"{name} has not joined the job within {timeout:g} s") from None

    def _connect(self, name: str, card: Card) -> Channel:
        reasons = []
        if "shm" in self.devices and card.shm is not None and card.probe is not None:
            if card.machine == machine_id():
                try:
                    channel = self.devices["shm"].connect(card.shm)
                    channel.map(RemoteRegion.unpack(card.probe).view())  # only a real mapping counts
                    return channel
                except (PeerLost, RemoteAccessError, AuthenticationError) as error:
                    reasons.append(f"shm: {error}")
            else:
                reasons.append("shm: it runs on another machine")
        if "tcp" in self.devices and card.tcp is not None:
            return self.devices["tcp"].connect(card.tcp)
        raise PeerLost(f"no device reaches {name}: {'; '.join(reasons) or 'none in common'}")

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
