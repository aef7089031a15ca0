"""Windows: views of regions side by side, that keep stray writes to themselves, or are shared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tensorwire._native import PAGE, Memory, Window
from tensorwire.testing.patterns import array, pattern


@pytest.fixture
def size() -> int:
    return 16 * PAGE


def behind(size: int, *, shared: bool = False) -> tuple[Memory, Window]:
    """A region of a pattern, and a window that shows all of it."""
    memory, window = Memory.allocate(size), Window(size, shared=shared)
    array(memory)[:] = pattern(1, size)
    window.place(0, memory, 0, size)
    return memory, window


def test_a_window_shows_regions_side_by_side(size: int) -> None:
    first, second = Memory.allocate(size), Memory.allocate(size)
    array(first)[:], array(second)[:] = pattern(1, size), pattern(2, size)
    window = Window(2 * PAGE + size)
    window.place(0, first, 4 * PAGE, 2 * PAGE)
    window.place(2 * PAGE, second, 0, size)
    assert window.nbytes == 2 * PAGE + size
    assert np.array_equal(array(window)[: 2 * PAGE], array(first)[4 * PAGE : 6 * PAGE])
    assert np.array_equal(array(window)[2 * PAGE :], array(second))
    array(second)[5] ^= 0xFF  # written by others, seen here
    assert np.array_equal(array(window)[2 * PAGE :], array(second))
    assert window.modified(10) == []


def test_a_stray_write_is_found_and_stays_here(size: int) -> None:
    memory, window = behind(size)
    array(window)[3 * PAGE + 7] ^= 0xFF
    array(window)[9 * PAGE : 11 * PAGE] = 0
    assert np.array_equal(array(memory), pattern(1, size))
    assert window.modified(10) == [3 * PAGE, 9 * PAGE, 10 * PAGE]
    assert window.modified(2) == [3 * PAGE, 9 * PAGE]
    assert window.modified(0) == []


def test_refresh_drops_stray_writes_in_its_range_only(size: int) -> None:
    memory, window = behind(size)
    array(window)[:] = 0
    window.refresh(PAGE + 1, PAGE)  # touches pages 1 and 2
    left = [i * PAGE for i in range(16) if i not in (1, 2)]
    assert window.modified(100) == left
    assert np.array_equal(array(window)[PAGE : 3 * PAGE], pattern(1, size)[PAGE : 3 * PAGE])
    assert not array(window)[:PAGE].any()
    array(memory)[PAGE] = 99
    assert array(window)[PAGE] == 99
    window.refresh(0, 2**64 - 1)
    window.refresh(2**63, 2**63)
    assert window.modified(100) == []
    assert np.array_equal(array(window), array(memory))
    array(window)[0] ^= 1  # writable again, privately
    assert window.modified(100) == [0]
    assert array(memory)[0] == pattern(1, size)[0]


def test_refreshing_often_leaves_one_mapping(size: int) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:tensorwire")

    _memory, window = behind(size)

    def round_(page: int) -> None:
        array(window)[page * PAGE] = 1
        window.refresh(page * PAGE, PAGE)

    for page in range(16):
        round_(page)
    before = mappings()
    for i in range(2000):
        round_(i % 16)
    assert mappings() <= before
    assert window.modified(1) == []


def test_a_window_outlives_the_regions_objects(size: int) -> None:
    memory, window = behind(size)
    del memory
    window.refresh(0, size)
    view = array(window)
    del window
    assert np.array_equal(view, pattern(1, size))


def test_a_sparse_region_stays_sparse_behind_a_window() -> None:
    memory = Memory.allocate(1 << 30, False)
    window = Window(1 << 30)
    window.place(0, memory, 0, 1 << 30)
    window.refresh(0, 1 << 30)
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    assert window.modified(1) == []


def test_a_shared_window_writes_into_its_regions(size: int) -> None:
    first, second = Memory.allocate(size), Memory.allocate(size)
    window = Window(3 * PAGE, shared=True)
    window.place(0, first, 4 * PAGE, 2 * PAGE)
    window.place(2 * PAGE, second, 0, PAGE)
    array(window)[:] = pattern(1, 3 * PAGE)
    assert np.array_equal(array(first)[4 * PAGE : 6 * PAGE], pattern(1, 3 * PAGE)[: 2 * PAGE])
    assert np.array_equal(array(second)[:PAGE], pattern(1, 3 * PAGE)[2 * PAGE :])
    assert not array(first)[: 4 * PAGE].any()
    array(second)[0] ^= 0xFF
    assert array(window)[2 * PAGE] == array(second)[0]


def test_a_forked_child_has_a_shared_window_for_itself(size: int) -> None:
    memory, window = behind(size, shared=True)
    child = os.fork()
    if child == 0:
        same = np.array_equal(array(window), pattern(1, size))
        array(window)[:] = 0
        os._exit(0 if same and not array(window).any() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(array(memory), pattern(1, size))
    array(window)[0] ^= 0xFF  # this process still shares it
    assert array(memory)[0] == array(window)[0]


def test_a_shared_window_takes_no_memory_that_cannot_be_written_unless_it_is_read_only(size: int) -> None:
    memory = Memory.allocate(size)
    array(memory)[:] = pattern(1, size)
    fd = os.dup(memory.fd)
    with pytest.raises(OSError):
        Window(size, shared=True).place(0, Memory.map(fd, False), 0, size)
    window = Window(size, shared=True, read_only=True)
    window.place(0, Memory.map(fd, False), 0, size)
    os.close(fd)
    assert np.array_equal(array(window), pattern(1, size))
    array(memory)[0] ^= 0xFF
    assert array(window)[0] == array(memory)[0]
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{window.address:x}-")
    ]
    assert [line.split()[1] for line in maps] == ["r--s"]


def test_what_does_not_fit_is_refused(size: int) -> None:
    memory, window = Memory.allocate(size - 10), Window(2 * size)
    for offset, source, length in (
        (1, 0, PAGE),
        (0, 1, PAGE),
        (0, 0, PAGE + 1),
        (0, 0, size + PAGE),
        (0, size, PAGE),
        (0, 2**64 - PAGE, PAGE),
        (2 * size, 0, PAGE),
        (2**64 - PAGE, 0, PAGE),
        (2 * size - PAGE, 0, 2 * PAGE),
    ):
        with pytest.raises(OSError):
            window.place(offset, memory, source, length)
    with pytest.raises(OSError):
        window.place(0, Memory.wrap(bytearray(size)), 0, PAGE)  # borrowed memory has no file
    window.place(0, memory, 0, 0)
    window.place(0, memory, 0, size)  # the last page is there as a whole
    for nbytes in (2**63, 2**64 - 1):
        with pytest.raises(OSError):
            Window(nbytes)
