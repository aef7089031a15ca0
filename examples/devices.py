"""Two processes and one transfer: the producer writes 1,000 numbers into the consumer's memory, then signals.

python examples/devices.py shm
python examples/devices.py tcp
"""

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

from tensorwire.device import Device, RemoteRegion, ShmDevice, TcpDevice

COUNT = 1000
PAYLOAD = 4 * COUNT  # bytes; the signal word lies behind it, at a multiple of 8
DEVICES: dict[str, type[Device]] = {"shm": ShmDevice, "tcp": TcpDevice}


def produce(name: str, pipe: Connection) -> None:
    """Runs in the second process: learns the address and the region, then writes once."""
    with DEVICES[name]() as device, device.connect(pipe.recv_bytes()) as channel:
        slot = RemoteRegion.unpack(pipe.recv_bytes())
        source = device.allocate(PAYLOAD)
        np.frombuffer(source, np.float32)[:] = np.arange(COUNT)
        signal = (slot.view(PAYLOAD, 8), 1)
        channel.write(source.view(), slot.view(0, PAYLOAD), signal).wait()
        pipe.recv_bytes()  # stay until the consumer has looked


def main(name: str) -> None:
    """Allocates the memory, hands out the capability for it, and waits for the signal."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with DEVICES[name]() as device:
        region = device.allocate(PAYLOAD + 8)
        producer = context.Process(target=produce, args=(name, theirs))
        producer.start()
        ours.send_bytes(device.address)
        ours.send_bytes(region.remote("write").pack())
        region.wait(PAYLOAD, at_least=1, timeout=60.0)
        values = np.frombuffer(region, np.float32, COUNT)
        print(f"{name}: {COUNT} numbers arrived, their sum is {values.sum():.0f}")
        ours.send_bytes(b"done")
        producer.join()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shm")
