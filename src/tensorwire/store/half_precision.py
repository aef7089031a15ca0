"""bfloat16 and float16 as numpy arrays. numpy has no bfloat16, so its bits are a uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def half_to_single(values: Array) -> Array:
    """float16 values, or the bits of bfloat16 ones, as float32."""
    if values.dtype != np.uint16:
        return values.astype(np.float32)
    found: Array = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return found


def single_to_half(values: Array, dtype: str) -> Array:
    """float32 values rounded to ``"float16"``, or to the bits of ``"bfloat16"``: to the nearest, ties to even.

    What is too large becomes infinite. bfloat16 is the upper half of a float32.
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(values)  # whose bits may have wrapped around
    if nan.any():
        found[nan] = bits[nan] >> np.uint32(16) | np.uint32(0x40)
    rounded: Array = found.astype(np.uint16)
    return rounded
