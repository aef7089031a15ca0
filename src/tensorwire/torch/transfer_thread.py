"""A thread that moves gradients or values, in order, while another thread computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from tensorwire.errors import WaitTimeout

Job = Callable[[], object]
Jobs = SimpleQueue["Job | threading.Event | None"]


class TransferThread:
    """Its thread starts with the first job and ends with ``close()``. After an error it does nothing more.

    An error is raised by the next call here, from any thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: Jobs = SimpleQueue()
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Does ``job()`` soon. Raises what an earlier job raised."""
        self.check()
        if self._thread is None:  # not before it is needed: a process that forks first is none the wiser
            arguments = (self._jobs, self._errors)
            self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            # Nobody closes what belonged to a job that failed; a process that goes on gets rid of the thread.
            weakref.finalize(self, self._jobs.put, None).atexit = False
        self._jobs.put(job)

    def drain(self, timeout: float) -> None:
        """Returns when all jobs are done. Raises what one raised, or `WaitTimeout` after ``timeout`` seconds."""
        if self._thread is not None:
            done = threading.Event()
            self._jobs.put(done)
            if not done.wait(timeout):
                raise WaitTimeout(f"gradients could not be handed to the servers within {timeout:g} s")
        self.check()

    def close(self, timeout: float) -> None:
        """Ends the thread when its jobs are done; after ``timeout`` seconds it is left to itself. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout)

    def check(self) -> None:
        """Raises what an earlier job raised."""
        if self._errors:
            raise self._errors[0]


def _work(jobs: Jobs, errors: list[BaseException]) -> None:
    """Holds the queue and not the `TransferThread`, which could not be collected otherwise."""
    while (job := jobs.get()) is not None:
        if isinstance(job, threading.Event):
            job.set()
        elif not errors:
            try:
                job()
            except BaseException as error:
                errors.append(error)
        del job  # what it holds is not to be kept until the next one comes
