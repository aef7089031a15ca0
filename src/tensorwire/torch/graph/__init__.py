"""PyTorch models whose parts run on several workers: captured, analyzed, and run with one-sided writes alone."""

import torch

from tensorwire.errors import Unsupported

# In 2.10 the workers capture different graphs of what takes an output of another graph; 2.9 traces no block of a
# worker.
_OLDEST = "2.11"


def check_torch() -> None:
    """Raises `Unsupported` for a torch that is too old to cut models over several workers."""
    if torch.__version__ < _OLDEST:
        raise Unsupported(f"models over several workers need torch {_OLDEST} or newer, and this is {torch.__version__}")
