"""The edges of a job's operators: connected by key, in the background, when an operator with that key is made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from typing import Any, NamedTuple

import tensorflow as tf

from tensorwire._native import Memory, async_edges
from tensorwire.control.settings import step_timeout
from tensorwire.device import Device
from tensorwire.edge.async_edge import AsyncEdges, Side
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.tensorflow.build import OperatorLibrary, load_library
from tensorwire.tensorflow.error_texts import failure_text, register

CHUNK_BYTES = 256 << 10  # of a slot of a varying edge
_DEPTH, _CHUNKS = 2, 4  # slots of an edge, and of a varying one
_ENCODED = (tf.string, tf.variant)  # by TensorFlow


class Carried(NamedTuple):
    """What an edge carries: the dtype and shape, of which not all need be known."""

    dtype: Any
    shape: Any

    @property
    def varies(self) -> bool:
        """Whether the size of its tensors is known only when they are sent: then they are sent in chunks."""
        return self.dtype in _ENCODED or not self.shape.is_fully_defined()

    @property
    def text(self) -> str:
        """What both ends must agree on: of varying tensors only how many dimensions they have."""
        if not self.varies:
            return f"{self.dtype.name}{self.shape.as_list()}"
        rank = self.shape.rank
        return f"{self.dtype.name}[{'...' if rank is None else ', '.join('?' * rank)}]"

    @property
    def slots(self) -> tuple[int, int]:
        """Bytes of a slot, and how many there are."""
        if self.varies:
            return CHUNK_BYTES, _CHUNKS
        return math.prod(self.shape.as_list()) * self.dtype.size, _DEPTH


def edge_name(key: str, source: int, target: int) -> str:
    """What the operators of both ends call an edge."""
    return f"{key} from worker {source} to worker {target}"


class OperatorEdges:
    """The edges of one worker's operators. All workers of the job that use TensorFlow have one."""

    def __init__(self, worker: Worker, library: ctypes.CDLL) -> None:
        self.worker, self._library = worker, library
        self._lock = threading.Lock()
        self._ends: dict[str, tuple[Side, str]] = {}  # by key
        self._devices: dict[str, AsyncEdges] = {}
        worker.at_close(self._leave)
        register(worker)

    def connect(self, key: str, side: Side, peer: int, carried: Carried) -> None:
        """Begins to connect an end, if it is not there yet. Operators wait for it.

        Args:
            key: The edge.
            side: Which end this worker has.
            peer: The other worker's rank.
            carried: What it carries.

        Raises:
            ArgumentError: The key has another end here, or other tensors, or there is no such worker.
        """
        if not 0 <= peer < self.worker.num_workers or peer == self.worker.rank:
            others = [rank for rank in range(self.worker.num_workers) if rank != self.worker.rank]
            raise ArgumentError(f"worker {self.worker.rank} exchanges tensors with ranks {others}, not with {peer}")
        with self._lock:
            known = self._ends.get(key)
            self._ends.setdefault(key, (side, carried.text))
        if known is not None and known != (side, carried.text):
            raise ArgumentError(f"{key} carries {known[1]}, and now {carried.text}: take another key")
        if known is not None:
            return
        threading.Thread(
            target=self._connect, args=(key, side, peer, carried), name=f"tensorwire {key}", daemon=True
        ).start()

    def connect_value(self, value: str, source: int, target: int, carried: Carried) -> str:
        """Begins to connect this worker's end of the edge of a graph's value, and returns its key."""
        key = edge_name(value, source, target)
        side: Side = "producer" if source == self.worker.rank else "consumer"
        self.connect(key, side, target if side == "producer" else source, carried)
        return key

    def _connect(self, key: str, side: Side, peer: int, carried: Carried) -> None:
        nbytes, depth = carried.slots
        try:
            member, timeout = self.worker.member, step_timeout()
            channel = member.channel("worker", peer)

            def meet(ours: bytes) -> bytes:
                member.client.publish(f"tensorflow/{key}/{self.worker.rank}", ours, to=[f"worker {peer}"])
                return member.client.lookup(f"tensorflow/{key}/{peer}", timeout)

            edges = self._edges(channel.device, timeout)
            end = edges.connect(channel, meet, side, carries=carried.text, nbytes=nbytes, depth=depth, timeout=timeout)
        except TensorwireError as error:
            self._know(key, None, failure_text(f"{key} cannot be connected", error))
        else:
            self._know(key, end.address, "")

    def _edges(self, device: Device, seconds: float) -> AsyncEdges:
        with self._lock:
            if device.name not in self._devices:
                self._devices[device.name] = AsyncEdges(device, seconds, lends=tensor_memory())
            return self._devices[device.name]

    def _know(self, key: str, address: int | None, failure: str) -> None:
        self._library.tensorwire_know(key.encode(), address, failure.encode())

    def _leave(self) -> None:
        """Returns when no worker uses an operator any more."""
        with contextlib.suppress(TensorwireError):
            self.worker.member.client.barrier("tensorflow is over", self.worker.num_workers, step_timeout())
        for edges in self._devices.values():
            edges.close()


_current: OperatorEdges | None = None
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
    global _current
    worker = current_worker()
    if _current is None or _current.worker is not worker:
        _current = OperatorEdges(worker, load_operators().library)
    return _current


@functools.cache
def load_operators() -> OperatorLibrary:
    """The operators. Raises `Unsupported` where they cannot be compiled, or are of another version."""
    found = load_library("operators")
    library = found.library
    library.tensorwire_begin.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.tensorwire_know.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p]
    library.tensorwire_know.restype = None
    if not library.tensorwire_begin(async_edges(), CHUNK_BYTES):
        raise Unsupported("the operators for TensorFlow are of another version of Tensorwire: install it again")
    return found
