"""How a worker that joins a job comes into rounds that all take together, without holding them up.

Until it is ready it gets each new version and takes part in nothing. Then it names a round that is about to come, and
each shard says at once from which round on it will wait for the worker: that one, or its next. The worker takes part
from the latest of these; to shards that said an earlier one, it says that it is absent until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tensorwire.store.step_header import StepHeader, StepOperation, pack_header

if TYPE_CHECKING:
    from tensorwire.store.store_client import StoreClient

_AHEAD = 2  # rounds: the one after that which is under way while this worker asks


def await_values(client: StoreClient) -> int:
    """Returns, when all buckets have values here, the oldest round of which some are. Raises as `StoreClient.wait`."""
    for bucket in client.order:
        client.wait_for(bucket, 1)
    return min((client.version_of(bucket) for bucket in client.order), default=0)


def take_over(client: StoreClient, options: Sequence[float]) -> None:
    """Where each worker has rounds of its own, the first one: it brings the present values, and how far others are.

    Raises as `StoreClient.wait`.
    """
    client.begin(StepOperation.JOIN, options)
    client.wait()
    for server in client.servers:
        client.wait_on(server, partial(server.updates.wait, 1))
    client.updates = max(server.updates.value for server in client.servers) - 1


def take_part(client: StoreClient) -> None:
    """From a next round on this worker takes part, with the values of the last. Raises as `StoreClient.wait`."""
    await_values(client)
    newest = max((client.version_of(bucket) for bucket in client.order), default=0)
    for server in client.servers:
        server.join.send(newest + _AHEAD)
    for server in client.servers:
        client.wait_on(server, partial(server.first.wait, 1))
    firsts = [server.first.value for server in client.servers]
    first = max(firsts)
    options = (0.0,) * len(client.spec.numeric)
    for round in range(min(firsts), first):
        block = pack_header(StepHeader(StepOperation.ABSENT, round, options))
        for server, mine in zip(client.servers, firsts, strict=True):
            if mine <= round:
                client.wait_on(server, partial(server.version(0).wait, round - 1))  # the last head has been read
                server.head.slot(round)[:] = block
                server.head.send(round)
    exact = client.servers[firsts.index(first)]
    client.wait_on(exact, partial(exact.updates.wait, 1))
    client.begin_from(first - 1, exact.updates.value - 1)
