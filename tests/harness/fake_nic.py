"""A NIC in software: a stand-in for the module ``ibverbs`` whose queue pairs really move bytes within this process.

It keeps the rules of reliable connections that the verbs device relies on, and is strict where a real NIC would fail
later or elsewhere: queue pairs go through their states, work requests and receives have room until their completions
are polled, requests of one queue pair are executed in their order, keys and ranges are checked, and what finds no
receive is counted (``not_ready``). A test may hold the fabric, execute requests one at a time, and make one fail.

The constants and the description of a queue pair are those of the package ``ibverbs``, whose library is not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorwire.device.verbs import VerbsDevice, device
from tensorwire.device.verbs.ports import ACTIVE, ROCE_2, Gid, Port

NAME = "fake0"
PORT = Port(
    device=NAME,
    number=1,
    state=ACTIVE,
    link_layer="Ethernet",
    mtu=4096,
    lid=0,
    max_message=1 << 20,
    gids=(Gid(0, bytes(10) + b"\xff\xff\x7f\0\0\x01", ROCE_2, "lo"),),
)


def _part(name: str) -> ModuleType:
    """A module of the package ``ibverbs``, without the package, which would load libibverbs."""
    found = importlib.util.find_spec("ibverbs")
    if found is None or found.origin is None:
        pytest.skip("the package ibverbs, whose constants this needs, is not installed")
    spec = importlib.util.spec_from_file_location(f"fake_ibverbs_{name}", Path(found.origin).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class VerbsError(OSError):
    """As in ``ibverbs``: what failed, and errno."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(number, what)


@dataclass
class SGE:
    addr: int
    length: int
    lkey: int


@dataclass
class SendWR:
    wr_id: int
    sg_list: list[SGE]
    opcode: int
    send_flags: int
    remote_addr: int = 0
    rkey: int = 0
    imm_data: int = 0
    compare_add: int = 0
    swap: int = 0


@dataclass
class RecvWR:
    wr_id: int
    sg_list: list[SGE]


@dataclass
class _Posted:
    """A request on its way. ``inlined``: its payload, where the NIC took it along at once."""

    request: SendWR
    inlined: bytes | None
    room: int  # what its completion frees


class FakeMR:
    """Registered memory. Its keys are this object's place in the fabric."""

    def __init__(self, domain: FakePD, addr: int, length: int, access: int) -> None:
        self.domain, self.addr, self.length, self.access = domain, addr, length, access
        self.lkey = self.rkey = next(domain.fabric.numbers)
        domain.fabric.registered[self.rkey] = self

    def allows(self, addr: int, length: int, access: int) -> bool:
        return self.addr <= addr and addr + length <= self.addr + self.length and self.access & access == access

    def close(self) -> None:
        del self.domain.fabric.registered[self.rkey]


class FakePD:
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def reg_mr(self, addr: int, length: int, access: int) -> FakeMR:
        return FakeMR(self, addr, length, access)

    def create_qp(self, wanted: Any) -> FakeQP:
        return FakeQP(self, wanted)

    def close(self) -> None:
        assert not [mr for mr in self.fabric.registered.values() if mr.domain is self], "memory is still registered"


class FakeCompChannel:
    """A completion channel: a descriptor that can be read while there is an event."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def get_cq_event(self) -> Any:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            raise VerbsError("ibv_get_cq_event", errno.EAGAIN) from None
        return SimpleNamespace(ack_events=lambda count: None)

    def close(self) -> None:
        os.close(self.fd)


class FakeCQ:
    """Completions with what each frees on its queue pair once it is polled."""

    def __init__(self, fabric: Fabric, size: int, channel: FakeCompChannel) -> None:
        self.fabric, self.cqe, self._channel = fabric, size, channel
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._armed = False

    def add(self, completion: Any, polled: Any) -> None:
        """``polled()`` is called when somebody has it."""
        self._waiting.append((completion, polled))
        assert len(self._waiting) <= self.cqe, "the completion queue overflows"
        if self._armed:
            self._armed = False
            os.eventfd_write(self._channel.fd, 1)

    def poll(self, most: int) -> list[Any]:
        with self.fabric.lock:
            found = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            for _, polled in found:
                polled()
            return [completion for completion, _ in found]

    def req_notify(self) -> None:
        with self.fabric.lock:
            self._armed = True

    def close(self) -> None:
        pass


class FakeQP:
    """A queue pair of type RC. ``fault``: a status with which the next request fails."""

    def __init__(self, domain: FakePD, wanted: Any) -> None:
        self.domain, self.fabric = domain, domain.fabric
        ib = self.fabric.ib
        assert wanted.qp_type == ib.QPType.RC
        self.send_cq, self.recv_cq = wanted.send_cq, wanted.recv_cq
        self.most_sends, self.most_receives = wanted.max_send_wr, wanted.max_recv_wr
        self.most_pieces, self.most_inlined = wanted.max_send_sge, wanted.max_inline_data
        self.state = ib.QPState.RESET
        self.fault: int | None = None
        self.waiting: deque[_Posted] = deque()
        self.receives: deque[RecvWR] = deque()
        self.sends_taken = self.receives_taken = 0
        self._silent = 0  # requests executed without a completion: the next one frees their room, too
        self._peer = 0
        self._first: tuple[int, int] = (0, 0)  # first packets: the peer's, our own
        self.access = 0
        with self.fabric.lock:
            self.qp_num = next(self.fabric.numbers)
            self.fabric.pairs[self.qp_num] = self

    # ---- states

    def _to(self, before: Any, after: Any) -> None:
        if self.state != before:
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        self.state = after

    def to_init(self, port: int, access: int) -> None:
        assert port == PORT.number
        self._to(self.fabric.ib.QPState.RESET, self.fabric.ib.QPState.INIT)
        self.access = access

    def to_rtr(self, peer: Any, *, sgid_index: int, mtu: int, hop_limit: int, max_dest_rd_atomic: int) -> None:
        with self.fabric.lock:
            assert self.receives, "the peer may send from now on, and would find no receive"
            self._to(self.fabric.ib.QPState.INIT, self.fabric.ib.QPState.RTR)
            self._peer, self._first = peer.qp_num, (peer.psn, 0)
            self.fabric.run()  # what the peer has sent until now

    def to_rts(self, psn: int, *, timeout: int, retry_cnt: int, rnr_retry: int, max_rd_atomic: int) -> None:
        with self.fabric.lock:
            self._to(self.fabric.ib.QPState.RTR, self.fabric.ib.QPState.RTS)
            self._first = (self._first[0], psn)

    @property
    def peer(self) -> FakeQP | None:
        """The queue pair at the other end; None where there is none any more."""
        return self.fabric.pairs.get(self._peer)

    def close(self) -> None:
        with self.fabric.lock:
            if self.fabric.pairs.pop(self.qp_num, None) is None:
                raise VerbsError("ibv_destroy_qp", errno.EINVAL)

    # ---- posting

    def post_recv(self, requests: list[RecvWR]) -> None:
        with self.fabric.lock:
            self.receives_taken += len(requests)
            if self.receives_taken > self.most_receives:
                raise VerbsError("ibv_post_recv", errno.ENOMEM)
            self.receives.extend(requests)

    def post_send(self, requests: list[SendWR]) -> None:
        ib = self.fabric.ib
        with self.fabric.lock:
            if self.state not in (ib.QPState.RTS, ib.QPState.ERR):
                raise VerbsError("ibv_post_send", errno.EINVAL)
            for request in requests:
                assert isinstance(request, SendWR)
                self.sends_taken += 1
                if self.sends_taken > self.most_sends or len(request.sg_list) > self.most_pieces:
                    raise VerbsError("ibv_post_send", errno.ENOMEM)
                inlined = None
                if request.send_flags & ib.SendFlags.INLINE:
                    inlined = b"".join(ctypes.string_at(sge.addr, sge.length) for sge in request.sg_list)
                    assert len(inlined) <= self.most_inlined
                self.waiting.append(_Posted(request, inlined, 1))
            self.fabric.run()

    # ---- executing, with the fabric's lock

    def step(self) -> bool:
        """Executes the next request; whether there was one that could be."""
        ib, peer = self.fabric.ib, self.peer
        if not self.waiting or (self.state == ib.QPState.RTS and peer is not None and peer.state < ib.QPState.RTR):
            return False
        posted = self.waiting.popleft()
        status = ib.WCStatus.WR_FLUSH_ERR if self.state == ib.QPState.ERR else self._execute(posted, peer)
        self._finish(posted, status)
        return True

    def _finish(self, posted: _Posted, status: int) -> None:
        ib, request = self.fabric.ib, posted.request
        if status == ib.WCStatus.SUCCESS:
            self.fabric.log.append((self.qp_num, ib.WROpcode(request.opcode).name, request.wr_id))
            if not request.send_flags & ib.SendFlags.SIGNALED:
                self._silent += 1
                return
        freed, self._silent = 1 + self._silent, 0

        def polled() -> None:
            self.sends_taken -= freed

        completion = SimpleNamespace(wr_id=request.wr_id, status=int(status), qp_num=self.qp_num, imm_data=0)
        self.send_cq.add(completion, polled)
        if status not in (ib.WCStatus.SUCCESS, ib.WCStatus.WR_FLUSH_ERR):
            self.break_down()

    def break_down(self) -> None:
        """The state ERR: everything that is posted, and will be, is flushed."""
        ib = self.fabric.ib
        self.state = ib.QPState.ERR
        while self.receives:
            self._receive(ib.WCStatus.WR_FLUSH_ERR, 0)

    def _receive(self, status: int, immediate: int) -> None:
        receive = self.receives.popleft()

        def polled() -> None:
            self.receives_taken -= 1

        completion = SimpleNamespace(wr_id=receive.wr_id, status=int(status), qp_num=self.qp_num, imm_data=immediate)
        self.recv_cq.add(completion, polled)

    def _execute(self, posted: _Posted, peer: FakeQP | None) -> int:
        ib, request = self.fabric.ib, posted.request
        if self.fault is not None:
            status, self.fault = self.fault, None
            if status in (ib.WCStatus.REM_ACCESS_ERR, ib.WCStatus.REM_INV_REQ_ERR, ib.WCStatus.REM_OP_ERR) and peer:
                peer.break_down()
            return status
        if peer is None or peer._peer != self.qp_num or peer.state not in (ib.QPState.RTR, ib.QPState.RTS):
            return int(ib.WCStatus.RETRY_EXC_ERR)
        assert peer._first[0] == self._first[1], "the peer expects another first packet"
        status = self._move(posted, peer)
        if status == ib.WCStatus.REM_ACCESS_ERR:
            peer.break_down()
        elif status == ib.WCStatus.SUCCESS and request.opcode == ib.WROpcode.RDMA_WRITE_WITH_IMM:
            if not peer.receives:
                self.fabric.not_ready += 1
                return int(ib.WCStatus.RNR_RETRY_EXC_ERR)
            peer._receive(ib.WCStatus.SUCCESS, request.imm_data)
        return status

    def _move(self, posted: _Posted, peer: FakeQP) -> int:
        ib, request = self.fabric.ib, posted.request
        op, flags = ib.WROpcode, ib.AccessFlags
        kinds = {
            op.RDMA_WRITE: (flags.REMOTE_WRITE, 0),
            op.RDMA_WRITE_WITH_IMM: (flags.REMOTE_WRITE, 0),
            op.RDMA_READ: (flags.REMOTE_READ, flags.LOCAL_WRITE),
            op.ATOMIC_FETCH_AND_ADD: (flags.REMOTE_ATOMIC, flags.LOCAL_WRITE),
            op.ATOMIC_CMP_AND_SWP: (flags.REMOTE_ATOMIC, flags.LOCAL_WRITE),
        }
        remote_access, local_access = kinds[op(request.opcode)]
        nbytes = sum(sge.length for sge in request.sg_list)
        if nbytes > PORT.max_message:
            return int(ib.WCStatus.LOC_LEN_ERR)
        if posted.inlined is None and not all(self._ours(sge, local_access) for sge in request.sg_list):
            return int(ib.WCStatus.LOC_PROT_ERR)
        if not nbytes:  # no key is looked at
            return int(ib.WCStatus.SUCCESS)
        there = self.fabric.registered.get(request.rkey)
        if (
            there is None
            or there.domain is not peer.domain
            or not there.allows(request.remote_addr, nbytes, remote_access)
            or not peer.access & remote_access
        ):
            return int(ib.WCStatus.REM_ACCESS_ERR)
        self._copy(posted, nbytes)
        return int(ib.WCStatus.SUCCESS)

    def _ours(self, sge: SGE, access: int) -> bool:
        mr = self.fabric.registered.get(sge.lkey)
        return mr is not None and mr.domain is self.domain and mr.allows(sge.addr, sge.length, access)

    def _copy(self, posted: _Posted, nbytes: int) -> None:
        op, request = self.fabric.ib.WROpcode, posted.request
        if request.opcode in (op.RDMA_WRITE, op.RDMA_WRITE_WITH_IMM):
            data = posted.inlined
            if data is None:
                data = b"".join(ctypes.string_at(sge.addr, sge.length) for sge in request.sg_list)
            ctypes.memmove(request.remote_addr, data, nbytes)
            return
        data = ctypes.string_at(request.remote_addr, nbytes)
        at = 0
        for sge in request.sg_list:
            ctypes.memmove(sge.addr, data[at : at + sge.length], sge.length)
            at += sge.length
        before = int.from_bytes(data[:8], "little")
        if request.opcode == op.ATOMIC_FETCH_AND_ADD:
            after = (before + request.compare_add) % 2**64
        elif request.opcode == op.ATOMIC_CMP_AND_SWP and before == request.compare_add:
            after = request.swap
        else:
            return
        ctypes.memmove(request.remote_addr, after.to_bytes(8, "little"), 8)


class FakeContext:
    """An opened device."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        fabric.opened += 1

    def create_comp_channel(self) -> FakeCompChannel:
        return FakeCompChannel()

    def query_device(self) -> Any:
        return SimpleNamespace(max_qp_wr=self._fabric.most_requests, max_qp_rd_atom=16, max_cqe=1 << 20)

    def alloc_pd(self) -> FakePD:
        return FakePD(self._fabric)

    def create_cq(self, size: int, channel: FakeCompChannel) -> FakeCQ:
        return FakeCQ(self._fabric, size, channel)

    def close(self) -> None:
        self._fabric.opened -= 1


@dataclass
class Fabric:
    """All queue pairs and all registered memory of a test. ``log``: what was executed: queue pair, opcode, number."""

    ib: ModuleType
    most_requests: int = 16384  # work requests of a queue pair
    pairs: dict[int, FakeQP] = field(default_factory=dict)
    registered: dict[int, FakeMR] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]
    log: list[tuple[int, str, int]] = field(default_factory=list)
    not_ready: int = 0
    opened: int = 0
    _holds: bool = False

    def run(self) -> None:
        """Executes what can be, unless the fabric is held."""
        with self.lock:
            while not self._holds and any(pair.step() for pair in list(self.pairs.values())):
                pass

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is executed inside it, but by `FakeQP.step`."""
        with self.lock:
            self._holds = True
        try:
            yield
        finally:
            with self.lock:
                self._holds = False
                self.run()

    def executed(self, pair: FakeQP) -> list[str]:
        """The opcodes of what was executed on a queue pair, in their order."""
        return [opcode for number, opcode, _ in self.log if number == pair.qp_num]


def make_fabric() -> Fabric:
    """A fabric, and in ``fabric.ib`` what stands for the module ``ibverbs``."""
    ib = ModuleType("ibverbs")
    enums, helpers = _part("enums"), _part("helpers")
    ib.__dict__.update({name: getattr(enums, name) for name in enums.__all__})
    ib.__dict__.update(QPInfo=helpers.QPInfo, VerbsError=VerbsError, SGE=SGE, SendWR=SendWR, RecvWR=RecvWR)
    ib.__dict__.update(__version__="0", QPInitAttr=lambda **fields: SimpleNamespace(**fields))
    fabric = ib.__dict__["fabric"] = Fabric(ib)
    here = SimpleNamespace(name=NAME, open=lambda: FakeContext(fabric))
    ib.__dict__["get_device_list"] = lambda: [here]
    return fabric


class VerbsInProcess(VerbsDevice):
    """A device for the conformance suite, whose peers are in its own process; for a process that has no other NIC."""

    capabilities = replace(VerbsDevice.capabilities, other_processes=False)

    def __init__(self) -> None:
        if not hasattr(sys.modules.get("ibverbs"), "fabric"):
            sys.modules["ibverbs"] = make_fabric().ib
            vars(device)["scan_ports"] = lambda: [PORT]
        super().__init__()


@pytest.fixture
def ibverbs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In place of the module ``ibverbs``; its ``fabric`` is what its NICs are on."""
    made = make_fabric()
    monkeypatch.setitem(sys.modules, "ibverbs", made.ib)
    return made.ib


@pytest.fixture
def fabric(ibverbs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """Verbs devices of this process are on this fabric, and have one port there."""
    monkeypatch.setattr(device, "scan_ports", lambda: [PORT])
    made: Fabric = ibverbs.fabric
    yield made
    assert made.not_ready == 0, "a signal found no receive"
    assert made.pairs == {}, "queue pairs are left"
    assert made.opened == 0, "the NIC is still open"
