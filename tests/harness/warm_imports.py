"""What processes of jobs have imported when they begin: this module is imported in the process that forks them."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "tensorflow",
    "pytest",
    "tensorwire.torch",
    "tensorwire.keyvalue",
    "tensorwire.launch.collectives",
    "tensorwire.launch.server_process",
    "tensorwire.store.server",
    "tests.harness.jobs",
)

for name in MODULES:
    with suppress(ImportError):
        import_module(name)
gc.freeze()  # collections, and searches for modules, of the forked processes pass over what was imported here
