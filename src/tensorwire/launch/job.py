"""``Job``: a script's view of the job that it has joined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorwire.control.reach import Route
from tensorwire.errors import ArgumentError
from tensorwire.launch.shares import DataShare, share_of_epoch
from tensorwire.launch.torchrun import JOIN_SECONDS
from tensorwire.launch.worker import Worker
from tensorwire.observe.scalars import scalars


class Job:
    """This worker's place in a job, and what its workers do together. `init` returns it.

    The worker leaves the job at the end of the script, at the end of a ``with`` block over the job, or by ``close()``.
    An exception that ends the script or the block ends the job for all.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    # ---- where this worker is

    @property
    def rank(self) -> int:
        """This worker's number, from 0 to ``num_workers - 1``."""
        return self._worker.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        return self._worker.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers the job has."""
        return self._worker.num_servers

    @property
    def local_rank(self) -> int:
        """This worker's number among those on its machine, in the order of the ranks.

        Processes in different network namespaces count as on different machines. The first access waits, up to 600
        seconds, until all workers have joined; it costs requests to the coordinator.

        Raises:
            WaitTimeout: Not all workers joined in time.
            JobEnded: The job ended; the message says why.
        """
        return self._worker.neighbors.index(self.rank)

    @property
    def local_workers(self) -> int:
        """How many workers are on this machine, including this one. Waits and raises as `local_rank` does."""
        return len(self._worker.neighbors)

    @property
    def name(self) -> str:
        """The name by which processes of this user on the servers' machine find the job: see `tw.store.connect`."""
        return self._worker.member.client.welcome.job

    @property
    def address(self) -> str:
        """The IP address at which all machines of the job reach worker 0's; 127.0.0.1 if there is only one machine.

        Raises:
            WaitTimeout: Worker 0 did not join within 600 seconds.
            JobEnded: The job ended; the message says why.
        """
        return self._worker.member.card("worker 0", JOIN_SECONDS).interface

    @property
    def routes(self) -> dict[str, Route]:
        """The device by which each peer was reached so far, and why: ``job.routes["server 0"].device`` and ``.why``."""
        return dict(self._worker.member.routes)

    # ---- what workers do together

    def barrier(self, timeout: float = 600.0) -> None:
        """Waits until every worker has come here. It costs a request to the coordinator: not for every step.

        Args:
            timeout: Seconds to wait for the others.

        Raises:
            WaitTimeout: Not all workers came in time; the message names those that came. You may call it again.
            PlanMismatch: Another worker called something else, such as `broadcast`.
            JobEnded: The job ended; the message says why.
            ArgumentError: Another thread of this worker is in such a call.
        """
        self._worker.collectives.barrier(timeout)

    def broadcast(self, value: Any = None, source: int = 0, *, timeout: float = 600.0) -> Any:
        """Broadcasts the value of worker ``source``. Call it on all workers.

        Small values travel with one request to the coordinator; larger ones are read from the memory of the source.
        Nothing is pickled.

        Args:
            value: None, bool, int of 64 bits, float, str, bytes, numpy arrays and scalars, torch tensors on the CPU
                (their data, without ``requires_grad``), and lists, tuples, dicts and OrderedDicts of them. Ignored on
                workers other than the source.
            source: The rank of the worker whose value counts.
            timeout: Seconds to wait for the others.

        Returns:
            The value; on the source ``value`` itself.

        Raises:
            ArgumentError: The value holds something else, which the message names; or another thread of this worker is
                in such a call. The other workers are still waiting.
            PlanMismatch: Another worker called something else; the message names worker and call.
            WaitTimeout: Not all workers came in time.
            JobEnded: The job ended; the message says why.
            OutOfMemory: There is no memory for a large value.
        """
        return self._worker.collectives.broadcast(value, source, timeout)

    def all_reduce(self, value: Any, op: str = "sum", *, timeout: float = 600.0) -> Any:
        """Returns the sum, mean, maximum or minimum of all workers' values. Call it on all workers.

        The values are combined in the order of the ranks, so every worker has the same bits. ``value`` is left as it
        is. Small values travel with one request to the coordinator; larger ones are read from the workers' memory.

        Args:
            value: An int of 64 bits, float, bool, numpy array or scalar, or torch tensor on the CPU: of the same type,
                dtype and shape on all workers. bool takes max (any) and min (all). The mean of ints is a float;
                integer arrays and tensors have no mean.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. NaN wins in the last two.
            timeout: Seconds to wait for the others.

        Returns:
            A value of the same type, dtype and shape, contiguous.

        Raises:
            ArgumentError: The value cannot be reduced; or another thread of this worker is in such a call.
            PlanMismatch: Another worker called something else, or with another type, dtype, shape or op.
            WaitTimeout: Not all workers came in time.
            JobEnded: The job ended; the message says why.
            OutOfMemory: There is no memory for a large value.
        """
        return self._worker.collectives.all_reduce(value, op, timeout)

    def report(
        self, *, step: int | None = None, total: int | None = None, samples: int | None = None, **values: Any
    ) -> None:
        """Reports how the training goes: in the table of ``tensorwire run``, the metrics and TensorBoard.

        It takes microseconds and waits for nothing: a thread passes the latest values on once a second where somebody
        looks at them, and writes all of them to TensorBoard's file where there is one. Each worker reports for itself.

        Args:
            step: Which step this is; by default one more than at the last call.
            total: How many steps there will be, for the time remaining; said once is enough.
            samples: How many samples this worker has taken since the last call, for samples per second.
            **values: A number each, such as ``loss=loss``: an int, float or bool, or a tensor or array of one element.
                At most 32 names.

        Raises:
            ArgumentError: Something is not such a number. Nothing was taken over.
        """
        number, numbers = scalars.report(values, step=step, total=total, samples=samples)
        if self._worker.events is not None:
            self._worker.events.add(number, numbers)

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Around the training loop of every worker: the workers may take different numbers of steps.

        A worker whose loop has ended waits at the end of the block, and contributes gradients of zero to the steps of
        the others. When the last loop has ended, all continue with the same parameters and the same number of steps.
        An exception in the block ends the job, as it does outside of it.

        Raises:
            ArgumentError: With ``overlap``, the block ended between ``backward()`` and ``step()``.
            WaitTimeout: No other worker took a step in time.
            JobEnded: The job ended; the message says why.
        """
        yield
        self._worker.finish_dropped()
        stores = self._worker.uneven_stores
        with self._worker.member.explained():
            for store in stores:
                store.check_pausing()
            for store in stores:
                store.idle()
            for store in stores:
                store.rejoin()

    # ---- workers that come and go

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of the workers that are in the job now, in their order. In most jobs these never change."""
        return tuple(self._worker.member.membership.workers)

    def steps(self, total: int) -> Iterator[int]:
        """Counts the steps of the training, up to the ``total``-th: the loop of each worker ends after the same step.

        The store counts: for a worker that joined later, too, and over restarts of workers.

        Args:
            total: How many steps the training has.

        Yields:
            How many steps are over, from 0. A worker that joins gets the present number, and that of its first step,
            in which it takes no part, twice.

        Raises:
            ArgumentError: No optimizer of the store was constructed before.
        """
        if not self._worker.optimizers:
            raise ArgumentError(
                "job.steps() counts the steps of a tw.torch.StoreOptimizer: construct it before the loop"
            )
        while (done := self._worker.steps_taken()) < total:
            yield done

    def shard(self, epoch: int) -> DataShare:
        """This worker's share of a data set in an epoch.

        All workers that ask for the share of one epoch get parts of one division: among the workers that are in the job
        when the first of them asks. One that joins in the middle of an epoch has no part of its own there, and gets one
        of the parts by its rank, so that some samples are seen twice. The part of a worker that is lost in an epoch is
        not seen again in it. It costs requests to the coordinator: call it once an epoch.

        Args:
            epoch: Which epoch, from 0.

        Returns:
            ``part`` and ``parts``: this worker takes that one, counted from 0, of so many parts, as with
            ``dataset[part::parts]``; `tw.torch.ShardSampler` does so for a DataLoader.

        Raises:
            ArgumentError: ``epoch`` is no whole number from 0.
            JobEnded: The job ended; the message says why.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ArgumentError(f"job.shard(): an epoch is a whole number from 0, not {epoch!r:.100}")
        return share_of_epoch(self._worker.member, epoch)

    def leave(self) -> None:
        """Leaves the job before it is over, as on a machine that is needed for something else. The others go on.

        What this worker has pushed counts. Its script may go on, but is in no job any more. In a job that survives the
        loss of workers, SIGTERM makes a worker do this at the end of its optimizer's step, and exit; it has the seconds
        of ``TENSORWIRE_GRACE`` for that.

        Raises:
            Unsupported: The job was started without ``min_workers``, and cannot go on without a worker.
        """
        self._worker.leave()

    def init_process_group(self, backend: str = "gloo", **options: Any) -> None:
        """Makes the default process group of ``torch.distributed`` for the workers. Call it on all workers.

        It works however the job was started: worker 0 serves torch's store on a free port of its own machine, and the
        others learn the port through the job. The group is destroyed when this worker leaves the job. A second call
        does nothing while the group is there.

        Args:
            backend: As for ``torch.distributed.init_process_group``.
            **options: Passed on to it, such as ``timeout``; not ``rank``, ``world_size``, ``store`` or
                ``init_method``, which the job knows.

        Raises:
            ArgumentError: There is a process group that the job did not make, or an option is the job's own.
            Unsupported: PyTorch is missing, or was built without ``torch.distributed``; or the job goes on without
                workers that are lost, as a process group cannot.
            PlanMismatch: Another worker called something else.
            JobEnded: The job ended; the message says why.
        """
        self._worker.refuse_to_change("a process group of torch.distributed")
        self._worker.process_group.init(backend, options)

    # ---- the end

    def close(self) -> None:
        """Leaves the job: this worker is done. Idempotent; called automatically at the end of the script.

        A worker that holds the coordinator or servers of the job stays until the others are done too.

        Raises:
            TensorwireError: What was still on its way did not come: such as `WaitTimeout` for the last exchange of
                `DiLoCo`, without which this worker's parameters are. It ends the job. At the end of the script it is
                printed, and the exit status is 1.
        """
        self._worker.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._worker.fail(error)
        self.close()

    def __repr__(self) -> str:
        worker, cause = self._worker, self._worker.member.client.cause
        state = f"ended: {str(cause).splitlines()[0]}" if cause else "left" if worker.closed else "running"
        servers = f"{self.num_servers} server{'' if self.num_servers == 1 else 's'}"
        return f"<tensorwire.Job: worker {self.rank} of {self.num_workers}, {servers}, {worker.place.who}, {state}>"
