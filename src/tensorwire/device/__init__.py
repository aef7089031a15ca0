"""A remote machine is a memory device: allocate, register, write, read, signal."""

from tensorwire.device.contract import Capabilities, Channel, Completion, Device
from tensorwire.device.loopback import LoopbackDevice
from tensorwire.device.meeting import connect_peer
from tensorwire.device.region import Region, RemoteRegion, RemoteView, View
from tensorwire.device.registry import device_names, find_device
from tensorwire.device.shm import ShmDevice
from tensorwire.device.tcp import TcpDevice
from tensorwire.device.verbs import VerbsDevice

__all__ = [
    "Capabilities",
    "Channel",
    "Completion",
    "Device",
    "LoopbackDevice",
    "Region",
    "RemoteRegion",
    "RemoteView",
    "ShmDevice",
    "TcpDevice",
    "VerbsDevice",
    "View",
    "connect_peer",
    "device_names",
    "find_device",
]
