"""The time limits of tests: one environment variable scales all of them, for slow or busy machines."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from tensorwire.errors import ArgumentError

VARIABLE = "TENSORWIRE_TEST_PATIENCE"


def read_patience(environment: Mapping[str, str]) -> float:
    """The factor for all time limits of tests.

    Args:
        environment: Variables by name; ``TENSORWIRE_TEST_PATIENCE`` counts, and 1 is the default.

    Returns:
        A number from 0.1 to 1000.

    Raises:
        ArgumentError: The variable is no such number.
    """
    text = environment.get(VARIABLE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0.1 <= factor <= 1000:
        raise ArgumentError(f"{VARIABLE}={text}: give a number from 0.1 to 1000, 4 for limits four times as long")
    return factor


PATIENCE = read_patience(os.environ)


def patient(seconds: float) -> float:
    """A time limit of a test, in seconds, as this machine needs it.

    Args:
        seconds: The limit that is right for two quiet cores.

    Returns:
        The limit times ``TENSORWIRE_TEST_PATIENCE``.
    """
    return seconds * PATIENCE
