"""
Tensorwire's native core: shared words, waits, copies and the tcp engine.
"""

from collections.abc import Sequence
from typing import overload

import tensorwire.device.contract
import tensorwire.device.region

class Notices:
    """Tokens that native code posts, and one thread takes."""

    def __init__(self) -> None: ...
    def post(self, token: int) -> None: ...
    def take(self) -> int:
        """The next token; waits for it."""

class Liveness:
    """Alive until lost, once and for good."""

    def __init__(self, parent: Liveness | None = None, peer: str = "", inbound: bool = False) -> None: ...
    def lose(self, reason: str) -> None:
        """Marks it lost and wakes every waiter of the process."""

    def close(self, reason: str) -> None:
        """The same by our own doing: no loss for the parent, and the end of one."""

    def notify(self, notices: Notices, token: int) -> None:
        """Posts the token when it is lost; at once if it is."""

    @property
    def lost(self) -> bool: ...
    @property
    def closed(self) -> bool:
        """Whether that end was our own doing."""

    @property
    def child_lost(self) -> bool: ...
    @property
    def last_loss(self) -> str:
        """Which child was lost, and why."""

    @property
    def peer(self) -> str: ...
    @property
    def forked(self) -> bool:
        """True in a forked child, for what its parent made."""

    @property
    def reason(self) -> str: ...

class Lent:
    """Memory of another library, lent by DLPack."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def shaped(owner: object, shape: Sequence[int], code: int, bits: int) -> object:
    """
    The memory of `owner` as a tensor of DLPack, in C order; `code` and `bits` are those of its DLDataType.
    """

def gather(target: object, source: object, part: bool = False) -> None:
    """
    Copies a tensor's elements, strided or not, in the order of its indices: as a `part` of more than caches hold.
    """

def take_rows(target: object, table: object, indices: object, row: int) -> None:
    """
    Copies rows of `row` bytes out of a table: those with these unsigned numbers of 32 bits. Raises `IndexError`.
    """

def add_rows(table: object, indices: object, rows: object, row: int, wide: bool) -> None:
    """
    Adds rows, of float32 or `wide` of float64, to those with these numbers. Raises `IndexError`, before any change.
    """

class Memory:
    """A span of memory that transfers may touch."""

    def __init__(self, other: Memory) -> None: ...
    @staticmethod
    def allocate(nbytes: int, reserve: bool = True) -> Memory:
        """A new sealed memfd, zeroed; touched if `reserve`."""

    @staticmethod
    def map(fd: int, writable: bool) -> Memory:
        """A peer's memfd."""

    @staticmethod
    def wrap(buffer: object) -> Memory:
        """
        Memory of a contiguous Python buffer, or of a contiguous tensor with DLPack.
        """

    @overload
    def bind(self, own: Liveness, engine: Engine | None = None) -> None:
        """Whose memory it is, and what must run while somebody waits on it."""

    @overload
    def bind(self, own: Liveness, sleepers: Sleepers) -> None: ...
    def dont_fork(self) -> None:
        """
        Children forked from now on do not get these pages: for mapped memory. Touching them there is a SIGSEGV.
        """

    def lies_in(self, whole: Memory, offset: int) -> None:
        """
        Says of a wrapped part of `whole` that it is one: then a window can show it.
        """

    @property
    def nbytes(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def mark_closed(self) -> None:
        """Ends waits on it, here and where it is mapped; peers are refused."""

    def load(self, offset: int) -> int: ...
    def store(self, offset: int, value: int) -> None:
        """Release store of a signal word, and wake its waiters."""

    def fetch_add(self, offset: int, value: int) -> int: ...
    def compare_swap(self, offset: int, expected: int, value: int) -> int: ...
    def wait(self, offset: int, at_least: int, seconds: float, peer: Liveness | None = None) -> int:
        """
        Without the GIL until the word reached `at_least`: 0 reached, 1 timed out, 2 lost or closed, ATTEND.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

class View:
    """
    A part of a region: what a write sends and a read fills. Prepare it once, use it every step.
    """

    def __init__(self, region: object, offset: int, nbytes: int) -> None: ...
    @property
    def region(self) -> tensorwire.device.region.Region: ...
    @property
    def buffer(self) -> memoryview:
        """The bytes themselves."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class RemoteView:
    """A part of a peer's region: where a write lands and a read comes from."""

    def __init__(self, region: object, offset: int, nbytes: int) -> None: ...
    @property
    def region(self) -> tensorwire.device.region.RemoteRegion: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Path:
    """
    The short way of a channel over mapped memory. What is unusual goes to the channel's own `_write` and `_signal`.
    """

    def __init__(self, liveness: Liveness, device: Liveness, channel: object, done: object) -> None: ...
    def remember(self, view: RemoteView, memory: Memory, writable: bool) -> None:
        """Where the region of a view lies, in this channel."""

    def write(
        self, local: View, remote: RemoteView, signal: tuple[RemoteView, int] | None = None, *, fence: bool = False
    ) -> tensorwire.device.contract.Completion: ...
    def signal(
        self, target: RemoteView, value: int, *, fence: bool = False
    ) -> tensorwire.device.contract.Completion: ...
    def read(self, target: View, source: RemoteView) -> bool:
        """False: nothing was done, take the long way."""

class Hold:
    """
    A part of memory that is given back once: by release(), or when nobody looks into it any more.
    """

    def __init__(self, memory: Memory, offset: int, nbytes: int, give_back: object, token: object) -> None:
        """Raises IndexError for bytes outside of the memory."""

    @property
    def nbytes(self) -> int: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Calls `give_back(token)`, unless that was done."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

COUNTERS: list[str] = ...

def count(which: int, amount: int) -> None:
    """Adds to the counter at that place of COUNTERS."""

def counted() -> list[int]:
    """All counters, in the order of COUNTERS."""

def put(source: Memory, source_offset: int, target: Memory, target_offset: int, nbytes: int) -> None:
    """Copies between mapped memories."""

def put_signal(
    source: Memory,
    source_offset: int,
    target: Memory,
    target_offset: int,
    nbytes: int,
    signal: Memory,
    signal_offset: int,
    value: int,
) -> None:
    """Copies, then stores the signal with release."""

class Window:
    """
    A view of regions, side by side in one address range: copy-on-write, or shared.
    """

    def __init__(self, nbytes: int, shared: bool = False) -> None: ...
    def place(self, offset: int, memory: Memory, source: int, length: int) -> None: ...
    def refresh(self, offset: int, length: int) -> None: ...
    def modified(self, limit: int) -> list[int]:
        """Offsets of pages written through the window."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Monitor:
    """A thread that notices hang-ups of watched sockets."""

    def __init__(self) -> None: ...
    def watch(self, fd: int, liveness: Liveness) -> None: ...
    def forget(self, fd: int) -> None: ...
    def close(self) -> None: ...

class DeathNotifier:
    """
    A thread whose own death the kernel tells to peers, and that watches theirs.
    """

    def __init__(self, heartbeat: float, lost_after: float) -> None: ...
    def enter(self, liveness: Liveness, socket: int = -1) -> int:
        """
        The number of a word that tells one peer of our death; 0 if none is free.
        """

    def watch(self, word: int, fd: int, peer_word: int, peer_heartbeat: float) -> None:
        """That peer's page and word."""

    def leave(self, word: int) -> None: ...
    def close(self) -> None: ...
    @property
    def fd(self) -> int: ...

class Heartbeat:
    """
    A thread that sends heartbeats on a socket, and the one way to send anything else there.
    """

    def __init__(self, fd: int, beat: bytes, interval: float) -> None: ...
    def send(self, data: bytes, seconds: float) -> int:
        """0, or the errno that ended the connection."""

    def close(self) -> None: ...

class Engine:
    """The tcp engine of one device."""

    def __init__(self, liveness: Liveness, heartbeat: float, lost_after: float) -> None: ...
    def expose(self, key: int, memory: Memory, writable: bool) -> None: ...
    def withdraw(self, key: int) -> None: ...
    def connect(self, fd: int, initiator: bool, liveness: Liveness, device: int, heartbeat: float) -> Connection:
        """
        Takes over a connected, authenticated socket of that peer device, which beats so often; 0: never.
        """

    def expel(self, device: int, reason: str) -> None:
        """Closes every connection of that peer device."""

    @property
    def connections(self) -> int: ...
    @property
    def sleeps(self) -> int:
        """How often a waiter slept."""

    @property
    def wake_ups(self) -> int:
        """How often the engine's own thread was woken."""

    def close(self) -> None: ...

class Connection:
    """One connection of the engine."""

    def write(
        self,
        source: Memory,
        source_offset: int,
        length: int,
        key: int,
        offset: int,
        signal_key: int,
        signal_offset: int,
        value: int,
        seconds: float,
        fence: bool = False,
    ) -> int: ...
    def write_view(self, source: View, target: RemoteView, signal: object | None, fence: bool, seconds: float) -> int:
        """
        The number of the write; 0: not posted, take the long way. TimeoutError: full all the time.
        """

    def signal(self, key: int, offset: int, value: int, seconds: float, fence: bool = False) -> int: ...
    def read(self, target: Memory, target_offset: int, length: int, key: int, offset: int, seconds: float) -> int: ...
    def fetch_add(self, key: int, offset: int, value: int, seconds: float) -> int: ...
    def compare_swap(self, key: int, offset: int, expected: int, value: int, seconds: float) -> int: ...
    def wait(self, engine: Engine, id: int, seconds: float) -> int:
        """0 done, 1 timed out, 2 lost, 3 refused: `refusal` says why."""

    def notify(self, id: int, notices: Notices, token: int) -> None:
        """Posts the token when that operation is done, or the connection lost."""

    @property
    def done(self) -> int: ...
    @property
    def liveness(self) -> Liveness: ...
    def refusal(self, id: int) -> int: ...
    def old_value(self, id: int) -> int: ...
    def close(self, reason: str, own: bool = False) -> None: ...

class Sleepers:
    """
    Waits for words that a NIC writes: one waiter sleeps on the completion channel, the others at their futexes.
    """

    def __init__(self, fd: int, naps: bool) -> None: ...
    def rest(self, seconds: float) -> int:
        """
        Until something came that no waiter attends to: ATTEND; 1 timed out, 2 closed, 3 a signal.
        """

    def armed(self) -> None:
        """The completion queues have been armed."""

    def wake_all(self) -> None:
        """Words may have changed: everybody looks."""

    def left(self) -> None:
        """A waiter that was sent to attend does not come back."""

    def close(self) -> None: ...

ATTEND: int = 4

def dtypes() -> list[tuple[str, int]]:
    """Name and bytes of each dtype of a header, by its number."""

HEADER: int = 256

def pack_header(
    slot: object,
    at: int,
    kind: int,
    type: bytes,
    step: int,
    nbytes: int,
    offset: int,
    value: bytes,
    region: bytes,
    shape: bytes,
) -> None:
    """
    Writes a header at `slot[at:]`. `type`: dtype and rank; `shape`: lengths and strides.
    """

def unpack_header(
    slot: object, at: int, bound: int, memory: int
) -> tuple[int, bytes, int, int, int, bytes, bytes, bytes]:
    """
    The fields of the header at `slot[at:]`, kind to shape, once they are checked. Raises ValueError.
    """

def step_of(slot: object, at: int) -> int:
    """
    The step of the header at `slot[at:]`, unchecked: whether it is worth reading.
    """

class Watcher:
    """A thread that looks at the words of one region for others."""

    def __init__(self, words: Memory, naps: bool = False) -> None: ...
    def close(self) -> None:
        """Whatever waits for a word is told that it is lost."""

class PostQueue:
    """Writes of such ends that Python is to post."""

    def __init__(self) -> None: ...
    def next(self, seconds: float) -> tuple[int, int, int, int] | None:
        """
        Whose it is, the signal, and where in the slots how many bytes lie that go with it; None: none came in time.
        """

    def close(self) -> None:
        """`next` returns at once, when it has returned what waits."""

class AsyncPath:
    """How an end's words, and a producer's slots, get to the other end."""

    @staticmethod
    def mapped(words: Memory, word: int, slots: Memory | None = None, ring: tuple[int, int] = (0, 1)) -> AsyncPath: ...
    @staticmethod
    def posted(
        connection: Connection,
        words_key: int,
        word: int,
        slots: Memory | None = None,
        ring: tuple[int, int] = (0, 1),
        key: int = 0,
    ) -> AsyncPath: ...
    @staticmethod
    def queued(
        queue: PostQueue, whose: int, slots: Memory | None = None, ring: tuple[int, int] = (0, 1)
    ) -> AsyncPath: ...

class AsyncProducer:
    """The sending end of an edge, for programs in C++."""

    def __init__(
        self,
        awaited: tuple[Watcher, int, Liveness, float],
        path: AsyncPath,
        ring: tuple[int, int],
        lends: tuple[Memory, bytes] | None,
    ) -> None:
        """`awaited`: the watcher, where its word is, the peer, and seconds."""

    @property
    def address(self) -> int: ...

class AsyncConsumer:
    """The receiving end of an edge, for programs in C++."""

    def __init__(
        self,
        awaited: tuple[Watcher, int, Liveness, float],
        path: AsyncPath,
        ring: tuple[int, int],
        slots: Memory,
        lent: tuple[Memory, bytes] | None,
    ) -> None: ...
    @property
    def address(self) -> int: ...

def async_edges() -> int:
    """The address of the functions that tensorwire/async_edges.h describes."""

NO_SIGNAL: int = 18446744073709551615

PAGE: int = 4096

def copy_kernel(nbytes: int) -> str:
    """What copies so many bytes: memcpy, movsb or streaming."""

def copy_is_large(nbytes: int) -> bool:
    """Whether its pieces had better be copied as parts of so much."""

def copy_steps() -> list[tuple[int, str]]:
    """From how many bytes on, which kernel; below, memcpy."""

def set_copy_steps(steps: Sequence[tuple[int, str]]) -> None:
    """In this order; what this processor lacks is left out."""

def copied_by(kernel: str) -> int:
    """
    How many copies of this process that kernel has made; memcpy is not counted.
    """

def time_copies(seconds: float) -> list[tuple[int, list[float]]]:
    """
    For some numbers of bytes the seconds by kernel; nothing if so little time was not enough.
    """

def available_bytes() -> int:
    """What the machine and the control groups around this process leave."""

def close_on_fork(fd: int) -> None: ...
def forget_fd(fd: int) -> None: ...
def open_socket(family: int, type: int) -> int:
    """A new socket that no forked child keeps, whenever it is forked."""

def close_socket(fd: int) -> None:
    """Closes what open_socket or accept_socket gave."""

def accept_socket(listener: int) -> int:
    """The next connection, likewise. The listener does not block."""
