"""For whoever writes a device, or tests code that uses one.

``python -m tensorwire.testing package.module:name`` runs the conformance suite on a device of yours; that needs
``pip install '.[testing]'`` in the folder of Tensorwire's source. `FaultyDevice` wraps a device and does to it what a
bad day does.
"""

from tensorwire.testing.faulty import FaultyChannel, FaultyDevice

__all__ = ["FaultyChannel", "FaultyDevice"]
