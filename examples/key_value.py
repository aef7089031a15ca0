"""Fits a line with numpy alone: the weights are keys of the store, the optimizer runs on its servers. Start it with:

tensorwire run --workers 2 --servers 1 -- python examples/key_value.py
tensorwire run --workers 4 --servers 2 --device tcp -- python examples/key_value.py
"""

import sys

import numpy as np

import tensorwire as tw

job = tw.init()
random = np.random.default_rng(job.rank)  # each worker has data of its own
slope, offset = np.array([2.0, -3.0], "f4"), np.float32(1.0)

kv = tw.store.KeyValue(rule="SGD", reduce="mean", lr=0.1, momentum=0.5)
kv.init(["w", "b"], [np.zeros(2, "f4"), np.zeros(1, "f4")])
w, b = kv.pull(["w", "b"]).wait()

for _ in range(200):
    x = random.standard_normal((32, 2)).astype("f4")
    error = x @ w + b - (x @ slope + offset)
    w, b = kv.pushpull(["w", "b"], [x.T @ error / 16, error[:16].mean(keepdims=True)]).wait()

assert "torch" not in sys.modules
if job.rank == 0:
    print(f"workers: {job.num_workers}, w: {w.round(2)}, b: {b.round(2)}")
