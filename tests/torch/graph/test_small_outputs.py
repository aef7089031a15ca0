"""Small outputs reach every worker in every run, also where only the run knows how large they are."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.graph.kinds import SMALL
from tensorwire.torch.graph.placement.remote_tensor import here_now, location_of
from tests.harness.jobs import run_job
from tests.torch.graph.training import wrong_gradients


class Classifier(nn.Module):
    """256 bytes of logits a sample: 64 KiB for 256 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


class Language(nn.Module):
    """Its text grows by one token a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.head(torch.tanh(self.mix(h.cumsum(1))))


def epochs(job: tw.Job) -> list[Any]:
    """Batches of several sizes, each read on every worker, with gradients."""
    torch.manual_seed(0)
    model = Classifier()
    alone = copy.deepcopy(model)
    tw.torch.place(model, {"": 0, "body": job.num_workers - 1})
    compiled = torch.compile(model, backend="tensorwire")
    criterion = torch.compile(nn.functional.cross_entropy, backend="tensorwire")
    found: list[Any] = []
    for step, size in enumerate((4, 4, 3, 4, 4, 300, 3, 256, 257, 4)):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(size, 8, generator=generator), torch.randint(0, 64, (size,), generator=generator)
        logits, right = compiled(x), alone(x)
        assert logits.shape == right.shape
        if size * 256 <= SMALL or job.rank == 0:
            found.append((size, torch.equal(logits, right)))
        else:
            with pytest.raises(tw.errors.NotOnThisWorker, match="is on worker 0"):
                logits.sum()
            found.append((size, "elsewhere"))
        losses = [criterion(logits, y), nn.functional.cross_entropy(right, y)]
        found.append(torch.equal(*losses))
        for loss in losses:
            loss.backward()
        found.append(wrong_gradients(model, alone) == [])
    return found


def decode(job: tw.Job) -> list[bool]:
    torch.manual_seed(0)
    model = Language().eval()
    alone = copy.deepcopy(model)
    tw.torch.place(model, {"": 0, "mix": job.num_workers - 1})
    texts = []
    with torch.no_grad():
        for one in (torch.compile(model, backend="tensorwire"), alone):
            ids = torch.tensor([[1, 2, 3]])
            for _ in range(8):
                ids = torch.cat([ids, one(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
            texts.append(ids)
    return [torch.equal(*texts), texts[0].shape == (1, 11)]


def both(job: tw.Job) -> tuple[list[Any], list[bool]]:
    found = epochs(job)
    torch._dynamo.reset()
    return found, decode(job)


@pytest.mark.parametrize(("workers", "device"), [(2, "shm"), pytest.param(3, "tcp", marks=pytest.mark.long)])
def test_small_outputs_of_varying_size_are_read_everywhere(workers: int, device: str) -> None:
    results = run_job(both, workers=workers, servers=0, device=device).ok()
    for rank, (batches, text) in enumerate(results):
        assert text == [True, True]
        for size, (shown, *same) in zip((4, 4, 3, 4, 4, 300, 3, 256, 257, 4), _threes(batches), strict=True):
            assert shown == (size, True if size <= 256 or rank == 0 else "elsewhere")
            assert same == [True, True]


def test_an_output_that_is_here_in_this_run_is_like_any_other_tensor() -> None:
    plain = torch.arange(6.0).view(2, 3)
    tensor = here_now(plain.clone())
    assert location_of(tensor) is None
    assert (repr(tensor), tensor.tolist(), str(tensor[0])) == (repr(plain), plain.tolist(), str(plain[0]))
    for made in (copy.deepcopy(tensor), copy.copy(tensor), pickle.loads(pickle.dumps(tensor)), tensor + 0, tensor[:]):
        assert type(made) is torch.Tensor
        assert torch.equal(made, plain)
    assert numpy.array_equal(numpy.asarray(tensor), plain.numpy())
    assert float(tensor.sum()) == 15
    tensor.add_(1)
    assert torch.equal(tensor, plain + 1)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain + 1)


def _threes(found: list[Any]) -> list[list[Any]]:
    return [found[i : i + 3] for i in range(0, len(found), 3)]
