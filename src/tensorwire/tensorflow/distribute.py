"""A ``tf.function`` whose operators run on several workers, as ``tf.device`` says."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph.analysis import Analysis, analyze
from tensorwire.graph.ir import worker_name
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.tensorflow.error_texts import translated
from tensorwire.tensorflow.graph_importer import Imported, import_function
from tensorwire.tensorflow.graph_part import GraphPart, PartBuilder, runnable
from tensorwire.tensorflow.operator_edges import operator_edges
from tensorwire.tensorflow.parts_on_servers import serve_parts
from tensorwire.tensorflow.placement import gradients_beside_their_operators

_numbers = itertools.count()  # of graphs: the same on all workers
_EAGER: Any = tf.__internal__.EagerTensor


def distribute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cuts a function over the workers of the job. Every worker calls the result, with the same arguments.

    ::

        @tw.tensorflow.distribute
        @tf.function
        def step(x, y):
            with tf.device("/job:worker/task:0"):
                hidden = tf.nn.relu(x @ w0)
            with tf.device("/job:worker/task:1"):
                return tf.reduce_mean((hidden @ w1 - y) ** 2)

    What no device is said of runs where its operands are; what only needs arguments and constants, wherever it is
    needed. Variables belong to the worker or server of their `worker` or `server` scope, else to worker 0; elsewhere
    they keep their value.

    Args:
        function: A ``tf.function``, or a function that becomes one.

    Returns:
        A function that returns on every worker what ``function`` returns. It raises `PeerLost` or `JobEnded` where
        another worker is gone, `PlanMismatch` where the workers call different functions, and `ArgumentError` or
        `Unsupported` for what cannot be cut.

    Raises:
        ArgumentError: This is no function.
    """
    if not callable(function):
        raise ArgumentError(f"distribute() takes a function, not {function!r:.100}")
    traced = function if hasattr(function, "get_concrete_function") else tf.function(function)
    return functools.wraps(function)(_Distributed(traced))


class _Distributed:
    """A function, and a part of it for each signature that it was called with."""

    def __init__(self, function: Any) -> None:
        self._function, self._name = function, getattr(function, "__name__", "function")
        self._parts: dict[Any, tuple[Any, Callable[..., list[Any]]]] = {}
        # The same by shapes and dtypes, where all arguments are tensors: a short way for every call but the first.
        self._known: dict[Any, tuple[Any, Callable[..., list[Any]]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kinds = _kinds(args) if not kwargs else None
        known = None if kinds is None else self._known.get(kinds)
        if known is not None:
            (concrete, run), flat = known, args
        else:
            with gradients_beside_their_operators():
                concrete = self._function.get_concrete_function(*args, **kwargs)
            if id(concrete) not in self._parts:
                self._parts[id(concrete)] = concrete, _part_of(concrete, f"{self._name} {next(_numbers)}")
            _, run = self._parts[id(concrete)]
            flat = concrete.function_type.unpack_inputs(concrete.function_type.bind(*args, **kwargs))
            if kinds is not None:
                self._known[kinds] = concrete, run
        try:
            results = iter(run(*flat))
        except tf.errors.AbortedError as error:
            ours = translated(error)
            if ours is None:
                raise
            raise current_worker().member.explain(ours) from None
        structure = concrete.structured_outputs
        leaves = tf.nest.flatten(structure, expand_composites=True)
        found = [None if leaf is None else next(results) for leaf in leaves]
        return tf.nest.pack_sequence_as(structure, found, expand_composites=True)


def _kinds(args: tuple[Any, ...]) -> Any:
    """What says which trace a call takes, where that is seen at once; else None."""
    if not tf.executing_eagerly() or not all(type(each) is _EAGER for each in args):
        return None
    return tuple((each.dtype, tuple(each.shape)) for each in args)


def _part_of(function: Any, name: str) -> Callable[..., list[Any]]:
    worker = current_worker()
    worker.refuse_to_change("a function that is cut over workers")
    imported, analysis = _analyzed(function, name, worker)
    plan = analysis.plan
    servers = plan.workers[worker.num_workers :]
    worker.member.client.compare(f"tensorflow/{name}", plan.digest, plan.text, worker.num_workers, step_timeout())

    def build(member: str, calls: Mapping[str, tuple[str, int]] | None = None) -> GraphPart:
        return PartBuilder(function, imported, analysis, member, name).build(calls)

    calls = serve_parts(servers, build, imported.captured)
    part = build(worker.member.name, calls)
    for end in part.ends:
        end.connect(operator_edges())
    return runnable(part, imported.captured)


def _analyzed(function: Any, title: str, worker: Worker) -> tuple[Imported, Analysis]:
    """Twice, if operators wait for others on other workers: then what says that these have run crosses, too."""
    workers = [worker_name(rank) for rank in range(worker.num_workers)]
    servers = [member_name("server", index) for index in range(worker.num_servers)]
    imported = import_function(function, title, workers, servers)
    analysis = analyze(imported.graph)
    runs = analysis.crossing.runs
    waited = {
        earlier.name
        for name, before in imported.waits.items()
        for earlier in before
        if name in runs and earlier.name in runs and not runs[name] <= runs[earlier.name]
    }
    if waited:
        imported = import_function(function, title, workers, servers, waited)
        analysis = analyze(imported.graph)
    for value in analysis.crossing.sent:
        _check(imported, value)
    return imported, analysis


def _check(imported: Imported, value: str) -> None:
    if imported.carried(value).dtype == tf.resource:
        op = imported.graph.node(value).op
        raise Unsupported(
            f"{value} ({op}) would cross to another worker, and is a resource, which cannot leave its own"
        )
