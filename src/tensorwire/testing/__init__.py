"""Tools for authors of devices, and for tests of code that uses devices.

``python -m tensorwire.testing package.module:name`` runs the conformance suite on your device; it needs ``pip install
'.[testing]'`` in the folder of Tensorwire's source. `FaultyDevice` wraps a device and injects faults.
"""

from tensorwire.testing.faulty import FaultyChannel, FaultyDevice

__all__ = ["FaultyChannel", "FaultyDevice"]
