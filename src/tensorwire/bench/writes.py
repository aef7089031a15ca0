"""``bench device``: writes of several sizes over shm, tcp and verbs, beside copies and sockets in C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorwire._native import copy_kernel
from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.machine import cpu_has
from tensorwire.bench.programs import OURS, Contender, actor, pair
from tensorwire.bench.records import Target, size_text

KIB, MIB = 2**10, 2**20
SMALL = 64 * KIB  # up to here time counts, above it the rate
PAGES = 16 * MIB  # from here on it counts on which pages the payload lies
LARGE = 64 * MIB  # from here on tcp has a target
SIZES = {
    "shm": (64, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "tcp": (64, 4 * KIB, SMALL, MIB, 64 * MIB),
    "verbs": (64, MIB, 8 * MIB, 64 * MIB),
}
QUICK_SIZES = (64, MIB)
BUFFER_SIZES = (0, 256 * KIB, MIB, 4 * MIB)  # of sockets


def workloads(devices: Sequence[str], sizes: Sequence[int], limits: Limits, *, quick: bool) -> list[Workload]:
    """All of them in the order of the table; ``sizes`` empty: each device's own."""
    made: list[Workload] = []
    kinds = {"shm": shm, "tcp": tcp, "verbs": verbs}
    for device in devices:
        for nbytes in sizes or (QUICK_SIZES if quick else SIZES[device]):
            made += kinds[device](nbytes, limits)
    return made


def ours(device: str, nbytes: int, mode: str, *, asleep: bool = False) -> Contender:
    """Our own two programs, in a mode of ``actors/transfer.py``."""
    return Contender(OURS, pair(actor("transfer"), device, nbytes, mode, "127.0.0.1"), asleep=asleep)


def shm(nbytes: int, limits: Limits) -> list[Workload]:
    """Small: a ping-pong of write and signal. Large: the writer's time alone, the target asleep."""
    title = f"shm write + signal, {size_text(nbytes)}"
    if nbytes <= SMALL:
        contenders = (ours("shm", nbytes, "ping-pong"), *limits.copies(nbytes, "ping-pong", ("memcpy",), "C memcpy"))
        target = Target(0.5e-6) if nbytes <= 64 else None
        return [Workload("device", "shm", title, nbytes, "ping-pong", contenders, ("C memcpy",), target, per=2)]
    kinds = copy_kinds()
    group = "best C copy"
    target = Target(shares={group: 0.90 if nbytes < MIB else 0.95})
    mode = "passive-target"
    how = f"{size_text(nbytes)} are copied by {copy_kernel(nbytes)}"
    writer = replace(ours("shm", nbytes, mode, asleep=True), how=how, memory=4 * nbytes)
    if nbytes < PAGES:
        copies = limits.copies(nbytes, "one-way", kinds, group)
    else:
        writer, copies = limits.same_memory(writer, kinds, group)
    return [Workload("device", "shm", title, nbytes, mode, (writer, *copies), (group,), target)]


def copy_kinds() -> list[str]:
    """The copies of ``c/memory.c`` that this processor has."""
    return ["memcpy", *(name for name, flag in _COPIES.items() if cpu_has(flag))]


_COPIES = {"rep-movsb": "erms", "nt-sse2": "sse2", "nt-avx2": "avx2", "nt-avx512": "avx512f"}


def tcp(nbytes: int, limits: Limits) -> list[Workload]:
    """Write and completion, against blocking sockets, which sleep."""
    title = f"tcp write + completion, {size_text(nbytes)}"
    small = nbytes <= SMALL
    sockets = limits.sockets(nbytes, (0,) if small else BUFFER_SIZES)
    waiting = (ours("tcp", nbytes, "waiting-target"), *sockets)
    if not small:
        target = Target(shares={"C sockets": 1.0}) if nbytes >= LARGE else None
        return [Workload("device", "tcp", title, nbytes, "waiting-target", waiting, ("C sockets",), target)]
    waiting = (*waiting, *limits.sockets(nbytes, (0,), polls=True))
    passive = (ours("tcp", nbytes, "passive-target", asleep=True), *sockets)
    half_of_sockets = Target(shares={"C sockets": 2.0})
    return [
        Workload("device", "tcp", title, nbytes, "waiting-target", waiting, ("C sockets",)),
        Workload("device", "tcp", title, nbytes, "passive-target", passive, ("C sockets",), half_of_sockets),
    ]


def verbs(nbytes: int, limits: Limits) -> list[Workload]:
    """Through the NIC, whose own loopback is the limit. Small: a ping-pong, and a write alone. Large: a stream."""
    text = size_text(nbytes)
    kinds = {"one-signal": f"verbs writes, {text}", "one-way": f"verbs writes + signals, {text}"}
    if nbytes < SMALL:
        kinds = {"ping-pong": f"verbs write + signal, {text}", "passive-target": f"verbs write + completion, {text}"}
    elif nbytes > MIB:
        del kinds["one-way"]  # a signal each no longer shows
    return [
        Workload(
            "device",
            "verbs",
            title,
            nbytes,
            mode,
            (ours("verbs", nbytes, mode, asleep=mode == "passive-target"),),
            per=2 if mode == "ping-pong" else 1,
        )
        for mode, title in kinds.items()
    ]
