"""How long memory stays a tensor's: until its last alias dies, wherever and whenever that is, and no longer."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tensorwire.torch.graph.memory.birthplace import Birthplace, alive
from tensorwire.torch.graph.memory.target import MemoryTarget
from tests.harness.sandbox import Sandbox, every
from tests.torch.graph.rooms import Room, liveness, place, room

aten = torch.ops.aten
THREADS, ROUNDS = 4, 300


def born(nbytes: int = 4096, *, copied: bool = False) -> tuple[torch.Tensor, weakref.ref[Room]]:
    """A tensor of float32 in memory whose end can be seen: born there, or copied as in a first call."""
    birth, zeros = Birthplace(aten.add.Tensor), torch.zeros(nbytes // 4)
    if not copied:
        birth([place(nbytes)], (zeros, 1.0))
    where = place(nbytes)
    tensor, _ = birth([where], (zeros, 1.0))
    assert where.holds(tensor)
    assert birth.missed == 1
    return tensor, liveness(where)


@pytest.mark.parametrize("copied", [False, True])
def test_the_last_alias_frees_the_memory(copied: bool) -> None:
    tensor, alive = born(copied=copied)
    alias, array = tensor.view(32, 32)[3:], tensor.numpy()
    del tensor
    assert alive() is not None
    del alias
    assert alive() is not None
    del array
    assert alive() is None


def test_memory_that_was_not_used_is_free_again() -> None:
    birth, where = Birthplace(aten.mm.default), place(64)
    birth([place(64)], (torch.randn(4, 4), torch.randn(4, 4)))
    count = sys.getrefcount(where.owner)
    with pytest.raises(RuntimeError):
        birth([where], (torch.randn(4, 4), torch.randn(5, 4)))
    birth([where], (torch.randn(8, 4), torch.randn(4, 4)))
    after = sys.getrefcount(where.owner)  # out of the assertion, which has one too
    assert after == count


def test_ten_thousand_births_leave_no_reference() -> None:
    birth, x = Birthplace(aten.sort.default, (0, 1)), torch.randn(16)
    values, indices = place(64), place(128)
    birth([values, indices], (x,))
    counts = [sys.getrefcount(where.owner) for where in (values, indices)]
    for _ in range(10_000):
        birth([values, indices], (x,))
    assert birth.missed == 2
    assert [sys.getrefcount(where.owner) for where in (values, indices)] == counts
    assert not alive(values)
    assert not alive(indices)


@pytest.mark.parametrize("thread", [False, True])
def test_a_saved_tensor_dies_in_a_backward_pass_without_the_interpreters_lock(thread: bool) -> None:
    tensor, alive = born()
    weight = torch.randn(1024, requires_grad=True)
    loss = (weight * tensor).sum()  # saves what was born
    del tensor
    assert alive() is not None
    if thread:
        every([loss.backward])
    else:
        loss.backward()
    assert alive() is None
    assert torch.equal(weight.grad, torch.ones(1024))


def test_any_code_may_run_at_the_owners_end() -> None:
    """The end of an owner gives credits back, and may call operators and be born itself."""
    said: list[float] = []

    class Lease(Room):
        def __del__(self) -> None:
            if self.base is not None and self.nbytes == 64:
                said.append(born()[0].sum().item())

    birth, x = Birthplace(aten.neg.default), torch.ones(16)
    birth([place(64)], (x,))
    tensor, _ = birth([MemoryTarget(room(64).view(Lease))], (x,))
    assert not said
    del tensor
    assert said == [1024.0]
    with pytest.raises(RuntimeError):
        birth([MemoryTarget(room(64).view(Lease))], (torch.ones(16).to_sparse(), 1))
    assert said == [1024.0] * 2


def test_other_threads_that_allocate_the_same_sizes_get_nothing() -> None:
    birth, x, stop = Birthplace(aten.add.Tensor), torch.randn(64), threading.Event()
    memory = room(256)
    where = MemoryTarget(memory)
    birth([place(256)], (x, x))

    def others() -> int:
        count = 0
        while not stop.is_set() or count < ROUNDS:
            tensors = [torch.empty(64) for _ in range(8)]
            assert not any(where.holds(t) for t in tensors)
            count += 1
        return count

    def ours() -> None:
        try:
            for _ in range(ROUNDS):
                result, _ = birth([where], (x, x))
                assert where.holds(result)
                del result
        finally:
            stop.set()

    outcomes = every([ours, others, others])
    assert not [o for o in outcomes if isinstance(o, BaseException)], outcomes
    assert birth.missed == 1


def test_threads_share_a_birthplace() -> None:
    birth, x = Birthplace(aten.sort.default, (0, 1)), torch.randn(1000)
    expected = x.sort()
    birth([place(4000), place(8000)], (x,))

    def work() -> None:
        values, indices = place(4000), place(8000)
        for _ in range(ROUNDS):
            result, _ = birth([values, indices], (x,))
            assert values.holds(result[0])
            assert indices.holds(result[1])
            assert torch.equal(result[0], expected.values)
            del result

    outcomes = every([work] * THREADS)
    assert not [o for o in outcomes if isinstance(o, BaseException)], outcomes
    assert birth.missed == 2


def test_a_tensor_may_die_in_another_thread_than_it_was_born_in() -> None:
    tensors = [born() for _ in range(64)]
    lives = [alive for _, alive in tensors]
    owned = [tensor for tensor, _ in tensors]
    del tensors

    def drop() -> None:
        for _ in range(16):
            owned.pop()

    every([drop] * THREADS)
    assert [alive() for alive in lives] == [None] * 64


def child(work: Callable[[], bool]) -> int:
    """The status of a forked child that calls ``work``: 0 if it was true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none of what they hold
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_frees_its_own() -> None:
    tensor, alive = born()
    held = [tensor]
    del tensor
    before = held[0].clone()

    def work() -> bool:
        held.clear()
        again, gone = born()
        del again
        return alive() is None and gone() is None

    assert child(work) == 0
    assert alive() is not None
    assert torch.equal(held[0], before)
    held.clear()
    assert alive() is None


def test_a_fork_at_any_moment_of_other_threads_births() -> None:
    """The table of births is whole in every child, and nobody holds it there."""
    birth, x, stop = Birthplace(aten.neg.default), torch.randn(16), threading.Event()
    birth([place(64)], (x,))

    def churn() -> None:
        where = place(64)
        while not stop.is_set():
            birth([where], (x,))

    def forks() -> None:
        try:
            for _ in range(40):
                tensor, alive = born()
                held = [tensor]
                del tensor

                def work(held: list[torch.Tensor] = held, alive: weakref.ref[Room] = alive) -> bool:
                    held.clear()
                    return alive() is None

                assert child(work) == 0
        finally:
            stop.set()

    outcomes = every([forks, churn, churn])
    assert not [o for o in outcomes if isinstance(o, BaseException)], outcomes


def test_resizing_a_born_tensor_moves_it_out() -> None:
    tensor, alive = born(64)
    tensor.resize_(8)
    assert alive() is not None
    tensor.resize_(1000)
    assert alive() is None
    assert torch.equal(tensor[:16], torch.ones(16))


def test_born_tensors_are_saved_cloned_copied_and_shared() -> None:
    tensor, alive = born(64)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for copy in (torch.load(file), tensor.clone(), torch._lazy_clone(tensor), torch.from_dlpack(tensor.clone())):
        assert torch.equal(copy, tensor)
        copy.add_(1.0)
        assert torch.equal(tensor, torch.ones(16))
    del copy
    foreign = np.from_dlpack(tensor)
    del tensor
    assert alive() is not None
    assert foreign.sum() == 16
    del foreign
    assert alive() is None


def test_a_cycle_with_a_born_tensor_is_collected() -> None:
    tensor, alive = born()
    tensor.itself = tensor
    del tensor
    assert alive() is not None
    gc.collect()
    assert alive() is None


@pytest.mark.slow
def test_the_interpreter_ends_with_born_tensors_alive(sandbox: Sandbox) -> None:
    script = sandbox.script(
        """
        import threading
        import torch
        from tensorwire.torch.graph.memory.birthplace import Birthplace, MemoryTarget
        import numpy as np

        def place(nbytes):
            memory = np.empty(nbytes + 64, np.uint8)
            start = -memory.ctypes.data % 64
            return MemoryTarget(memory[start:start + nbytes])

        birth, x = Birthplace(torch.ops.aten.neg.default), torch.randn(1 << 16)
        kept = [birth([place(1 << 18)], (x,))[0] for _ in range(8)]
        kept[3].itself = kept[3]
        torch.kept = kept[5:]  # dies with the module
        weight = torch.ones(1 << 16, requires_grad=True)
        graph = (weight * kept[4]).sum()
        assert birth.missed == 1

        ready, never = threading.Event(), threading.Event()

        def work():
            mine = [birth([place(1 << 18)], (x,))[0] for _ in range(8)]
            ready.set()
            never.wait()

        threading.Thread(target=work, daemon=True).start()
        assert ready.wait(60)
        print("end")
        """,
        init=False,
    )
    result = sandbox.python(script).finish()
    assert (result.status, result.out.strip(), result.err) == (0, "end", "")
