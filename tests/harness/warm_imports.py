"""What processes of jobs have when they begin: this module is imported in the process that forks them.

Imports take most of a short job's time, and what torch does for its first compiled model takes seconds.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "pytest",
    "tensorwire.torch",
    "tensorwire.keyvalue",
    "tensorwire.launch.collectives",
    "tensorwire.launch.server_process",
    "tensorwire.store.server",
    "tests.harness.jobs",
)


def compile_once() -> None:
    import torch

    import tensorwire.torch.graph.backend
    import tensorwire.torch.graph.execution.compiled_graph  # noqa: F401

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that forks has no threads
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    torch.compile(net, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    torch.compiler.reset()
    torch.set_num_threads(threads)


for name in MODULES:
    with suppress(ImportError):
        import_module(name)
if find_spec("tqdm"):
    import_module("tqdm").tqdm.monitor_interval = 0  # otherwise what shows progress has a thread
for framework in ("tensorflow", "mxnet"):
    if find_spec(framework):
        import_module(f"tensorwire.{framework}")
if find_spec("torch"):
    compile_once()
gc.collect()
gc.freeze()  # a collection then writes to none of these objects, and forked processes go on sharing their memory
