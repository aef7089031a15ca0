"""Training with the gRPC store: its servers, ``server INDEX WORKERS HOST``, and the optimizer of its workers.

The store is that of ``grpc_store.py``. Here its parameters are those of a model: worker 0 tells their shapes, values
and options before the first step. The options stay. Spans are recorded as Tensorwire's own store records them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import torch
from grpc_store import OPTIONS, SWITCH_SECONDS, Part, Service, Worker

from tensorwire.bench.actors.lines import Lines
from tensorwire.observe import spans
from tensorwire.observe.spans import clock
from tensorwire.store.sharding import Bucket, ParameterSpec, StorePlan, make_plan

BEGIN = "/store/begin"
PATIENCE_SECONDS = 600.0


class Start(msgspec.Struct):
    """What a server begins with: which of how many it is, tensors, their values one after another, options of SGD."""

    server: int
    servers: int
    tensors: list[ParameterSpec]
    values: bytes
    options: dict[str, Any]


class TrainedPart(Part):
    """A bucket that begins with a model's values, and tells when it is updated."""

    def __init__(self, bucket: Bucket, plan: StorePlan, workers: int, values: list[torch.Tensor], options: Any) -> None:
        super().__init__(bucket, plan, "SGD", workers)
        for piece, own in zip(bucket.pieces, self._values, strict=True):
            own.copy_(values[piece.tensor][piece.start : piece.stop])
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(v) for v in self._values], **options)
        self._step = 0

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        start = clock()
        super()._update(optimizer)
        self._step += 1
        spans.add("update", self._step, start, clock())


class TrainService(Service):
    """The same service, which begins when worker 0 has said with what."""

    def __init__(self, workers: int) -> None:
        super().__init__([], workers)
        self._workers = workers
        self._begun = threading.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method == BEGIN:
            return grpc.unary_unary_rpc_method_handler(self.begin)
        return super().service(details)

    def begin(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        start = msgspec.msgpack.decode(message, type=Start)
        plan = make_plan(start.tensors, start.servers)
        whole = torch.frombuffer(bytearray(start.values), dtype=torch.float32)
        values = list(whole.split([t.elements for t in start.tensors]))
        self._parts = [TrainedPart(b, plan, self._workers, values, start.options) for b in plan.buckets[start.server]]
        self._begun.set()
        return b""

    def _receive(self, worker: int, messages: Any) -> None:
        if self._begun.wait(PATIENCE_SECONDS):
            super()._receive(worker, messages)


class GrpcOptimizer:
    """``step()`` of a worker: pushes all gradients, and has the parameters' new version when it returns."""

    def __init__(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], addresses: list[str], rank: int, **options: Any
    ) -> None:
        items = list(named)
        self._parameters = [p for _, p in items]
        tensors = [ParameterSpec(name, tuple(p.shape), "float32") for name, p in items]
        if rank == 0:
            values = b"".join(bytes(memoryview(p.detach().numpy()).cast("B")) for p in self._parameters)
            for server, address in enumerate(addresses):
                start = Start(server, len(addresses), tensors, values, options)
                with grpc.insecure_channel(address, options=OPTIONS) as channel:
                    channel.unary_unary(BEGIN)(msgspec.msgpack.encode(start), timeout=PATIENCE_SECONDS)
        self._worker = Worker(rank, make_plan(tensors, len(addresses)), addresses)
        with torch.no_grad():
            for p, own in zip(self._parameters, self._worker.parameters, strict=True):
                own.copy_(p.reshape(-1))
                p.data = own.view(p.shape)
        self._step, self._left = 0, clock()

    def step(self) -> None:
        start = clock()
        self._step += 1
        spans.add("compute", self._step, self._left, start)
        # A message is made from the gradient where it lies: one copy, as in the store's own benchmark.
        self._worker._bytes = [_row(p.grad) for p in self._parameters]
        spans.add("push", self._step, start, clock())  # messages are made and sent by gRPC's threads
        start = clock()
        self._worker.steps(1)
        self._left = clock()
        spans.add("wait", self._step, start, self._left)


def _row(gradient: torch.Tensor | None) -> memoryview:
    assert gradient is not None
    return memoryview(gradient.reshape(-1).numpy()).cast("B")


def serve(lines: Lines, index: int, workers: int, interface: str) -> None:
    """Until a line comes; then the trace is written."""
    server = grpc.server(ThreadPoolExecutor(workers + 1), options=OPTIONS)
    server.add_generic_rpc_handlers((TrainService(workers),))
    port = server.add_insecure_port(f"{interface}:0")
    server.start()
    lines.hello(f"{interface}:{port}")  # and what it hears is that it may go
    server.stop(None).wait()
    spans.write(f"server-{index}")


def main(role: str, index: str, workers: str, interface: str) -> None:
    assert role == "server"
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    serve(Lines(), int(index), int(workers), interface)


if __name__ == "__main__":
    main(*sys.argv[1:])
