"""Two processes and one edge: the producer sends a tensor a step, and the consumer prints what arrives.

python examples/edges.py shm
python examples/edges.py tcp
"""

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

from tensorwire.device import Device, ShmDevice, TcpDevice, connect_peer
from tensorwire.edge import Spec, connect_edge

SPEC = Spec((32, 100), "float32")
STEPS = 3
DEVICES: dict[str, type[Device]] = {"shm": ShmDevice, "tcp": TcpDevice}


def produce(name: str, pipe: Connection) -> None:
    """Runs in the second process."""
    with (
        DEVICES[name]() as device,
        connect_peer(device, pipe) as channel,
        connect_edge(channel, pipe, "producer", spec=SPEC) as edge,
    ):
        for step in range(1, STEPS + 1):
            edge.fill(step, np.full(SPEC.shape, step, np.float32))
            edge.send(step)


def consume(name: str, pipe: Connection) -> None:
    """Runs in the first process."""
    with (
        DEVICES[name]() as device,
        connect_peer(device, pipe) as channel,
        connect_edge(channel, pipe, "consumer", spec=SPEC) as edge,
    ):
        for step in range(1, STEPS + 1):
            with edge.receive(step, timeout=60.0) as received:
                print(f"{name}, step {step}: {received.spec}, sum {received.numpy().sum():.0f}")


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "shm"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=produce, args=(name, theirs))
    producer.start()
    consume(name, ours)
    producer.join()
