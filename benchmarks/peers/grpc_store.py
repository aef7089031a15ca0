"""A parameter store on gRPC: ``server|worker INDEX WORKLOAD RULE WORKERS SERVERS HOST``.

The same plan, rule and order of sums as Tensorwire's store. A worker has one stream of raw bytes to each server,
without protocol buffers, which would copy once more: a message a bucket each way. A bucket is updated by the thread
that brings its last gradient, and is sent back at once, as one object for all workers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import torch

from tensorwire.bench.actors.expected_values import Expected, check_gradient, digest, flat, put, put_start, sgd
from tensorwire.bench.actors.lines import Lines, timed
from tensorwire.models import Model, find
from tensorwire.store.sharding import Bucket, StorePlan, make_plan

# Tried with FCN-5 and two workers on two cores, in turns, each against the rest as it is: these gave the least time of
# processor, by some percent. Without effect or worse: Unix sockets, larger frames, write buffers and look-ahead, no
# probing of the bandwidth-delay product, huge pages, messages of 1 or 8 MiB. What costs is gRPC's own copies.
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
]
SWITCH_SECONDS = 0.0005  # its threads wait for each other's turn


class Part:
    """A bucket on its server: parameters, optimizer, and the gradients of the present step."""

    def __init__(self, bucket: Bucket, plan: StorePlan, rule: str, workers: int) -> None:
        self.bucket, self._workers = bucket, workers
        self._memory = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        self.bytes = memoryview(self._memory.numpy())
        self._values = [flat(self._memory.numpy(), p.stop - p.start, p.offset) for p in bucket.pieces]
        for piece, values in zip(bucket.pieces, self._values, strict=True):
            put_start(values, piece.tensor)
        self._sums = [torch.empty_like(v) for v in self._values]
        self._optimizer = sgd([torch.nn.Parameter(v) for v in self._values]) if rule == "SGD" else None
        self.pushed: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def gradients(self, worker: int) -> list[torch.Tensor]:
        """What a worker has pushed."""
        return [flat(self.pushed[worker], p.stop - p.start, p.offset) for p in self.bucket.pieces]

    def push(self, worker: int, message: bytes) -> bool:
        """Takes a gradient; True for the last one, with which the step is done."""
        with self.lock:
            if len(self.pushed) == self._workers:
                self.pushed = {}
            self.pushed[worker] = message
            if len(self.pushed) < self._workers:
                return False
        if self._optimizer is not None:
            self._update(self._optimizer)
        return True

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        pushed = [self.gradients(w) for w in range(self._workers)]
        parameters = optimizer.param_groups[0]["params"]
        for i, (parameter, total) in enumerate(zip(parameters, self._sums, strict=True)):
            if self._workers == 1:
                parameter.grad = pushed[0][i]
                continue
            torch.add(pushed[0][i], pushed[1][i], out=total)
            for more in pushed[2:]:
                total.add_(more[i])
            parameter.grad = total.div_(self._workers)
        optimizer.step()


class Service(grpc.GenericRpcHandler):
    """One stream a worker: buckets come in the plan's order, again and again; new versions leave as they are made."""

    def __init__(self, parts: list[Part], workers: int) -> None:
        self._parts = parts
        self._ready: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(workers)]

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.exchange)

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker = int(dict(context.invocation_metadata())["worker"])
        threading.Thread(target=self._receive, args=(worker, messages), daemon=True).start()
        return iter(self._ready[worker].get, None)

    def _receive(self, worker: int, messages: Iterator[bytes]) -> None:
        torch.set_num_threads(1)
        try:
            while True:
                for part in self._parts:
                    if part.push(worker, next(messages)):
                        new = bytes(part.bytes)
                        for ready in self._ready:
                            ready.put(new)
        except (StopIteration, grpc.RpcError):
            self._ready[worker].put(None)


def start(lines: Lines, service: grpc.GenericRpcHandler, threads: int, interface: str) -> grpc.Server:
    """A server that has said its address; callers stop it at the end."""
    server = grpc.server(ThreadPoolExecutor(threads), options=OPTIONS)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(f"{interface}:0")
    server.start()
    lines.hello(f"{interface}:{port}")
    return server


def serve(lines: Lines, parts: list[Part], workers: int, interface: str) -> None:
    server = start(lines, Service(parts, workers), workers, interface)
    for run in lines.runs():
        for part in parts:
            for worker in range(workers):
                for piece, gradient in zip(part.bucket.pieces, part.gradients(worker), strict=True):
                    check_gradient(gradient, piece.tensor, worker, run.round)
        lines.answer()
    server.stop(None)


class Worker:
    """Private gradients, parameters, and a stream to each server. A step's messages are made while answers come in."""

    def __init__(self, index: int, plan: StorePlan, addresses: list[str]) -> None:
        self.index, self.plan = index, plan
        self._order = plan.in_order()
        self._gradients = [torch.zeros(t.elements) for t in plan.tensors]
        self._bytes = [memoryview(g.numpy()).cast("B") for g in self._gradients]
        self._space = torch.zeros(plan.space_bytes, dtype=torch.uint8)
        self._window = memoryview(self._space.numpy())
        self.parameters = [
            flat(self._space.numpy(), t.elements, o) for t, o in zip(plan.tensors, plan.offsets, strict=True)
        ]
        self._made: dict[tuple[int, int], bytes] = {}
        self._begun: list[SimpleQueue[bool]] = [SimpleQueue() for _ in addresses]
        self._answers = [self._open(server, address) for server, address in enumerate(addresses)]

    def _open(self, server: int, address: str) -> Iterator[bytes]:
        call = grpc.insecure_channel(address, options=OPTIONS).stream_stream("/store/exchange")
        return call(self._pushes(server), metadata=(("worker", str(self.index)),))

    def _pushes(self, server: int) -> Iterator[bytes]:
        while self._begun[server].get():
            for bucket in self.plan.buckets[server]:
                yield self._made.get((server, bucket.index)) or self._message(bucket)

    def _message(self, bucket: Bucket) -> bytes:
        """A bucket's gradients as gRPC takes them: one copy."""
        parts: list[memoryview] = []
        at = 0
        for p in bucket.pieces:
            parts += [memoryview(bytes(p.offset - at)), self._bytes[p.tensor][4 * p.start : 4 * p.stop]]
            at = p.offset + 4 * (p.stop - p.start)
        return bytes(parts[1]) if len(bucket.pieces) == 1 else b"".join(parts)

    def prepare(self, round: int, word: str) -> None:
        """The round's gradients; where they are born, the messages that hold them. No parameter is left."""
        for i, gradient in enumerate(self._gradients):
            put(gradient, i, self.index, round)
        born = self._order if word == "born" else []
        self._made = {(b.server, b.index): self._message(b) for b in born}
        self._space.fill_(255)

    def steps(self, count: int) -> None:
        """Pushes and pulls everything so many times."""
        for _ in range(count):
            for begun in self._begun:
                begun.put(True)
            for b in self._order:
                self._window[b.space : b.space + b.nbytes] = next(self._answers[b.server])


def work(lines: Lines, index: int, model: Model, plan: StorePlan, rule: str, workers: int) -> None:
    addresses = lines.hello().split()[: plan.servers]
    worker = Worker(index, plan, addresses)
    expected = Expected(model, workers, rule)
    for run in lines.runs():
        worker.prepare(run.round, run.word)
        seconds = timed(run, worker.steps)
        expected.went(run.round, run.warm + run.count)
        expected.check(worker.parameters)
        lines.answer(seconds, values=digest(worker.parameters))


def main(role: str, index: str, workload: str, rule: str, workers: str, servers: str, interface: str) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    lines = Lines()
    model = find(workload)
    plan = make_plan(model.tensors, int(servers))
    if role == "server":
        parts = [Part(b, plan, rule, int(workers)) for b in plan.buckets[int(index)]]
        serve(lines, parts, int(workers), interface)
    else:
        work(lines, int(index), model, plan, rule, int(workers))


if __name__ == "__main__":
    main(*sys.argv[1:])
