"""The layout of one store's memory on both sides, and their exchange before round 1."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorwire.control.frames import MOST_ENTRY_BYTES
from tensorwire.errors import ArgumentError
from tensorwire.sizes import round_up, size_text
from tensorwire.store.compression import check_dtypes
from tensorwire.store.modes import Mode, Sync, mode_of, settings_of
from tensorwire.store.request_link import MOST_OPTIONS, WORD
from tensorwire.store.row_layout import TableSpec, plan_rows
from tensorwire.store.sharding import PAGE, ParameterSpec, StorePlan, joined, make_plan
from tensorwire.store.step_header import header_bytes
from tensorwire.store.versions.cuts import CUT_BYTES
from tensorwire.store.versions.every import PublishSpec


class FunctionsSpec(msgspec.Struct, frozen=True, tag="functions"):
    """Published by worker 0 instead of a store's: servers run parts of functions of ``framework``."""

    versions: str
    framework: str = "tensorflow"


class StoreSpec(msgspec.Struct, frozen=True, tag="store"):
    """All a server needs to know of a store; published by worker 0.

    ``versions`` says which software made it. ``rule`` names a torch optimizer, or is the import path of another one:
    its constructor takes ``arguments``, ``sources`` holds the hashes of its files by module, and ``folders`` is where
    worker 0 found it. ``groups`` holds each parameter group's options; ``numeric`` lists ``(group, option, index)``, in
    the order of the option block (index -1: a plain number). ``whole``: no tensor is cut; ``together``: one optimizer
    has all of them.
    ``reduce``: what becomes of the workers' gradients, ``mean`` or ``sum``. ``buffers``: how many versions of the
    parameters have a place, 1 or 2; round ``n`` writes buffer ``n % buffers``. With 2 an update may go on while workers
    still read the version before it. ``mode_settings``: `mode`, as it travels. ``keys``: every tensor is a key, whose
    rounds are its own. ``compression``: the name of what pushes are coded by; empty: they are not. ``table``: the only
    tensor is a table, of whose rows some travel. ``alike``: all workers' options must be the same in a round, because
    they stand for the parameters that each computes on; the last tensor, of float64, says of which others a worker has
    a gradient, and is not coded. ``shards``: into how many the space is divided, which servers take in turn; None: one
    per server. ``overlap``: the next forward runs while a round goes on, so what it needs first goes first.
    ``publish``: readers get versions of it. ``parts``: it has no tensors of its own, and readers get versions of these
    stores of keys and of rows, by name, together.
    """

    versions: str
    tensors: list[ParameterSpec]
    rule: str
    groups: list[dict[str, Any]]
    numeric: list[tuple[int, str, int]]
    bucket_bytes: int
    whole: bool
    reduce: str = "mean"
    buffers: int = 1
    arguments: dict[str, Any] = {}
    sources: dict[str, str] = {}
    folders: list[str] = []
    together: bool = False
    mode_settings: dict[str, Any] = msgspec.field(default_factory=lambda: settings_of(Sync()))
    keys: bool = False
    compression: str = ""
    table: TableSpec | None = None
    alike: bool = False
    shards: int | None = None
    overlap: bool = False
    publish: PublishSpec | None = None
    parts: dict[str, StoreSpec] = {}

    @property
    def mode(self) -> Mode:
        """The training mode."""
        return mode_of(self.mode_settings)

    @property
    def by_bucket(self) -> bool:
        """Whether buckets of one version that readers get may have different numbers of updates."""
        return bool(self.parts) or not isinstance(self.mode, Sync)

    def plan(self, servers: int) -> StorePlan:
        """The layout; raises `ArgumentError` or `Unsupported` for tensors that have none, or cannot be coded."""
        if self.parts:
            return joined([part.plan(servers) for part in self.parts.values()])
        if self.table is not None:
            return plan_rows(self.tensors[0], servers, self.bucket_bytes)
        if self.compression:
            check_dtypes(self.tensors[:-1] if self.alike else self.tensors)
        return make_plan(
            self.tensors,
            servers,
            shards=self.shards,
            bucket_bytes=self.bucket_bytes,
            whole=self.whole,
            together=self.together,
            apart=self.keys,
        )

    def digest(self, plan: StorePlan) -> bytes:
        """What workers have to agree on: all but where each found the optimizer's files."""
        return plan.digest(msgspec.structs.replace(self, folders=[]).encoded())

    def encoded(self) -> bytes:
        """As servers get it. Raises `ArgumentError` for what cannot travel: refused here, no server waits for it."""
        try:
            found = msgspec.msgpack.encode(self)
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"a name or an option of the optimizer cannot be sent to servers: {error}") from None
        if (self.keys or self.table) and len(self.numeric) > MOST_OPTIONS:
            raise ArgumentError(f"a rule of keys or rows has at most {MOST_OPTIONS} numbers as options")
        if len(found) > MOST_ENTRY_BYTES:
            raise ArgumentError(
                f"the names and shapes of {len(self.tensors)} parameters take {size_text(len(found))}; "
                f"servers take {MOST_ENTRY_BYTES >> 20} MiB: give parameters shorter names"
            )
        return found


class Inbox(msgspec.Struct, frozen=True):
    """The layout of a worker's inbox at a shard: arrival words, the head, the norm, a cut, what is present, the slots;
    and a word in which one that joins says in which round it wants to take part first.

    What is present: a byte a piece, whether this worker has a gradient for it. The slots begin at a page, and lie as
    their buckets do in the shard: so a window shows those of a tensor side by side, whatever shards they are in.
    """

    head: int
    norm: int
    cut: int
    present: tuple[tuple[int, int], ...]  # where each bucket's bytes begin, and how many these are
    slots: int
    nbytes: int

    @property
    def head_word(self) -> int:
        """Where the head's arrival word is."""
        return 0

    @property
    def norm_word(self) -> int:
        """Where the arrival word of the norm is."""
        return WORD

    @property
    def cut_word(self) -> int:
        """Where the arrival word of a cut is."""
        return WORD * 2

    @property
    def join_word(self) -> int:
        """Where the round is in which a worker that joins wants to take part first."""
        return WORD * 3

    def word(self, bucket: int) -> int:
        """Where the arrival word of a bucket is."""
        return WORD * (4 + bucket)


def inbox(plan: StorePlan, shard: int, options: int) -> Inbox:
    """The inbox that every worker has at a shard."""
    buckets = plan.buckets[shard]
    norm = WORD * (4 + len(buckets))
    cut = norm + WORD
    head = cut + CUT_BYTES
    end = head + header_bytes(options)
    present = []
    for bucket in buckets:
        present.append((end, len(bucket.pieces)))
        end += len(bucket.pieces)
    slots = round_up(end, PAGE)
    return Inbox(head, norm, cut, tuple(present), slots, slots + plan.shard_bytes[shard])


class Outbox(msgspec.Struct, frozen=True):
    """The layout of what a worker opens to one shard: a version word a bucket, the norm with its word, a word that says
    in which round all idle workers go on together, the grant of a buffer for the next version that readers get, how
    often readers asked for one, and for a worker that joins, its first round and how many updates there were before it.

    A shard without buckets has one word all the same: it says that the round's head has been read.
    """

    buckets: int

    def word(self, bucket: int) -> int:
        """Where the version word of a bucket is."""
        return WORD * bucket

    @property
    def norm_word(self) -> int:
        """Where the arrival word of the server's part of the norm is."""
        return WORD * max(1, self.buckets)

    @property
    def norm(self) -> int:
        """Where the server's part of the norm is."""
        return self.norm_word + WORD

    @property
    def together_word(self) -> int:
        """Where the round is from which all idle workers go on."""
        return self.norm + WORD

    @property
    def grant_word(self) -> int:
        """Where the grant is."""
        return self.together_word + WORD

    @property
    def asked_word(self) -> int:
        """Where the number of readers' requests for a version is."""
        return self.grant_word + WORD

    @property
    def first_word(self) -> int:
        """Where the first round is that waits for a worker that joins."""
        return self.asked_word + WORD

    @property
    def updates_word(self) -> int:
        """Where one more than the number of updates is that there were before this round."""
        return self.first_word + WORD

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.updates_word + WORD
