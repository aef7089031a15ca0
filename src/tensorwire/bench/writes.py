"""``bench device``: writes of several sizes over shm and tcp, beside copies and sockets in C."""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire.bench.baselines import Peers
from tensorwire.bench.compare import Workload
from tensorwire.bench.machine import cpu_has
from tensorwire.bench.programs import OURS, Contender, actors
from tensorwire.bench.records import Target, size_text

KIB, MIB = 2**10, 2**20
SMALL = 64 * KIB  # up to here time counts, above it the rate
STREAMING = 16 * MIB  # from here on several ways to copy compete
SIZES = {"shm": (64, MIB, 16 * MIB, 64 * MIB), "tcp": (64, 4 * KIB, SMALL, MIB, 64 * MIB)}
QUICK_SIZES = {"shm": (64, MIB), "tcp": (64, MIB)}
_BUFFERS = (0, 256 * KIB, MIB, 4 * MIB)


def workloads(devices: Sequence[str], sizes: Sequence[int], peers: Peers, *, quick: bool) -> list[Workload]:
    """All of them in the order of the table; ``sizes`` empty: each device's own."""
    made: list[Workload] = []
    kinds = {"shm": shm, "tcp": tcp}
    for device in devices:
        for nbytes in sizes or (QUICK_SIZES if quick else SIZES)[device]:
            made += kinds[device](nbytes, peers)
    return made


def _ours(device: str, nbytes: int, mode: str, *, asleep: bool = False) -> Contender:
    return Contender(OURS, actors("transfer", device, nbytes, mode, "127.0.0.1"), asleep=asleep)


def shm(nbytes: int, peers: Peers) -> list[Workload]:
    """Small: a ping-pong of write and signal. Large: the writer's time alone, the target asleep."""
    title = f"shm write + signal, {size_text(nbytes)}"
    others = peers.contenders("shm", nbytes)
    if nbytes <= SMALL:
        contenders = (_ours("shm", nbytes, "ping-pong"), *peers.copies(nbytes, "ping-pong", ("memcpy",), "C memcpy"))
        target = Target(0.5e-6) if nbytes <= 64 else None
        made = [Workload("device", "shm", title, nbytes, "ping-pong", contenders, ("C memcpy",), target, per=2)]
        # Their write is one way with an acknowledgement.
        return made if not others else [*made, *_acknowledged("shm", nbytes, others)]
    kinds = ["memcpy"]
    if nbytes >= STREAMING:
        kinds += [name for name, flag in _COPIES.items() if cpu_has(flag)]
    group = "C memcpy" if len(kinds) == 1 else "best C copy"
    target = Target(shares={group: 0.90 if nbytes < STREAMING else 0.95})
    mode = "passive-target"
    ours = _ours("shm", nbytes, mode, asleep=True)
    if nbytes < STREAMING:
        copies = peers.copies(nbytes, "one-way", kinds, group)
    else:
        ours, copies = peers.same_memory(ours, kinds, group)
    contenders = (ours, *copies, *others)
    return [Workload("device", "shm", title, nbytes, mode, contenders, (group,), target)]


_COPIES = {"rep-movsb": "rep_good", "nt-sse2": "sse2", "nt-avx512": "avx512f"}


def _acknowledged(device: str, nbytes: int, others: Sequence[Contender]) -> list[Workload]:
    title = f"{device} write, {size_text(nbytes)}, beside peers"
    contenders = (_ours(device, nbytes, "passive-target", asleep=True), *others)
    return [Workload("device", device, title, nbytes, "passive-target", contenders)]


def tcp(nbytes: int, peers: Peers) -> list[Workload]:
    """Write and completion: against libfabric, which polls, and blocking sockets, which sleep."""
    title = f"tcp write + completion, {size_text(nbytes)}"
    small = nbytes <= SMALL
    sockets = peers.sockets(nbytes, (0,) if small else _BUFFERS)
    others = (*peers.libfabric(nbytes), *sockets, *peers.contenders("tcp", nbytes))
    waiting = (_ours("tcp", nbytes, "waiting-target"), *others)
    if not small:
        target = Target(shares={"C sockets": 1.0, "libfabric": 1.0}) if nbytes >= 64 * MIB else None
        return [Workload("device", "tcp", title, nbytes, "waiting-target", waiting, ("C sockets",), target)]
    waiting = (*waiting, *peers.polling_sockets(nbytes))
    passive = (_ours("tcp", nbytes, "passive-target", asleep=True), *sockets)
    as_libfabric, half_of_sockets = Target(shares={"libfabric": 1.0}), Target(shares={"C sockets": 2.0})
    limits = ("libfabric", "C sockets")
    return [
        Workload("device", "tcp", title, nbytes, "waiting-target", waiting, limits, as_libfabric),
        Workload("device", "tcp", title, nbytes, "passive-target", passive, ("C sockets",), half_of_sockets),
    ]
