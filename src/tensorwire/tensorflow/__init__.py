"""TensorFlow's tensors cross between workers by edges: ``import tensorwire.tensorflow``.

`distribute` cuts a ``tf.function`` over workers, as its devices say. `send` and `recv` are operators, for use inside
and outside of functions. `StoreOptimizer` trains one Keras model on all workers, each on its own data. `StoreEmbedding`
keeps its table on the servers.
"""

from __future__ import annotations

from tensorwire.tensorflow.find_tensorflow import load_tensorflow

load_tensorflow()

from tensorwire.tensorflow.distribute import distribute  # noqa: E402
from tensorwire.tensorflow.embedding_layer import StoreEmbedding  # noqa: E402
from tensorwire.tensorflow.fit_callbacks import AverageMetrics, BackupAndRestore  # noqa: E402  # need tensorflow
from tensorwire.tensorflow.operators import recv, send  # noqa: E402
from tensorwire.tensorflow.placement import server, worker  # noqa: E402
from tensorwire.tensorflow.store_optimizer import StoreOptimizer  # noqa: E402

__all__ = [
    "AverageMetrics",
    "BackupAndRestore",
    "StoreEmbedding",
    "StoreOptimizer",
    "distribute",
    "recv",
    "send",
    "server",
    "worker",
]
