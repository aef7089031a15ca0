"""Barrier, broadcast and all-reduce between the workers of a job.

Small values travel with the request by which workers meet at the coordinator. Large ones are read, one-sided, from the
workers that have them. Each call costs requests to the coordinator, so no step uses these.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from tensorwire.control import Member
from tensorwire.errors import (
    ArgumentError,
    AuthenticationError,
    PeerLost,
    PlanMismatch,
    RemoteAccessError,
    TensorwireError,
)
from tensorwire.launch.carrier import Carrier, Offer
from tensorwire.launch.reduce import combine, flatten
from tensorwire.launch.values import Bytes, Form, pack, unpack
from tensorwire.messages import decode_message

# What all workers' values of one call take together when they still travel with the requests.
SMALL_BYTES = 512 << 10


class Parcel(msgspec.Struct, frozen=True):
    """What a worker shows the others: its value itself, or where to read it. ``tree``: as for `unpack`."""

    data: bytes = b""
    offer: Offer | None = None
    tree: int = 0


class Collectives:
    """Those of one worker. ``workers``: how many the job has; ``pid``: the process that joined."""

    def __init__(self, member: Member, workers: int, pid: int) -> None:
        self._member, self._workers = member, workers
        self._rank = member.index
        self._carrier = Carrier(member)
        self._number = 0  # of calls so far; all workers make the same
        self._lock = threading.Lock()
        self._inside = ""  # the call that holds the lock
        self._pid = pid

    def barrier(self, timeout: float) -> None:
        """Returns when all workers have come."""
        with self._turn("job.barrier()"):
            self._meet("job.barrier()", Parcel(), timeout)

    def broadcast(self, value: Any, source: int, timeout: float) -> Any:
        """The ``value`` of worker ``source``."""
        if type(source) is not int or not 0 <= source < self._workers:
            raise ArgumentError(f"job.broadcast: source is a rank, 0 to {self._workers - 1}, not {source!r}")
        call = f"job.broadcast(source={source})"
        with self._turn(call), contextlib.ExitStack() as offers:
            end = time.monotonic() + timeout
            parcel = Parcel()
            if self._rank == source:
                packed = pack(value, "job.broadcast")
                if small := packed.nbytes <= SMALL_BYTES:
                    data = np.zeros(packed.nbytes, np.uint8)
                else:
                    data, offer = self._offer(offers, packed.nbytes)
                packed.write(data)
                tree = len(packed.tree)
                parcel = Parcel(data.tobytes(), None, tree) if small else Parcel(b"", offer, tree)
            parcel = self._meet(call, parcel, timeout)[source]
            if self._rank != source:
                value = unpack(self._read(source, parcel, end), parcel.tree)
            if parcel.offer is not None:
                self._together("read", end)
            return value

    def all_reduce(self, value: Any, op: str, timeout: float) -> Any:
        """The values of all workers as one."""
        form, data = flatten(value, op)
        call = f"job.all_reduce(op={op!r}) of {form}"
        with self._turn(call):
            if data.nbytes * self._workers > SMALL_BYTES:
                return form.value(self._large(call, form, data, op, timeout))
            parcels = self._meet(call, Parcel(data.tobytes()), timeout)
            return form.value(
                combine(form, op, [np.frombuffer(bytearray(parcel.data), np.uint8) for parcel in parcels])
            )

    def close(self) -> None:
        """Gives back what large values took. Idempotent."""
        self._carrier.close()

    # ---- large values

    def _large(self, call: str, form: Form, data: Bytes, op: str, timeout: float) -> Bytes:
        """Each worker combines its share of the elements of all, and then reads the others' shares."""
        end = time.monotonic() + timeout
        size = data.nbytes // form.count
        bounds = [size * (form.count * rank // self._workers) for rank in range(self._workers + 1)]
        shares = list(itertools.starmap(slice, itertools.pairwise(bounds)))
        mine = shares[self._rank]
        with contextlib.ExitStack() as offers:
            own, offer = self._offer(offers, data.nbytes)
            own[:] = data
            parcels = self._meet(call, Parcel(offer=offer), timeout)
            values = [np.empty(mine.stop - mine.start, np.uint8) for _ in parcels]
            for rank, parcel in enumerate(parcels):
                if rank == self._rank:
                    values[rank][:] = own[mine]
                else:
                    self._fetch(rank, parcel, mine.start, values[rank], end)
            own[mine] = combine(form, op, values)  # where nobody else reads
            self._together("combined", end)
            result: Bytes = own.copy()
            for rank, parcel in enumerate(parcels):
                if rank != self._rank:
                    self._fetch(rank, parcel, shares[rank].start, result[shares[rank]], end)
            self._together("read", end)
        return result

    def _offer(self, offers: contextlib.ExitStack, nbytes: int) -> tuple[Bytes, Offer]:
        """As `Carrier.offer`, until ``offers`` is left. Raises `JobEnded` where the devices were closed by that."""
        try:
            return offers.enter_context(self._carrier.offer(nbytes))
        except PeerLost as error:
            raise self._member.explain(error) from None

    def _read(self, rank: int, parcel: Parcel, end: float) -> Bytes:
        if parcel.offer is None:
            return np.frombuffer(parcel.data, np.uint8)
        target = np.empty(parcel.offer.nbytes, np.uint8)
        self._fetch(rank, parcel, 0, target, end)
        return target

    def _fetch(self, rank: int, parcel: Parcel, start: int, target: Bytes, end: float) -> None:
        assert parcel.offer is not None  # the calls agree, and with them the sizes
        try:
            self._carrier.fetch(rank, parcel.offer, start, target, max(0.0, end - time.monotonic()))
        except (AuthenticationError, RemoteAccessError) as error:  # it went away during the handshake, or gave up
            gone = PeerLost(f"worker {rank} no longer offers its value: {error}")
            raise self._member.explain(gone) from None
        except TensorwireError as error:
            raise self._member.explain(error) from None

    # ---- meeting

    @contextlib.contextmanager
    def _turn(self, call: str) -> Iterator[None]:
        """One call at a time: two at once would be in another order on other workers."""
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"{call} in a forked child, which is not a member of the job: call it in the worker itself"
            )
        if not self._lock.acquire(blocking=False):
            raise ArgumentError(
                f"{call} while another thread of this worker is in {self._inside}: make such calls from one thread"
            )
        try:
            self._inside = call
            yield
        finally:
            self._carrier.rest()
            self._lock.release()

    def _meet(self, call: str, parcel: Parcel, timeout: float) -> list[Parcel]:
        """The parcels of all workers. After `WaitTimeout` this call may be made again."""
        name, value = f"collective {self._number + 1}", msgspec.msgpack.encode(parcel)
        try:
            values = self._member.client.gather(name, call, value, self._workers, timeout)
        except PlanMismatch:
            self._number += 1
            raise
        self._number += 1
        return [decode_message(value, Parcel) for value in values]

    def _together(self, what: str, end: float) -> None:
        """Returns when all workers have come so far in this call."""
        name = f"collective {self._number}/{what}"
        self._member.client.barrier(name, self._workers, max(0.0, end - time.monotonic()))
