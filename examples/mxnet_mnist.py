"""Trains an MLP on Fashion-MNIST with Gluon, through the store: `sgd` runs on the servers.

pip install '.[mxnet]' idx2numpy
tensorwire run --workers 2 --servers 1 -- python examples/mxnet_mnist.py
"""

import argparse
import gzip
from pathlib import Path

import tensorwire.mxnet  # noqa: F401  # before mxnet

import idx2numpy  # isort: skip
import mxnet as mx  # isort: skip
import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), help="where the IDX files are"
)
parser.add_argument("--kvstore", default="dist_tensorwire_sync")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=128)
options = parser.parse_args()


def read(name: str) -> np.ndarray:
    """The array of an IDX file."""
    with gzip.open(options.data / f"{name}.gz") as file:
        return idx2numpy.convert_from_file(file)


images, test_images = (read(f"{part}-images-idx3-ubyte").reshape(-1, 784) / 255 for part in ("train", "t10k"))
labels, test_labels = (read(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k"))

store = mx.kv.create(options.kvstore)
mx.random.seed(0)
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(2048, activation="relu"), mx.gluon.nn.Dense(1024, activation="relu"), mx.gluon.nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
net(mx.nd.zeros((1, 784)))
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)
loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

drawn = np.random.default_rng(store.rank)
for _ in range(options.steps):
    batch = drawn.integers(0, len(images), options.batch)
    with mx.autograd.record():
        loss = loss_of(net(mx.nd.array(images[batch])), mx.nd.array(labels[batch]))
    loss.backward()
    trainer.step(options.batch * store.num_workers)

store.barrier()
if store.rank == 0:
    found = net(mx.nd.array(test_images)).argmax(axis=1).asnumpy()
    print(f"workers: {store.num_workers}, test accuracy: {(found == test_labels).mean():.3f}")
