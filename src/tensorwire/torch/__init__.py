"""Tensorwire for PyTorch."""

from tensorwire.torch.graph.clip import clip_grad_norm_
from tensorwire.torch.graph.placing import place, unplace
from tensorwire.torch.optimizer import StoreOptimizer
from tensorwire.torch.profiling import show_ranges

show_ranges()

__all__ = ["StoreOptimizer", "clip_grad_norm_", "place", "unplace"]
