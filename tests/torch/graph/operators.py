"""Operators with arguments, to be born: what graphs of models are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Values = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operator, what makes its arguments, and those outputs that are born together."""

    name: str
    op: Any
    make: Callable[[Values], tuple[Any, ...]]
    outputs: tuple[int, ...] = (0,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The same values each time."""
        generator = torch.Generator().manual_seed(7)
        return self.make(lambda *shape: torch.randn(*shape, generator=generator).to(dtype))

    def run(self, dtype: torch.dtype) -> Any:
        """What the operator returns by itself."""
        torch.manual_seed(3)
        return self.op(*self.arguments(dtype))


@functools.cache
def _indices(*shape: int, below: int = 8) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(1))


def _flash(v: Values) -> tuple[Any, ...]:
    q, k, w = (v(2, 4, 16, 32) for _ in range(3))
    return q, k, w


def _flash_backward(v: Values) -> tuple[Any, ...]:
    q, k, w = _flash(v)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, w)
    return v(2, 4, 16, 32), q, k, w, out, logsumexp, 0.0, False


def _layer_norm_backward(v: Values) -> tuple[Any, ...]:
    x, weight, bias = v(6, 32), v(32), v(32)
    _, mean, rstd = aten.native_layer_norm(x, [32], weight, bias, 1e-5)
    return v(6, 32), x, [32], mean, rstd, weight, bias, [True, True, True]


def _batch_norm_backward(v: Values) -> tuple[Any, ...]:
    x, weight = v(4, 8, 6, 6), v(8)
    _, mean, rstd = aten.native_batch_norm(x, weight, v(8), v(8), v(8).abs(), True, 0.1, 1e-5)
    return v(4, 8, 6, 6), x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True]


def _conv(v: Values) -> tuple[Any, ...]:
    return v(2, 3, 12, 12), v(16, 3, 3, 3), v(16), [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def _conv_backward(v: Values, mask: tuple[bool, ...] = (True, True, True)) -> tuple[Any, ...]:
    x, w = v(2, 3, 12, 12), v(16, 3, 3, 3)
    return v(2, 16, 12, 12), x, w, [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, list(mask)


def _pool_backward(v: Values) -> tuple[Any, ...]:
    x = v(2, 4, 8, 8)
    out, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    return v(*out.shape), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def _loss_backward(v: Values) -> tuple[Any, ...]:
    x, target = v(16, 8).log_softmax(-1), _indices(16)
    _, weight = aten.nll_loss_forward(x, target, None, 1, -100)
    return v(1)[0], x, target, None, 1, -100, weight


_BFLOAT = {"dtypes": (torch.bfloat16,)}
_FLOAT = {"dtypes": (torch.float32,)}

CASES = [
    Case("mm", aten.mm.default, lambda v: (v(24, 16), v(16, 40))),
    Case("mm-transposed", aten.mm.default, lambda v: (v(16, 24).t(), v(40, 16).t())),
    Case("addmm", aten.addmm.default, lambda v: (v(40), v(24, 16), v(16, 40))),
    Case("addmm-square", aten.addmm.default, lambda v: (v(32), v(32, 32), v(32, 32))),
    Case("bmm", aten.bmm.default, lambda v: (v(3, 8, 16), v(3, 16, 4))),
    Case("add", aten.add.Tensor, lambda v: (v(8, 16), v(16))),
    Case("add-transposed", aten.add.Tensor, lambda v: (v(8, 16).t(), v(8, 16).t())),
    Case("add-alpha", aten.add.Tensor, lambda v: (v(8, 16), 2)),
    Case("mul", aten.mul.Tensor, lambda v: (v(8, 16), v(8, 1))),
    Case("div", aten.div.Tensor, lambda v: (v(8, 16), v(8, 1))),
    Case("relu", aten.relu.default, lambda v: (v(8, 16),)),
    Case("gelu", aten.gelu.default, lambda v: (v(8, 16),)),
    Case("gelu_backward", aten.gelu_backward.default, lambda v: (v(8, 16), v(8, 16))),
    Case("silu", aten.silu.default, lambda v: (v(8, 16),)),
    Case("tanh", aten.tanh.default, lambda v: (v(33),)),
    Case("pow", aten.pow.Tensor_Scalar, lambda v: (v(8, 16), 3.0)),
    Case("rsqrt", aten.rsqrt.default, lambda v: (v(8, 16).abs(),)),
    Case("where", aten.where.self, lambda v: (v(8, 16) > 0, v(8, 16), v(8, 16))),
    Case("softmax", aten._softmax.default, lambda v: (v(8, 16), -1, False)),
    Case(
        "softmax_backward",
        aten._softmax_backward_data.default,
        lambda v: (v(8, 16), v(8, 16), -1, torch.float32),
        **_FLOAT,
    ),
    Case("log_softmax", aten._log_softmax.default, lambda v: (v(8, 16), 1, False)),
    Case("layer_norm", aten.native_layer_norm.default, lambda v: (v(6, 32), [32], v(32), v(32), 1e-5), (0, 1, 2)),
    Case("layer_norm-rstd", aten.native_layer_norm.default, lambda v: (v(6, 32), [32], v(32), v(32), 1e-5), (2,)),
    Case("layer_norm_backward", aten.native_layer_norm_backward.default, _layer_norm_backward, (0, 1, 2)),
    Case("convolution", aten.convolution.default, _conv),
    Case(
        "convolution-channels-last",
        aten.convolution.default,
        lambda v: (_conv(v)[0].to(memory_format=torch.channels_last), *_conv(v)[1:]),
    ),
    Case("convolution_backward", aten.convolution_backward.default, _conv_backward, (0, 1, 2)),
    Case(
        "convolution_backward-masked",
        aten.convolution_backward.default,
        lambda v: _conv_backward(v, (False, True, False)),
        (1,),
    ),
    Case(
        "batch_norm",
        aten.native_batch_norm.default,
        lambda v: (v(4, 8, 6, 6), v(8), v(8), v(8), v(8).abs(), True, 0.1, 1e-5),
        (0, 1, 2),
    ),
    Case(
        "batch_norm-functional",
        aten._native_batch_norm_legit_functional.default,
        lambda v: (v(4, 8, 6, 6), v(8), v(8), v(8), v(8).abs(), True, 0.1, 1e-5),
        (0, 1, 2, 3, 4),
    ),
    Case(
        "batch_norm-evaluated",
        aten._native_batch_norm_legit_no_training.default,
        lambda v: (v(4, 8, 6, 6), v(8), v(8), v(8), v(8).abs(), 0.1, 1e-5),
    ),
    Case("batch_norm_backward", aten.native_batch_norm_backward.default, _batch_norm_backward, (0, 1, 2)),
    Case("flash", aten._scaled_dot_product_flash_attention_for_cpu.default, _flash, (0, 1)),
    Case(
        "flash_backward", aten._scaled_dot_product_flash_attention_for_cpu_backward.default, _flash_backward, (0, 1, 2)
    ),
    Case("embedding", aten.embedding.default, lambda v: (v(8, 24), _indices(3, 5))),
    Case(
        "embedding_backward",
        aten.embedding_dense_backward.default,
        lambda v: (v(3, 5, 24), _indices(3, 5), 8, -1, False),
    ),
    Case("sort", aten.sort.default, lambda v: (v(8, 16),), (0, 1)),
    Case("topk", aten.topk.default, lambda v: (v(8, 16), 4), (0, 1)),
    Case("argmax", aten.argmax.default, lambda v: (v(8, 16), 1)),
    Case("cat", aten.cat.default, lambda v: ([v(2, 8), v(3, 8)],)),
    Case("stack", aten.stack.default, lambda v: ([v(2, 8), v(2, 8)],)),
    Case("clone", aten.clone.default, lambda v: (v(8, 16).t(),)),
    Case("copy", aten._to_copy.default, lambda v: (v(8, 16),)),
    Case("index", aten.index.Tensor, lambda v: (v(8, 16), [_indices(5)])),
    Case("index_select", aten.index_select.default, lambda v: (v(8, 16), 0, _indices(5))),
    Case("index_put", aten.index_put.default, lambda v: (v(8, 16), [_indices(5)], v(5, 16), True)),
    Case("gather", aten.gather.default, lambda v: (v(8, 16), 1, _indices(8, 3))),
    Case("scatter", aten.scatter.src, lambda v: (v(8, 16), 1, _indices(8, 3), v(8, 3))),
    Case("scatter_add", aten.scatter_add.default, lambda v: (v(8, 16), 1, _indices(8, 3), v(8, 3))),
    Case("slice_backward", aten.slice_backward.default, lambda v: (v(3, 16), [8, 16], 0, 2, 5, 1)),
    Case("constant_pad", aten.constant_pad_nd.default, lambda v: (v(4, 6), [1, 2], 0.0)),
    Case("sum", aten.sum.dim_IntList, lambda v: (v(8, 16), [0], True)),
    Case("sum-all", aten.sum.default, lambda v: (v(8, 16),)),
    Case("mean", aten.mean.dim, lambda v: (v(8, 16), [-1], True)),
    Case("var_mean", aten.var_mean.correction, lambda v: (v(8, 16), [1]), (0, 1), **_FLOAT),
    Case("cumsum", aten.cumsum.default, lambda v: (v(8, 16), 1)),
    Case("max", aten.max.dim, lambda v: (v(8, 16), 1), (0, 1)),
    Case("max_pool", aten.max_pool2d_with_indices.default, lambda v: (v(2, 4, 8, 8), [2, 2], [2, 2]), (0, 1)),
    Case("max_pool_backward", aten.max_pool2d_with_indices_backward.default, _pool_backward),
    Case("avg_pool", aten.avg_pool2d.default, lambda v: (v(2, 4, 8, 8), [2, 2])),
    Case("adaptive_avg_pool", aten._adaptive_avg_pool2d.default, lambda v: (v(2, 4, 8, 8), [2, 2])),
    Case("threshold_backward", aten.threshold_backward.default, lambda v: (v(8, 16), v(8, 16), 0)),
    Case("nll_loss", aten.nll_loss_forward.default, lambda v: (v(16, 8), _indices(16), None, 1, -100), (0, 1)),
    Case("nll_loss_backward", aten.nll_loss_backward.default, _loss_backward),
    Case("dropout", aten.native_dropout.default, lambda v: (v(8, 16), 0.5, True), (0, 1)),
    Case("bernoulli", aten.bernoulli.p, lambda v: (v(8, 16), 0.5)),
    Case("split_copy", aten.split_copy.Tensor, lambda v: (v(8, 16), 3), (0, 2)),
    Case("foreach_add", aten._foreach_add.Scalar, lambda v: ([v(8), v(9)], 1.0), (0, 1)),
    Case("full", aten.full.default, lambda v: ([4, 4], 1.5)),
    Case("arange", aten.arange.default, lambda v: (16,)),
]
