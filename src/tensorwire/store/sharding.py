"""From tensors to servers: one deterministic layout that every process computes for itself.

Each tensor has a place in one address space, the *space* that a worker sees its parameters in. It is divided into
*shards*, which servers take in turn: by default one each. Big tensors are split over all shards, at multiples of the
page and of 1,024 elements; small ones go whole to the shard with the least bytes. A shard is cut into *buckets* of at
most 4 MiB: the unit of transfer and of update. A bucket is contiguous in the space and in the shard, so that one write
moves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.sizes import counted, round_up, size_text

PAGE = 4096
ALIGNMENT = 64  # enough for every framework to alias a tensor
CUT = 1024  # elements: vectorised optimizers give the same bits on both sides of such a cut
BUCKET_BYTES = 4 << 20
MOST_BUCKET_BYTES = 1 << 40
MOST_BUCKETS = 1 << 22  # of a plan: every process makes all of it
MOST_SHARDS = 1 << 16  # of a plan

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

    ``number`` is its own among all buckets of the plan, from 0; ``index`` among those of its shard.
    """

    number: int
    server: int
    shard_number: int
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

    servers: int
    tensors: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    space_bytes: int
    shard_bytes: tuple[int, ...]
    buckets: tuple[tuple[Bucket, ...], ...]  # by shard, in its order

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.shard_bytes)

    def server_of(self, shard: int) -> int:
        """Which server has a shard."""
        return shard % self.servers

    def in_order(self) -> list[Bucket]:
        """All buckets, shards taking turns, so that all servers have work from the start."""
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
        """Maximal spans ``(shard number, space, shard, nbytes)`` that are contiguous on both sides, in whole pages."""
        runs: list[tuple[int, int, int, int]] = []
        for bucket in sorted((b for s in self.buckets for b in s), key=lambda b: b.space):
            if runs:
                number, space, shard, nbytes = runs[-1]
                gap = bucket.space - (space + nbytes)
                if number == bucket.shard_number and 0 <= gap < PAGE and bucket.shard == shard + nbytes + gap:
                    runs[-1] = (number, space, shard, nbytes + gap + bucket.nbytes)
                    continue
            runs.append((bucket.shard_number, bucket.space, bucket.shard, bucket.nbytes))
        return [(number, space, shard, round_up(nbytes, PAGE)) for number, space, shard, nbytes in runs]

    def describe(self) -> str:
        """One line a tensor: what processes of a job must agree on."""
        lines = [f"{t.name} {list(t.shape)} {t.dtype} group {t.group}" for t in self.tensors]
        return "\n".join(
            [*lines, f"{self.servers} servers, {self.shards} shards, {sum(map(len, self.buckets))} buckets"]
        )

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
        return sum(self.shard_bytes[server :: self.servers]) * (buffers + workers)


def joined(plans: Sequence[StorePlan]) -> StorePlan:
    """Plans with a shard a server, as one: in its spaces and shards the tensors of a plan follow those of the last."""
    servers = plans[0].servers
    tensors: list[ParameterSpec] = []
    offsets: list[int] = []
    buckets: list[list[Bucket]] = [[] for _ in range(servers)]
    shard_bytes, space, count = [0] * servers, 0, 0
    for plan in plans:
        for server, mine in enumerate(plan.buckets):
            for b in mine:
                pieces = tuple(replace(piece, tensor=len(tensors) + piece.tensor) for piece in b.pieces)
                number, index, shard = count + b.number, len(buckets[server]), shard_bytes[server] + b.shard
                moved = replace(b, number=number, index=index, space=space + b.space, shard=shard, pieces=pieces)
                buckets[server].append(moved)
        offsets += [space + offset for offset in plan.offsets]
        tensors += plan.tensors
        shard_bytes = [mine + more for mine, more in zip(shard_bytes, plan.shard_bytes, strict=True)]
        space, count = space + plan.space_bytes, count + sum(map(len, plan.buckets))
    return StorePlan(servers, tuple(tensors), tuple(offsets), space, tuple(shard_bytes), tuple(map(tuple, buckets)))


class _Builder:
    def __init__(self, servers: int, shards: int, bucket_bytes: int) -> None:
        self.servers = servers
        self.space = 0
        self.shards = [0] * shards
        self.buckets: list[list[Bucket]] = [[] for _ in range(shards)]
        self.bucket_bytes = bucket_bytes

    def page(self, shard: int) -> None:
        """Starts a run: space and shard both at a page, so that one maps onto the other."""
        self.space = round_up(self.space, PAGE)
        self.shards[shard] = round_up(self.shards[shard], PAGE)

    def add(self, shard: int, pieces: Sequence[Piece], nbytes: int) -> None:
        mine, number, at = self.buckets[shard], sum(map(len, self.buckets)), self.shards[shard]
        mine.append(Bucket(number, shard % self.servers, shard, len(mine), self.space, at, nbytes, tuple(pieces)))
        self.space += nbytes
        self.shards[shard] += nbytes

    def skip(self, shard: int, alignment: int) -> None:
        gap = round_up(self.space, alignment) - self.space
        self.space += gap
        self.shards[shard] += gap

    def chunks(self, shard: int, tensor: int, start: int, stop: int, size: int, chunk: int) -> None:
        """Elements ``start`` to ``stop`` of one tensor, in buckets of ``chunk`` elements."""
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            self.add(shard, [Piece(tensor, at, end, 0)], (end - at) * size)


def make_plan(
    tensors: Sequence[ParameterSpec],
    servers: int,
    *,
    shards: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    whole: bool = False,
    together: bool = False,
    apart: bool = False,
) -> StorePlan:
    """Lays ``tensors`` out over ``shards``, by default as many as there are ``servers``.

    ``whole``: no tensor is cut, for rules that need whole ones. ``together``: all are in the first shard, for rules
    that look at all of them. ``apart``: no two tensors share a bucket.

    Raises `ArgumentError` for no servers or shards, duplicate names, a bad bucket size, or more buckets than a plan may
    have; `Unsupported` for a dtype.
    """
    count = servers if shards is None else shards
    check_plan(tensors, servers, count, bucket_bytes)
    build = _Builder(servers, count, bucket_bytes)
    offsets = [0] * len(tensors)
    big = [] if whole or count == 1 else [i for i, t in enumerate(tensors) if t.nbytes >= count * bucket_bytes]
    for i in big:
        _split(build, tensors[i], i, offsets)
    load = list(build.shards)
    placed: list[list[int]] = [[] for _ in range(count)]
    split = set(big)
    for i in sorted((i for i in range(len(tensors)) if i not in split), key=lambda i: (-tensors[i].nbytes, i)):
        shard = 0 if together else min(range(count), key=lambda s: (load[s], s))
        load[shard] += tensors[i].nbytes
        placed[shard].append(i)
    for shard, mine in enumerate(placed):
        build.page(shard)
        _gather(build, shard, sorted(mine), tensors, offsets, whole=whole, apart=apart)
    shard_bytes, buckets = tuple(round_up(n, PAGE) for n in build.shards), tuple(map(tuple, build.buckets))
    return StorePlan(servers, tuple(tensors), tuple(offsets), round_up(build.space, PAGE), shard_bytes, buckets)


def check_plan(tensors: Sequence[ParameterSpec], servers: int, shards: int, bucket_bytes: int) -> None:
    """Raises as `make_plan`."""
    if servers < 1:
        raise ArgumentError("a store needs at least one server")
    if isinstance(shards, bool) or not isinstance(shards, int) or not servers <= shards <= MOST_SHARDS:
        least = counted(servers, "server")
        raise ArgumentError(
            f"shards must be a whole number from {servers}, for {least}, to {MOST_SHARDS}, not {shards!r:.100}"
        )
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
    shards = len(build.shards)
    cut = max(CUT, PAGE // size)
    share = round_up((tensor.elements + shards - 1) // shards, cut)
    build.page(0)
    offsets[index] = build.space
    for shard in range(shards):
        start, stop = min(shard * share, tensor.elements), min((shard + 1) * share, tensor.elements)
        if start < stop:
            build.page(shard)
            build.chunks(shard, index, start, stop, size, _chunk(size, build.bucket_bytes))


def _gather(
    build: _Builder,
    shard: int,
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
            build.space, build.shards[shard] = build.space - nbytes, build.shards[shard] - nbytes
            build.add(shard, pieces, nbytes)
            pieces = []

    for i in mine:
        t = tensors[i]
        build.skip(shard, ALIGNMENT)
        if not whole and t.nbytes > build.bucket_bytes:
            close()
            offsets[i] = build.space
            size = DTYPES[t.dtype]
            build.chunks(shard, i, 0, t.elements, size, _chunk(size, build.bucket_bytes))
            continue
        if pieces and (apart or build.space - start + t.nbytes > build.bucket_bytes):
            close()
        if not pieces:
            start = build.space
        offsets[i] = build.space
        pieces.append(Piece(i, 0, t.elements, build.space - start))
        build.space += t.nbytes
        build.shards[shard] += t.nbytes
    close()
