"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """Programs of this test; each test says itself when nothing may be left."""
    made = Sandbox(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def allocator_built() -> None:
    """No program of a test has to build it, and to tell people so."""
    from tensorwire.torch.graph.memory import allocator

    allocator._load()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch computes with as many threads as in the processes of jobs, with which results are compared.

    Convolutions have other bits with more, and where a CPU has AMX also products of bfloat16 matrices, as in Muon.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
