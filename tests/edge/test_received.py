"""What was received, as arrays and tensors: the memory itself, for as long as anybody looks into it."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.edge import Received
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.observe import counters
from tests.edge.edges import Pair
from tests.edge.varying import EDGES, LIMIT, SECONDS, copied, make, make_dynamic

SHORT_FLOATS = [name for name in DTYPES if name == "bfloat16" or name.startswith("float8")]


def sent(pair: Pair, kind: str, tensor: Any) -> Received:
    """The tensor at the other end of an edge; one that is read in place may be written to there."""
    if kind == "dynamic":
        producer, consumer = make_dynamic(pair, 2, LIMIT, access="write")
    else:
        producer, consumer = make(kind, pair, 2, 1 << 16)  # type: ignore[assignment]
    copied(producer, 1, tensor)
    return consumer.receive(1, SECONDS)


def example(dtype: str, *shape: int) -> torch.Tensor:
    raw = torch.arange(int(np.prod(shape)) * DTYPES[dtype], dtype=torch.uint8)
    return (raw % 2 if dtype == "bool" else raw).view(getattr(torch, dtype)).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_a_tensor_of_torch(pair: Pair, kind: str, dtype: str) -> None:
    tensor = example(dtype, 2, 3, 4)
    before = counters.snapshot()
    received = sent(pair, kind, tensor)
    shown = torch.from_dlpack(received)
    assert (shown.dtype, shown.shape, raw(shown)) == (tensor.dtype, tensor.shape, raw(tensor))
    shown.view(torch.uint8).zero_()  # the memory itself
    assert not any(received.memory)
    done = counters.since(before)  # only what fill copied
    assert (done.copies, done.copied_bytes) == (1, tensor.nbytes)


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in SHORT_FLOATS])
def test_every_dtype_of_numpy_is_an_array(pair: Pair, kind: str, dtype: str) -> None:
    array = example(dtype, 2, 3, 4).numpy()
    received = sent(pair, kind, array)
    shown = received.numpy()
    assert (shown.dtype, shown.shape) == (array.dtype, array.shape)
    assert shown.tobytes() == array.tobytes()
    shown.view(np.uint8)[:] = 0
    assert not any(received.memory)
    assert np.from_dlpack(received).shape == array.shape


@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(pair: Pair, kind: str, shape: tuple[int, ...]) -> None:
    tensor = example("float64", *shape)
    received = sent(pair, kind, tensor)
    assert received.numpy().shape == shape
    assert torch.equal(torch.from_dlpack(received), tensor)


def test_short_floats_in_numpy_need_a_package(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in SHORT_FLOATS:
        received = sent(pair, "bounded", example(dtype, 4))
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(Unsupported, match=rf"numpy has no {dtype}: use torch.from_dlpack\(received\)"):
            received.numpy()
        stand_in = np.dtype(f"V{DTYPES[dtype]}")  # what that package registers
        monkeypatch.setitem(sys.modules, "ml_dtypes", SimpleNamespace(**{dtype: stand_in}))
        assert received.numpy().dtype == stand_in


@pytest.mark.parametrize("look", [torch.from_dlpack, Received.numpy, np.from_dlpack])
def test_a_view_keeps_the_memory(pair: Pair, look: Any) -> None:
    producer, consumer = make("bounded", pair, 1, 800)
    copied(producer, 1, np.full(100, 1.5))
    view = look(consumer.receive(1, SECONDS))[10:]  # nothing else is left of it
    gc.collect(1)  # what is young: the rest would take a second
    with pytest.raises(TimeoutError, match="gave back nothing"):
        producer.fill(2, np.full(100, 2.5), 0.01)
    assert float(view.sum()) == 135.0
    del view
    gc.collect(1)
    producer.fill(2, np.full(100, 2.5), SECONDS)


def test_memory_that_is_read_only_is_copied_or_refused(pair: Pair) -> None:
    producer, consumer = make_dynamic(pair, 2)
    copied(producer, 1, np.arange(5.0))
    received = consumer.receive(1, SECONDS)
    if not received.memory.readonly:
        assert not pair.consumer.capabilities.maps
        return
    assert not received.numpy().flags.writeable
    with pytest.raises(ArgumentError, match="and read-only here"):
        torch.from_dlpack(received)
    copy = torch.from_dlpack(received, copy=True)
    copy[0] = 7
    assert received.numpy()[0] == 0


def test_nothing_is_shown_after_release(pair: Pair) -> None:
    received = sent(pair, "bounded", np.arange(5))
    received.release()
    for look in (Received.numpy, torch.from_dlpack):
        with pytest.raises(ArgumentError, match="was released"):
            look(received)
