"""Limits on the memory of regions: the machine's, its control groups', and those of processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from tensorwire._native import available_bytes
from tensorwire.device.verbs.ports import has_active_port
from tensorwire.doctor.findings import Finding, Level, Section
from tensorwire.sizes import size_text

LEAST_BYTES = 64 << 20  # less is no room for a server with anything to serve
FEW_DESCRIPTORS, LEAST_DESCRIPTORS = 1024, 64
_IPC_LOCK = 1 << 14  # linux/capability.h
_NO_LIMIT = 1 << 60  # version 1 of control groups has no word for it

# name, what it is for, what to do about it
_LIMITS = (
    ("RLIMIT_AS", "regions and what is mapped count", "ulimit -v unlimited"),
    ("RLIMIT_DATA", "Python's own memory", "ulimit -d unlimited"),
    ("RLIMIT_FSIZE", "the largest region", "ulimit -f unlimited"),
)


def memory() -> Section:
    """The machine's memory, and every limit on the way to it."""
    return Section(
        "memory", (*_machine(), *_groups(), *(_limit(*limit) for limit in _LIMITS), _pinned(), _descriptors())
    )


def _machine() -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    table = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, left = table["MemTotal"], available_bytes()
    yield Finding("machine", f"{size_text(total)}, {size_text(table['MemAvailable'])} available", number=total)
    if left < LEAST_BYTES:
        advice = "end what uses the memory, or raise the limit of the control group"
        yield Finding("left for regions", size_text(left), "stops", advice, left)
    else:
        yield Finding("left for regions", f"{size_text(left)}; allocate() refuses more", number=left)


def _groups() -> Iterator[Finding]:
    """Control groups around this process that have a limit, of both versions."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")
        if not controllers:
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        inner = Path(path)
        for group in (inner, *inner.parents):
            try:
                text = (root / group.relative_to("/") / name).read_text().strip()
            except (OSError, ValueError):  # not mounted here, or a path of the host's
                continue
            if text != "max" and int(text) < _NO_LIMIT:
                yield Finding(f"control group {group}", size_text(int(text)), "note", number=int(text))


def _limit(name: str, what: str, command: str) -> Finding:
    soft, _ = resource.getrlimit(getattr(resource, name))
    if soft == resource.RLIM_INFINITY:
        return Finding(name, f"unlimited ({what})")
    level: Level = "stops" if soft < LEAST_BYTES else "note"
    return Finding(name, f"{size_text(soft)} ({what})", level, f"{command}, where regions do not fit", soft)


def _pinned() -> Finding:
    """Only verbs pins memory: its regions, and what it is lent."""
    name, (soft, _) = "RLIMIT_MEMLOCK", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "unlimited (regions of verbs count)")
    if not has_active_port():
        return Finding(name, f"{size_text(soft)} (only verbs would need it)", number=soft)
    if _capabilities() & _IPC_LOCK:
        return Finding(name, f"{size_text(soft)}, which does not bind this process (CAP_IPC_LOCK)", number=soft)
    advice = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity in the systemd unit, also of slurmd; docker run --ulimit memlock=-1"
    )
    return Finding(name, f"{size_text(soft)} (regions of verbs count)", "note", advice, soft)


def _capabilities() -> int:
    return int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft}, at most {hard} (one a region, one a region of a peer on shm, one or two a channel)"
    advice = f"ulimit -n {hard}" if hard > soft else "raise the hard limit of open files"
    level: Level = "stops" if soft < LEAST_DESCRIPTORS else "note" if soft < FEW_DESCRIPTORS else "fine"
    return Finding("RLIMIT_NOFILE", value, level, "" if level == "fine" else advice, soft)
