"""What the statuses of failed requests become: which error, whose, and what happened to the transfer."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace

import pytest
from tests.harness.cable import WORD, cable, queue_pair, until
from tests.harness.fake_nic import Fabric

from tensorwire.errors import DeviceError, PeerLost, RemoteAccessError, WaitTimeout
from tensorwire.testing.patterns import SECONDS, array

# Statuses that are one operation's own, with its error; the channel lives on.
REFUSALS = {
    "REM_ACCESS_ERR": (RemoteAccessError, "the target refused: no open region has that key, or out of its range"),
    "REM_INV_REQ_ERR": (RemoteAccessError, "the target refused: an invalid request"),
    "REM_OP_ERR": (RemoteAccessError, "the target refused: it failed there"),
    "LOC_LEN_ERR": (DeviceError, r"this NIC refused its own memory \(length\)"),
    "LOC_PROT_ERR": (DeviceError, r"this NIC refused its own memory \(protection of the local memory\)"),
    "LOC_ACCESS_ERR": (DeviceError, r"this NIC refused its own memory \(access\)"),
}
# Statuses after which the peer is lost.
LOSSES = {
    "RETRY_EXC_ERR": "its NIC does not answer: it, its machine or the link is gone",
    "LOC_QP_OP_ERR": "this machine's own port sends nothing",
    "RNR_RETRY_EXC_ERR": r"the queue pair failed with RNR_RETRY_EXC_ERR \(IBV_WC_",
    "FATAL_ERR": "the queue pair failed with FATAL_ERR",
}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_is_the_error_of_its_operation_alone(fabric: Fabric, status: str) -> None:
    kind, why = REFUSALS[status]
    with cable(fabric) as c:
        first = c.pair
        with fabric.held():
            posted = [c.write(0, 64), c.write(64, 64, signal=1), c.write(128, 64), c.write(192, 64, signal=2)]
            c.pair.step()
            c.pair.fault = int(fabric.ib.WCStatus[status])
            c.pair.step()
            assert not c.arrived(64, 64)
        posted[3].wait(SECONDS)
        with pytest.raises(DeviceError, match=why) as raised:
            posted[1].wait(SECONDS)
        assert type(raised.value) is kind
        for completion in (posted[0], posted[2]):  # before it, and behind it: each was executed once
            completion.wait(SECONDS)
        assert [c.arrived(at, 64) for at in (0, 64, 128, 192)] == [True, False, True, True]
        assert c.word == 2
        assert fabric.executed(first) == ["RDMA_WRITE"]
        assert c.opcodes == ["RDMA_WRITE", "RDMA_WRITE", "RDMA_WRITE_WITH_IMM"], "a fresh queue pair has the rest"
        assert not c.channel.lost
        c.works()


@pytest.mark.parametrize("status", LOSSES)
def test_a_loss_ends_everything_that_is_outstanding(fabric: Fabric, status: str) -> None:
    with cable(fabric) as c:
        told: list[str] = []
        c.channel.on_lost(told.append)
        with fabric.held():
            posted = [c.write(0, 64), c.write(64, 64, signal=1), c.write(128, 64)]
            c.pair.step()
            c.pair.fault = int(fabric.ib.WCStatus[status])
            c.pair.step()
            posted[0].wait(SECONDS)
            for completion in posted[1:]:
                with pytest.raises(PeerLost, match=LOSSES[status]):
                    completion.wait(SECONDS)
        assert not c.arrived(64, 64)
        assert not c.arrived(128, 64), "what had failed was executed all the same"
        assert c.channel.lost
        for use in (lambda: c.write(0, 8), lambda: c.channel.signal(c.remote.view(WORD, 8), 1)):
            with pytest.raises(PeerLost, match=LOSSES[status]):
                use()
        until(lambda: bool(told))
        assert len(told) == 1
        assert c.channel.peer in told[0]


def test_refusals_in_a_batch_hit_only_themselves(fabric: Fabric) -> None:
    with cable(fabric) as c:
        bad, wrong = replace(c.remote, key=c.remote.key ^ 1), (0, 20, 21, 49)
        with c.channel.batch():
            posted = [
                c.channel.write(c.source.view(64 * i, 64), (bad if i in wrong else c.remote).view(64 * i, 64))
                for i in range(50)
            ]
        for i, completion in enumerate(posted):
            with pytest.raises(RemoteAccessError) if i in wrong else contextlib.nullcontext():
                completion.wait(SECONDS)
        assert [c.arrived(64 * i, 64) for i in range(50)] == [i not in wrong for i in range(50)]


def test_one_refusal_after_another(fabric: Fabric) -> None:
    with cable(fabric) as c:
        bad = replace(c.remote, key=c.remote.key ^ 1)
        for value in range(1, 21):
            refused = c.channel.signal(bad.view(WORD, 8), 99)
            good = c.channel.signal(c.remote.view(WORD, 8), value)
            with pytest.raises(RemoteAccessError):
                refused.wait(SECONDS)
            good.wait(SECONDS)
            assert c.word == value
        assert len(fabric.pairs) == 2, "the queue pairs that were given up are still there"


def test_a_timeout_leaves_the_transfer_under_way(fabric: Fabric) -> None:
    with cable(fabric) as c:
        with fabric.held():
            posted = c.write(0, 64, signal=1)
            with pytest.raises(WaitTimeout, match="the transfer goes on: do not reuse its memory"):
                posted.wait(0.01)
            assert not posted.done
        posted.wait(SECONDS)
        assert (c.word, c.arrived(0, 64)) == (1, True)


def test_memory_is_kept_until_its_operation_is_over(fabric: Fabric) -> None:
    """Nobody but the operation has it any more, and the NIC still reads it."""
    with cable(fabric) as c:
        source = c.device.allocate(64)
        array(source)[:] = 5
        alive = weakref.ref(source)
        with fabric.held():
            posted = c.channel.write(source.view(), c.remote.view(0, 64))
            del source
            gc.collect()
            assert alive() is not None
        posted.wait(SECONDS)
        assert array(c.target)[:64].tolist() == [5] * 64
        gc.collect()
        assert alive() is None


def test_a_pair_that_cannot_be_made_again_loses_the_peer(fabric: Fabric) -> None:
    """A refusal ends the queue pair, and the other side is not there to agree on another one."""
    with cable(fabric) as c:
        bad = replace(c.remote, key=c.remote.key ^ 1)
        with fabric.held():
            refused = c.channel.signal(bad.view(WORD, 8), 1)
            behind = c.write(0, 64)
            there = queue_pair(c.channel).peer
            assert there is not None
            c.other.close()
        with pytest.raises((PeerLost, RemoteAccessError)):
            refused.wait(SECONDS)
        with pytest.raises(PeerLost):
            behind.wait(SECONDS)
        assert c.channel.lost
