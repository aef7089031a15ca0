"""Waits: they end when they should, with the right error, and give way to signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tensorwire.errors import PeerLost, RegionClosed, WaitTimeout
from tensorwire.testing.fixtures import FarPair, InThread, Pair, need_an_active_peer
from tensorwire.testing.patterns import SECONDS, array, until_asleep
from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-6, 1e-4, 1e-3, 0.02, 0.15])
def test_a_wait_for_nothing_times_out(pair: Pair, seconds: float) -> None:
    region = pair.target.allocate(8)
    with pytest.raises(WaitTimeout):
        region.wait(0, 1, seconds)
    pair.channel.signal(region.remote().view(), 1).wait(SECONDS)
    region.wait(0, 1, seconds)
    with pytest.raises(WaitTimeout):
        region.wait(0, 2, -1.0)


def test_polling_brings_what_it_polls_for(pair: Pair) -> None:
    region = pair.target.allocate(8)
    completion = pair.channel.signal(region.remote().view(), 5)
    polls: list[Callable[[], object]] = [lambda: region.wait(0, 5, 0.0), lambda: completion.wait(0.0)]
    for poll in polls:
        while True:
            try:
                poll()
                break
            except WaitTimeout:
                pass
    assert completion.done


def test_a_completion_that_is_not_awaited_comes_by_itself(pair: Pair) -> None:
    region, source = pair.target.allocate(1 << 20), pair.initiator.allocate(1 << 20)
    completion = pair.channel.write(source.view(), region.remote().view())
    while not completion.done:
        os.sched_yield()
    completion.wait(0.0)


def test_many_threads_wait_on_one_device(pair: Pair, in_thread: InThread) -> None:
    region = pair.target.allocate(64 * 8)
    rounds = 20

    def wait(word: int) -> None:
        for i in range(1, rounds + 1):
            region.wait(word * 64, i, SECONDS)

    threads = [in_thread(wait, word) for word in range(8)]
    remote = region.remote()
    for i in range(1, rounds + 1):
        for word in range(8):
            pair.channel.signal(remote.view(word * 64, 8), i)
    for thread in threads:
        thread.join()


def test_a_store_of_ones_own_wakes_a_waiter(pair: Pair, in_thread: InThread) -> None:
    region = pair.target.allocate(8)
    thread = in_thread(lambda: region.wait(0, 1, SECONDS))
    until_asleep(os.getpid(), thread.native_id)
    region.store(0, 1)
    thread.join()


def check_raises(error: type[Exception] | tuple[type[Exception], ...], work: Callable[..., object], *args: Any) -> None:
    with pytest.raises(error):
        work(*args)


def test_closing_a_region_ends_a_wait_on_it(pair: Pair, in_thread: InThread) -> None:
    region = pair.target.allocate(8)
    thread = in_thread(check_raises, RegionClosed, region.wait, 0, 1, SECONDS)
    until_asleep(os.getpid(), thread.native_id)
    region.close()
    thread.join()


def test_closing_a_device_ends_every_wait(pair: Pair, in_thread: InThread) -> None:
    regions = [pair.target.allocate(8) for _ in range(4)]
    threads = [in_thread(check_raises, (RegionClosed, PeerLost), r.wait, 0, 1, SECONDS) for r in regions]
    for thread in threads:
        until_asleep(os.getpid(), thread.native_id)
    pair.target.close()
    for thread in threads:
        thread.join()
    for region in regions:
        assert region.closed


def test_closing_a_channel_ends_a_wait_for_it_and_no_other(pair: Pair, in_thread: InThread) -> None:
    region = pair.initiator.allocate(8)
    other = pair.initiator.connect(pair.target.address)
    thread = in_thread(check_raises, PeerLost, region.wait, 0, 1, SECONDS, other)
    until_asleep(os.getpid(), thread.native_id)
    other.close()
    thread.join()
    check_raises(PeerLost, region.wait, 0, 1, SECONDS, other)
    with pytest.raises(PeerLost):
        other.signal(pair.target.allocate(8).remote().view(), 1).wait(SECONDS)
    assert other.lost
    assert not pair.channel.lost
    with pytest.raises(WaitTimeout):
        region.wait(0, 1, 1e-3, pair.channel)


def test_abort_ends_waits_and_operations(pair: Pair, in_thread: InThread) -> None:
    region = pair.initiator.allocate(8)
    thread = in_thread(check_raises, PeerLost, region.wait, 0, 1, SECONDS, pair.channel)
    until_asleep(os.getpid(), thread.native_id)
    pair.initiator.abort("the job ended")
    thread.join()
    with pytest.raises(PeerLost, match="the job ended"):
        pair.channel.signal(region.remote().view(), 1).wait(SECONDS)
    with pytest.raises(PeerLost, match="the job ended"):
        pair.initiator.allocate(8)


def test_a_timed_out_write_goes_on(far: FarPair) -> None:
    need_an_active_peer(far)
    remote, source = far.peer.allocate(32 << 20), far.device.allocate(32 << 20)
    array(source)[:] = 4
    far.peer.stop()
    completion = far.channel.write(source.view(), remote.view())
    with pytest.raises(WaitTimeout):
        completion.wait(0.01)
    assert not completion.done
    far.peer.resume()
    completion.wait(SECONDS)
    assert far.peer.call("content", remote.key, (32 << 20) - 4, 4) == b"\x04" * 4


def test_ctrl_c_ends_a_wait(spec: DeviceSpec) -> None:
    with Peer(spec) as peer:
        remote = peer.allocate(8)
        peer.start("wait", remote.key, 1, 600.0)
        until_asleep(peer.pid)
        peer.signal(signal.SIGINT)
        assert peer.finish() == "interrupted"


def test_a_waiting_daemon_thread_lets_the_interpreter_end(spec: DeviceSpec) -> None:
    script = f"""
import os, sys, threading
sys.path[:] = {sys.path!r}
from tensorwire.testing.patterns import until_asleep
from tensorwire.testing.spec import DeviceSpec
device, other = DeviceSpec({spec.text!r}).make(), DeviceSpec({spec.text!r}).make()
channel = device.connect(other.address)
channel.on_lost(print)
regions = [device.allocate(8) for _ in range(4)]
threads = [threading.Thread(target=r.wait, args=(0, 1, 600.0), daemon=True) for r in regions]
for thread in threads:
    thread.start()
    until_asleep(os.getpid(), thread.native_id)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
