"""Tensorwire for PyTorch."""

from tensorwire.errors import MissingPackage
from tensorwire.extras import how_to_install

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":  # PyTorch is here, and lacks something itself
        raise
    raise MissingPackage(f"tensorwire.torch needs PyTorch: {how_to_install('torch')}") from None

from tensorwire.torch.graph.execution.clip import clip_grad_norm_
from tensorwire.torch.graph.placement.place_model import place, unplace
from tensorwire.torch.optimizer import StoreOptimizer
from tensorwire.torch.profiling import show_ranges
from tensorwire.torch.sampler import ShardSampler
from tensorwire.torch.store_embedding import StoreEmbedding

show_ranges()

__all__ = ["ShardSampler", "StoreEmbedding", "StoreOptimizer", "clip_grad_norm_", "place", "unplace"]
