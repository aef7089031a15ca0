"""Joining a store, on the worker's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tensorwire.control import Member
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.launch.worker import Worker
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_client import StoreClient, agree
from tensorwire.store.store_layout import StoreSpec

Client = TypeVar("Client")


def join_store(worker: Worker, spec: StoreSpec, *, late: bool = False) -> StoreClient:
    """This worker's end of a new store. Every worker calls it, with the same ``spec``.

    ``late``: the caller knows what to do where this worker joins a job that has begun. Raises as `join_with`.
    """
    return join_with(worker, spec, StoreClient, late=late)


def join_with(
    worker: Worker,
    spec: StoreSpec,
    make: Callable[[Member, str, StoreSpec, StorePlan], Client],
    *,
    late: bool = False,
) -> Client:
    """What ``make`` makes of the membership, and of a new store's name, spec and plan. ``late``: as for `join_store`.

    Raises `ArgumentError`, `Unsupported`, `PlanMismatch`, `JobEnded` or `WaitTimeout`.
    """
    if not worker.num_servers:
        raise ArgumentError("this job has no servers to keep the parameters: start it with --servers 1 or more")
    plan = spec.plan(worker.num_servers)
    name = worker.next_store()
    try:
        agree(worker.member, name, spec, plan, worker.num_workers)
    except BaseException as error:
        worker.release_store()
        raise worker.member.explain(error) if isinstance(error, TensorwireError) else error from None
    if name in worker.member.late and not late:
        raise Unsupported(
            "a worker that joins a job which has begun joins the stores of PyTorch's optimizers, keys and rows, and no "
            "others yet: neither Keras's, nor versions of keys"
        )
    try:
        return make(worker.member, name, spec, plan)
    except BaseException as error:
        cause = worker.member.explain(error) if isinstance(error, TensorwireError) else error
        worker.fail(cause)  # servers and the other workers wait for this one: nothing can take that back
        raise cause from None
