"""``python -m tensorwire.testing DEVICE...``: does this device keep the contract?"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tensorwire.errors import TensorwireError
from tensorwire.extras import how_to_install
from tensorwire.testing.spec import DeviceSpec

USAGE = """usage: python -m tensorwire.testing DEVICE [DEVICE...] [options of pytest]

Runs the conformance suite of Tensorwire's devices on each DEVICE: the name of an installed device, or
package.module:name, which is called without arguments and returns a device. DEVICE+delays: the same, with every
operation held back for a random time.
Options of pytest follow: -x stops at the first failure, -k atomics chooses tests."""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 if the device passed."""
    factories = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not factories:
        print(USAGE, file=sys.stderr)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if find_spec(name) is None]
    if missing:
        print(f"the suite needs {', '.join(missing)}: {how_to_install('testing')}", file=sys.stderr)
        return 2
    try:
        for factory in factories:
            DeviceSpec(factory).make().close()
    except TensorwireError as error:
        print(error, file=sys.stderr)
        return 2
    return run(factories, arguments[len(factories) :])


def run(factories: list[str], options: list[str]) -> int:
    """pytest's exit status."""
    import pytest

    # The project around us has a configuration of its own, and no say here; nor is anything left in it.
    own = ["-c", os.devnull, "--rootdir", str(Path.cwd()), "-p", "no:cacheprovider", "-p", "tensorwire.testing.plugin"]
    devices = itertools.chain.from_iterable(("--device", factory) for factory in factories)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", folder)
        return int(pytest.main([*own, "--pyargs", "tensorwire.testing.conformance", *devices, "-q", *options]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
