"""TensorFlow's tensors cross between workers by edges: ``import tensorwire.tensorflow``.

`send` and `recv` are operators, for use inside and outside of ``tf.function``.
"""

from __future__ import annotations

from tensorwire.tensorflow.find_tensorflow import load_tensorflow

load_tensorflow()

from tensorwire.tensorflow.operators import recv, send  # noqa: E402  # need tensorflow

__all__ = ["recv", "send"]
