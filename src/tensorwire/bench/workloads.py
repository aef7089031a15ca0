"""The models whose tensors stores are measured with: names and shapes, as a store sees them. No framework is needed.

AlexNet, Inception-v3, VGG-16, LSTM, GRU and FCN-5 have the shapes of the papers on RDMA for TensorFlow and MXNet, with
10 classes (LSTM and GRU: 1000 outputs); they are not torchvision's. GPT-2 small has OpenAI's, with tied embeddings.
Shapes stand as torch has them: outputs first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tensorwire.store.plan import TensorSpec

CLASSES = 10
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class Model:
    """A model's tensors, in the order of its layers. ``name`` is what people type, ``title`` what they read."""

    name: str
    title: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(t.elements for t in self.tensors)

    @property
    def mean(self) -> float:
        """Bytes of the mean tensor."""
        return self.nbytes / len(self.tensors)

    @property
    def median(self) -> float:
        """Bytes of the median tensor."""
        return statistics.median(t.nbytes for t in self.tensors)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(t.nbytes for t in self.tensors)

    @property
    def small(self) -> int:
        """How many tensors have less than 4 KiB."""
        return sum(t.nbytes < 4 * _KIB for t in self.tensors)

    @property
    def large(self) -> int:
        """How many tensors have 1 MiB or more."""
        return sum(t.nbytes >= _MIB for t in self.tensors)


class _Layers:
    """Collects tensors of float32 layer by layer."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []

    def add(self, name: str, *shape: int) -> None:
        self.tensors.append(TensorSpec(name, shape, "float32"))

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        self.add(f"{name}.bias", outputs)

    def conv(self, name: str, inputs: int, outputs: int, height: int, width: int) -> None:
        self.add(f"{name}.weight", outputs, inputs, height, width)
        self.add(f"{name}.bias", outputs)

    def model(self, name: str, title: str) -> Model:
        return Model(name, title, tuple(self.tensors))


def fcn(name: str, title: str, widths: Sequence[int]) -> Model:
    """Fully connected layers between these widths."""
    layers = _Layers()
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.linear(f"fc{i + 1}", inputs, outputs)
    return layers.model(name, title)


def _alexnet() -> Model:
    layers = _Layers()
    sizes = ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 384, 3), (384, 256, 3))
    for i, (inputs, outputs, kernel) in enumerate(sizes):
        layers.conv(f"conv{i + 1}", inputs, outputs, kernel, kernel)
    layers.conv("fc6", 256, 4096, 5, 5)  # convolutions over all there is, as in TensorFlow's models
    layers.conv("fc7", 4096, 4096, 1, 1)
    layers.conv("fc8", 4096, CLASSES, 1, 1)
    return layers.model("alexnet", "AlexNet")


def _vgg16() -> Model:
    layers = _Layers()
    inputs = 3
    for block, (outputs, convolutions) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for i in range(convolutions):
            layers.conv(f"conv{block + 1}_{i + 1}", inputs, outputs, 3, 3)
            inputs = outputs
    layers.linear("fc6", 512 * 7 * 7, 4096)
    layers.linear("fc7", 4096, 4096)
    layers.linear("fc8", 4096, CLASSES)
    return layers.model("vgg16", "VGG-16")


# Inception-v3: (outputs, height, width) of the convolutions along each path of a block; their inputs follow.
_Path = tuple[tuple[int, int, int], ...]


def _inception_a(pool: int) -> list[_Path]:
    return [((64, 1, 1),), ((48, 1, 1), (64, 5, 5)), ((64, 1, 1), (96, 3, 3), (96, 3, 3)), ((pool, 1, 1),)]


def _inception_b(n: int) -> list[_Path]:
    long = ((n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7))
    return [((192, 1, 1),), ((n, 1, 1), (n, 1, 7), (192, 7, 1)), long, ((192, 1, 1),)]


_STEM: _Path = ((32, 3, 3), (32, 3, 3), (64, 3, 3), (80, 1, 1), (192, 3, 3))
_BLOCKS: list[tuple[str, int, list[_Path]]] = [
    ("mixed_5b", 192, _inception_a(32)),
    ("mixed_5c", 256, _inception_a(64)),
    ("mixed_5d", 288, _inception_a(64)),
    ("mixed_6a", 288, [((384, 3, 3),), ((64, 1, 1), (96, 3, 3), (96, 3, 3))]),
    ("mixed_6b", 768, _inception_b(128)),
    ("mixed_6c", 768, _inception_b(160)),
    ("mixed_6d", 768, _inception_b(160)),
    ("mixed_6e", 768, _inception_b(192)),
    ("mixed_7a", 768, [((192, 1, 1), (320, 3, 3)), ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3))]),
]


def _inception_v3() -> Model:
    """Convolutions without bias, each followed by a batch norm that has only its beta."""
    layers = _Layers()

    def conv(name: str, inputs: int, outputs: int, height: int, width: int) -> int:
        layers.add(f"{name}.weight", outputs, inputs, height, width)
        layers.add(f"{name}.beta", outputs)
        return outputs

    def path(name: str, inputs: int, convolutions: _Path) -> int:
        for i, (outputs, height, width) in enumerate(convolutions):
            inputs = conv(f"{name}.{i}", inputs, outputs, height, width)
        return inputs

    path("stem", 3, _STEM)
    for block, inputs, paths in _BLOCKS:
        for i, convolutions in enumerate(paths):
            path(f"{block}.{i}", inputs, convolutions)
    for block, inputs in (("mixed_7b", 1280), ("mixed_7c", 2048)):
        path(f"{block}.0", inputs, ((320, 1, 1),))
        for i, stem in ((1, ((384, 1, 1),)), (2, ((448, 1, 1), (384, 3, 3)))):
            split = path(f"{block}.{i}", inputs, stem)
            conv(f"{block}.{i}.wide", split, 384, 1, 3)
            conv(f"{block}.{i}.high", split, 384, 3, 1)
        path(f"{block}.3", inputs, ((192, 1, 1),))
    path("aux", 768, ((128, 1, 1), (768, 5, 5)))
    layers.conv("aux.logits", 768, CLASSES, 1, 1)
    layers.conv("logits", 2048, CLASSES, 1, 1)
    return layers.model("inception", "Inception-v3")


def _recurrent(name: str, title: str, gates: int, width: int = 1024, outputs: int = 1000) -> Model:
    layers = _Layers()
    for i in range(gates):
        layers.add(f"gate{i}.input", width, width)
        layers.add(f"gate{i}.hidden", width, width)
        layers.add(f"gate{i}.bias", width)
    layers.linear("out", width, outputs)
    return layers.model(name, title)


def _gpt2(width: int = 768, blocks: int = 12, words: int = 50257, positions: int = 1024) -> Model:
    """The head shares its weight with the embedding of words, so it is no tensor of its own."""
    layers = _Layers()
    layers.add("wte.weight", words, width)
    layers.add("wpe.weight", positions, width)
    for i in range(blocks):
        for name, inputs, outputs in (
            ("ln_1", 0, width),
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("ln_2", 0, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            if inputs:
                layers.linear(f"h.{i}.{name}", inputs, outputs)
            else:
                _norm(layers, f"h.{i}.{name}", outputs)
    _norm(layers, "ln_f", width)
    return layers.model("gpt2", "GPT-2 small")


def _norm(layers: _Layers, name: str, width: int) -> None:
    layers.add(f"{name}.weight", width)
    layers.add(f"{name}.bias", width)


# The seven that figures are told of, and a small one to try things out with.
MODELS = {
    model.name: model
    for model in (
        _alexnet(),
        _inception_v3(),
        _vgg16(),
        _recurrent("lstm", "LSTM", 4),
        _recurrent("gru", "GRU", 3),
        fcn("fcn5", "FCN-5", (784, 4096, 4096, 4096, 4096, CLASSES)),
        _gpt2(),
    )
}
TINY = fcn("tiny", "tiny", (33, 2051, 1030, CLASSES))  # some 8 MiB: three buckets, odd sizes


def find(name: str) -> Model:
    """A model by name. Raises `KeyError`."""
    return TINY if name == TINY.name else MODELS[name]
