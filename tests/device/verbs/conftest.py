"""The fake NIC, for every test here that asks for it."""

from tests.harness.fake_nic import fabric as fabric
from tests.harness.fake_nic import ibverbs as ibverbs
