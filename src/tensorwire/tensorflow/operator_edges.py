"""The edges of a job's operators. A thread connects each by key, when an operator with that key is made."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tensorwire._native import Memory, async_edges
from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.device import Device
from tensorwire.edge.agreement import Side
from tensorwire.edge.async_edge import AsyncEdges
from tensorwire.edge.header import HEADER, MOST_DIMENSIONS
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.launch.worker import current_worker
from tensorwire.tensorflow.build import OperatorLibrary, load_library
from tensorwire.tensorflow.error_texts import failure_text, register

_DEPTH = 2  # slots of an edge, each for a tensor
_PIECE, _PIECES = (256 << 10) - HEADER, 4  # the same of a varying edge, whose larger tensors fill many
_JOB = " of job "
_jobs = itertools.count(1)  # of this process


class Carried(NamedTuple):
    """What an edge carries: the dtype and shape, of which not all need be known."""

    dtype: Any
    shape: Any

    @property
    def varies(self) -> bool:
        """Whether the size is known only when a tensor is sent: then TensorFlow encodes what no header describes."""
        described = self.dtype.name in DTYPES and self.shape.is_fully_defined() and self.shape.rank <= MOST_DIMENSIONS
        return not described

    @property
    def text(self) -> str:
        """What both ends must agree on: of varying tensors only how many dimensions they have."""
        if not self.varies:
            return f"{self.dtype.name}{self.shape.as_list()}"
        rank = self.shape.rank
        return f"{self.dtype.name}[{'...' if rank is None else ', '.join('?' * rank)}]"

    @property
    def slots(self) -> tuple[int, int]:
        """Bytes of a tensor that fits into a slot, and how many there are."""
        if self.varies:
            return _PIECE, _PIECES
        return math.prod(self.shape.as_list()) * self.dtype.size, _DEPTH


def edge_name(key: str, source: str, target: str) -> str:
    """What both ends call an edge from one member of the job to another."""
    return f"{key} from {source} to {target}"


def edge_ends(key: str) -> tuple[str, str, str]:
    """Key, source and target of an edge by the key of its operators."""
    key, _, rest = key.rpartition(" from ")
    source, _, target = rest.partition(_JOB)[0].partition(" to ")
    return key, source, target


class OperatorEdges:
    """The edges of the operators of one member of a job. All workers that use TensorFlow have one."""

    def __init__(self, member: Member, library: ctypes.CDLL) -> None:
        self.member, self._library = member, library
        number = next(_jobs)
        self._job = f"{_JOB}{number}" if number > 1 else ""
        welcome = member.client.welcome
        self._workers = [member_name("worker", rank) for rank in range(welcome.workers)]
        self._servers = [member_name("server", index) for index in range(welcome.servers)]
        self._lock = threading.Lock()
        self._ends: dict[str, tuple[Side, str]] = {}  # by key
        self._devices: dict[str, AsyncEdges] = {}
        self.at_leave: list[Callable[[], None]] = []  # called once no worker sends or receives any more

    def connect(self, key: str, side: Side, peer: str, carried: Carried, *, seconds: float | None = None) -> None:
        """Begins to connect an end, if it is not there yet. Operators wait for it.

        Args:
            key: The edge.
            side: Which end this member has.
            peer: Who has the other one.
            carried: What it carries.
            seconds: How long a send or a receive may take; None: the job's limit.

        Raises:
            ArgumentError: The key has another end here, or other tensors, or there is nobody of that name.
        """
        if peer not in (*self._workers, *self._servers) or peer == self.member.name:
            others = [worker for worker in self._workers if worker != self.member.name]
            raise ArgumentError(
                f"{self.member.name} exchanges tensors with {', '.join(others) or 'nobody'}, not with {peer}"
            )
        with self._lock:
            known = self._ends.get(key)
            self._ends.setdefault(key, (side, carried.text))
        if known is not None and known != (side, carried.text):
            raise ArgumentError(f"{key} carries {known[1]}, and now {carried.text}: take another key")
        if known is not None:
            return
        threading.Thread(
            target=self._connect, args=(key, side, peer, carried, seconds), name=f"tensorwire {key}", daemon=True
        ).start()

    def _connect(self, key: str, side: Side, peer: str, carried: Carried, seconds: float | None) -> None:
        nbytes, depth = carried.slots
        try:
            member, timeout = self.member, step_timeout()
            channel = member.channel(peer)

            def meet(ours: bytes) -> bytes:
                member.client.publish(f"tensorflow/{key}/{member.name}", ours, to=[peer])
                return member.client.lookup(f"tensorflow/{key}/{peer}", timeout)

            edges = self._edges(channel.device, timeout)
            end = edges.connect(
                channel,
                meet,
                side,
                carries=carried.text,
                nbytes=nbytes,
                depth=depth,
                timeout=timeout,
                seconds=seconds,
            )
        except TensorwireError as error:
            self._know(key, None, failure_text(f"{key} cannot be connected", error))
        else:
            self._know(key, end.address, "")

    def _edges(self, device: Device, seconds: float) -> AsyncEdges:
        with self._lock:
            if device.name not in self._devices:
                self._devices[device.name] = AsyncEdges(device, seconds, lends=tensor_memory())
            return self._devices[device.name]

    def operator_key(self, edge: str) -> str:
        """What operators of this process call an edge: in each of its jobs otherwise, for operators keep their ends."""
        return edge + self._job

    def _know(self, key: str, address: int | None, failure: str) -> None:
        self._library.tensorwire_know(self.operator_key(key).encode(), address, failure.encode())

    def leave(self) -> None:
        """Returns when no worker uses an operator any more, and closes what has become useless by that."""
        try:
            self.member.client.barrier("tensorflow is over", len(self._workers), step_timeout())
            for call in self.at_leave:
                call()
        finally:
            self.close()

    def close(self) -> None:
        """Whatever still waits is told that it is lost. Idempotent."""
        for edges in self._devices.values():
            edges.close()


_current: OperatorEdges | None = None
_past: list[OperatorEdges] = []  # of earlier jobs: functions that were traced in them refer to their ends
_memory: Memory | None = None


def tensor_memory() -> Memory | None:
    """Where TensorFlow's tensors lie, if that is memory of ours."""
    return _memory


def set_tensor_memory(memory: Memory) -> None:
    """Says where TensorFlow's tensors lie from now on."""
    global _memory
    _memory = memory


def operator_edges() -> OperatorEdges:
    """This process's. Raises `ArgumentError` where it is in no job."""
    if _current is not None and _current.member.role == "server":
        return _current
    worker = current_worker()
    if _current is None or _current.member is not worker.member:
        worker.at_close(begin_edges(worker.member).leave)
        register(worker)
    assert _current is not None
    return _current


def begin_edges(member: Member) -> OperatorEdges:
    """Makes the edges of this process, which is that member of its job. Raises as `load_operators`."""
    global _current
    if _current is not None:
        _past.append(_current)
    _current = OperatorEdges(member, load_operators().library)
    return _current


@functools.cache
def load_operators() -> OperatorLibrary:
    """The operators. Raises `Unsupported` where they cannot be compiled, or are of another version."""
    found = load_library("operators")
    library = found.library
    numbers = (ctypes.c_int * len(DTYPES))(*map(_number_of, DTYPES))
    library.tensorwire_begin.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_uint64]
    library.tensorwire_know.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p]
    library.tensorwire_know.restype = None
    if not library.tensorwire_begin(async_edges(), numbers, len(DTYPES)):
        raise Unsupported("the operators for TensorFlow are of another version of Tensorwire: install it again")
    return found


def _number_of(dtype: str) -> int:
    """TensorFlow's number of a dtype; 0: it has none of that name."""
    try:
        return int(tf.as_dtype(dtype).as_datatype_enum)
    except TypeError:
        return 0
