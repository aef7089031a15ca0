"""Weights by other libraries: ``target|initiator KIND NBYTES TENSORS FOLDER``. The target trains, the initiator reads.

``KIND``: ``rpc`` (torch RPC, TensorPipe), ``gloo`` (broadcast), ``grpc`` (a message a tensor), ``file`` (a safetensors
file in FOLDER that is written and read each time), ``flight`` (Arrow Flight, a batch a tensor). An operation lasts from
the reader's request until its own tensors hold the weights; ``pause`` is from the first to the last change of them.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from tensorwire.bench.actors.lines import Lines, timed

HOST = "127.0.0.1"
_LONG = 600.0  # seconds; only a guard
weights: list[torch.Tensor] = []  # this process's
Fetch = Callable[[], float]


def copied(sources: Iterable[np.ndarray]) -> float:
    """Copies what comes into the weights; the seconds since the first came."""
    start = 0.0
    for own, source in zip(weights, sources, strict=True):
        start = start or time.perf_counter()
        np.copyto(own.numpy(), source)
    return time.perf_counter() - start


def in_thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def values(data: object) -> np.ndarray:
    return np.frombuffer(data, np.float32)


# ---- torch.distributed


def present() -> list[torch.Tensor]:
    """What the reader calls."""
    return weights


def meet(lines: Lines, rank: int) -> str:
    """A free port of the target, as both know it."""
    if rank:
        return lines.hello()
    with socket.create_server((HOST, 0)) as sock:
        port = str(sock.getsockname()[1])
    lines.hello(port)
    return port


def rpc(lines: Lines, rank: int) -> Fetch:
    from torch.distributed import rpc as calls

    options = calls.TensorPipeRpcBackendOptions(init_method=f"tcp://{HOST}:{meet(lines, rank)}", rpc_timeout=_LONG)
    calls.init_rpc(("target", "initiator")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return lambda: copied(tensor.numpy() for tensor in calls.rpc_sync("target", present))


def gloo(lines: Lines, rank: int) -> Fetch:
    from torch import distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{meet(lines, rank)}", rank=rank, world_size=2)
    request = torch.zeros(1)

    def serve() -> None:
        while True:
            dist.recv(request, 1)
            for tensor in weights:
                dist.broadcast(tensor, 0)

    def fetch() -> float:
        start = time.perf_counter()
        dist.send(request, 0)
        for tensor in weights:
            dist.broadcast(tensor, 0)
        return time.perf_counter() - start

    if rank == 0:
        in_thread(serve)
    return fetch


# ---- gRPC


def grpc(lines: Lines, rank: int) -> Fetch:
    import grpc as library
    from grpc_store import OPTIONS, start

    if rank:
        pull = library.insecure_channel(lines.hello(), options=OPTIONS).unary_stream("/weights/pull")
        return lambda: copied(values(message) for message in pull(b""))

    class Service(library.GenericRpcHandler):
        def service(self, details: object) -> object:
            return library.unary_stream_rpc_method_handler(
                lambda request, context: (tensor.numpy().tobytes() for tensor in weights)
            )

    server = start(lines, Service(), 2, HOST)
    return lambda: float(server is None)


# ---- a file


def file(lines: Lines, rank: int, folder: str) -> Fetch:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = f"{folder}/weights.safetensors"
    if rank:
        sock = socket.create_connection((HOST, int(lines.hello())))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def fetch() -> float:
            sock.sendall(b"?")
            sock.recv(1)
            with safe_open(path, "pt") as held:
                return copied(held.get_tensor(f"p{i}").numpy() for i in range(len(weights)))

        return fetch
    listener = socket.create_server((HOST, 0))
    lines.hello(str(listener.getsockname()[1]))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sock.recv(1):
            save_file({f"p{i}": tensor for i, tensor in enumerate(weights)}, path)
            sock.sendall(b"!")

    in_thread(serve)
    return lambda: float(listener.fileno())


# ---- Arrow Flight


def flight(lines: Lines, rank: int) -> Fetch:
    import pyarrow as pa
    from pyarrow import flight as library

    if rank:
        client = library.connect(f"grpc://{HOST}:{lines.hello()}")
        ticket = library.Ticket(b"weights")
        return lambda: copied(values(chunk.data.column(0).buffers()[1]) for chunk in client.do_get(ticket))
    schema = pa.schema([("values", pa.float32())])

    class Server(library.FlightServerBase):
        def do_get(self, context: object, ticket: object) -> object:
            arrays = [pa.Array.from_buffers(pa.float32(), t.numel(), [None, pa.py_buffer(t.numpy())]) for t in weights]
            batches = [pa.RecordBatch.from_arrays([array], schema=schema) for array in arrays]
            return library.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, batches))

    server = Server(f"grpc://{HOST}:0")
    in_thread(server.serve)
    lines.hello(str(server.port))
    return lambda: float(server is None)


def main(role: str, kind: str, nbytes: str, tensors: str, folder: str) -> None:
    torch.set_num_threads(1)
    lines, rank = Lines(), int(role == "initiator")
    weights.extend(torch.full((int(nbytes) // 4 // int(tensors),), -1.0 if rank else 0.0) for _ in range(int(tensors)))
    kinds = {"rpc": rpc, "gloo": gloo, "grpc": grpc, "file": partial(file, folder=folder), "flight": flight}
    fetch = kinds[kind](lines, rank)
    pauses: list[float] = []

    def repeat(count: int) -> None:
        pauses[:] = [fetch() for _ in range(count)]

    for number, run in enumerate(lines.runs()):
        if rank:
            seconds = timed(run, repeat)
            if {float(v) for tensor in weights for v in (tensor.min(), tensor.max())} != {float(number)}:
                raise SystemExit("the weights that arrived are wrong")
            lines.answer(seconds, pause=sum(pauses) / len(pauses))
            continue
        while lines.others_work(_LONG):
            pass
        for tensor in weights:
            tensor.fill_(number + 1.0)
        lines.answer()


if __name__ == "__main__":
    main(*sys.argv[1:])
