"""Models to measure and to plan with: the papers' six workloads, GPT-2 small, and a tiny one to try things out.

Each is a torch module that takes a batch and returns its loss. The parameters have the shapes of the papers on RDMA for
TensorFlow and MXNet, with 10 classes (LSTM and GRU: 1000 outputs), not those of a model zoo: Inception-v3's
normalisations have an offset and no scale, LSTM and GRU are cells written out with one matrix a gate. GPT-2 small has
OpenAI's, with tied embeddings. ``shrink`` divides the hidden sizes, for quick runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorwire.store.sharding import ParameterSpec

CLASSES = 10


@dataclass(frozen=True)
class Model:
    """A workload: ``build(shrink)`` makes the module, ``inputs(size, generator)`` a synthetic batch.

    ``name`` is what people type, ``title`` what they read. ``size``: samples a worker and step, such that a step takes
    a processor core about a second.
    """

    name: str
    title: str
    size: int
    build: Callable[[int], nn.Module]
    inputs: Callable[[int, torch.Generator], tuple[Tensor, ...]]

    @cached_property
    def tensors(self) -> tuple[ParameterSpec, ...]:
        """Its parameters, as a store sees them. Makes no memory for them."""
        with torch.device("meta"):
            named = list(self.build(1).named_parameters())
        return tuple(ParameterSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(t.elements for t in self.tensors)


class Classifier(nn.Module):
    """``net``'s classes for a batch and their labels: the mean cross entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Tensor, labels: Tensor) -> Tensor:
        """``batch``: what the net takes; ``labels``: int64, one a sample."""
        return functional.cross_entropy(self.net(batch), labels)


# ---- the three of images, and the plain one


def fcn5(shrink: int = 1) -> nn.Module:
    """784 inputs, four hidden layers of 4096, 10 classes."""
    return connected(784, *(4 * [4096 // shrink]))


def tiny(shrink: int = 1) -> nn.Module:
    """Some 8 MiB in odd sizes: three buckets."""
    return connected(33, 2051 // shrink, 1030 // shrink)


def connected(*widths: int) -> nn.Module:
    """Fully connected layers between these widths and the classes."""
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Classifier(nn.Sequential(*hidden, nn.Linear(widths[-1], CLASSES)))


def alexnet(shrink: int = 1) -> nn.Module:
    """Krizhevsky's "One weird trick" (arXiv 1404.5997) on 224 x 224, as the papers have it: fc6 takes 5 x 5."""
    a, b, c, d, wide = (n // shrink for n in (64, 192, 384, 256, 4096))
    layers = [
        *(nn.Conv2d(3, a, 11, 4), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(5 * 5 * d, wide), nn.ReLU(), nn.Dropout(), nn.Linear(wide, wide), nn.ReLU(), nn.Dropout()),
        nn.Linear(wide, CLASSES),
    ]
    return Classifier(nn.Sequential(*layers))


# Outputs of the convolutions; 0 is a pooling (arXiv 1409.1556, configuration D).
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def vgg16(shrink: int = 1) -> nn.Module:
    """Thirteen convolutions and three dense layers, on 224 x 224."""
    layers: list[nn.Module] = []
    channels, wide = 3, 4096 // shrink
    for out in _VGG16:
        layers += [nn.Conv2d(channels, out // shrink, 3, padding=1), nn.ReLU()] if out else [nn.MaxPool2d(2)]
        channels = out // shrink or channels
    layers += [nn.Flatten(), nn.Linear(7 * 7 * channels, wide), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(wide, wide), nn.ReLU(), nn.Dropout(), nn.Linear(wide, CLASSES)]
    return Classifier(nn.Sequential(*layers))


def images(side: int, flat: bool = False) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    """Noise with a label each: float32 [size, 3, side, side], or ``flat`` of one channel [size, side * side]."""

    def make(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (size, side * side) if flat else (size, 3, side, side)
        return torch.randn(shape, generator=generator), torch.randint(CLASSES, (size,), generator=generator)

    return make


# ---- Inception-v3 (arXiv 1512.00567)


class _Offset(nn.BatchNorm2d):
    """Batch normalisation with an offset (beta) and no scale (gamma)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, affine=False)
        self.bias = nn.Parameter(torch.zeros(channels))


class _Branches(nn.Module):
    """The outputs of all branches, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Inception(nn.Module):
    """Inception-v3 on 299 x 299 with its auxiliary head, whose loss counts 0.4."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__()
        self._shrink = shrink
        chain, pool = self._chain, nn.MaxPool2d(3, 2)
        self.stem = nn.Sequential(
            chain(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3)), pool, chain(64, (80, 1), (192, 3, 1, 0)), pool
        )
        self.grid35 = nn.Sequential(self._mixed5(192, 32), self._mixed5(256, 64), self._mixed5(288, 64))
        down6 = _Branches(chain(288, (384, 3, 2, 0)), chain(288, (64, 1), (96, 3), (96, 3, 2, 0)), pool)
        self.grid17 = nn.Sequential(down6, *(self._mixed6(width) for width in (128, 160, 160, 192)))
        left = chain(768, (192, 1), (320, 3, 2, 0))
        right = chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2, 0))
        self.grid8 = nn.Sequential(_Branches(left, right, pool), self._mixed7(1280), self._mixed7(2048))
        self.head = nn.Linear(2048 // shrink, CLASSES)
        self.aux = nn.Sequential(
            nn.AvgPool2d(5, 3), chain(768, (128, 1), (768, 5, 1, 0)), nn.Flatten(), nn.Linear(768 // shrink, CLASSES)
        )

    def forward(self, batch: Tensor, labels: Tensor) -> Tensor:
        """The loss of both heads."""
        middle = self.grid17(self.grid35(self.stem(batch)))
        out = self.head(functional.dropout(self.grid8(middle).mean((2, 3)), 0.2, self.training))
        return functional.cross_entropy(out, labels) + 0.4 * functional.cross_entropy(self.aux(middle), labels)

    def _chain(self, channels: int, *convolutions: tuple[Any, ...]) -> nn.Sequential:
        """Convolutions of (outputs, kernel, stride, padding), each normalised; they keep the size unless said."""
        layers: list[nn.Module] = []
        inputs = channels if channels == 3 else channels // self._shrink
        for out, kernel, *rest in convolutions:
            sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
            stride, padding = rest or (1, tuple(side // 2 for side in sides))
            outputs = out // self._shrink
            layers += [nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False), _Offset(outputs), nn.ReLU()]
            inputs = outputs
        return nn.Sequential(*layers)

    def _pooled(self, channels: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), self._chain(channels, (out, 1)))

    def _mixed5(self, n: int, pooled: int) -> _Branches:
        chain = self._chain
        double = chain(n, (64, 1), (96, 3), (96, 3))
        return _Branches(chain(n, (64, 1)), chain(n, (48, 1), (64, 5)), double, self._pooled(n, pooled))

    def _mixed6(self, width: int) -> _Branches:
        row, column = (width, (1, 7)), (width, (7, 1))
        single = self._chain(768, (width, 1), row, (192, (7, 1)))
        double = self._chain(768, (width, 1), column, row, column, (192, (1, 7)))
        return _Branches(self._chain(768, (192, 1)), single, double, self._pooled(768, 192))

    def _mixed7(self, n: int) -> _Branches:
        def split() -> _Branches:
            return _Branches(self._chain(384, (384, (1, 3))), self._chain(384, (384, (3, 1))))

        single = nn.Sequential(self._chain(n, (384, 1)), split())
        double = nn.Sequential(self._chain(n, (448, 1), (384, 3)), split())
        return _Branches(self._chain(n, (320, 1)), single, double, self._pooled(n, 192))


# ---- the recurrent ones: cells written out

_STEPS, _FEATURES, _OUTPUTS = 10, 1024, 1000


class _Products(nn.Module):
    """What the gates make of the input, or of the state: a matrix each, and a bias if there is one."""

    def __init__(self, matrices: nn.ParameterList, biases: nn.ParameterList | None = None) -> None:
        super().__init__()
        self.matrices, self.biases = matrices, biases

    def forward(self, k: int, x: Tensor) -> Tensor:
        """Of gate ``k``."""
        product: Tensor = (
            x @ self.matrices[k] if self.biases is None else torch.addmm(self.biases[k], x, self.matrices[k])
        )
        return product


class Recurrent(nn.Module):
    """What LSTM and GRU share: per gate a matrix for the input, one for the state, a bias; a dense layer at the end."""

    def __init__(self, gates: int, shrink: int) -> None:
        super().__init__()
        self.wide = _FEATURES // shrink
        x, h = (self._made(gates, self.wide, self.wide) for _ in range(2))
        self.inputs, self.states = _Products(x, self._made(gates, self.wide)), _Products(h)
        self.out = nn.Linear(self.wide, _OUTPUTS)

    def _made(self, gates: int, *shape: int) -> nn.ParameterList:
        bound = 1 / math.sqrt(self.wide)
        return nn.ParameterList(nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for _ in range(gates))

    def gate(self, k: int, x: Tensor, h: Tensor) -> Tensor:
        """Gate ``k`` before its activation."""
        before: Tensor = self.inputs(k, x) + self.states(k, h)
        return before

    def forward(self, batch: Tensor, labels: Tensor) -> Tensor:
        """``batch``: float32 [steps, size, features]; one label a sequence."""
        h = c = batch.new_zeros(batch.shape[1], self.wide)
        for x in batch[..., : self.wide]:
            h, c = self.cell(x, h, c)
        return functional.cross_entropy(self.out(h), labels)

    def cell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the next state and memory."""
        raise NotImplementedError


class LSTM(Recurrent):
    """Gates: input, forget, output, candidate."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__(4, shrink)

    def cell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o = (torch.sigmoid(self.gate(k, x, h)) for k in range(3))
        c = f * c + i * torch.tanh(self.gate(3, x, h))
        return o * torch.tanh(c), c


class GRU(Recurrent):
    """Gates: reset, update, candidate."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__(3, shrink)

    def cell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        r, z = (torch.sigmoid(self.gate(k, x, h)) for k in range(2))
        candidate = torch.tanh(self.gate(2, x, r * h))
        return (1 - z) * candidate + z * h, c


def sequences(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Noise, one label a sequence."""
    batch = torch.randn((_STEPS, size, _FEATURES), generator=generator)
    return batch, torch.randint(_OUTPUTS, (size,), generator=generator)


# ---- GPT-2 small

_VOCABULARY, _CONTEXT, _TOKENS = 50257, 1024, 64


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        wide: Tensor = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.down(wide)
        return out


class GPT2(nn.Module):
    """GPT-2 small: 12 blocks of width 768, the output tied to the token embedding, no dropout."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__()
        width = 768 // shrink
        self.tokens, self.places = nn.Embedding(_VOCABULARY // shrink, width), nn.Embedding(_CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, 12) for _ in range(12 if shrink == 1 else 2))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """``text``: int64 [size, tokens]; the mean loss of the next token."""
        text = text % self.tokens.num_embeddings
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def texts(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens by chance."""
    return (torch.randint(_VOCABULARY, (size, _TOKENS), generator=generator),)


def vectors(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Noise, 33 values a sample, and a label for each."""
    return torch.randn((size, 33), generator=generator), torch.randint(CLASSES, (size,), generator=generator)


# The seven that figures are told of, and a small one to try things out with.
MODELS = {
    model.name: model
    for model in (
        Model("alexnet", "AlexNet", 8, alexnet, images(224)),
        Model("inception", "Inception-v3", 2, Inception, images(299)),
        Model("vgg16", "VGG-16", 1, vgg16, images(224)),
        Model("lstm", "LSTM", 64, LSTM, sequences),
        Model("gru", "GRU", 64, GRU, sequences),
        Model("fcn5", "FCN-5", 64, fcn5, images(28, flat=True)),
        Model("gpt2", "GPT-2 small", 1, GPT2, texts),
    )
}
TINY = Model("tiny", "tiny", 64, tiny, vectors)


def find(name: str) -> Model:
    """A model by name. Raises `KeyError`."""
    return TINY if name == TINY.name else MODELS[name]
