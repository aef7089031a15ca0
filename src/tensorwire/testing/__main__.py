"""``python -m tensorwire.testing FACTORY...``: does this device keep the contract?"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

USAGE = """usage: python -m tensorwire.testing FACTORY [FACTORY...] [options of pytest]

Runs the conformance suite of Tensorwire's devices on each FACTORY (package.module:name), which is called without
arguments and returns a device. FACTORY+delays: the same, with every operation held back for a random time.
Options of pytest follow: -x stops at the first failure, -k atomics chooses tests."""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 if the device passed."""
    factories = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not factories:
        print(USAGE, file=sys.stderr)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    try:
        import hypothesis
        import pytest
        import pytest_timeout
    except ImportError as error:
        print(f"the suite needs {error.name}: pip install 'tensorwire[testing]'", file=sys.stderr)
        return 2
    del hypothesis, pytest_timeout
    # The project around us has a configuration of its own, and no say here.
    own = ["-c", os.devnull, "--rootdir", str(Path.cwd()), "-p", "no:cacheprovider", "-p", "tensorwire.testing.plugin"]
    devices = itertools.chain.from_iterable(("--device", factory) for factory in factories)
    rest = arguments[len(factories) :]
    return int(pytest.main([*own, "--pyargs", "tensorwire.testing.conformance", *devices, "-q", *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
