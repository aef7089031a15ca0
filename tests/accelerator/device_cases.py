"""What the simulated accelerator has of a real one: waits of the host, copies, memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.accelerator import simulated
from tests.accelerator.training_cases import GPT, same_bits, tokens

DEVICE = "sim:0"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


def waits_of(call: Callable[[], object]) -> int:
    before = simulated.host_waits()
    call()
    return simulated.host_waits() - before


# ---- waits of the host


def case_counts_host_waits() -> None:
    x, pinned, plain = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True), torch.empty(3)
    stream, event = torch.accelerator.current_stream(), torch.Event(device=DEVICE)
    event.record(stream)
    assert waits_of(event.synchronize) == 1
    assert waits_of(stream.synchronize) == 1
    assert waits_of(torch.accelerator.synchronize) == 1
    assert waits_of(x.cpu) == 1
    assert waits_of(x[0].item) == 1
    assert waits_of(x.nonzero) == 1
    assert waits_of(lambda: x[x > 0]) == 1
    assert waits_of(lambda: torch.equal(x, x)) == 1
    assert waits_of(lambda: plain.copy_(x, non_blocking=True)) == 1
    assert waits_of(lambda: x.copy_(pinned)) == 1
    assert waits_of(lambda: torch.tensor([1.0], device=DEVICE)) == 1
    assert waits_of(lambda: pinned.copy_(x, non_blocking=True)) == 0
    assert waits_of(lambda: x.copy_(pinned, non_blocking=True)) == 0
    assert waits_of(lambda: x.copy_(plain, non_blocking=True)) == 0
    assert waits_of(lambda: (x * 2).to("sim:1").sum()) == 0
    assert waits_of(lambda: (stream.query(), event.query(), event.record(stream), stream.wait_event(event))) == 0


def case_counts_host_waits_by_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(waits_of(torch.ones(3, device=DEVICE).sum().item)))
    assert waits_of(lambda: (thread.start(), thread.join())) == 0
    assert found == [1]


def case_training_waits_only_where_it_asks() -> None:
    model, (x, wanted) = GPT().to(DEVICE), (t.to(DEVICE) for t in tokens())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, -2), wanted.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert waits_of(step) == 0


def case_queries_end() -> None:
    """A host that asks until it is so goes on, also where nothing runs but what is needed."""
    for seed in (0, 1, 5):
        simulated.schedule(seed)
        side, event = torch.Stream(DEVICE), torch.Event(device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        x = torch.ones(3, device=DEVICE)
        with side:
            x.mul(2)
            event.record(side)
        assert not event.query() or seed  # lazily, the first one cannot have been enough
        while not event.query():
            pass
        while not torch.accelerator.current_stream().query():
            pass


def case_the_lazy_schedule_runs_only_what_is_needed() -> None:
    host, side = torch.empty(3, pin_memory=True), torch.Stream(DEVICE)
    x = torch.ones(3, device=DEVICE)
    simulated.settle()
    with side:
        y = torch.ones(3, device=DEVICE)
    before = simulated.pending()
    host.copy_(x, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert simulated.pending() == before > 0
    simulated.settle()
    assert simulated.pending() == 0
    del y


# ---- copies


def copies_as_on_cpu(device: Tensor, source: Tensor) -> None:
    """Both ways, and with a conversion; none waits that is asked not to."""
    assert same_bits(device.cpu().float(), source.float())
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    assert waits_of(lambda: pinned.copy_(device, non_blocking=True)) == 0
    torch.accelerator.synchronize()
    assert same_bits(pinned.float(), source.float())
    other = torch.empty(source.shape, dtype=torch.float32, pin_memory=True)
    assert waits_of(lambda: other.copy_(device, non_blocking=True)) == 0
    torch.accelerator.synchronize()
    assert torch.equal(other, source.float())
    target = torch.empty_like(device)
    assert waits_of(lambda: target.copy_(pinned, non_blocking=True)) == 0
    assert same_bits(target.cpu().float(), source.float())


def case_copies_of_every_kind() -> None:
    """Also views and other types are as on the CPU."""
    for seed in (0, 1, 6):
        simulated.schedule(seed)
        for dtype in DTYPES:
            source = torch.arange(24).reshape(2, 3, 4).to(dtype)
            device = source.to(DEVICE)
            for a, b in (
                (device, source),
                (device.permute(2, 0, 1), source.permute(2, 0, 1)),
                (device[:, 1:, ::2], source[:, 1:, ::2]),
                (device[0, 0, :1].expand(5), source[0, 0, :1].expand(5)),
                (device[:0], source[:0]),
            ):
                copies_as_on_cpu(a, b)
            strided = torch.empty(4, 3, 2, dtype=dtype, pin_memory=True).permute(2, 1, 0)
            strided.copy_(device)
            assert torch.equal(strided, source)
            assert torch.equal(device.copy_(strided, non_blocking=True).cpu(), source)


def case_strided_memory_of_the_host_is_copied_at_once() -> None:
    """CUDA makes it contiguous on the host first. So what comes to it is waited for, and what it has is read."""
    whole = torch.zeros(4, 6, pin_memory=True)
    part, x = whole[:, ::2], torch.ones(4, 3, device=DEVICE)
    assert waits_of(lambda: part.copy_(x, non_blocking=True)) == 1
    assert whole.sum() == 12
    assert waits_of(lambda: x.copy_(part, non_blocking=True)) == 0
    whole.fill_(7)
    assert x.sum().item() == 12


def case_pageable_memory_is_copied_at_once() -> None:
    plain, x = torch.full((5,), 3.0), torch.zeros(5, device=DEVICE)
    x.copy_(plain, non_blocking=True)
    plain.zero_()  # it was read already
    plain.copy_(x, non_blocking=True)
    assert torch.equal(plain, torch.full((5,), 3.0))


def case_asynchronous_copies_are_late() -> None:
    host, x = torch.full((5,), 3.0).pin_memory(), torch.zeros(5, device=DEVICE)
    simulated.settle()
    x.copy_(host, non_blocking=True)
    host.fill_(4.0)
    assert x.sum().item() == 20.0
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.sum() == 20.0


# ---- memory


def case_host_access_faults() -> None:
    x = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    address = x.data_ptr()
    for access in (lambda: ctypes.string_at(address, 4), lambda: ctypes.memset(address, 0, 4)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads, of which the child uses none
            child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            access()
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    with open("/dev/zero", "rb", buffering=0) as zeros, pytest.raises(OSError, match="Bad address"):
        zeros.readinto((ctypes.c_char * 4).from_address(address))  # system calls say so


def case_fresh_and_freed_memory_is_poison() -> None:
    assert torch.empty(3, device=DEVICE).isnan().all().item()
    x = torch.ones(1000, device=DEVICE)
    address = x.data_ptr()
    del x
    torch.accelerator.synchronize()
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == address
    assert again.isnan().all().item()


def case_memory_is_reused_only_when_its_work_is_done() -> None:
    x, side = torch.ones(1000, device=DEVICE), torch.Stream(DEVICE)
    address = x.data_ptr()
    x.record_stream(side)
    with side:
        x.mul(2)
    del x
    torch.accelerator.current_stream().synchronize()
    assert torch.empty(1000, device=DEVICE).data_ptr() != address
    torch.accelerator.synchronize()
    torch.empty(7, device=DEVICE)  # looks what has been done
    torch.accelerator.synchronize()
    assert torch.empty(1000, device=DEVICE).data_ptr() == address


def case_out_of_memory() -> None:
    gc.collect()
    before = simulated.allocated(1)
    simulated.limit(before + 4096)
    x = torch.ones(1024, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError, match="sim:1 is out of memory: 4 bytes are wanted"):
        torch.ones(1, device="sim:1")
    assert simulated.allocated(1) == before + 4096 == torch.accelerator.memory_allocated(1)
    del x
    assert simulated.allocated(1) == before
    assert torch.ones(1, device="sim:1").item() == 1.0
    assert simulated.peak(1) == torch.accelerator.max_memory_allocated(1) >= before + 4096
    torch.accelerator.reset_peak_memory_stats(1)
    assert simulated.peak(1) == before
    simulated.limit(None)
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
        torch.empty((4 << 30) + 1, dtype=torch.uint8, device=DEVICE)


def case_pinned_memory() -> None:
    assert not torch.empty(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.arange(5).pin_memory()[2:].is_pinned()
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 2, pin_memory=True)
    assert next(iter(loader)).is_pinned()


def case_registered_memory() -> None:
    memory = mmap.mmap(-1, 8192)
    host = torch.frombuffer(memory, dtype=torch.float32)
    address, x = host.data_ptr(), torch.ones(1024, device=DEVICE)
    assert not host.is_pinned()
    simulated.register(address, 4096)
    assert simulated.registered() == 1
    assert host[5:9].is_pinned()
    assert waits_of(lambda: host[:1024].copy_(x, non_blocking=True)) == 0
    with pytest.raises(RuntimeError, match="pending copy"):
        simulated.unregister(address)
    torch.accelerator.synchronize()
    assert host[:1024].sum() == 1024
    with pytest.raises(RuntimeError, match="already registered"):
        simulated.register(address + 1024, 4096)
    with pytest.raises(RuntimeError, match="only some are page-locked"):
        x.resize_(2048).copy_(host, non_blocking=True)
    simulated.register(address + 4096, 4096)
    for at in (address + 4096, address):
        simulated.unregister(at)
    with pytest.raises(RuntimeError, match="no memory is registered"):
        simulated.unregister(address)
    with pytest.raises(RuntimeError, match="no memory is registered"):
        simulated.unregister(torch.empty(3, pin_memory=True).data_ptr())
    assert not host.is_pinned()
