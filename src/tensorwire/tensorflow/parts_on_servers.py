"""Servers run parts of cut functions, beside the variables that lie there.

Worker 0 sends each server its part of a function, with the first values of its variables. In every call, worker 0's
part sends the number of the server's part by an edge, and the server runs its parts in that order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import tensorflow as tf

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.errors import ProtocolError
from tensorwire.launch.place import server_threads
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.store.admission import versions
from tensorwire.store.store_layout import FunctionsSpec
from tensorwire.tensorflow.error_texts import translated
from tensorwire.tensorflow.graph_part import GraphPart, runnable
from tensorwire.tensorflow.operator_edges import Carried, begin_edges, edge_name, load_operators, operator_edges
from tensorwire.tensorflow.operators import receive_from, send_to
from tensorwire.tensorflow.placement import variable_of

_FOREVER = 1e9  # seconds: how long workers take from one call to the next is theirs to say
_OVER = -1  # the number of no part
_FIRST = member_name("worker", 0)
_NUMBER = "_tensorwire_number"  # an attribute of variables
_CALLS = Carried(tf.int64, tf.TensorShape([]))
_MESSAGE = tf.TensorShape([])
_numbers = itertools.count()  # of variables: no two jobs of a process share one


class _NewVariable(msgspec.Struct, frozen=True):
    """A variable that is made on a server: its number, its dtype, and the shape that its values may have."""

    number: int
    dtype: str
    rank: int
    shape: list[int | None] | None


class _NewPart(msgspec.Struct, frozen=True):
    """A part; by the placeholders of variables their numbers; and those that are new."""

    part: GraphPart
    variables: dict[str, int]
    new: list[_NewVariable]


_decoder = msgspec.msgpack.Decoder(_NewPart)


def serve_parts(
    servers: Sequence[str], build: Callable[[str], GraphPart], captured: Mapping[str, Any]
) -> dict[str, tuple[str, int]]:
    """Gives servers their parts of a function. Every worker calls it, for the same functions in the same order.

    Args:
        servers: The servers that have one.
        build: Makes a server's.
        captured: What the function has captured, by its placeholders.

    Returns:
        On worker 0: by server, the edge that tells it of a call, and the number to be sent. On others: nothing.
    """
    global _serving
    worker = current_worker()
    if not servers:
        return {}
    if _serving is None or _serving.worker is not worker:
        _serving = _Serving(worker)
    return {server: _serving.add(server, build(server), captured) for server in servers if worker.rank == 0}


class _Serving:
    """What a worker knows of the servers' parts. Worker 0 speaks for all."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self._name = worker, worker.next_store()
        self._parts: dict[str, int] = {}  # how many, by server
        self._known: set[int] = set()  # variables
        self._edges = operator_edges()
        self._edges.at_leave.append(self._end)  # when this process is in no job any more
        if worker.rank == 0:
            worker.member.client.publish(self._name, msgspec.msgpack.encode(FunctionsSpec(versions(__name__))))

    def add(self, server: str, part: GraphPart, captured: Mapping[str, Any]) -> tuple[str, int]:
        """Sends a part, and the values of variables that are new there. Returns the edge of calls, and its number."""
        number = self._parts.get(server, 0)
        self._parts[server] = number + 1
        calls = edge_name("calls", _FIRST, server)
        self._edges.connect(calls, "producer", server, _CALLS)
        variables = {name: variable_of(captured[name]) for name in part.captured}
        numbers = {name: self._number(variable) for name, variable in variables.items()}
        new = {numbers[name]: each for name, each in variables.items() if numbers[name] not in self._known}
        self._known.update(new)
        values = [each.read_value() for each in new.values()]
        described = [_described(*each) for each in zip(new, new.values(), values, strict=True)]
        self._send_call(calls, number)
        message = tf.constant(msgspec.msgpack.encode(_NewPart(part, numbers, described)), tf.string)
        send_to(message, edge_name("parts", _FIRST, server), server, None, _MESSAGE)
        for each, value in zip(described, values, strict=True):
            send_to(value, _values_edge(each, server), server, None, tf.TensorShape([None] * each.rank))
        return calls, number

    def _number(self, variable: Any) -> int:
        if not hasattr(variable, _NUMBER):
            setattr(variable, _NUMBER, next(_numbers))
        return int(getattr(variable, _NUMBER))

    def _send_call(self, calls: str, number: int) -> None:
        key = self._edges.operator_key(calls)
        message, step = tf.constant(number, tf.int64), tf.constant(0, tf.int64)
        load_operators().ops.tensorwire_send(message, step, shape=_CALLS.shape, key=key)

    def _end(self) -> None:
        """Returns when servers have run their parts to the end."""
        for server in self._parts:
            self._send_call(edge_name("calls", _FIRST, server), _OVER)
            self.worker.member.client.lookup(f"{self._name}/{server} is done", step_timeout())


_serving: _Serving | None = None


def _described(number: int, variable: Any, value: Any) -> _NewVariable:
    shape = None if variable.shape.rank is None else variable.shape.as_list()
    return _NewVariable(number, value.dtype.name, value.shape.rank, shape)


def _values_edge(variable: _NewVariable, server: str) -> str:
    return edge_name(f"values {variable.dtype} {variable.rank}", _FIRST, server)


def serve(member: Member, name: str) -> None:
    """On a server: runs parts as worker 0 says, until it is over. ``name``: the service's, among the job's stores.

    Raises what a part raises, in our words where these are known; and `PeerLost` or `JobEnded`.
    """
    with contextlib.suppress(RuntimeError):  # a rule of a store's has computed by now
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(server_threads(os.environ))
    edges = begin_edges(member)
    calls, parts = edge_name("calls", _FIRST, member.name), _Parts(member)
    edges.connect(calls, "consumer", _FIRST, _CALLS, seconds=_FOREVER)
    try:
        while (number := int(receive_from(calls, _CALLS.shape, _CALLS.dtype, _FIRST, None, True))) != _OVER:
            parts.run(number)
    except tf.errors.OpError as error:
        raise translated(error) or error from None
    member.client.publish(f"{name}/{member.name} is done", b"")
    edges.close()


class _Parts:
    """A server's parts of functions, and its variables."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._runs: list[Any] = []
        self._variables: dict[int, Any] = {}

    def run(self, number: int) -> None:
        """Runs a part that is known; the next one is received first, and not run."""
        if number < len(self._runs):
            self._runs[number]()
        elif number == len(self._runs):
            self._runs.append(self._next())
        else:
            raise ProtocolError(f"worker 0 calls part {number} of {len(self._runs)}")

    def _next(self) -> Any:
        server = self._member.name
        message = receive_from(edge_name("parts", _FIRST, server), _MESSAGE, tf.string, _FIRST, None, True)
        found = _decoder.decode(message.numpy())
        for each in found.new:
            shape = tf.TensorShape([None] * each.rank)
            value = receive_from(_values_edge(each, server), shape, tf.as_dtype(each.dtype), _FIRST, None, True)
            self._variables[each.number] = tf.Variable(value, shape=tf.TensorShape(each.shape), trainable=False)
        for end in found.part.ends:
            end.connect(operator_edges())
        handles = {name: self._variables[number].handle for name, number in found.variables.items()}
        return runnable(found.part, handles)
