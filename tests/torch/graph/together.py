"""All workers of a graph in one process: a thread each, over loopback devices, with a dictionary for a coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tensorwire.device import Channel, Device, LoopbackDevice
from tensorwire.errors import PlanMismatch, WaitTimeout
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.testing.patience import patient

T = TypeVar("T")
TIMEOUT = patient(20.0)


class Book:
    """What the coordinator does for plans: an address book, and the comparison of plans."""

    def __init__(self, parties: int) -> None:
        self._entries: dict[str, bytes] = {}
        self._plans: dict[str, list[bytes]] = {}
        self._groups = parties
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes, to: list[str] | None = None) -> None:
        with self._changed:
            assert key not in self._entries
            self._entries[key] = value
            self._changed.notify_all()

    def lookup(self, key: str, timeout: float = TIMEOUT) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._entries, min(timeout, TIMEOUT)):
                raise WaitTimeout(key)
            return self._entries[key]

    def compare(self, name: str, digest: bytes, text: str, parties: int, timeout: float = TIMEOUT) -> None:
        with self._changed:
            plans = self._plans.setdefault(name, [])
            plans.append(digest)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(plans) == self._groups, min(timeout, TIMEOUT)):
                raise WaitTimeout(name)
            if len(set(plans)) > 1:
                raise PlanMismatch(name)


class Member:
    """One worker: its device, and channels to the others."""

    def __init__(self, index: int, devices: list[Device], book: Book) -> None:
        self.index, self.client = index, book
        self._devices = devices
        self._channels: dict[str, Channel] = {}

    def channel(self, name: str) -> Channel:
        if name not in self._channels:
            other = self._devices[int(name.removeprefix("worker "))]
            self._channels[name] = self._devices[self.index].connect(other.address)
        return self._channels[name]


class Together:
    """``workers`` parties of one job. ``each(call)`` runs ``call(group)`` for all at once and returns the results."""

    def __init__(self, workers: int, device: Callable[[], Device] = LoopbackDevice) -> None:
        self._devices = [device() for _ in range(workers)]
        book = Book(workers)
        members: list[Any] = [Member(index, self._devices, book) for index in range(workers)]
        self.parties = [WorkerGroup(member, workers, TIMEOUT) for member in members]
        self._pool = ThreadPoolExecutor(workers)

    def each(self, call: Callable[[WorkerGroup], T]) -> list[T]:
        """The first error of one is raised, once the others have ended; they end because the devices are aborted."""

        def run(group: WorkerGroup) -> T:
            try:
                return call(group)
            except BaseException as error:
                errors.append(error)
                for device in self._devices:
                    device.abort("another worker failed")
                raise

        errors: list[BaseException] = []
        futures = [self._pool.submit(run, group) for group in self.parties]
        wait(futures, TIMEOUT * 2)
        if errors:
            raise errors[0]
        return [future.result(0) for future in futures]

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.parties:
            group.close()
        for device in self._devices:
            device.close()
        self._pool.shutdown()
