"""Preloaded by the process that forks jobs: what torch does for the first compiled model takes seconds a process."""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec


def compile_once() -> None:
    import torch
    import tqdm

    import tensorwire.launch.collectives
    import tensorwire.torch.graph.backend
    import tensorwire.torch.graph.execution.compiled_graph  # noqa: F401

    threads, interval = torch.get_num_threads(), tqdm.tqdm.monitor_interval
    torch.set_num_threads(1)  # a process that forks has no threads
    tqdm.tqdm.monitor_interval = 0
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    torch.compile(net, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    torch.compiler.reset()
    torch.set_num_threads(threads)
    tqdm.tqdm.monitor_interval = interval


if find_spec("torch"):
    compile_once()
for framework in ("tensorflow", "mxnet"):
    if find_spec(framework):
        import_module(f"tensorwire.{framework}")
gc.collect()
gc.freeze()  # a collection then writes to none of these objects, and forked processes go on sharing their memory
