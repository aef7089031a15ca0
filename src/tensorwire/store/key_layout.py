"""What a worker and a server of a store of keys share: slots for pushes, and memory for answers and values.

The numbers of a request are those of buckets. Pushed bytes lie in the buckets' slots in the server's memory,
laid out as in its shard. In the worker's memory each bucket has a word that counts its answers. A pull is answered
with the values. Where rounds are those of all workers, a push is answered when its round closes; where each push is
applied by itself, it has been when the server has looked at its request, or has answered a later pull.
"""

from __future__ import annotations

from collections.abc import Collection

from tensorwire.sizes import round_up
from tensorwire.store.modes import Async, Sync
from tensorwire.store.request_link import MOST_NUMBERS, WORD, RequestOperation
from tensorwire.store.sharding import PAGE, StorePlan

MOST_BUCKETS = MOST_NUMBERS  # of one request
REQUEST_BYTES = 1 << 20  # that are pushed with one request, unless one bucket has more
PUSHES = (RequestOperation.PUSH, RequestOperation.PUSHPULL)
CARRYING = (*PUSHES, RequestOperation.ASSIGN)
WANTING = (RequestOperation.PULL, RequestOperation.PUSHPULL)


def telling(mode: object) -> Collection[RequestOperation]:
    """The operations whose answer tells that the slots are free: then nothing else has to.

    With `SSP` an answer may have to wait for other workers, when the push has long been applied.
    """
    if isinstance(mode, Sync):
        return tuple(RequestOperation)
    return WANTING if isinstance(mode, Async) else ()


def words_at(plan: StorePlan, server: int) -> int:
    """Where, in a worker's memory, a server's words begin: one for each of its buckets."""
    return WORD * sum(map(len, plan.buckets[:server]))


def answer_word(plan: StorePlan, server: int, bucket: int) -> int:
    """Where the word of a server's bucket is."""
    return words_at(plan, server) + WORD * bucket


def values_at(plan: StorePlan) -> int:
    """Where, behind the words of all servers, the values begin, laid out as the space."""
    return round_up(words_at(plan, len(plan.buckets)), PAGE)
