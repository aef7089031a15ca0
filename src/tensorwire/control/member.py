"""One process of a job: its control connection, its devices, and its channels to the others."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from tensorwire.control.client import Client
from tensorwire.control.frames import Cause
from tensorwire.control.locality import locality
from tensorwire.control.membership import Membership
from tensorwire.control.names import member_name
from tensorwire.control.reach import CANDIDATES, Card, Endpoint, Route, connect, endpoint, not_opened
from tensorwire.device import Channel, Device
from tensorwire.device.copy_choice import measure_copy_aside
from tensorwire.device.registry import AUTO, find_job_device
from tensorwire.errors import (
    AlreadyPublished,
    JobEnded,
    OutOfMemory,
    PeerLost,
    RemoteAccessError,
    TensorwireError,
    VerbsUnavailable,
    WaitTimeout,
)
from tensorwire.messages import decode_message
from tensorwire.observe import spans

T = TypeVar("T")
FRAMEWORKS = ("torch",)
# After a peer is lost, how long the coordinator may take to say why.
CAUSE_SECONDS = 5.0
_BETWEEN_LOOKS = 60.0  # seconds between looks at the job while others take their time
_LOOK = 1.0  # seconds between looks at the job while a loss is to be confirmed
PATIENCE = 2.0  # seconds that a worker waits in a step without a word to the coordinator


class Member:
    """Joins the job at ``address`` as ``role index`` and opens its devices.

    ``device`` is ``auto`` (shm where a peer's memory really can be mapped, verbs over a network where a first write
    really arrived, else tcp), or the name of the only device to use; ``interface`` is the address of the interface that
    devices listen on; ``timeout`` is how many seconds the coordinator may take for each answer while we join.

    Raises `ArgumentError`, `PeerLost`, `AuthenticationError`, `JobEnded`, or what opening the device raises.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        role: str,
        index: int,
        *,
        device: str = "auto",
        interface: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        if device != AUTO:
            find_job_device(device)  # refused before anybody hears of us
        measure_copy_aside()  # where no launcher has done it
        self.role, self.index = role, index
        self.client = Client(address, secret, role, index, timeout=timeout)
        self.devices: dict[str, Device] = {}
        self.routes: dict[str, Route] = {}  # by which device each member was reached, and why
        self.interface = interface
        self.where = locality()
        self._absent: dict[str, str] = {}  # devices that auto could not open, and why
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}  # to connect to a member
        self._members_changed = threading.Condition()
        self.late: set[str] = set()  # stores that the others had made before this worker joined the job
        self._settled: weakref.WeakKeyDictionary[Channel, threading.Event] = weakref.WeakKeyDictionary()
        try:
            if spans.enabled:
                spans.clock = self.client.clock()
            card = self._open_devices(device)
            self.client.on_end(self._ended)
            self.client.on_members(self._change)
            self.client.publish(f"card/{self.name}", msgspec.msgpack.encode(card))
        except BaseException:
            self.close(goodbye=False)
            raise

    def _open_devices(self, device: str) -> Card:
        names = [device]
        if device == AUTO:
            self._absent = not_opened(self.interface)
            names = [name for name in CANDIDATES if name not in self._absent]
        table: dict[str, Endpoint] = {}
        for name in names:
            try:
                self.devices[name] = self.new_device(name)
                table[name] = endpoint(self.devices[name])
            except (VerbsUnavailable, OutOfMemory) as error:
                if device != AUTO or not CANDIDATES[name].agreed:
                    raise
                if name in self.devices:
                    self.devices.pop(name).close()
                self._absent[name] = str(error)
        frameworks = tuple(f for f in FRAMEWORKS if f in sys.modules)
        return Card(self.where, table, self._absent, frameworks, self.interface)

    def new_device(self, name: str) -> Device:
        """Another device of that name, with the job's settings; the caller closes it. Raises as its class does."""
        welcome = self.client.welcome
        kind = find_job_device(name)
        return kind.for_job(interface=self.interface, heartbeat=welcome.beat, lost_after=welcome.lost_after)

    @property
    def name(self) -> str:
        """``worker 0``."""
        return self.client.name

    def channel(self, name: str) -> Channel:
        """A channel to another member, such as ``server 0``, over the best device that reaches it; made once.

        Raises `WaitTimeout` if it has not joined, `PeerLost` if no device reaches it, or it is lost meanwhile.
        """
        with self._lock:
            if name in self._channels:
                return self._channels[name]
            turn = self._turns.setdefault(name, threading.Lock())
        with turn:  # not under the other lock: a peer that is stopped must not keep others waiting
            incarnation = self._incarnation(name)
            if (found := self._channels.get(name)) is not None:
                return found
            channel = self._connect(name)
            with self._lock:
                if self._incarnation(name) == incarnation:
                    self._channels[name] = channel
                    return channel
        channel.close()
        raise PeerLost(f"{name} is lost: the job goes on without the process to which this one was about to connect")

    def _incarnation(self, name: str) -> int | None:
        role, _, index = name.partition(" ")
        return self.membership.workers.get(int(index)) if role == "worker" else None

    def _connect(self, name: str) -> Channel:
        try:
            channel, self.routes[name] = connect(
                self.devices, self.where, self.card(name), agree=partial(self._agree, name), absent=self._absent
            )
        except PeerLost as error:
            raise PeerLost(f"no device reaches {name}: {error}") from None
        for lane in channel.lanes:
            lane.known_as = name
        return channel

    def _agree(self, name: str, device: str, found: str) -> str:
        """The first to try the device decides for both: '' to use it, otherwise why not."""
        pair = sorted((self.name, name))
        key = f"{device}/{'/'.join(pair)}"
        try:
            self.client.publish(key, msgspec.msgpack.encode(found), to=pair)
            return found
        except AlreadyPublished:
            return msgspec.msgpack.decode(self.client.lookup(key), type=str)

    def card(self, name: str, timeout: float = 60.0) -> Card:
        """Another member's entry. Raises `WaitTimeout` if it has not joined, `PeerLost` if it is lost."""
        try:
            return decode_message(self.client.lookup(f"card/{name}", timeout, owner=name), Card)
        except WaitTimeout:
            raise WaitTimeout(f"{name} has not joined the job within {timeout:g} s") from None

    def wait(self, wait: Callable[[float], object], timeout: float, place: Callable[[], tuple[str, str]]) -> None:
        """``wait(seconds)``. Where it takes long, this worker says where it waits, and for whom: see `Client.waits`.

        Raises as ``wait``.
        """
        try:
            wait(min(timeout, PATIENCE))
            return
        except WaitTimeout:
            if timeout <= PATIENCE:
                raise
        where, whom = place()
        self.client.waits(where, whom, PATIENCE)
        try:
            wait(timeout - PATIENCE)
        except WaitTimeout:
            whom = whom or "another worker"
            raise WaitTimeout(
                f"{self.name} has waited {timeout:g} s in {where} for {whom}; it may still come"
            ) from None
        finally:
            self.client.waits()

    def outwait(self, wait: Callable[[float], T]) -> T:
        """What ``wait(seconds)`` returns, which is called again after a `WaitTimeout`, as long as the job lives.

        How long others compute is theirs to say, and they have a timeout. Raises `JobEnded`, or as ``wait`` else.
        """
        while True:
            try:
                return wait(_BETWEEN_LOOKS)
            except WaitTimeout:
                self.check()

    def explain(self, error: TensorwireError, seconds: float = CAUSE_SECONDS) -> TensorwireError:
        """The job's own cause where ``error`` only says that a peer is gone, or has closed its memory; it may take
        ``seconds`` to come."""
        if isinstance(error, (PeerLost, RemoteAccessError)) and self.client.ended.wait(seconds):
            return self.client.error()
        return error

    @contextlib.contextmanager
    def explained(self, seconds: float = CAUSE_SECONDS) -> Iterator[None]:
        """Inside it an error of Tensorwire becomes what `explain` makes of it."""
        try:
            yield
        except TensorwireError as error:
            raise self.explain(error, seconds) from None

    def fail(self, what: str, traceback: str = "", *, settle: float = 0.0, alone: bool = False) -> None:
        """Ends the job: this process did ``what``; after ``settle`` seconds, unless somebody has a better account.

        ``alone``: a job that survives this process goes on.
        """
        self.client.fail(Cause(self.name, what, traceback, settle), alone=alone)

    # ---- members that are lost

    @property
    def membership(self) -> Membership:
        """Who is in the job, as far as this process has been told."""
        return self.client.membership

    def on_members(self, call: Callable[[Membership], object]) -> None:
        """As `Client.on_members`, after the channels to those that are lost have ended."""
        self.client.on_members(call)

    def _change(self, membership: Membership) -> None:
        """Wakes all that wait for a worker that is lost. How it may be reached again, another process says."""
        with self._lock:
            lost = {member_name("worker", rank): how.what for rank, how in membership.lost.items()}
            ended = [(self._channels.pop(name), what) for name, what in lost.items() if name in self._channels]
            for channel, _ in ended:
                self._settled[channel] = threading.Event()
        for channel, what in ended:
            for lane in channel.lanes:
                lane.liveness.lose(what)
            threading.Thread(target=self._settle, args=(channel,), name="tensorwire-settle", daemon=True).start()
        with self._members_changed:
            self._members_changed.notify_all()

    def _settle(self, channel: Channel) -> None:
        with contextlib.suppress(TensorwireError):  # a process that is stopped, and lives on
            channel.settle(self.client.welcome.lost_after)
            self._settled[channel].set()
        channel.close()  # else waits that name no channel would end for this loss, again and again

    def is_settled(self, channel: Channel) -> bool:
        """Whether the process at the other end, which is lost, can no longer write to memory of this one."""
        return channel in self._settled and self._settled[channel].is_set()

    def await_loss(self, worker: int, error: PeerLost) -> None:
        """Returns when the worker, a channel to which ended with ``error``, is out of the job.

        Raises ``error`` where the job does not survive that, or why it ended.
        """
        if not self.membership.survives:
            raise error
        incarnation = self.membership.workers.get(worker)
        if incarnation is not None:
            self.client.suspect(worker, incarnation)
        with self._members_changed:
            while incarnation is not None and self.membership.workers.get(worker) == incarnation:
                if self.client.ended.is_set():
                    raise self.client.error()
                self._members_changed.wait(_LOOK)

    def _ended(self, cause: Cause | None) -> None:
        if cause is not None:
            for device in list(self.devices.values()):
                device.abort(f"the job ended: {cause}")

    def check(self) -> None:
        """Raises `JobEnded` if the job has failed."""
        if self.client.ended.is_set() and self.client.cause is not None:
            raise JobEnded(str(self.client.cause))

    def close(self, *, goodbye: bool = True, early: bool = False) -> None:
        """Leaves the job and closes the devices. Idempotent. ``early``: as for `Client.close`."""
        self.client.close(goodbye=goodbye, early=early)
        for device in list(self.devices.values()):
            device.close()
