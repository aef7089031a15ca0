"""Versions for readers of stores of keys and of rows, as workers make them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.handle import Calls, finish_all
from tensorwire.keyvalue.key_arguments import check_whole
from tensorwire.launch.join_store import join_with
from tensorwire.launch.worker import Worker
from tensorwire.store.admission import versions
from tensorwire.store.published_client import PublishedClient
from tensorwire.store.request_client import RequestClient
from tensorwire.store.rule_names import ASSIGN
from tensorwire.store.sharding import BUCKET_BYTES
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.every import Every, PublishSpec, parse_publish
from tensorwire.store.versions.listing import ReaderState, list_versions
from tensorwire.store.versions.publishing import Publishing


def publishing_of(publish: object) -> Every | None:
    """What ``publish=`` means for keys and rows. Raises `ArgumentError` for steps, which they have not."""
    every = parse_publish(publish)
    if every is not None and every.steps is not None:
        raise ArgumentError(
            f"keys have no steps to count: pass publish=True, or Every(buffers=), and call publish(), not {every!r}"
        )
    return every


class KeyVersions:
    """Versions of some stores together, which are fixed when the first one is made. ``every``: of `publishing_of`."""

    def __init__(self, worker: Worker, calls: Calls, every: Every | None) -> None:
        self._worker, self._calls, self._every = worker, calls, every
        self._client: PublishedClient | None = None
        self._publishing: Publishing | None = None
        self._finish: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the stores are fixed."""
        return self._client is not None

    def publish(
        self,
        stores: Sequence[RequestClient],
        complete: Callable[[], object],
        step: int | None,
        *,
        if_asked: bool,
    ) -> int | None:
        """As `PublishedCalls.publish`. ``complete()`` returns when this worker's pushes have been applied."""
        if step is not None:
            check_whole("step", step)
            if not 0 <= step < 2**63:
                raise ArgumentError(f"step must be 0 or more, and less than 2**63, not {step}")
        with self._calls:
            publishing = self._begin(stores)
            publishing.steps = publishing.steps + 1 if step is None else int(step)
            if self._worker.rank or (if_asked and not publishing.due):
                return None
            complete()
            return publishing.publish()

    def _begin(self, stores: Sequence[RequestClient]) -> Publishing:
        """The first call, on every worker."""
        if self._every is None:
            raise ArgumentError("nothing is published here: construct it with publish=True")
        if self._publishing is None:
            if not stores:
                raise ArgumentError("there are no keys to publish: make them before the first publish()")
            spec = StoreSpec(
                versions(ASSIGN),
                [],
                ASSIGN,
                [],
                [],
                BUCKET_BYTES,
                False,
                publish=PublishSpec(self._every.buffers),
                # Where each worker found a rule's files may differ, and nobody imports them for this.
                parts={store.name: msgspec.structs.replace(store.spec, folders=[]) for store in stores},
            )
            client = join_with(self._worker, spec, PublishedClient)
            client.course = self._calls.course
            self._client, self._publishing = client, Publishing(self._worker.rank, self._every, lambda: client)
            self._worker.say_published()
            self._finish = partial(finish_all, self._calls.lock, [client])
            self._worker.at_close(self._finish, owner=self)
        return self._publishing

    def loaded(self) -> None:
        """A checkpoint was loaded: the next version begins a new run."""
        if self._publishing is not None:
            self._publishing.run += 1

    def readers(self) -> list[ReaderState]:
        """As `PublishedCalls.readers`."""
        with self._calls:
            if self._client is None:
                raise ArgumentError("there are no readers yet: the first publish() lets them come")
            return list_versions(self._worker.member, self._client.name).readers

    def close(self) -> None:
        """This worker is done with them: when all are, there are no versions any more. Idempotent."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._worker.not_at_close(finish)


class PublishedCalls:
    """The calls of keys, and of an embedding's rows, that make versions."""

    _versions: KeyVersions

    @abstractmethod
    def _published(self) -> Sequence[RequestClient]:
        """The stores of which there are versions."""

    @abstractmethod
    def _complete(self) -> None:
        """Returns when this worker's pushes have been applied."""

    def publish(self, *, step: int | None = None, if_asked: bool = False) -> int | None:
        """Makes a version for readers: of all keys, or all rows, the values that a pull of them would return here.

        Every worker makes the first call, in the same place of its program: it waits for the others, fixes the keys,
        and reserves the snapshot buffers. After that a call does something on worker 0 alone. It waits until that
        worker's pushes have been applied, and not until readers have the version; no later push changes what is in it.
        With `Async` and `SSP` each server takes part with the values that it has when it hears of it.

        Args:
            step: What the version's name says of how far the training is. None: how often this was called.
            if_asked: Whether to make one only where a reader has asked for it since the last one.

        Returns:
            On worker 0 the version's counter, which readers see; None where none was made, because nobody has asked or
            readers hold all snapshot buffers. None on other workers.

        Raises:
            ArgumentError: It has no ``publish=``, or no key, or ``step`` is no whole number of 0 or more.
            OutOfMemory: The snapshot buffers do not fit; it ends the job.
            WaitTimeout: Another worker has not pushed a key, or has not made the first call; or, with
                ``Every(when_held="wait")``, readers hold the buffers for too long.
            JobEnded: The job ended; the message says why.
        """
        return self._versions.publish(self._published(), self._complete, step, if_asked=if_asked)

    def readers(self) -> list[ReaderState]:
        """Who reads the versions, and what each reader runs. Any worker may call it.

        Returns:
            One entry for each reader.

        Raises:
            ArgumentError: There was no `publish` yet.
            PeerLost: Server 0 did not answer.
            JobEnded: The job ended; the message says why.
        """
        return self._versions.readers()
