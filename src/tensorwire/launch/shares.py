"""Which part of a data set each worker takes in an epoch, in a job whose workers come and go."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tensorwire.control import Member
from tensorwire.errors import AlreadyPublished
from tensorwire.messages import decode_message


class DataShare(NamedTuple):
    """One of ``parts`` parts of a data set: number ``part``, from 0."""

    part: int
    parts: int


def share_of_epoch(member: Member, epoch: int) -> DataShare:
    """A worker's part: the first worker to ask says for all of them who takes part in that epoch. Raises `JobEnded`."""
    key, ranks = f"shares of epoch {epoch}", sorted(member.membership.workers)
    try:
        member.client.publish(key, msgspec.msgpack.encode(ranks))
    except AlreadyPublished:
        ranks = decode_message(member.client.lookup(key), list[int])
    part = ranks.index(member.index) if member.index in ranks else member.index % len(ranks)
    return DataShare(part, len(ranks))
