"""Rules over numpy arrays have the bits of torch's arithmetic, in every floating-point dtype, and keep masters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.store.admission import versions
from tensorwire.store.arithmetic_rules import make_rule
from tensorwire.store.half_precision import half_to_single, single_to_half
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import ELASTIC, MEAN, SUM
from tensorwire.store.sharding import ParameterSpec
from tensorwire.store.store_layout import StoreSpec

COUNT = 1000
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Store:
    """One bucket of a tensor of floats and one of whole numbers, and slots of some workers."""

    def __init__(self, rule: str, dtype: str, workers: int) -> None:
        tensors = [ParameterSpec("x", (COUNT,), dtype), ParameterSpec("n", (3,), "int64")]
        spec = StoreSpec(versions(), tensors, rule, [{"alpha": 0.3}], [(0, "alpha", -1)], 1 << 20, False)
        self.plan = spec.plan(1)
        self.memory = bytearray(self.plan.shard_bytes[0])
        self.slots = [bytearray(self.plan.shard_bytes[0]) for _ in range(workers)]
        self.kind: torch.dtype = getattr(torch, dtype)
        self.start(self.memory, 0)
        self.rule = make_rule(spec, self.plan, 0, memoryview(self.memory))
        self.rule.set_options((0.3,))

    def tensor(self, memory: bytearray) -> torch.Tensor:
        (bucket,) = self.plan.buckets[0]
        offset = next(p.offset for p in bucket.pieces if p.tensor == 0)
        return torch.frombuffer(memory, dtype=self.kind, count=COUNT, offset=offset)

    def start(self, memory: bytearray, seed: int) -> torch.Tensor:
        drawn = torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.tensor(memory).copy_(drawn)
        return self.tensor(memory)

    def push(self, seed: int) -> list[Push]:
        for number, slot in enumerate(self.slots):
            self.start(slot, seed + number)
        return [Push(number, memoryview(slot), b"\1\1") for number, slot in enumerate(self.slots)]

    def round(self, seed: int, divisor: float) -> None:
        pushes = self.push(seed)
        self.rule.reduce(0, pushes, divisor, keep=True)
        self.rule.apply(0, 0)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("rule", [SUM, MEAN])
def test_sums_and_means_have_the_bits_of_torch(rule: str, workers: int, dtype: str) -> None:
    store = Store(rule, dtype, workers)
    master = wide(store.tensor(store.memory))
    for seed in (10, 20):
        store.round(seed, workers)
        found = [wide(store.tensor(slot)) for slot in store.slots]
        total = found[0]
        for other in found[1:]:
            total = total + other
        total = total / workers
        master = total if rule == MEAN else master + total
        assert torch.equal(store.tensor(store.memory), master.to(store.kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_elastic_rule_has_the_bits_of_torch(dtype: str) -> None:
    store = Store(ELASTIC, dtype, 1)
    master = wide(store.tensor(store.memory))
    for seed in (10, 20):
        pushed = store.start(store.slots[0], seed).clone()
        own = store.tensor(store.memory).clone()
        store.round(seed, 1)
        moved = pushed.sub_(own).mul_(0.3)
        master = master + moved
        assert torch.equal(store.tensor(store.slots[0]), moved)
        assert torch.equal(store.tensor(store.memory), master.to(store.kind))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_are_saved_and_loaded(dtype: str) -> None:
    store, other = Store(SUM, dtype, 2), Store(SUM, dtype, 2)
    store.round(10, 1)
    saved = [(entry, memoryview(bytes(data))) for part in store.rule.state() for entry, data in part]
    assert [entry.key for entry, _ in saved] == ["master"]
    other.memory[:] = store.memory
    other.rule.load_state(saved)
    for each in (store, other):
        each.round(30, 1)
    assert store.memory == other.memory


def test_halves_round_as_torch_does() -> None:
    values: Any = np.array([0, -0.0, 1e-8, 1.00390625, 1.01171875, 65519, 65520, 3.4e38, np.inf, -np.inf], np.float32)
    for dtype in ("bfloat16", "float16"):
        bits = single_to_half(values, dtype)
        wanted = torch.from_numpy(values).to(getattr(torch, dtype))
        assert torch.equal(torch.from_numpy(half_to_single(bits)), wanted.float())
    assert np.isnan(half_to_single(single_to_half(np.array([np.nan], np.float32), "bfloat16"))).all()
