"""Turns the graphs that dynamo and AOTAutograd capture of a model into Tensorwire's.

Importing it raises `Unsupported` for a torch that is too old: it relies on private names of newer ones.
"""

from tensorwire.torch.graph import check_torch

check_torch()
