"""Slabs, the cache of registrations, and what is shown to peers: on a protection domain that only keeps account."""

from __future__ import annotations

import errno
import faulthandler
import gc
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.harness.domain import FakeDomain

from tensorwire._native import PAGE, Liveness, Memory
from tensorwire.device.verbs import memory as module
from tensorwire.device.verbs.memory import Registrar, owner_of
from tensorwire.device.verbs.registrations import local_access, pinned_bytes, remote_access
from tensorwire.device.verbs.slabs import LARGEST_PIECE, SLAB
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost
from tensorwire.observe import counters

pytestmark = pytest.mark.usefixtures("ibverbs")  # for its constants


# A frame that is traced, as by coverage, refers to its arrays once more.
untraced = pytest.mark.skipif(sys.gettrace() is not None, reason="tracing changes reference counts")


@pytest.fixture
def domain() -> FakeDomain:
    return FakeDomain()


@pytest.fixture
def registrar(domain: FakeDomain) -> Iterator[Registrar]:
    registrar = Registrar(domain)
    yield registrar
    registrar.close()
    assert domain.open == []


def bytes_of(memory: Memory) -> np.ndarray:
    return np.frombuffer(memory, np.uint8)


# Slabs


def test_small_regions_share_one_registration(domain: FakeDomain, registrar: Registrar) -> None:
    before = counters.snapshot()
    pieces = [registrar.allocate(n) for n in (0, 1, 4096, 4097, 1 << 20, LARGEST_PIECE)]
    assert {registrar.cover(piece).lkey for piece in pieces if piece.nbytes} == {domain.open[0].lkey}
    assert (domain.made, domain.open[0].length, domain.open[0].access) == (1, SLAB, local_access())
    assert counters.since(before).registrations == 1
    spans = sorted((p.address, p.address + max(1, p.nbytes)) for p in pieces)
    assert all(a % PAGE == 0 for a, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_large_and_unreserved_regions_have_their_own(domain: FakeDomain, registrar: Registrar) -> None:
    large, sparse = registrar.allocate(LARGEST_PIECE + 1), registrar.allocate(PAGE, reserve=False)
    assert [mr.length for mr in domain.open] == [LARGEST_PIECE + 1, PAGE]
    assert [registrar.cover(m).addr for m in (large, sparse)] == [large.address, sparse.address]
    del large, sparse
    assert domain.open == []


def test_pieces_come_back_zeroed_and_joined(domain: FakeDomain, registrar: Registrar) -> None:
    random.seed(1)
    held: list[Memory] = []
    for i in range(600):
        if held and (random.random() < 0.45 or len(held) > 40):
            held.pop(random.randrange(len(held)))
        held.append(registrar.allocate(random.choice((8, PAGE, 5000, 100_000, 1 << 20))))
        assert not bytes_of(held[-1]).any()
        bytes_of(held[-1])[:] = i % 255 + 1
    marks = [int(bytes_of(piece)[0]) for piece in held]
    assert all(np.all(bytes_of(piece) == mark) for piece, mark in zip(held, marks, strict=True)), "pieces overlap"
    held.clear()
    assert domain.pinned == SLAB, "an empty slab beyond the first stays"
    pieces = [registrar.allocate(LARGEST_PIECE) for _ in range(4)]
    assert domain.pinned == SLAB, "neighbours were not joined"
    assert not any(bytes_of(piece).any() for piece in pieces)


def test_a_piece_lives_as_long_as_anything_looks_into_it(domain: FakeDomain, registrar: Registrar) -> None:
    piece = registrar.allocate(PAGE)
    at, array = piece.address, bytes_of(piece)
    array[:] = 7
    copy = Memory(piece)
    del piece
    assert registrar.allocate(PAGE).address != at
    del array
    assert registrar.allocate(PAGE).address != at, "native code holds it still"
    del copy
    assert registrar.allocate(PAGE).address == at


def test_an_array_outlives_the_registrar(domain: FakeDomain) -> None:
    registrar = Registrar(domain)
    arrays = [bytes_of(registrar.allocate(n)) for n in (PAGE, SLAB)]
    registrar.close()
    registrar.close()
    assert domain.open == []
    with pytest.raises(PeerLost, match="closed"):
        registrar.allocate(PAGE)
    del registrar
    gc.collect()
    for array in arrays:
        array[:] = 7
        assert array.sum() == 7 * array.size


def test_a_slab_that_cannot_be_pinned_is_no_reason_to_refuse_a_page(domain: FakeDomain, registrar: Registrar) -> None:
    domain.limit = SLAB - 1
    piece = registrar.allocate(100)
    assert [mr.length for mr in domain.open] == [PAGE]
    assert registrar.cover(piece) is domain.open[0]


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 56, 2**64 - 1])
def test_absurd_sizes(registrar: Registrar, nbytes: int) -> None:
    for reserve in (True, False):
        with pytest.raises(OutOfMemory, match=str(nbytes)):
            registrar.allocate(nbytes, reserve)


# What others own


def test_the_registration_of_an_array_is_kept_and_ends_with_it(domain: FakeDomain, registrar: Registrar) -> None:
    array = np.zeros(1000)
    first = Memory.wrap(array)
    mr = registrar.cover(first, array)
    assert (mr.addr, domain.open[0].length, domain.open[0].access) == (array.ctypes.data, 8000, local_access())
    del first
    assert domain.pinned == 8000
    with pytest.raises(ValueError, match="resize"):
        array.resize(10**6)  # else its memory would be freed under the registration
    again = Memory.wrap(array)
    assert registrar.cover(again, array) is mr
    part = Memory.wrap(array[10:20])
    assert registrar.cover(part, array[10:20]).lkey != mr.lkey
    del again, part, array
    assert domain.open == []


def test_freed_memory_is_never_hit(domain: FakeDomain, registrar: Registrar) -> None:
    """Arrays of one size come and go: the allocator hands out the same addresses again and again."""
    seen: dict[int, int] = {}
    again = 0
    for _ in range(300):
        array = np.empty(4096, np.uint8)
        region = Memory.wrap(array)
        mr = registrar.cover(region, array)
        again += array.ctypes.data in seen
        assert seen.get(array.ctypes.data) != mr.lkey
        seen[array.ctypes.data] = mr.lkey
        del region, array
    assert again
    assert domain.open == []


def test_a_new_owner_at_an_old_address_is_no_hit(
    domain: FakeDomain, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the same memory had come to another object before the end of the first one was heard of."""
    owners = [np.zeros(8), np.zeros(8)]
    memory = np.zeros(100)
    monkeypatch.setattr(module, "owner_of", lambda buffer: owners[0])
    first = registrar.cover(Memory.wrap(memory), memory)
    assert domain.pinned == 800
    monkeypatch.setattr(module, "owner_of", lambda buffer: owners[1])
    assert registrar.cover(Memory.wrap(memory), memory) is not first
    assert domain.pinned == 800


def test_what_may_be_moved_is_shared_while_a_region_lives(domain: FakeDomain, registrar: Registrar) -> None:
    mapping = mmap.mmap(-1, PAGE)
    for buffer in (bytearray(100), torch.zeros(25), mapping, torch.zeros(25).numpy()):
        one, two = Memory.wrap(buffer), Memory.wrap(buffer)
        assert registrar.cover(one, buffer) is registrar.cover(two, buffer)
        del one
        assert len(domain.open) == 1
        del two
        assert domain.open == []
    grows = bytearray(100)
    registrar.cover(Memory.wrap(grows), grows)
    grows.extend(bytes(10**6))  # BufferError if anything still looked into it
    mapping.close()


def test_read_only_memory_is_registered_without_the_right_to_write(domain: FakeDomain, registrar: Registrar) -> None:
    regions = [Memory.wrap(bytes(100)), Memory.wrap(np.zeros(10))]
    for region in regions:
        registrar.cover(region)
    assert [mr.access for mr in domain.open] == [0, local_access()]


def test_owners() -> None:
    array = np.zeros((4, 4))
    assert owner_of(array) is array
    assert owner_of(memoryview(array[1:].T)) is array
    region = Memory.allocate(64)
    assert owner_of(np.frombuffer(region)[1:]) is region
    for other in (bytearray(8), torch.zeros(1), torch.zeros(1).numpy(), np.frombuffer(bytearray(8)), None):
        assert owner_of(other) is None


@untraced
def test_the_cache_is_bounded_in_entries_and_bytes(domain: FakeDomain) -> None:
    registrar = Registrar(domain, kept=3, kept_bytes=10_000)
    arrays = [np.zeros(1000, np.uint8) for _ in range(6)]
    for array in arrays:
        registrar.cover(Memory.wrap(array), array)
    assert [mr.addr for mr in domain.open] == [a.ctypes.data for a in arrays[3:]]
    large = np.zeros(8000, np.uint8)
    registrar.cover(Memory.wrap(large), large)
    assert domain.pinned == 10_000
    too_large = np.zeros(10_001, np.uint8)
    region = Memory.wrap(too_large)
    registrar.cover(region, too_large)
    assert domain.pinned == 20_001, "what is in use is not the cache's to end"
    del region
    assert domain.pinned <= 10_000
    del array
    arrays[5].resize(10)  # nothing refers to it any more


def test_ten_thousand_rounds_leave_nothing(domain: FakeDomain, registrar: Registrar) -> None:
    registrar.allocate(PAGE)
    array = np.zeros(100)
    for i in range(10_000):
        piece = registrar.allocate(PAGE)
        registrar.cover(Memory.wrap(bytearray(100)))
        registrar.cover(Memory.wrap(array), array)
        if i % 2:
            registrar.withdraw(registrar.expose(piece, "write"))
    assert domain.pinned == SLAB + 800
    assert domain.made == 2 + 10_000 + 5_000


# Peers


def test_peers_get_exactly_the_memory(domain: FakeDomain, registrar: Registrar) -> None:
    piece = registrar.allocate(100)
    read, write = registrar.expose(piece, "read"), registrar.expose(piece, "write")
    assert [(mr.addr, mr.length, mr.access) for mr in domain.open[1:]] == [
        (piece.address, 100, remote_access("read")),
        (piece.address, 100, remote_access("write")),
    ]
    registrar.withdraw(read)
    registrar.withdraw(read)
    assert [mr.rkey for mr in domain.open[1:]] == [write.rkey]


def test_empty_memory_shows_nobody_elses_byte(domain: FakeDomain, registrar: Registrar) -> None:
    other = registrar.allocate(PAGE)
    for empty in (registrar.allocate(0), Memory.wrap(memoryview(other)[8:8]), Memory.wrap(b"")):
        mr = registrar.expose(empty, "write")
        assert not other.address <= mr.addr < other.address + PAGE
        assert domain.open[-1].length == 1
        registrar.cover(empty)
    taken = {registrar.allocate(PAGE).address for _ in range(100)}
    assert mr.addr not in taken


# Refusals


@untraced
@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EPERM, errno.EAGAIN])
def test_too_little_pinnable_memory_says_what_to_do(domain: FakeDomain, registrar: Registrar, error: int) -> None:
    domain.limit, domain.error = 0, error
    array = np.zeros(1000)
    for use in (
        lambda: registrar.allocate(SLAB),
        lambda: registrar.allocate(8),
        lambda: registrar.cover(Memory.wrap(array), array),
        lambda: registrar.expose(Memory.wrap(array), "read"),
    ):
        with pytest.raises(
            OutOfMemory, match=r"(?s)\d+ bytes.*RLIMIT_MEMLOCK.*ulimit -l.*LimitMEMLOCK.*--ulimit memlock"
        ):
            use()
    array.resize(10**6)  # nothing half-made looks into it
    domain.limit = 1 << 40
    assert registrar.cover(registrar.allocate(8)).addr


def test_what_is_only_kept_gives_way(domain: FakeDomain, registrar: Registrar) -> None:
    arrays = [np.zeros(1000, np.uint8) for _ in range(4)]
    for array in arrays:
        registrar.cover(Memory.wrap(array), array)
    domain.limit = 4000
    mr = registrar.expose(Memory.wrap(arrays[0]), "read")
    assert domain.pinned <= 4000
    assert mr in domain.open


def test_memory_that_no_nic_takes(domain: FakeDomain, registrar: Registrar) -> None:
    domain.limit, domain.error = 0, errno.EFAULT
    with pytest.raises(ArgumentError, match="Bad address"):
        registrar.cover(Memory.wrap(bytearray(8)))


def test_pinned_bytes_are_the_kernels() -> None:
    assert pinned_bytes() == 0


# Threads and forks


def test_threads(domain: FakeDomain, registrar: Registrar) -> None:
    arrays = [np.zeros(1000, np.uint8) for _ in range(3)]
    errors: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            for i in range(300):
                piece, array = registrar.allocate(PAGE * (1 + i % 3)), arrays[i % 3]
                assert not bytes_of(piece).any()
                bytes_of(piece)[:] = mark
                region = Memory.wrap(array)
                mr = registrar.cover(region, array)
                assert mr.addr == array.ctypes.data
                assert mr in domain.open
                if not i % 10:
                    gc.collect()
                assert np.all(bytes_of(piece) == mark)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert domain.pinned == SLAB + 3000


def in_child(action: object) -> int:
    """The status of a forked child that calls it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # it may die on purpose
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            action()  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: of a fork beside threads
def test_a_forked_child_ends_no_registration_and_has_no_page(domain: FakeDomain, registrar: Registrar) -> None:
    regions = [registrar.allocate(PAGE), registrar.allocate(SLAB)]
    buffer = bytearray(8)
    lent = Memory.wrap(buffer)
    registrar.cover(lent, buffer)
    liveness = Liveness()
    regions[0].bind(liveness)

    def drop() -> None:
        nonlocal lent
        assert regions[0].wait(0, 1, 60.0) == 2, "a wait touched the page"
        before = domain.made, len(domain.open)
        regions.clear()
        lent = None  # type: ignore[assignment]
        registrar.close()
        gc.collect()
        assert (domain.made, len(domain.open)) == before

    assert in_child(drop) == 0
    for region in regions:
        assert os.WTERMSIG(in_child(lambda region=region: bytes_of(region)[0])) == signal.SIGSEGV
        bytes_of(region)[:] = 1


def test_only_mapped_memory_can_be_kept_from_children() -> None:
    with pytest.raises(OSError, match="children"):
        Memory.wrap(bytearray(8)).dont_fork()
