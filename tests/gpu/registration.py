"""Host memory that the driver page-locks: of what kinds it takes it, how long that takes, and how fast copies are.

A region of the store is a sealed memfd. Workers map it shared: the slots for gradients, and read-only the values. A
user's view of the values is a private mapping, copy-on-write; locking that may give the device private copies, which
never show what servers write later.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from tensorwire._native import Memory, Window
from tensorwire.store.rules import tensor_over
from tensorwire.tables import print_table
from tensorwire.torch.page_locking import PageLocks, page_locked
from tests.gpu import devices
from tests.gpu.programs import answer, one_line

SIZES = (4 << 20, 64 << 20)
_PATTERNS = 251  # a prime: no two pages of a pattern are alike

Row = dict[str, Any]


@dataclass
class Area:
    """Host memory. ``behind``: the memory that it shows, as its other owner sees it."""

    name: str
    host: torch.Tensor
    behind: list[torch.Tensor] = field(default_factory=list)
    lock: tuple[int, bool] | None = None  # the address to lock, and whether the driver is told that it is read-only
    writable: bool = True
    keeps: tuple[object, ...] = ()


def measure(pipe: Connection, kind: str, quick: bool) -> None:
    """The program: rows of each kind of memory, then None."""
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    device = devices.prepare(kind)
    nbytes = SIZES[-1] * (1 if quick else 16)
    there = torch.empty(SIZES[-1], dtype=torch.uint8, device=device)
    for make in areas(nbytes):
        answer(pipe, [_row(make, there, nbytes, kind)])
    answer(pipe, None)


def areas(nbytes: int) -> Iterator[tuple[str, Callable[[], Area]]]:
    """The kinds of memory, each made when its turn comes."""
    yield "pinned by torch", lambda: Area("", page_locked(nbytes))
    yield "pageable", lambda: Area("", torch.zeros(nbytes, dtype=torch.uint8))
    yield "memfd, shared", lambda: _mapped(nbytes, shared=True)
    yield "memfd, private", lambda: _mapped(nbytes, shared=False)
    yield "memfd, shared, read-only, with flag", lambda: _mapped(nbytes, shared=True, read_only=True, flag=True)
    yield "memfd, shared, read-only, no flag", lambda: _mapped(nbytes, shared=True, read_only=True)
    yield "two memfds, side by side", lambda: _mapped(nbytes, shared=True, files=2)
    yield (
        "two memfds, read-only, with flag",
        lambda: _mapped(nbytes, shared=True, read_only=True, flag=True, files=2),
    )


def _mapped(nbytes: int, *, shared: bool, read_only: bool = False, flag: bool = False, files: int = 1) -> Area:
    """Memory as the store maps it, from one memfd or several."""
    each = nbytes // files
    owned = [Memory.allocate(each) for _ in range(files)]
    window = Window(nbytes, shared=shared, read_only=read_only)
    for n, memory in enumerate(owned):
        fd = os.dup(memory.fd)
        window.place(n * each, Memory.map(fd, not read_only), 0, each)
        os.close(fd)
    return Area(
        "",
        tensor_over(memoryview(window), "uint8", 0, nbytes),
        [tensor_over(memoryview(memory), "uint8", 0, each) for memory in owned],
        (window.address, flag),
        not read_only,
        (window, owned),
    )


def _row(named: tuple[str, Callable[[], Area]], there: torch.Tensor, nbytes: int, kind: str) -> Row:
    """What one kind of memory is like. An error is its row's."""
    name, make = named
    row: Row = {"memory": name, "bytes": nbytes}
    locks = PageLocks(kind)
    try:
        area = make()
        _write(area, 0)
        if area.lock is not None:
            began = time.perf_counter()
            row["locked"] = locks.lock(area.lock[0], nbytes, read_only=area.lock[1])
            row["lock_seconds_per_gib"] = (time.perf_counter() - began) * 2**30 / nbytes
            row["reason"] = locks.refusal
        row["is_pinned"] = area.host.is_pinned()
        row["up"], row["down"] = _check_up(area, there), _check_down(area, there) if area.writable else ""
        for size in SIZES:
            for word, there_first in (("up", True), *((("down", False),) if area.writable else ())):
                row[f"{word}_{size >> 20}_mib"] = _rate(area.host, there, size, there_first)
    except Exception as error:
        row["reason"] = one_line(error)
    finally:
        torch.accelerator.synchronize(there.device)
        locks.close()
    return row


# ---- values


def _pattern(nbytes: int, turn: int) -> torch.Tensor:
    """Bytes that differ from turn to turn everywhere."""
    block = (torch.arange(_PATTERNS << 10, dtype=torch.int32) % _PATTERNS + turn).to(torch.uint8)
    return block.repeat(-(-nbytes // block.numel()))[:nbytes]


def _write(area: Area, turn: int) -> None:
    """As the other owner of the memory does, which for plain memory is this one."""
    for memory in area.behind or [area.host]:
        memory.copy_(_pattern(memory.numel(), turn))


def _middle(area: Area, there: torch.Tensor) -> slice:
    """The part that is checked; where there are two files, it has the border in its middle."""
    nbytes = min(there.numel(), area.host.numel()) // 2
    start = (area.host.numel() - nbytes) // 2
    return slice(start, start + nbytes)


def _behind(area: Area) -> torch.Tensor:
    """What the other owner sees."""
    return torch.cat(area.behind) if area.behind else area.host


def _check_up(area: Area, there: torch.Tensor) -> str:
    """Whether the device sees what the other owner has written since the memory was locked."""
    earlier, part = _behind(area)[_middle(area, there)].clone(), _middle(area, there)
    _write(area, 1)
    room = there[: earlier.numel()]
    room.copy_(area.host[part], non_blocking=True)
    torch.accelerator.synchronize(there.device)
    return _verdict(room.cpu(), _behind(area)[part], earlier)


def _check_down(area: Area, there: torch.Tensor) -> str:
    """Whether the other owner sees what the device copies there."""
    part = _middle(area, there)
    earlier = _behind(area)[part].clone()
    room = there[: earlier.numel()]
    sent = _pattern(earlier.numel(), 3)
    room.copy_(sent)
    area.host[part].copy_(room, non_blocking=True)
    torch.accelerator.synchronize(there.device)
    return _verdict(_behind(area)[part], sent, earlier)


def _verdict(found: torch.Tensor, right: torch.Tensor, earlier: torch.Tensor) -> str:
    if torch.equal(found, right):
        return "right"
    return "a copy of its own" if torch.equal(found, earlier) else "WRONG"


# ---- speed


def _rate(host: torch.Tensor, there: torch.Tensor, size: int, up: bool) -> float:
    """Bytes a second of copies of ``size``, over all of ``host``, in the second round."""
    seconds = 0.0
    for _ in range(2):
        torch.accelerator.synchronize(there.device)
        began = time.perf_counter()
        for at in range(0, host.numel(), size):
            to, source = (there[:size], host[at : at + size]) if up else (host[at : at + size], there[:size])
            to.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(there.device)
        seconds = time.perf_counter() - began
    return host.numel() / seconds


# ---- output


def show(rows: list[Row]) -> None:
    """The table."""
    head = ["memory", "locked", "s/GiB", "pinned", "read", "written"]
    head += [f"{word} {size >> 20} MiB" for size in SIZES for word in ("up", "down")]
    table = []
    for row in rows:
        locked = "" if "locked" not in row else "yes" if row["locked"] else "no"
        cost = f"{row['lock_seconds_per_gib']:.3f}" if row.get("locked") else ""
        rates = [row.get(f"{word}_{size >> 20}_mib") for size in SIZES for word in ("up", "down")]
        pinned = {True: "yes", False: "no"}.get(row.get("is_pinned", ""), "")
        cells = [row["memory"], locked, cost, pinned, row.get("up", ""), row.get("down", "")]
        table.append([*cells, *("" if rate is None else f"{rate / 1e9:.1f}" for rate in rates)])
    print_table(
        head,
        table,
        left=(0, 1, 3, 4, 5),
        title="Page-locked host memory (up: to the device, down: from it, in GB/s; read, written: by the device)",
    )
    for row in rows:
        if row.get("reason"):
            print(f"  {row['memory']}: {row['reason']}")


def wrong(rows: list[Row]) -> list[str]:
    """What is not as the store needs it."""
    return [
        f"{row['memory']}: {word} {row[word]!r}"
        for row in rows
        for word in ("up", "down")
        if row.get(word) and row[word] != "right" and not ("private" in row["memory"] and row[word] != "WRONG")
    ]
