"""What is special about the devices that come with Tensorwire; tensorwire.testing has what holds for every device."""

from __future__ import annotations

import pytest

from tensorwire.testing.fixtures import far as far
from tensorwire.testing.fixtures import far_spec as far_spec
from tensorwire.testing.fixtures import in_thread as in_thread
from tensorwire.testing.fixtures import nothing_left as nothing_left
from tensorwire.testing.fixtures import pair as pair
from tensorwire.testing.fixtures import warm as warm
from tensorwire.testing.spec import DeviceSpec

DEVICES = [DeviceSpec(f"tensorwire.device:{name}") for name in ("LoopbackDevice", "ShmDevice", "TcpDevice")]


@pytest.fixture(params=DEVICES, ids=[spec.label for spec in DEVICES])
def spec(request: pytest.FixtureRequest) -> DeviceSpec:
    """Each of them."""
    named: DeviceSpec = request.param
    return named


@pytest.fixture(params=["loopback", "shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a device."""
    name: str = request.param
    return name


@pytest.fixture(params=["shm", "tcp"])
def far_kind(request: pytest.FixtureRequest) -> str:
    """The name of a device that reaches other processes."""
    name: str = request.param
    return name
