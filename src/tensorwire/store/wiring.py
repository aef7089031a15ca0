"""How one store's memory is laid out on both sides, and what each tells the other before round 1."""

from __future__ import annotations

from typing import Any

import msgspec

from tensorwire.store.plan import PAGE, Plan, TensorSpec, make_plan
from tensorwire.store.rounds import head_bytes

WORD = 64  # bytes between signal words: each has its cache line


class StoreSpec(msgspec.Struct, frozen=True):
    """All a server needs to know of a store; published by worker 0.

    ``versions`` says which software made it. ``rule`` names a torch optimizer; ``groups`` holds each parameter group's
    options; ``numeric`` lists ``(group, option, index)``, in the order of the option block (index -1: a plain number).
    """

    versions: str
    tensors: list[TensorSpec]
    rule: str
    groups: list[dict[str, Any]]
    numeric: list[tuple[int, str, int]]
    bucket_bytes: int
    whole: bool

    def plan(self, servers: int) -> Plan:
        """The layout; raises `ArgumentError` or `Unsupported` for tensors that have none."""
        return make_plan(self.tensors, servers, bucket_bytes=self.bucket_bytes, whole=self.whole)


class Inbox(msgspec.Struct, frozen=True):
    """The layout of a worker's inbox on a server: arrival words, the head, then gradient slots like the shard."""

    buckets: int
    head: int
    slots: int
    nbytes: int

    @property
    def head_word(self) -> int:
        """Where the head's arrival word is."""
        return 0

    def word(self, bucket: int) -> int:
        """Where the arrival word of a bucket is."""
        return WORD * (1 + bucket)


def inbox(plan: Plan, server: int, options: int) -> Inbox:
    """The inbox every worker has on ``server``."""
    buckets = len(plan.buckets[server])
    head = WORD * (1 + buckets)
    slots = -(-(head + head_bytes(options, len(plan.tensors))) // PAGE) * PAGE
    return Inbox(buckets, head, slots, slots + plan.shard_bytes[server])


def together_word(buckets: int) -> int:
    """Where, behind a worker's version words, a server says in which round all idle workers go on together."""
    return WORD * max(1, buckets)


class ServerDoor(msgspec.Struct, frozen=True):
    """What a server opens to one worker: its inbox there, and the parameters to look at."""

    inbox: bytes
    parameters: bytes


class WorkerDoor(msgspec.Struct, frozen=True):
    """What a worker opens to one server: version words, and (where it cannot map) memory for the parameters."""

    versions: bytes
    parameters: bytes | None
