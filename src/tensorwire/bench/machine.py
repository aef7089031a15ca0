"""The machine that a benchmark ran on, printed with every result: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tensorwire.device.copy_choice import described
from tensorwire.errors import ArgumentError

# glibc gives big blocks back to the kernel when they are freed, so that every step's gradients are new pages. Told to
# keep them, one worker's backward took 166 ms instead of 245, with 0 page faults a step instead of 49,155 (FCN-5,
# batch 64, one thread). MALLOC_MMAP_MAX_ alone changed nothing; MALLOC_TOP_PAD_ added nothing.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
_IDLE_LOAD = 0.5
_MEMORY = Path("/sys/kernel/mm/transparent_hugepage")


def choose_cores(wanted: str | None, *, shared: bool = False) -> tuple[int, ...]:
    """Two processors for two processes, on different cores where there are several; ``wanted`` is "A,B".

    ``shared``: those that several processes share, by default all.

    Raises `ArgumentError` for processors that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if wanted is not None:
        try:
            chosen = tuple(int(part) for part in wanted.split(","))
        except ValueError:
            raise ArgumentError(f"--cores takes two numbers such as 0,1, not {wanted!r}") from None
        if len(chosen) != 2 or not set(chosen) <= set(allowed):
            raise ArgumentError(f"--cores {wanted}: two of the processors {_ranges(allowed)}")
        return chosen
    if shared:
        return tuple(allowed)
    first = allowed[0]
    others = [core for core in allowed if core not in _siblings(first)] or [first]
    return (first, others[0])


def _siblings(core: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    siblings = {core}
    try:
        for part in path.read_text().strip().split(","):
            low, _, high = part.partition("-")
            siblings |= set(range(int(low), int(high or low) + 1))
    except (OSError, ValueError):
        pass
    return siblings


def describe(cores: tuple[int, ...], *, shared: bool = False) -> list[str]:
    """Processor, kernel, load and settings that change figures: one line each. ``shared``: nobody is pinned to one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    pinned = f"pinned: initiator on processor {cores[0]}, target on {cores[1]}"
    if shared:
        pinned = f"all programs share the processors {_ranges(list(cores))}"
    lines = [
        f"{_cpu()}, {os.cpu_count()} processors, {memory:.0f} GiB; Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        f"{pinned}; load average " + " ".join(f"{load:.2f}" for load in os.getloadavg()),
        f"transparent huge pages: {_setting('enabled')}, for shared memory: {_setting('shmem_enabled')}",
        f"copies: {described()}",
    ]
    if len(set(cores)) == 1:
        lines.append("only one processor: all processes share it, and the figures are those of its scheduler")
    if is_busy():
        lines.append("this machine is busy: no ratios and verdicts; compare only figures of this run with each other")
    return lines


def is_busy() -> bool:
    """Whether others use the processors, so that no time says much: the load of the last minute is above 0.5."""
    return os.getloadavg()[0] > _IDLE_LOAD


def cpu_has(flag: str) -> bool:
    """Whether the processor says that it has an instruction set."""
    try:
        return f" {flag} " in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    except OSError:
        return False


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _setting(name: str) -> str:
    try:
        text = (_MEMORY / name).read_text()
    except OSError:
        return "not in this kernel"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
