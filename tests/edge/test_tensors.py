"""Tensors that were not born in their slot: every dtype, shape and stride arrives as it is, or is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tensorwire.edge import Spec
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters
from tensorwire.testing.patience import patient
from tests.edge.edges import KINDS, Pair, make_edge

SECONDS = patient(60.0)
PROPERTY = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NUMPY = [name for name in DTYPES if name not in ("bfloat16",) and not name.startswith("float8")]


@pytest.fixture(scope="module")
def loopback() -> Iterator[Pair]:
    a, b = KINDS["loopback"](), KINDS["loopback"]()
    yield Pair(a, b, a.connect(b.address), b.connect(a.address))
    a.close()
    b.close()


def through(pair: Pair, tensor: Any, spec: Spec | None = None) -> bytes:
    """What arrives when ``tensor`` is sent."""
    nbytes = (spec or Spec.of(tensor)).nbytes
    producer, consumer, _ = make_edge(pair, 1, nbytes, spec=spec)
    producer.fill(1, tensor, SECONDS)
    producer.send(1)
    slot = consumer.receive(1, SECONDS)
    assert slot is not None
    return bytes(slot)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays as users have them: sliced, reversed, transposed, broadcast, without dimensions, empty."""
    dtype = draw(st.sampled_from(NUMPY))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
    content = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(content).integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    array = (raw % 2 if dtype == "bool" else raw).view(dtype).reshape(shape)
    array = array[draw(arrays.basic_indices(shape, allow_ellipsis=True))] if shape else array
    array = np.asarray(array)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


@PROPERTY
@given(array=views())
def test_any_view_arrives_as_it_is(loopback: Pair, array: np.ndarray[Any, Any]) -> None:
    assert through(loopback, array, Spec.of(array)) == array.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_neg().resolve_conj().contiguous().clone()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_torch(loopback: Pair, dtype: str) -> None:
    raw = torch.arange(24 * DTYPES[dtype], dtype=torch.uint8)
    tensor = (raw % 2 if dtype == "bool" else raw).view(getattr(torch, dtype)).reshape(2, 3, 4)
    for view in (tensor, tensor.permute(2, 0, 1), tensor[:, ::2], tensor[0, 0, :1].expand(5, 1), tensor[0, 0, 0]):
        assert Spec.of(view) == Spec(tuple(view.shape), dtype)
        assert through(loopback, view, Spec.of(view)) == bits(view)
    for empty in (tensor[:0], tensor[:, :, :0].permute(2, 1, 0)):
        assert through(loopback, empty, Spec.of(empty)) == b""


def test_on_every_device(pair: Pair) -> None:
    array = np.arange(60_000, dtype=np.float32).reshape(300, 200)  # long enough to let go of the interpreter's lock
    before = counters.snapshot()
    assert through(pair, array.T, Spec.of(array.T)) == array.T.tobytes()
    copied = counters.since(before)
    assert (copied.copies, copied.copied_bytes) == (1, array.nbytes)
    half = torch.randn(33, 7).to(torch.bfloat16)
    assert through(pair, half[:, ::2]) == bits(half[:, ::2])
    assert through(pair, np.zeros((0, 3))) == b""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another dtype": (lambda: np.zeros((2, 3), np.int32), r"carries float32\[2, 3\], not int32\[2, 3\]"),
    "another shape": (lambda: np.zeros((3, 2), np.float32), r"not float32\[3, 2\]"),
    "another byte order": (lambda: np.zeros((2, 3), ">f4"), "'>f4'"),
    "no tensor": (lambda: b"x" * 24, "which bytes lacks"),
    "python objects": (lambda: np.zeros((2, 3), object), "holds Python objects"),
    "another device": (lambda: torch.zeros(2, 3, device="meta"), "has none"),
    "wants a gradient": (lambda: torch.zeros(2, 3, requires_grad=True), r"detach\(\)"),
    "sparse": (lambda: torch.zeros(2, 3).to_sparse(), "cannot be copied into its slot"),
    "negative": (lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
}


def test_tensors_without_memory_are_refused_by_every_kind() -> None:
    """In a process of its own: what is not refused ends it with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", MEMORYLESS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


MEMORYLESS = """
from tensorwire.errors import ArgumentError
from tests.edge.edges import KINDS, Pair, make_edge
from tests.edge.varying import make
from tests.memoryless import COUNT, WITHOUT_MEMORY
nbytes = 4 * COUNT
with KINDS["loopback"]() as a, KINDS["loopback"]() as b:
    pair = Pair(a, b, a.connect(b.address), b.connect(a.address))
    producers = [make_edge(pair, 1, nbytes)[0]]
    producers += [make(kind, pair, 2, nbytes)[0] for kind in ("bounded", "dynamic")]
    for producer in producers:
        for name, tensor in WITHOUT_MEMORY.items():
            try:
                producer.fill(1, tensor())
            except ArgumentError as error:
                assert str(error).count("\\n") == 0, error
            else:
                raise AssertionError((producer, name))
"""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(loopback: Pair, name: str) -> None:
    make, why = REFUSED[name]
    producer, _, inbox = make_edge(loopback, 1, 24, spec=Spec((2, 3), "float32"))
    memoryview(inbox)[:] = b"\x07" * inbox.nbytes
    inbox.store(0, 0)
    with pytest.raises(ArgumentError, match=why):
        producer.fill(1, make(), SECONDS)
    assert set(memoryview(inbox)[8:]) == {7}, "the slot was touched"


def test_without_a_spec_the_size_counts(loopback: Pair) -> None:
    producer, _, _ = make_edge(loopback, 1, 24)
    producer.fill(1, b"x" * 24, SECONDS)
    for wrong in (np.zeros(5, np.float32), np.zeros(7, np.float32), b""):
        with pytest.raises(ArgumentError, match="the room is 24"):
            producer.fill(1, wrong, SECONDS)


def test_a_tensor_is_not_copied_onto_itself(loopback: Pair) -> None:
    producer, _, _ = make_edge(loopback, 1, 24)
    born = np.frombuffer(producer.slot(1, SECONDS), np.uint8)
    for overlapping in (born, born[::-1]):
        with pytest.raises(ArgumentError, match="lies in the memory"):
            producer.fill(1, overlapping, SECONDS)


def test_slots_are_of_the_specs_size(loopback: Pair) -> None:
    for nbytes in (20, 28):
        with pytest.raises(ArgumentError, match="has 24 bytes"):
            make_edge(loopback, 1, nbytes, spec=Spec((2, 3), "float32"))


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "object"), ((2,), "float128"), ((2,), "qint8"), ((-1,), "int8")])
def test_specs_that_nothing_carries(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ArgumentError):
        Spec(shape, dtype)


FAR = """
import hashlib, sys
from tensorwire.device import RemoteRegion, ShmDevice, TcpDevice
from tensorwire.edge import Consumer, Word
kind, sizes = sys.argv[1], [int(n) for n in sys.argv[2:]]
with {"shm": ShmDevice, "tcp": TcpDevice}[kind]() as device:
    inboxes = [device.allocate(64 + n) for n in sizes]
    print(device.address.hex(), *(r.remote().pack().hex() for r in inboxes), flush=True)
    address, credit = (bytes.fromhex(word) for word in input().split())
    channel = device.connect(address)
    for i, (n, inbox) in enumerate(zip(sizes, inboxes)):
        word = RemoteRegion.unpack(credit).view(8 * i, 8)
        edge = Consumer(Word(inbox, 0, channel), slots=[inbox.view(64).buffer], credit=(channel, word))
        print(hashlib.sha256(edge.receive(1, 60.0)).hexdigest(), flush=True)
        edge.release(1)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_between_processes(kind: str) -> None:
    from tensorwire.device import RemoteRegion
    from tensorwire.edge import Producer, Word

    raw = torch.arange(5 * 1001, dtype=torch.uint8)
    tensors = [torch.zeros(0), raw[:1], raw.view(5, 1001).T[::3], raw[:5000].view(torch.bfloat16)[::7]]
    sizes = [Spec.of(t).nbytes for t in tensors]
    child = subprocess.Popen(
        [sys.executable, "-c", FAR, kind, *map(str, sizes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child, KINDS[kind]() as device:
        assert child.stdin is not None
        assert child.stdout is not None
        address, *remotes = (bytes.fromhex(word) for word in child.stdout.readline().split())
        credit = device.allocate(8 * len(tensors))
        print(device.address.hex(), credit.remote().pack().hex(), file=child.stdin, flush=True)
        channel = device.connect(address)
        for i, (tensor, nbytes, packed) in enumerate(zip(tensors, sizes, remotes, strict=True)):
            inbox = RemoteRegion.unpack(packed)
            source = [] if device.capabilities.maps else [device.allocate(nbytes).view()]
            edge = Producer(
                channel,
                inbox.view(0, 8),
                slots=[inbox.view(64)],
                source=source,
                credit=Word(credit, 8 * i, channel),
                spec=Spec.of(tensor),
            )
            edge.fill(1, tensor, SECONDS)
            edge.send(1)
            assert child.stdout.readline().strip() == hashlib.sha256(bits(tensor)).hexdigest()
            edge.slot(2, SECONDS)  # given back
        child.stdin.close()
    assert child.returncode == 0
