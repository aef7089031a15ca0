"""The fake NIC, for every test here that asks for it."""

from .fake_nic import fabric as fabric
from .fake_nic import ibverbs as ibverbs
