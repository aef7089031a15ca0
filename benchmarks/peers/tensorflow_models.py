"""The papers' six workloads as operators of TensorFlow, in two parts that may be on different workers.

Their parameters have the shapes of ``tensorwire.models``, in TensorFlow's order of dimensions. There is no
dropout, so that two runtimes compute the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

CLASSES = 10
STEPS, FEATURES, OUTPUTS = 10, 1024, 1000  # of the recurrent ones
Tensors = list[Any]
Part = Callable[[Tensors], Tensors]


@dataclass
class Maker:
    """Makes variables, whose values are the same in every process. ``shrink`` divides hidden sizes."""

    shrink: int
    variables: list[Any] = field(default_factory=list)

    def variable(self, *shape: int, scale: float | None = None) -> Any:
        """Noise; of that scale, or of one that keeps the size of what is multiplied by it; or zeros."""
        drawn = np.random.default_rng(len(self.variables)).standard_normal(shape, np.float32)
        fan_in = math.prod(shape[:-1]) or 1
        self.variables.append(tf.Variable(drawn * np.float32(math.sqrt(2 / fan_in) if scale is None else scale)))
        return self.variables[-1]

    def dense(self, inputs: int, outputs: int, *, relu: bool = True) -> Part:
        """A fully connected layer."""
        w, b = self.variable(inputs, outputs), self.variable(outputs, scale=0.0)
        return lambda x: [tf.nn.relu(x[0] @ w + b) if relu else x[0] @ w + b]

    def conv(self, inputs: int, outputs: int, side: int, stride: int = 1, padding: str = "SAME") -> Part:
        """A convolution with a bias."""
        w, b = self.variable(side, side, inputs, outputs), self.variable(outputs, scale=0.0)
        return lambda x: [tf.nn.relu(tf.nn.conv2d(x[0], w, stride, padding) + b)]

    def chain(self, inputs: int, *convolutions: tuple[Any, ...]) -> Part:
        """Convolutions of (outputs, side or sides, stride, padding), each normalised with an offset and no scale."""
        layers: list[Part] = []
        inputs = inputs if inputs == 3 else inputs // self.shrink
        for outputs, sides, *rest in convolutions:
            high, wide = sides if isinstance(sides, tuple) else (sides, sides)
            layers.append(self._normalised(high, wide, inputs, outputs // self.shrink, *rest))
            inputs = outputs // self.shrink
        return chained(layers)

    def _normalised(
        self, high: int, wide: int, inputs: int, outputs: int, stride: int = 1, padding: str = "SAME"
    ) -> Part:
        w, offset = self.variable(high, wide, inputs, outputs), self.variable(outputs, scale=0.0)

        def call(x: Tensors) -> Tensors:
            y = tf.nn.conv2d(x[0], w, stride, padding)
            mean, variance = tf.nn.moments(y, [0, 1, 2])
            return [tf.nn.relu((y - mean) * tf.math.rsqrt(variance + 1e-3) + offset)]

        return call


@dataclass
class Network:
    """``first`` and ``second``: the parts; the second ends with the logits of one head or more.

    ``split``: how many of the variables belong to the first. ``heads``: what the loss of each head counts.
    """

    first: Part
    second: Part
    variables: list[Any]
    split: int
    heads: tuple[float, ...] = (1.0,)

    def loss(self, logits: Tensors, labels: Any) -> Any:
        """The mean cross entropy of all heads."""
        each = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, one) for one in logits]
        return tf.add_n([weight * tf.reduce_mean(one) for weight, one in zip(self.heads, each, strict=True)])


Scope = Callable[[int], Any]


def chained(parts: Sequence[Part]) -> Part:
    """One after the other."""

    def call(x: Tensors) -> Tensors:
        for part in parts:
            x = part(x)
        return x

    return call


def pool(side: int, stride: int) -> Part:
    """The largest of each square."""
    return lambda x: [tf.nn.max_pool2d(x[0], side, stride, "VALID")]


def flat(x: Tensors) -> Tensors:
    """A row for each sample."""
    return [tf.reshape(x[0], [x[0].shape[0], -1])]


def beside(*branches: Part) -> Part:
    """The channels of all branches."""
    return lambda x: [tf.concat([branch(x)[0] for branch in branches], 3)]


def built(shrink: int, scope: Scope, first: Callable[[Maker], Part], second: Callable[[Maker], Part]) -> Network:
    """Both parts, whose variables are made in ``scope(0)`` and ``scope(1)``."""
    make = Maker(shrink)
    with scope(0):
        one = first(make)
    split = len(make.variables)
    with scope(1):
        two = second(make)
    return Network(one, two, make.variables, split)


def fcn5(shrink: int, scope: Scope) -> Network:
    """Cut in the middle of the hidden layers."""
    wide = 4096 // shrink
    return built(
        shrink,
        scope,
        lambda m: chained([m.dense(784, wide), m.dense(wide, wide), m.dense(wide, wide)]),
        lambda m: chained([m.dense(wide, wide), m.dense(wide, CLASSES, relu=False)]),
    )


def alexnet(shrink: int, scope: Scope) -> Network:
    """Cut between convolutions and dense layers."""
    a, b, c, d, wide = (n // shrink for n in (64, 192, 384, 256, 4096))

    def first(m: Maker) -> Part:
        layers = [m.conv(3, a, 11, 4, "VALID"), pool(3, 2), m.conv(a, b, 5), pool(3, 2)]
        return chained([*layers, m.conv(b, c, 3), m.conv(c, c, 3), m.conv(c, d, 3), pool(3, 2)])

    def second(m: Maker) -> Part:
        return chained([flat, m.dense(25 * d, wide), m.dense(wide, wide), m.dense(wide, CLASSES, relu=False)])

    return built(shrink, scope, first, second)


_VGG16 = ((64, 64, 0, 128, 128, 0, 256, 256, 256, 0), (512, 512, 512, 0, 512, 512, 512, 0))  # 0: a pooling


def vgg16(shrink: int, scope: Scope) -> Network:
    """Cut after the third block of convolutions."""

    def convolutions(m: Maker, channels: int, outputs: Sequence[int]) -> list[Part]:
        layers: list[Part] = []
        for out in outputs:
            layers.append(m.conv(channels, out // shrink, 3) if out else pool(2, 2))
            channels = out // shrink or channels
        return layers

    def second(m: Maker) -> Part:
        layers, wide = convolutions(m, 256 // shrink, _VGG16[1]), 4096 // shrink
        dense = [m.dense(49 * 512 // shrink, wide), m.dense(wide, wide), m.dense(wide, CLASSES, relu=False)]
        return chained([*layers, flat, *dense])

    return built(shrink, scope, lambda m: chained(convolutions(m, 3, _VGG16[0])), second)


def inception(shrink: int, scope: Scope) -> Network:
    """Cut between the grids of 35 and of 17, with the auxiliary head in the second part."""

    def average(x: Tensors) -> Tensors:
        return [tf.nn.avg_pool2d(x[0], 3, 1, "SAME")]

    def first(m: Maker) -> Part:
        chain = m.chain

        def mixed(n: int, pooled: int) -> Part:
            double = chain(n, (64, 1), (96, 3), (96, 3))
            last = chained([average, chain(n, (pooled, 1))])
            return beside(chain(n, (64, 1)), chain(n, (48, 1), (64, 5)), double, last)

        stem = [chain(3, (32, 3, 2, "VALID"), (32, 3, 1, "VALID"), (64, 3)), pool(3, 2)]
        stem += [chain(64, (80, 1), (192, 3, 1, "VALID")), pool(3, 2)]
        return chained([*stem, mixed(192, 32), mixed(256, 64), mixed(288, 64)])

    def second(m: Maker) -> Part:
        chain = m.chain

        def mixed17(width: int) -> Part:
            row, column = (width, (1, 7)), (width, (7, 1))
            single = chain(768, (width, 1), row, (192, (7, 1)))
            double = chain(768, (width, 1), column, row, column, (192, (1, 7)))
            return beside(chain(768, (192, 1)), single, double, chained([average, chain(768, (192, 1))]))

        def mixed8(n: int) -> Part:
            def split() -> Part:
                return beside(chain(384, (384, (1, 3))), chain(384, (384, (3, 1))))

            single = chained([chain(n, (384, 1)), split()])
            double = chained([chain(n, (448, 1), (384, 3)), split()])
            return beside(chain(n, (320, 1)), single, double, chained([average, chain(n, (192, 1))]))

        narrow = beside(chain(288, (384, 3, 2, "VALID")), chain(288, (64, 1), (96, 3), (96, 3, 2, "VALID")), pool(3, 2))
        grid17 = chained([narrow, *(mixed17(width) for width in (128, 160, 160, 192))])
        left = chain(768, (192, 1), (320, 3, 2, "VALID"))
        right = chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2, "VALID"))
        grid8 = chained([beside(left, right, pool(3, 2)), mixed8(1280), mixed8(2048)])
        head = m.dense(2048 // shrink, CLASSES, relu=False)
        aside = chain(768, (128, 1), (768, 5, 1, "VALID"))
        other = m.dense(768 // shrink, CLASSES, relu=False)

        def call(x: Tensors) -> Tensors:
            (middle,) = grid17(x)
            out = head([tf.reduce_mean(grid8([middle])[0], [1, 2])])
            return [*out, *other(flat(aside([tf.nn.avg_pool2d(middle, 5, 3, "VALID")])))]

        return call

    found = built(shrink, scope, first, second)
    found.heads = (1.0, 0.4)
    return found


def recurrent(gates: int, cell: Callable[..., tuple[Any, Any]]) -> Callable[[int, Scope], Network]:
    """All products of inputs in the first part, the states one after the other in the second."""

    def build(shrink: int, scope: Scope) -> Network:
        wide = FEATURES // shrink
        scale = 1 / math.sqrt(3 * wide)

        def first(m: Maker) -> Part:
            pairs = [(m.variable(wide, wide, scale=scale), m.variable(wide, scale=0.0)) for _ in range(gates)]

            def call(x: Tensors) -> Tensors:
                rows = tf.reshape(x[0][..., :wide], [-1, wide])
                return [tf.reshape(rows @ w + b, [STEPS, -1, wide]) for w, b in pairs]

            return call

        def second(m: Maker) -> Part:
            states = [m.variable(wide, wide, scale=scale) for _ in range(gates)]
            out = m.dense(wide, OUTPUTS, relu=False)

            def call(x: Tensors) -> Tensors:
                read = [tf.convert_to_tensor(w) for w in states]  # once, or each step's read would cross by itself
                h = c = tf.zeros([x[0].shape[1] or tf.shape(x[0])[1], wide])
                for step in range(STEPS):
                    h, c = cell([one[step] for one in x], read, h, c)
                return out([h])

            return call

        return built(shrink, scope, first, second)

    return build


def _lstm(x: Tensors, w: Tensors, h: Any, c: Any) -> tuple[Any, Any]:
    i, f, o = (tf.sigmoid(x[k] + h @ w[k]) for k in range(3))
    c = f * c + i * tf.tanh(x[3] + h @ w[3])
    return o * tf.tanh(c), c


def _gru(x: Tensors, w: Tensors, h: Any, c: Any) -> tuple[Any, Any]:
    r, z = (tf.sigmoid(x[k] + h @ w[k]) for k in range(2))
    candidate = tf.tanh(x[2] + (r * h) @ w[2])
    return (1 - z) * candidate + z * h, c


NETWORKS: dict[str, Callable[[int, Scope], Network]] = {
    "alexnet": alexnet,
    "inception": inception,
    "vgg16": vgg16,
    "lstm": recurrent(4, _lstm),
    "gru": recurrent(3, _gru),
    "fcn5": fcn5,
}
_SIDES = {"alexnet": 224, "vgg16": 224, "inception": 299}


def batch(name: str, size: int) -> tuple[Any, Any]:
    """Noise, and a label for each sample."""
    rng = np.random.default_rng(1)
    if name in _SIDES:
        shape: tuple[int, ...] = (size, _SIDES[name], _SIDES[name], 3)
    else:
        shape = (size, 784) if name == "fcn5" else (STEPS, size, FEATURES)
    classes = OUTPUTS if name in ("lstm", "gru") else CLASSES
    return rng.standard_normal(shape, np.float32), rng.integers(0, classes, size).astype(np.int32)
