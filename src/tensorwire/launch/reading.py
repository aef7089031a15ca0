"""``tw.store.connect()``: a process that is no part of a job becomes a reader of its versions."""

from __future__ import annotations

from tensorwire.launch.published import find_published
from tensorwire.store.versions.reader import Reader


def connect(job: str | None = None, *, number: int = 0, timeout: float = 60.0) -> Reader:
    """Becomes a reader of the versions that a job publishes, without joining it: the job neither waits for this
    process nor misses it.

    Args:
        job: The job's name, for a job of this user with its servers on this machine; None: the only one. Or
            ``HOST:PORT``, the address of its coordinator: ``--rendezvous`` of ``tensorwire run``. The secret is then
            that in ``TENSORWIRE_SECRET_FILE``; processes that were started by the job's have it without.
        number: Which of what the job publishes: optimizers with ``publish=`` in the order of their construction, and
            each `KeyValue` and `StoreEmbedding` from its first ``publish()`` on.
        timeout: Seconds to wait for the job, and for the job to have it.

    Returns:
        The reader; ``close()`` it when it is no longer needed.

    Raises:
        ArgumentError: There is no such job, or several; or ``job`` or the environment is wrong.
        AuthenticationError: The job has another secret.
        PeerLost: Nobody answers at that address.
        WaitTimeout: The job publishes nothing of that number within ``timeout`` seconds.
        JobEnded: The job ended meanwhile.
    """
    found = find_published(job, number, timeout)
    return Reader(found.member, found.store, found.layout, found.source)
