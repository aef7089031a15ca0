"""A device that wraps another and injects faults: delays, lost peers, failed operations and refused memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from tensorwire._native import Memory
from tensorwire.device.checks import check_fillable, check_signal, check_sizes, check_value, check_word
from tensorwire.device.contract import DONE, Channel, Completion, Device, Failed, Signal
from tensorwire.device.operands import check_operands
from tensorwire.device.region import Access, Region, RemoteView, View
from tensorwire.errors import (
    ArgumentError,
    DeviceError,
    OutOfMemory,
    PeerLost,
    RegionClosed,
    RemoteAccessError,
    WaitTimeout,
)

_MOST_HELD = 1024  # operations that a channel holds back; the next one waits
_POST_SECONDS = 60.0


def _injected() -> Exception:
    return RemoteAccessError("injected: this operation was made to fail; the target's memory is untouched")


class FaultyDevice(Device):
    """Another device, with faults. Everything else is that device's: regions, addresses, capabilities, its close().

    Args:
        device: The device to wrap.
        seed: Determines the delays.
        delay: Every operation is held back for a random time of up to so many seconds, in its order, and completes
            after the call has returned. Memory from ``Channel.map`` is plain memory: nothing holds that back.
        lose_after: Each channel loses its peer after so many operations; None: not by itself.
        fail_every: Every such operation of a channel fails with ``error()``, and changes nothing; None: none does.
        error: Creates the errors of ``fail_every``; by default a `RemoteAccessError`.
        refuse_memory_at: Which call of ``allocate`` or ``register``, counted from 1, raises `OutOfMemory`.

    Raises:
        ArgumentError: A number is out of range.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 0,
        delay: float = 0.0,
        lose_after: int | None = None,
        fail_every: int | None = None,
        error: Callable[[], Exception] = _injected,
        refuse_memory_at: int | None = None,
    ) -> None:
        if delay < 0 or any(n is not None and n < 1 for n in (lose_after, fail_every, refuse_memory_at)):
            raise ArgumentError("faults: a delay must be 0 seconds or more; operations and calls are counted from 1")
        super().__init__()
        self.device = device
        self.liveness = device.liveness
        self.callbacks = device.callbacks
        self.name = device.name
        self.capabilities = device.capabilities
        self.seed, self.delay, self.lose_after = seed, delay, lose_after
        self.fail_every, self.error = fail_every, error
        self._refuse_memory_at = refuse_memory_at
        self._registered = itertools.count(1)
        self._connected = itertools.count(1)
        self._channels: list[FaultyChannel] = []

    @property
    def address(self) -> bytes:
        return self.device.address

    def connect(self, address: bytes, timeout: float = 30.0) -> FaultyChannel:
        inner = self.device.connect(address, timeout)
        channel = FaultyChannel(self, inner, random.Random(f"{self.seed} {next(self._connected)}"))
        self._channels.append(channel)
        return channel

    def allocate(self, nbytes: int, alignment: int = 4096, *, reserve: bool = True) -> Region:
        self._maybe_refuse(f"cannot allocate a region of {nbytes} bytes")
        return self.device.allocate(nbytes, alignment, reserve=reserve)

    def register(self, buffer: Any) -> Region:
        self._maybe_refuse("cannot register memory")
        return self.device.register(buffer)

    def _maybe_refuse(self, what: str) -> None:
        if next(self._registered) == self._refuse_memory_at:
            raise OutOfMemory(f"{what}: injected")

    def lose_peers(self, reason: str = "injected") -> None:
        """Makes every channel of this device lose its peer now.

        Args:
            reason: What their errors say.
        """
        for channel in list(self._channels):
            channel.lose_peer(reason)

    def why_lost(self, channel: Channel | None = None) -> str:
        return self.device.why_lost(channel)

    def _expose(self, region: Region, access: Access) -> int:
        return self.device._expose(region, access)

    def _withdraw(self, region: Region) -> None:
        self.device._withdraw(region)

    def _forget(self, channel: FaultyChannel) -> None:
        with contextlib.suppress(ValueError):
            self._channels.remove(channel)

    def close(self) -> None:
        for channel in list(self._channels):
            channel.close()  # what they hold back is called back while there is a thread for it
        self.device.close()


class FaultyChannel(Channel):
    """A channel of a `FaultyDevice`. With a delay, a thread of its own passes the operations on.

    Attributes:
        device: The device of the channel.
    """

    device: FaultyDevice

    def __init__(self, device: FaultyDevice, inner: Channel, chance: random.Random) -> None:
        super().__init__(device, inner.liveness)
        self._inner = inner
        self._chance = chance
        self._count = itertools.count(1)
        self._turn = threading.Condition()
        self._held: collections.deque[tuple[DelayedCompletion, int, Callable[[], Completion]]] = collections.deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        check_operands("write", local=local, remote=remote, signal=signal)
        check_sizes(local.nbytes, remote.nbytes)
        check_signal(signal)
        self._check_alive()
        if local.region.closed:
            raise RegionClosed("the source region was closed")
        return self._post(lambda: self._inner.write(local, remote, signal, fence=fence))

    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        check_operands("signal", remote=target, values=(value,))
        check_signal((target, value))
        return self._post(lambda: self._inner.signal(target, value, fence=fence))

    def read(self, local: View, remote: RemoteView) -> Completion:
        check_operands("read", local=local, remote=remote)
        check_sizes(remote.nbytes, local.nbytes)
        check_fillable(local)
        self._check_alive()
        if local.region.closed:
            raise RegionClosed("the target region was closed")
        return self._post(lambda: self._inner.read(local, remote))

    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        check_operands("fetch_add", remote=target, values=(value,))
        check_word(target)
        return self._atomic(lambda left: self._inner.fetch_add(target, value, left), timeout)

    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        check_operands("compare_swap", remote=target, values=(expected, value))
        check_word(target)
        check_value(expected, value)
        return self._atomic(lambda left: self._inner.compare_swap(target, expected, value, left), timeout)

    def _atomic(self, call: Callable[[float], int], timeout: float) -> int:
        old: list[int] = []

        def run() -> Completion:
            old.append(call(timeout))
            return DONE

        self._post(run).wait(timeout)
        return old[0]

    def map(self, target: RemoteView) -> Memory | None:
        return self._inner.map(target)

    def on_lost(self, call: Callable[[str], None]) -> None:
        self._inner.on_lost(call)

    def settle(self, timeout: float = 60.0) -> None:
        self._inner.settle(timeout)

    def lose_peer(self, reason: str = "injected") -> None:
        """Makes this channel lose its peer now. Operations that are not done by then fail with `PeerLost`.

        Args:
            reason: What their errors say.
        """
        self.liveness.lose(reason)
        self._inner.close()  # after which nothing touches the memory of what was under way

    def close(self) -> None:
        if self.liveness.forked:
            return
        self._inner.close()
        self._closed.set()
        with self._turn:
            self._turn.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.device._forget(self)

    def _post(self, call: Callable[[], Completion]) -> Completion:
        self._check_alive()
        if not self.device.delay:
            return self._hand_on(next(self._count), call)
        with self._turn:
            if not self._turn.wait_for(lambda: len(self._held) < _MOST_HELD, _POST_SECONDS):
                raise WaitTimeout(f"the channel stayed full for {_POST_SECONDS:g} s; the operation was not started")
            self._check_alive()
            if self._closed.is_set():  # its thread is gone, or about to go
                raise PeerLost(f"{self.device.name}: the channel was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._hand_on_all, name="tensorwire-faulty", daemon=True)
                self._thread.start()
            held = DelayedCompletion(self)
            self._held.append((held, next(self._count), call))
            self._turn.notify_all()
        return held

    def _hand_on(self, number: int, call: Callable[[], Completion]) -> Completion:
        device = self.device
        if device.fail_every is not None and number % device.fail_every == 0:
            return Failed(device.error())
        completion = call()
        if number == device.lose_after:
            with contextlib.suppress(DeviceError):
                completion.wait()
            self.lose_peer(f"injected after {number} operations")
        return completion

    def _hand_on_all(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._held or self._closed.is_set())
                if not self._held:
                    return
                held, number, call = self._held[0]
            if not self.lost:
                self._closed.wait(self._chance.uniform(0, self.device.delay))
            try:
                completion = self._hand_on(number, call)
            except Exception as error:
                completion = Failed(error.with_traceback(None))  # its frames hold the operation's memory
            with self._turn:
                self._held.popleft()
                self._turn.notify_all()
            held.hand_on(completion)
            del held, call, completion  # and with them the memory of the operation


class DelayedCompletion(Completion):
    """The completion of an operation that may not have begun."""

    def __init__(self, channel: FaultyChannel) -> None:
        self._channel = channel
        self._begun = threading.Event()
        self._inner: Completion = DONE  # until it has begun
        self._calls: list[Callable[[Completion], object]] = []
        self._lock = threading.Lock()

    def hand_on(self, inner: Completion) -> None:
        """From now on it is as ``inner`` says."""
        with self._lock:
            self._inner = inner
            self._begun.set()
            calls, self._calls = self._calls, []
        for call in calls:
            self._pass_on(call)

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        with self._lock:
            if not self._begun.is_set():
                self._calls.append(call)
                return
        self._pass_on(call)

    def _pass_on(self, call: Callable[[Completion], object]) -> None:
        callbacks = self._channel.device.callbacks
        token = callbacks.add(lambda: call(self))
        self._inner.on_done(lambda _: callbacks.notices.post(token))

    @property
    def done(self) -> bool:
        return self._channel.liveness.forked or (self._begun.is_set() and self._inner.done)

    def wait(self, timeout: float = 60.0) -> None:
        if self._channel.liveness.forked:
            raise PeerLost(self._channel.device.why_lost(self._channel))
        end = time.monotonic() + timeout
        if not self._begun.wait(max(0.0, timeout)):
            raise WaitTimeout(f"held back for more than {timeout:g} s; the transfer goes on: do not reuse its memory")
        self._inner.wait(max(0.0, end - time.monotonic()))
