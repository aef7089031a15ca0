"""The same plan over RPC: each tensor that crosses is serialised, sent by a gRPC call of its own, and unpacked.

What the papers compare with, in one program with everything else: ``mode="rpc"``. It needs the package grpcio. The
calls are not authenticated by gRPC: each carries the job's token, which the control connection hands out.
"""

from __future__ import annotations

import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import numpy

from tensorwire.control import Member
from tensorwire.edge import Spec
from tensorwire.edge.header import HEADER, Header, pack_tensor, unpack
from tensorwire.errors import PeerLost, Unsupported, WaitTimeout
from tensorwire.extras import how_to_install
from tensorwire.graph.bank import Bank, Held, hold
from tensorwire.graph.inflow import mismatch, moved_on
from tensorwire.graph.plan import Plan
from tensorwire.observe import counters, spans
from tensorwire.observe.edges import edge_of
from tensorwire.observe.spans import clock

_HEAD = struct.Struct("<16sIIQQ")  # token, plan, edge, run, bytes of a layout in front of the payload
_NEWS = 0xFFFFFFFF  # in place of an edge; with it, plan and run are a rank and what it plans
_METHOD = "/tensorwire.Graph/Put"
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
]
_LOOK = 0.05  # seconds between looks whether the job still goes on


class Address(msgspec.Struct, frozen=True):
    """Where a host takes calls, and the token that admits them."""

    target: str
    token: bytes


class _Threads(Executor):
    """Threads for calls. ``ThreadPoolExecutor`` takes none once the interpreter ends, where hosts still meet."""

    def __init__(self, count: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name="tensorwire-rpc", daemon=True).start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._work.put(work)
        return future

    def _run(self) -> None:
        while True:
            self._work.get()()


class Calls:
    """This process's server, and its channels to the other hosts. One a job."""

    def __init__(self, member: Member, host: str = "127.0.0.1") -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it tells people that a peer has left in good order
        try:
            import grpc
        except ImportError:
            raise Unsupported(f"mode='rpc' needs grpcio: {how_to_install('rpc')}") from None
        self._grpc, self._member = grpc, member
        self._token = secrets.token_bytes(16)
        self._arrived: dict[tuple[int, int, int], bytes] = {}
        self._planning: dict[str, int] = {}  # by host, the number of the plan that it said last it makes
        self._changed = threading.Condition()
        handler = grpc.method_handlers_generic_handler(
            "tensorwire.Graph", {"Put": grpc.unary_unary_rpc_method_handler(self._put)}
        )
        self._server = grpc.server(_Threads(4), options=_OPTIONS)
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port(f"{host}:0")
        self._server.start()
        self._peers: dict[str, tuple[Any, bytes]] = {}
        address = Address(f"{host}:{port}", self._token)
        self._member.client.publish(f"rpc/{member.name}", msgspec.msgpack.encode(address))

    def _put(self, request: bytes, context: Any) -> bytes:
        if len(request) < _HEAD.size:
            context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, "no head")
        token, plan, edge, run, _ = _HEAD.unpack_from(request)
        if not secrets.compare_digest(token, self._token):
            context.abort(self._grpc.StatusCode.UNAUTHENTICATED, "another job's token")
        with self._changed:
            if edge == _NEWS:
                self._planning[f"worker:{plan}"] = run
            else:
                self._arrived[plan, edge, run] = request
            self._changed.notify_all()
        return b""

    def call(self, host: str, plan: int, edge: int, run: int, payload: memoryview, layout: bytes = b"") -> Any:
        """Begins a call; its future."""
        counters.add(copies=1, copied_bytes=payload.nbytes)
        return self._call(host, plan, edge, run, payload, layout)

    def tell(self, host: str, number: int) -> Any:
        """Begins to tell ``host`` that this one plans its ``number``-th graph, counted from 1; the call's future."""
        return self._call(host, self._member.index, _NEWS, number)

    def planning(self, host: str) -> int:
        """The number of the plan that ``host`` said last it makes."""
        return self._planning.get(host, 0)

    def _call(
        self, host: str, plan: int, edge: int, run: int, payload: memoryview | bytes = b"", layout: bytes = b""
    ) -> Any:
        if host not in self._peers:
            packed = self._member.client.lookup(f"rpc/{host.replace(':', ' ')}")
            address = msgspec.msgpack.decode(packed, type=Address)
            channel = self._grpc.insecure_channel(address.target, options=_OPTIONS)
            self._peers[host] = channel, address.token
        channel, token = self._peers[host]
        counters.add(rpcs=1)
        return channel.unary_unary(_METHOD).future(_HEAD.pack(token, plan, edge, run, len(layout)) + layout + payload)

    def take(
        self, plan: int, edge: int, run: int, timeout: float, check: Callable[[], None]
    ) -> tuple[memoryview, memoryview]:
        """The layout and the payload that arrived for an edge. ``check()`` raises what ends the wait.

        Raises `PeerLost` when the job ends meanwhile, or `WaitTimeout`.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while (plan, edge, run) not in self._arrived:
                if self._member.client.ended.is_set():
                    raise PeerLost("rpc: the job ended")
                check()
                if time.monotonic() >= end:
                    raise WaitTimeout(f"rpc: edge {edge} of run {run} did not arrive within {timeout:g} s")
                self._changed.wait(_LOOK)
            request = memoryview(self._arrived.pop((plan, edge, run)))
            behind = _HEAD.size + _HEAD.unpack_from(request)[-1]
            return request[_HEAD.size : behind], request[behind:]

    def finish(self, future: Any, timeout: float) -> None:
        """Waits for a call. Raises `PeerLost`."""
        try:
            future.result(timeout)
        except self._grpc.RpcError as error:
            raise PeerLost(f"rpc: a call failed: {error.code().name}") from None

    def close(self) -> None:
        """Ends the server and the channels. Idempotent."""
        self._server.stop(None)
        for channel, _ in self._peers.values():
            channel.close()
        self._peers.clear()


class RpcWires:
    """As `Wires`, over calls. Memory is ordinary memory, made anew where a tensor is unpacked."""

    def __init__(
        self,
        plan: Plan,
        me: str,
        calls: Calls,
        number: int,
        timeout: float,
        plans: Callable[[], int] = int,
    ) -> None:
        self._plans = plans
        self.plan, self.me, self.number = plan, me, number
        self.what = [edge_of(plan.name, edge.name) for edge in plan.edges]  # in spans
        self._calls, self._timeout = calls, timeout
        self.run = 0
        self._outbox = numpy.empty(dict(plan.outbox)[me], numpy.uint8).data
        self.bank: Bank | None = Bank(0, self._outbox)
        self.held: Held | None = hold(self._outbox)
        self._sent: list[Any] = []
        self._headers: dict[int, Header] = {}  # of this run, by edge: those that were received

    def begin(self) -> None:
        """Starts the next run."""
        self.run += 1
        self._headers.clear()

    def describe(self, index: int, spec: Spec, at: int) -> None:
        """As `Wires.describe`."""
        pack_tensor(self._outbox, self._place(index), self.run, spec, offset=at)

    def described(self, index: int, held: Held) -> Header | None:
        """As `Wires.described`."""
        return self._headers.get(index)

    def _place(self, index: int) -> int:
        at = self.plan.edges[index].header
        assert at is not None
        return at

    def send(self, index: int, nbytes: int, at: int | None = None) -> None:
        """Serialises edge ``index`` and calls each of its targets."""
        edge = self.plan.edges[index]
        assert edge.slot is not None
        header = b"" if at is None else bytes(self._outbox[self._place(index) :][:HEADER])
        at = edge.slot + edge.offset if at is None else at
        start = clock()
        for host in edge.targets:
            payload = self._outbox[at : at + nbytes]
            future = self._calls.call(host, self.number, index, self.run, payload, header)
            self._sent.append(future)
            if spans.enabled:
                self._trace(future, index)
        spans.add("push", self.run, start, clock(), self.what[index])

    def _trace(self, call: Any, index: int) -> None:
        run, start = self.run, clock()
        call.add_done_callback(lambda _: spans.add("transfer", run, start, clock(), self.what[index]))

    def receive(self, index: int) -> Held:
        """Waits for the call of edge ``index``, and unpacks it into memory of its own."""
        edge = self.plan.edges[index]
        assert edge.slot is not None
        start = clock()
        check = lambda: self._check(edge.source)  # noqa: E731
        header, payload = self._calls.take(self.number, index, self.run, self._timeout, check)
        at = edge.slot + edge.offset
        if header:
            self._headers[index] = found = unpack(header, 0, payload.nbytes, 1 << 62)
            at = found.offset
        memory = numpy.empty(at + payload.nbytes, numpy.uint8)  # pages in front of it are never touched
        memory[at:] = payload
        counters.add(copies=1, copied_bytes=payload.nbytes)
        spans.add("wait", self.run, start, clock(), self.what[index])
        return hold(memory.data)

    def loan(self, index: int) -> Held:
        """Nothing is lent over calls."""
        raise Unsupported(f"mode='rpc' lends nothing: edge {index}")

    def lend(self, index: int) -> None:
        """Nothing is lent over calls."""
        raise Unsupported(f"mode='rpc' lends nothing: edge {index}")

    def end(self) -> None:
        """Waits until every call of this run was answered."""
        sent, self._sent = self._sent, []
        start = clock()
        for future in sent:
            self._calls.finish(future, self._timeout)
        spans.add("push", self.run, start, clock(), edge_of(self.plan.name, "answers"))

    def plan_another(self, number: int) -> None:
        """Tells the other hosts that this one plans its ``number``-th graph, counted from 1."""
        ends = [(edge.source, target) for edge in self.plan.edges for target in edge.targets]
        others = {host for pair in ends if self.me in pair for host in pair} - {self.me}
        for told in [self._calls.tell(host, number) for host in sorted(others)]:
            self._calls.finish(told, self._timeout)

    def _check(self, host: str) -> None:
        does = moved_on(self._calls.planning(host), self._plans())
        if does:
            raise mismatch(host, does, self.plan.name)

    def close(self) -> None:
        """Nothing is kept."""
