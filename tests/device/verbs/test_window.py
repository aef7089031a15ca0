"""What a verbs device allocates can be shown in a window, as the store does with parameters."""

from __future__ import annotations

import pytest
from tests.harness.domain import FakeDomain

from tensorwire._native import PAGE, Memory, Window
from tensorwire.device.verbs.memory import Registrar
from tensorwire.device.verbs.slabs import LARGEST_PIECE


@pytest.mark.usefixtures("ibverbs")
@pytest.mark.parametrize("nbytes", [2 * PAGE, LARGEST_PIECE + PAGE])
def test_a_window_shows_a_piece_of_a_slab(nbytes: int) -> None:
    registrar = Registrar(FakeDomain())
    other, memory = registrar.allocate(PAGE), registrar.allocate(nbytes)
    memoryview(other)[:] = b"o" * PAGE
    window = Window(3 * PAGE)
    window.place(PAGE, memory, PAGE, PAGE)
    memoryview(memory)[PAGE : PAGE + 5] = b"first"
    assert bytes(memoryview(window)[PAGE : PAGE + 5]) == b"first"
    memoryview(window)[PAGE : PAGE + 5] = b"stray"
    assert bytes(memoryview(memory)[PAGE : PAGE + 5]) == b"first"
    window.refresh(PAGE, PAGE)
    memoryview(memory)[PAGE : PAGE + 5] = b"later"
    assert bytes(memoryview(window)[PAGE : PAGE + 5]) == b"later"
    with pytest.raises(OSError, match="window"):
        window.place(0, memory, nbytes, PAGE)  # the neighbour's
    registrar.close()


def test_bytes_of_other_memory_are_no_part() -> None:
    whole, part = Memory.allocate(2 * PAGE), Memory.wrap(bytearray(PAGE))
    for offset in (0, 2 * PAGE):
        with pytest.raises(OSError, match="lie elsewhere"):
            part.lies_in(whole, offset)
    inside = Memory.wrap(memoryview(whole)[PAGE:])
    with pytest.raises(OSError, match="lie elsewhere"):
        inside.lies_in(whole, 0)
    inside.lies_in(whole, PAGE)
