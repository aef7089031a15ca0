"""Programs that leave out a wait have wrong numbers under the lazy schedule; with it, right ones under every schedule.

Each program gets whether it waits, and returns what it found and what is right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.accelerator import simulated

DEVICE = "sim:0"
SCHEDULES = range(20)
N = 1000

Program = Callable[[bool], tuple[Tensor, Tensor]]


def shows(program: Program) -> None:
    """It does, and nothing is wrong with the wait."""
    simulated.schedule(0)
    found, right = program(False)
    assert not torch.equal(found, right), "a missing wait does not show"
    simulated.settle()
    never_wrong(lambda: program(True))


def never_wrong(program: Callable[[], tuple[Tensor, Tensor]]) -> None:
    for seed in SCHEDULES:
        simulated.schedule(seed)
        found, right = program()
        assert torch.equal(found, right), f"schedule {seed}: {found} {right}"
        simulated.settle()


def side_stream() -> tuple[torch.Stream, torch.Event]:
    """A stream that has waited for all that the current one has, and an event for it."""
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    return side, torch.Event(device=DEVICE)


def on_host() -> Tensor:
    return torch.empty(N, pin_memory=True)


def case_read_before_the_copy_to_the_host_is_done() -> None:
    def program(waits: bool) -> tuple[Tensor, Tensor]:
        y = torch.full((N,), 3.0, device=DEVICE) * 2 + 1
        host, (side, done) = on_host(), side_stream()
        with side:
            host.copy_(y, non_blocking=True)
            done.record(side)
        y.record_stream(side)
        if waits:
            done.synchronize()
        return host.clone(), torch.full((N,), 7.0)

    shows(program)


def copied(waits: bool) -> tuple[Tensor, Tensor]:
    """A copy to the host on a stream that has to wait for what computes its source."""
    host, side = on_host(), torch.Stream(DEVICE)
    y = torch.full((N,), 3.0, device=DEVICE) * 2 + 1
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(y, non_blocking=True)
    y.record_stream(side)
    side.synchronize()
    return host.clone(), torch.full((N,), 7.0)


def case_copied_before_it_is_computed() -> None:
    shows(copied)


def case_source_overwritten_before_it_is_copied_to_the_device() -> None:
    def program(waits: bool) -> tuple[Tensor, Tensor]:
        host, x = torch.full((N,), 3.0).pin_memory(), torch.zeros(N, device=DEVICE)
        side, done = side_stream()
        with side:
            x.copy_(host, non_blocking=True)
            done.record(side)
        if waits:
            done.synchronize()
        host.fill_(5.0)
        torch.accelerator.current_stream().wait_event(done)
        return x.cpu(), torch.full((N,), 3.0)

    shows(program)


def case_read_before_another_stream_has_written_it() -> None:
    def program(waits: bool) -> tuple[Tensor, Tensor]:
        host, x = torch.full((N,), 3.0).pin_memory(), torch.zeros(N, device=DEVICE)
        side, done = side_stream()
        with side:
            x.copy_(host, non_blocking=True)
            done.record(side)
        if waits:
            torch.accelerator.current_stream().wait_event(done)
        return (x * 2).cpu(), torch.full((N,), 6.0)

    shows(program)


def case_gradient_overwritten_before_it_is_copied() -> None:
    def program(waits: bool) -> tuple[Tensor, Tensor]:
        weight = torch.full((N,), 2.0, device=DEVICE, requires_grad=True)
        weight.square().sum().backward()
        assert weight.grad is not None
        host, (side, done) = on_host(), side_stream()
        with side:
            host.copy_(weight.grad, non_blocking=True)
            done.record(side)
        if waits:
            torch.accelerator.current_stream().wait_event(done)
        weight.grad.zero_()
        torch.accelerator.current_stream().synchronize()
        done.synchronize()
        return host.clone(), torch.full((N,), 4.0)

    shows(program)


def case_freed_without_record_stream() -> None:
    def program(waits: bool) -> tuple[Tensor, Tensor]:
        gradient, host = torch.full((N,), 4.0, device=DEVICE), on_host()
        side, done = side_stream()
        with side:
            host.copy_(gradient, non_blocking=True)
            done.record(side)
        if waits:
            gradient.record_stream(side)
        del gradient
        other = torch.full((N,), 9.0, device=DEVICE)
        torch.accelerator.current_stream().synchronize()
        done.synchronize()
        del other
        return host.clone(), torch.full((N,), 4.0)

    shows(program)


def case_found_in_memory_of_an_earlier_step() -> None:
    """The same program again and again: what an earlier run has left there must not make this one right."""

    def program(waits: bool) -> tuple[Tensor, Tensor]:
        found = copied(waits)
        torch.accelerator.synchronize()
        return found

    for _ in range(5):
        shows(program)


# ---- what is right without a wait of the program's


def case_pinned_memory_is_freed_while_a_copy_reads_it() -> None:
    def program() -> tuple[Tensor, Tensor]:
        host, x = torch.full((N,), 3.0).pin_memory(), torch.zeros(N, device=DEVICE)
        side, _ = side_stream()
        with side:
            x.copy_(host, non_blocking=True)
        del host
        torch.full((N,), 4.0).pin_memory()
        torch.accelerator.current_stream().wait_stream(side)
        return x.cpu(), torch.full((N,), 3.0)

    never_wrong(program)


def case_a_copy_to_the_host_after_one_from_the_same_memory() -> None:
    """What the first one has to read is not overwritten when the second one is issued."""

    def program() -> tuple[Tensor, Tensor]:
        host, x = torch.full((N,), 3.0).pin_memory(), torch.zeros(N, device=DEVICE)
        x.copy_(host, non_blocking=True)
        x.add_(1)
        host.copy_(x, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        return host.clone(), torch.full((N,), 4.0)

    never_wrong(program)


def case_copies_between_devices() -> None:
    def program() -> tuple[Tensor, Tensor]:
        x = torch.arange(N, dtype=torch.float32, device="sim:0") * 3
        y = x.to("sim:1", non_blocking=True)
        x.zero_()
        return (y + 1).cpu(), torch.arange(N) * 3.0 + 1

    never_wrong(program)


def case_an_event_is_recorded_again() -> None:
    """A wait is for what was recorded when it was issued."""

    def program() -> tuple[Tensor, Tensor]:
        first, (second, done) = torch.Stream(DEVICE), side_stream()
        x = torch.zeros(N, device=DEVICE)
        first.wait_stream(torch.accelerator.current_stream())
        with first:
            x += 1
            done.record(first)
            second.wait_event(done)
        with second:
            y = x.clone()
            copied = torch.Event(device=DEVICE)
            copied.record(second)
        with first:
            first.wait_event(copied)
            x += 1
            done.record(first)
        done.synchronize()
        return torch.stack([x.cpu(), y.cpu()]), torch.tensor([[2.0], [1.0]]).expand(2, N)

    never_wrong(program)
