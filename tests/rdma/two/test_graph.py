"""A model whose parts run on two machines, over verbs: the bits of one process, and its tensors go by RDMA."""

from __future__ import annotations

import secrets

import pytest

from tensorwire.control import Coordinator
from tests.rdma.two.conftest import Far
from tests.rdma.two.roles import Roles
from tests.rdma.two.training import Parted
from tests.rdma.wire import FAR


@pytest.mark.usefixtures("warmed")
@pytest.mark.timeout(600)
def test_a_model_cut_in_two(far: Far) -> None:
    secret = secrets.token_hex(32)
    coordinator = Coordinator(secret.encode(), workers=2, servers=1, interface=FAR[0])
    common = (coordinator.address, secret, "verbs", 2)
    here = Roles()
    here.start_server(*common)
    here.start_worker(*common, 0, "train_parted")
    far.call("start_worker", *common, 1, "train_parted")
    results = here.results() + far.call("worker_results")
    coordinator.close()
    assert [error for error, _ in results] == ["", ""], results
    first, second = (result for _, result in results)
    assert isinstance(first, Parted)
    assert (first.wrong, second.wrong, first.losses) == ([], [], second.losses)
    assert {path.split(".")[0] for path in first.here} == {"0", "2"}
    assert {path.split(".")[0] for path in second.here} == {"1"}
    assert first.route == second.route == "verbs"
    # There and back in both passes; the logits of the model reach both as well.
    assert min(first.sent, second.sent) >= 2 * 8 * 16 * 32 * 4
    assert first.asked == second.asked == 0
    print(
        f"\nover verbs: losses {first.losses}; sent {first.sent} and {second.sent} bytes in the last step;"
        f" copies {first.copies} and {second.copies}"
    )
