"""A job of MXNet on two machines: scheduler, server and a worker in this guest, another worker in the second."""

from __future__ import annotations

import pytest

from tensorwire.testing.patience import patient
from tests.rdma.two.conftest import Far
from tests.rdma.two.environments import Framework, Settings
from tests.rdma.wire import FAR

MXNET = Framework("mxnet")
SECONDS = patient(200.0)  # only a guard: guests are slow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not MXNET.python.exists(), reason="there is no environment of MXNet's: make setup-mxnet"),
]


def role(name: str, port: int) -> Settings:
    return {
        "DMLC_ROLE": name,
        "DMLC_PS_ROOT_URI": FAR[0],
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": 2,
        "DMLC_NUM_SERVER": 1,
    }


def trained(far: Far, device: str, port: int) -> set[str]:
    """What the workers say: their device, and the digest of their parameters."""
    here = [role(name, port) for name in ("scheduler", "server", "worker")]
    return MXNET.trained(far, device, here, role("worker", port), SECONDS)


def test_training_is_the_same_over_verbs_and_over_tcp(far: Far) -> None:
    (over_verbs,), (over_tcp,) = trained(far, "verbs", 9091), trained(far, "tcp", 9092)
    assert [over_verbs.split()[0], over_tcp.split()[0]] == ["verbs", "tcp"]
    assert over_verbs.split()[1] == over_tcp.split()[1]
