"""From tensors to servers: one deterministic layout that every process computes for itself.

Each tensor has a place in the *space*, one range of addresses in which a worker sees its parameters. Big tensors are
split over all servers, at multiples of the page and of 1,024 elements; small ones go whole to the server with the
fewest bytes. A server's part of the space is its *shard*, cut into *buckets* of at most 4 MiB: the unit of transfer and
of update. A bucket is contiguous in the space and in the shard, so one write moves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.sizes import round_up, size_text

PAGE = 4096
ALIGNMENT = 64  # enough for every framework to alias a tensor
CUT = 1024  # elements: vectorised optimizers give the same bits on both sides of such a cut
BUCKET_BYTES = 4 << 20
MOST_BUCKET_BYTES = 1 << 40
MOST_BUCKETS = 1 << 22  # of a plan: every process makes all of it

# What parameters, and the tensors that an optimizer keeps, may be made of.
PARAMETER_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as the plan sees it. ``group`` is its parameter group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a tensor, at ``offset`` bytes within their bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """``nbytes`` that travel and are updated together, at ``space`` in the space and at ``shard`` in the shard.

    ``number`` is its own among all buckets of the plan, from 0; ``index`` among those of its server.
    """

    number: int
    server: int
    index: int
    space: int
    shard: int
    nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def first(self) -> tuple[int, int]:
        """Its first tensor and element: in the order of the model, which is about that of its forward pass."""
        return self.pieces[0].tensor, self.pieces[0].start


@dataclass(frozen=True)
class StorePlan:
    """Where everything lies. ``offsets[i]`` is tensor ``i``'s place in the space."""

    tensors: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    space_bytes: int
    shard_bytes: tuple[int, ...]
    buckets: tuple[tuple[Bucket, ...], ...]  # by server, in shard order

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.shard_bytes)

    def in_order(self) -> list[Bucket]:
        """All buckets, servers taking turns, so that all of them have work from the start."""
        most = max((len(b) for b in self.buckets), default=0)
        return [b[i] for i in range(most) for b in self.buckets if i < len(b)]

    def fragments(self, count: int) -> list[int]:
        """By bucket number: which of ``count`` fragments it is in. They follow the order of the model.

        Raises `ArgumentError` where there are fewer buckets than fragments.
        """
        buckets = sorted((b for s in self.buckets for b in s), key=lambda b: b.first)
        if count > max(1, len(buckets)):
            raise ArgumentError(
                f"{count} fragments need as many buckets, and there are {len(buckets)}: use fewer, or a smaller "
                "bucket_bytes"
            )
        found = [0] * len(buckets)
        for place, bucket in enumerate(buckets):
            found[bucket.number] = place * count // len(buckets)
        return found

    def runs(self) -> list[tuple[int, int, int, int]]:
        """Maximal spans ``(server, space, shard, nbytes)`` that are contiguous on both sides, in whole pages."""
        runs: list[tuple[int, int, int, int]] = []
        for bucket in sorted((b for s in self.buckets for b in s), key=lambda b: b.space):
            if runs:
                server, space, shard, nbytes = runs[-1]
                gap = bucket.space - (space + nbytes)
                if server == bucket.server and 0 <= gap < PAGE and bucket.shard == shard + nbytes + gap:
                    runs[-1] = (server, space, shard, nbytes + gap + bucket.nbytes)
                    continue
            runs.append((bucket.server, bucket.space, bucket.shard, bucket.nbytes))
        return [(server, space, shard, round_up(nbytes, PAGE)) for server, space, shard, nbytes in runs]

    def describe(self) -> str:
        """One line a tensor: what processes of a job must agree on."""
        lines = [f"{t.name} {list(t.shape)} {t.dtype} group {t.group}" for t in self.tensors]
        return "\n".join([*lines, f"{self.servers} servers, {sum(map(len, self.buckets))} buckets"])

    def summary(self, workers: int, buffers: int = 1) -> str:
        """One line for people: what moves a step, and what servers register."""
        most = max(self.registered_bytes(s, workers, buffers) for s in range(self.servers))
        return (
            f"{size_text(sum(t.nbytes for t in self.tensors))} in {counted(len(self.tensors), 'tensor')}, "
            f"{counted(sum(map(len, self.buckets)), 'bucket')} on {counted(self.servers, 'server')}; "
            f"{size_text(most)} registered on {'it' if self.servers == 1 else 'the fullest one'}"
        )

    def digest(self, extra: bytes = b"") -> bytes:
        """A hash of the whole plan and of ``extra``."""
        return hashlib.sha256(repr(self).encode() + b"\0" + extra).digest()

    def registered_bytes(self, server: int, workers: int, buffers: int = 1) -> int:
        """What server ``server`` registers: its parameters, ``buffers`` times, and one gradient slot a worker."""
        return self.shard_bytes[server] * (buffers + workers)


def counted(number: int, what: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _Builder:
    def __init__(self, servers: int, bucket_bytes: int) -> None:
        self.space = 0
        self.shards = [0] * servers
        self.buckets: list[list[Bucket]] = [[] for _ in range(servers)]
        self.bucket_bytes = bucket_bytes

    def page(self, server: int) -> None:
        """Starts a run: space and shard both at a page, so that one maps onto the other."""
        self.space = round_up(self.space, PAGE)
        self.shards[server] = round_up(self.shards[server], PAGE)

    def add(self, server: int, pieces: Sequence[Piece], nbytes: int) -> None:
        mine = self.buckets[server]
        number = sum(map(len, self.buckets))
        mine.append(Bucket(number, server, len(mine), self.space, self.shards[server], nbytes, tuple(pieces)))
        self.space += nbytes
        self.shards[server] += nbytes

    def skip(self, server: int, alignment: int) -> None:
        gap = round_up(self.space, alignment) - self.space
        self.space += gap
        self.shards[server] += gap

    def chunks(self, server: int, tensor: int, start: int, stop: int, size: int, chunk: int) -> None:
        """Elements ``start`` to ``stop`` of one tensor, in buckets of ``chunk`` elements."""
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            self.add(server, [Piece(tensor, at, end, 0)], (end - at) * size)


def make_plan(
    tensors: Sequence[ParameterSpec],
    servers: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    whole: bool = False,
    together: bool = False,
    apart: bool = False,
) -> StorePlan:
    """Lays ``tensors`` out over ``servers``.

    ``whole``: no tensor is cut, for rules that need whole ones. ``together``: all are on the first server, for rules
    that look at all of them. ``apart``: no two tensors share a bucket.

    Raises `ArgumentError` for no servers, duplicate names, a bad bucket size, or more buckets than a plan may have;
    `Unsupported` for a dtype.
    """
    _check(tensors, servers, bucket_bytes)
    build = _Builder(servers, bucket_bytes)
    offsets = [0] * len(tensors)
    big = [] if whole or servers == 1 else [i for i, t in enumerate(tensors) if t.nbytes >= servers * bucket_bytes]
    for i in big:
        _split(build, tensors[i], i, offsets)
    load = list(build.shards)
    placed: list[list[int]] = [[] for _ in range(servers)]
    split = set(big)
    for i in sorted((i for i in range(len(tensors)) if i not in split), key=lambda i: (-tensors[i].nbytes, i)):
        server = 0 if together else min(range(servers), key=lambda s: (load[s], s))
        load[server] += tensors[i].nbytes
        placed[server].append(i)
    for server, mine in enumerate(placed):
        build.page(server)
        _gather(build, server, sorted(mine), tensors, offsets, whole=whole, apart=apart)
    shards = tuple(round_up(n, PAGE) for n in build.shards)
    return StorePlan(
        tuple(tensors), tuple(offsets), round_up(build.space, PAGE), shards, tuple(tuple(b) for b in build.buckets)
    )


def _check(tensors: Sequence[ParameterSpec], servers: int, bucket_bytes: int) -> None:
    if servers < 1:
        raise ArgumentError("a store needs at least one server")
    whole = isinstance(bucket_bytes, int) and not isinstance(bucket_bytes, bool)
    if not whole or not PAGE <= bucket_bytes <= MOST_BUCKET_BYTES or bucket_bytes % PAGE:
        most = f"{MOST_BUCKET_BYTES >> 40} TiB"
        raise ArgumentError(f"bucket_bytes must be a multiple of {PAGE}, of at most {most}, not {bucket_bytes!r:.100}")
    seen: set[str] = set()
    for t in tensors:
        if t.name in seen:
            raise ArgumentError(f"two parameters have the name {t.name!r}")
        seen.add(t.name)
        if t.dtype not in PARAMETER_DTYPES:
            raise Unsupported(
                f"parameter {t.name!r} has dtype {t.dtype}; the store holds {', '.join(PARAMETER_DTYPES)}"
            )
    if sum(t.nbytes for t in tensors) > MOST_BUCKETS * bucket_bytes:
        total = size_text(sum(t.nbytes for t in tensors))
        raise ArgumentError(f"parameters of {total} take more than {MOST_BUCKETS} buckets of {size_text(bucket_bytes)}")


def _chunk(size: int, bucket_bytes: int) -> int:
    """Elements of one bucket: a multiple of 1,024."""
    return max(CUT, bucket_bytes // size // CUT * CUT)


def _split(build: _Builder, tensor: ParameterSpec, index: int, offsets: list[int]) -> None:
    size = DTYPES[tensor.dtype]
    servers = len(build.shards)
    cut = max(CUT, PAGE // size)
    share = round_up((tensor.elements + servers - 1) // servers, cut)
    build.page(0)
    offsets[index] = build.space
    for server in range(servers):
        start, stop = min(server * share, tensor.elements), min((server + 1) * share, tensor.elements)
        if start < stop:
            build.page(server)
            build.chunks(server, index, start, stop, size, _chunk(size, build.bucket_bytes))


def _gather(
    build: _Builder,
    server: int,
    mine: list[int],
    tensors: Sequence[ParameterSpec],
    offsets: list[int],
    *,
    whole: bool,
    apart: bool,
) -> None:
    """Lays whole tensors side by side; small ones share a bucket."""
    pieces: list[Piece] = []
    start = 0

    def close() -> None:
        nonlocal pieces
        if pieces:
            nbytes = build.space - start
            build.space, build.shards[server] = build.space - nbytes, build.shards[server] - nbytes
            build.add(server, pieces, nbytes)
            pieces = []

    for i in mine:
        t = tensors[i]
        build.skip(server, ALIGNMENT)
        if not whole and t.nbytes > build.bucket_bytes:
            close()
            offsets[i] = build.space
            size = DTYPES[t.dtype]
            build.chunks(server, i, 0, t.elements, size, _chunk(size, build.bucket_bytes))
            continue
        if pieces and (apart or build.space - start + t.nbytes > build.bucket_bytes):
            close()
        if not pieces:
            start = build.space
        offsets[i] = build.space
        pieces.append(Piece(i, 0, t.elements, build.space - start))
        build.space += t.nbytes
        build.shards[server] += t.nbytes
    close()
