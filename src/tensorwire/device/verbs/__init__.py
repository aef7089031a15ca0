"""The verbs device: InfiniBand and RoCE. ``ibverbs`` is imported when the first device is made, not before."""

from tensorwire.device.verbs.device import VerbsDevice

__all__ = ["VerbsDevice"]
