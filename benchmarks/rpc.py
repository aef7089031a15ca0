"""The edges of a graph over gRPC: each tensor that crosses is serialised, sent by a call of its own, and unpacked.

What the papers compare with, on the same plans and the same partitions as Tensorwire's own ``copy``. `install` puts it
in the place of the product's edges; it sends tensors whose shapes are known in the plan.
"""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import grpc
import numpy

from tensorwire._native import Hold
from tensorwire.control import Member
from tensorwire.device import LoopbackDevice
from tensorwire.edge import Spec
from tensorwire.edge.bank import Bank, hold_all
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER, Header, pack_tensor, unpack
from tensorwire.edge.peers import Peers
from tensorwire.errors import PeerLost, WaitTimeout
from tensorwire.graph.plan import Plan
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock

_HEAD = struct.Struct("<IIQQ")  # plan, edge, run, bytes of a header in front of the payload
_METHOD = "/tensorwire.Graph/Put"
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
]
TIMEOUT = 600.0  # seconds to wait for a tensor, or for an answer
_LOOK = 0.05  # seconds between looks whether the job still goes on


def install(group: WorkerGroup) -> None:
    """Has the graphs of ``group`` send by calls from now on."""
    group.make_edges = partial(RpcEdges, Calls(group.member))


class Calls:
    """This process's server, and its channels to the other workers. One a job."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._arrived: dict[tuple[int, int, int], bytes] = {}
        self._changed = threading.Condition()
        handler = grpc.method_handlers_generic_handler(
            "tensorwire.Graph", {"Put": grpc.unary_unary_rpc_method_handler(self._put)}
        )
        self._server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channels: dict[str, Any] = {}
        member.client.publish(f"rpc/{member.name}", f"127.0.0.1:{port}".encode())

    def _put(self, request: bytes, context: Any) -> bytes:
        plan, edge, run, _ = _HEAD.unpack_from(request)
        with self._changed:
            self._arrived[plan, edge, run] = request
            self._changed.notify_all()
        return b""

    def call(self, worker: str, plan: int, edge: int, run: int, payload: memoryview, header: bytes) -> Any:
        """Begins a call; its future."""
        if worker not in self._channels:
            target = self._member.client.lookup(f"rpc/{worker}").decode()
            self._channels[worker] = grpc.insecure_channel(target, options=_OPTIONS)
        counters.add(rpcs=1, copies=1, copied_bytes=payload.nbytes)
        request = _HEAD.pack(plan, edge, run, len(header)) + header + payload
        return self._channels[worker].unary_unary(_METHOD).future(request)

    def take(self, plan: int, edge: int, run: int, timeout: float) -> tuple[memoryview, memoryview]:
        """The header and the payload that arrived for an edge.

        Raises `PeerLost` when the job ends meanwhile, or `WaitTimeout`.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while (plan, edge, run) not in self._arrived:
                if self._member.client.ended.is_set():
                    raise PeerLost("rpc: the job ended")
                if time.monotonic() >= end:
                    raise WaitTimeout(f"rpc: edge {edge} of run {run} did not arrive within {timeout:g} s")
                self._changed.wait(_LOOK)
            request = memoryview(self._arrived.pop((plan, edge, run)))
        behind = _HEAD.size + _HEAD.unpack_from(request)[-1]
        return request[_HEAD.size : behind], request[behind:]

    def close(self) -> None:
        """Ends the server and the channels. Idempotent."""
        self._server.stop(None)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class RpcEdges(EdgeGroup):
    """The same over calls. Memory is ordinary memory, made anew where a tensor is unpacked."""

    def __init__(self, calls: Calls, plan: Plan, number: int, peers: Peers) -> None:
        # Not the base's: it would register memory and make it known.
        self.edges, self.me, self._peers, self._number = plan.edges, peers.me, peers, number
        self.labels = [f"{peers.name}, {edge.name}" for edge in plan.edges]  # in spans
        self.step = 0
        self._calls, self._device = calls, LoopbackDevice()
        region = self._device.allocate(dict(plan.outbox)[peers.me])
        self.bank, self.held, self._outbox = Bank(0, region), hold_all(region), memoryview(region)
        self._sent: list[Any] = []
        self._headers: dict[int, Header] = {}  # of this run, by edge: those that were received

    def begin(self, timeout: float | None = None, *, holds: bool = True) -> None:
        self.step += 1
        self._headers.clear()

    def describe(self, index: int, spec: Spec, at: int) -> None:
        pack_tensor(self._outbox, self._header_at(index), self.step, spec, offset=at)

    def described(self, index: int, held: Hold) -> Header | None:
        return self._headers.get(index)

    def _header_at(self, index: int) -> int:
        at = self.edges[index].header
        assert at is not None
        return at

    def send(self, index: int, nbytes: int, at: int | None = None) -> None:
        """Serialises edge ``index`` and calls each of its targets."""
        edge, start = self.edges[index], clock()
        assert edge.slot is not None
        header = b"" if at is None else bytes(self._outbox[self._header_at(index) :][:HEADER])
        at = edge.slot + edge.offset if at is None else at
        for worker in edge.targets:
            future = self._calls.call(worker, self._number, index, self.step, self._outbox[at : at + nbytes], header)
            self._sent.append(future)
            if spans.enabled:
                self._trace(future, index)
        spans.add("push", self.step, start, clock(), self.labels[index])

    def _trace(self, call: Any, index: int) -> None:
        step, start = self.step, clock()
        call.add_done_callback(lambda _: spans.add("transfer", step, start, clock(), self.labels[index]))

    def receive(self, index: int, timeout: float | None = None) -> Hold:
        """Waits for the call of edge ``index``, and unpacks it into memory of its own."""
        edge, start = self.edges[index], clock()
        assert edge.slot is not None
        header, payload = self._calls.take(self._number, index, self.step, TIMEOUT)
        at = edge.slot + edge.offset
        if header:
            self._headers[index] = found = unpack(header, 0, payload.nbytes, 1 << 62)
            at = found.offset
        memory = numpy.empty(at + payload.nbytes, numpy.uint8)  # pages in front of it are never touched
        memory[at:] = payload
        counters.add(copies=1, copied_bytes=payload.nbytes)
        spans.add("wait", self.step, start, clock(), self.labels[index])
        return cast(Hold, memory)  # it is read as any buffer is

    def end(self) -> None:
        """Waits until every call of this run was answered. Raises `PeerLost`."""
        sent, self._sent = self._sent, []
        start = clock()
        try:
            for future in sent:
                future.result(TIMEOUT)
        except grpc.RpcError as error:
            raise PeerLost(f"rpc: a call failed: {error.code().name}") from None
        spans.add("push", self.step, start, clock(), f"{self._peers.name}, answers")

    def announce(self, number: int) -> None:
        """The workers of a benchmark make the same plans: nobody waits for news of them."""

    def close(self) -> None:
        self._calls.close()
        self._device.close()
