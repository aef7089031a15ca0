"""A NIC that does nothing: the part of the module ``ibverbs`` that the verbs device uses, without any hardware.

Work requests, their parts and descriptions of queue pairs are those of ``ibverbs`` itself. Whatever is posted is
complete at once, whatever is a signal is credited again, and no byte moves. For measuring what the verbs device itself
costs; a process that installs it (`install`) has no other NIC.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import time
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from tensorwire.device.verbs import device, library
from tensorwire.device.verbs.port_selection import select_port
from tensorwire.device.verbs.ports import ACTIVE, ROCE_2, Gid, Port

_CREDITS = 64  # signals that are credited together
_PORT = Port(
    device="none0",
    number=1,
    state=ACTIVE,
    link_layer="Ethernet",
    mtu=4096,
    lid=0,
    max_message=1 << 30,
    gids=(Gid(0, bytes(10) + b"\xff\xff\x7f\0\0\x01", ROCE_2, "lo"),),
)


class Completions:
    """What was posted, in its order."""

    def __init__(self, size: int) -> None:
        self.cqe = size
        self.waiting: deque[Any] = deque()

    def poll(self, most: int) -> list[Any]:
        """Up to so many."""
        waiting = self.waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def req_notify(self) -> None:
        """Nobody is ever notified."""

    def close(self) -> None:
        """Nothing is held."""


class QueuePair:
    """``posted``: when the last list of work requests came (``perf_counter_ns``); ``posts``, ``requests``: how many."""

    made: ClassVar[list[QueuePair]] = []
    _numbers = itertools.count(1)

    def __init__(self, completions: Completions) -> None:
        self.qp_num = next(self._numbers)
        self._completions = completions
        self._signals = 0
        ib = library.load()
        self._write_imm, self._signaled = int(ib.WROpcode.RDMA_WRITE_WITH_IMM), int(ib.SendFlags.SIGNALED)
        self.posted = self.posts = self.requests = 0
        self.made.append(self)

    def post_send(self, requests: list[Any]) -> None:
        """As on a queue pair whose peer answers at once."""
        self.posted = time.perf_counter_ns()
        self.posts += 1
        self.requests += len(requests)
        for request in requests:
            self._signals += request.opcode == self._write_imm
            if request.send_flags & self._signaled:
                done = SimpleNamespace(wr_id=request.wr_id, status=0, qp_num=self.qp_num, imm_data=0)
                self._completions.waiting.append(done)
        if self._signals >= _CREDITS:
            back = SimpleNamespace(wr_id=0, status=0, qp_num=self.qp_num, imm_data=self._signals)
            self._completions.waiting.append(back)
            self._signals = 0

    def post_recv(self, requests: list[Any]) -> None:
        """Nothing comes."""

    def to_init(self, *_: Any, **__: Any) -> None:
        """It has no states."""

    to_rtr = to_rts = close = to_init


class Registered:
    """Memory that nobody will touch."""

    def __init__(self, addr: int, length: int, key: int) -> None:
        self.addr, self.length, self.lkey, self.rkey = addr, length, key, key

    def close(self) -> None:
        """Nothing is held."""


class Domain:
    """A protection domain."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)

    def reg_mr(self, addr: int, length: int, access: int) -> Registered:
        """Pins nothing."""
        return Registered(addr, length, next(self._keys))

    def create_qp(self, attributes: Any) -> QueuePair:
        """See `QueuePair`."""
        return QueuePair(attributes.send_cq)

    def close(self) -> None:
        """Nothing is held."""


class Channel:
    """A completion channel on which nothing ever comes."""

    def __init__(self, error: Any) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._error = error

    def get_cq_event(self) -> Any:
        """There is none."""
        raise self._error("ibv_get_cq_event", errno.EAGAIN)

    def close(self) -> None:
        """The descriptor goes."""
        os.close(self.fd)


class Context:
    """An opened device."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def create_comp_channel(self) -> Channel:
        """See `Channel`."""
        return Channel(self._error)

    def query_device(self) -> Any:
        """Limits like a real one's."""
        return SimpleNamespace(max_qp_wr=16384, max_qp_rd_atom=16, max_cqe=1 << 22)

    def alloc_pd(self) -> Domain:
        """See `Domain`."""
        return Domain()

    def create_cq(self, size: int, channel: Channel) -> Completions:
        """See `Completions`."""
        return Completions(size)

    def close(self) -> None:
        """Nothing is held."""


def install() -> None:
    """From now on this process's verbs devices use it. Raises `VerbsUnavailable` without the package ``ibverbs``."""
    real = library.load()
    fake = ModuleType("ibverbs")
    fake.__dict__.update({name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
    fake.QPInitAttr = lambda **fields: SimpleNamespace(**fields)  # type: ignore[attr-defined]
    sys.modules["ibverbs"] = fake
    vars(library)["open_device"] = lambda *_: Context(real.VerbsError)
    vars(device).update(scan_ports=lambda: [_PORT], select_port=lambda *_, **__: select_port([_PORT], environment={}))
