"""A graph of TensorFlow that is cut over two machines: worker 0 in this guest, worker 1 in the second."""

from __future__ import annotations

import json

import pytest

from tensorwire.testing.patience import patient
from tests.rdma.two.conftest import Far
from tests.rdma.two.environments import Framework, Settings
from tests.rdma.wire import FAR

TENSORFLOW = Framework("tensorflow")
SECONDS = patient(300.0)  # only a guard: guests are slow, and may have to compile the operators

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        not TENSORFLOW.python.exists(), reason="there is no environment of TensorFlow's: make setup-tensorflow"
    ),
]


def rank(index: int, port: int) -> Settings:
    cluster = {"worker": [f"{address}:{port}" for address in FAR]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}


def trained(far: Far, device: str, port: int) -> set[str]:
    """What the workers say: their device, and the digest of the losses."""
    return TENSORFLOW.trained(far, device, [rank(0, port)], rank(1, port), SECONDS)


def test_a_cut_function_is_the_same_over_verbs_and_over_tcp(far: Far) -> None:
    (over_verbs,), (over_tcp,) = trained(far, "verbs", 9093), trained(far, "tcp", 9094)
    assert [over_verbs.split()[0], over_tcp.split()[0]] == ["verbs", "tcp"]
    assert over_verbs.split()[1] == over_tcp.split()[1]
