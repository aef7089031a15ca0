"""What we use of TensorFlow 2.21 and its Keras that is private to them: each is here by name, and does what we think.

A new version that changes one fails the test of that name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorwire.tensorflow
from tests.tensorflow.test_operators import load

SOURCE = Path(tensorwire.tensorflow.__file__).parent
OURS = (
    "_tensorwire",
    "_bucket_bytes",
    "_compression",
    "_mode",
    "_on_servers",
    "_reduce",
)  # attributes that we add ourselves


def traced(tf: Any) -> Any:
    """A graph with a call in it."""

    @tf.function
    def inner(x: Any) -> Any:
        return x * 2

    @tf.function
    def outer(x: Any) -> Any:
        return inner(x) + 1

    return outer.get_concrete_function(tf.TensorSpec([], tf.float32)).graph


def op_id(tf: Any) -> None:
    numbers = [op._id for op in traced(tf).get_operations()]
    assert numbers == sorted(set(numbers))


def functions_of_a_graph(tf: Any) -> None:
    graph = traced(tf)
    called = [op.get_attr("f").name for op in graph.get_operations() if "Call" in op.type]
    assert len(called) == 1
    assert graph._is_function(called[0])
    assert not graph._is_function("no such function")
    assert graph._get_function(called[0]).cached_definition.node_def


def set_attribute(tf: Any) -> None:
    with tf.Graph().as_default():
        op = tf.raw_ops.MatMul(a=tf.zeros([2, 2]), b=tf.zeros([2, 2])).op
        op._set_attr("transpose_a", tf.compat.v1.AttrValue(b=True))
        assert op.get_attr("transpose_a")


def scope_exit(tf: Any) -> None:
    seen = []

    @tf.function
    def f() -> Any:
        tf.compat.v1.get_default_graph()._add_scope_exit_callback(lambda: seen.append(1))
        return tf.zeros([])

    f.get_concrete_function()
    assert seen


def gradient_function(tf: Any) -> None:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    stock, seen = backprop._gradient_function, []

    def placed(op_name: str, *rest: Any) -> Any:
        seen.append(op_name)
        return stock(op_name, *rest)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(placed)
    try:
        x = tf.Variable(2.0)
        with tf.GradientTape() as tape:
            y = tf.exp(x)
        tape.gradient(y, x)
    finally:
        pywrap_tfe.TFE_Py_RegisterGradientFunction(stock)
    assert "Exp" in seen


def call_flat(tf: Any) -> None:
    wrapped = tf.compat.v1.wrap_function(lambda x, y: x - y, [tf.TensorSpec([2]), tf.TensorSpec([2])])
    pruned = wrapped.prune(wrapped.inputs, [wrapped.outputs[0]])
    (found,) = pruned._call_flat([tf.constant([3.0, 4.0]), tf.constant([1.0, 1.0])], pruned.captured_inputs)
    assert found.numpy().tolist() == [2.0, 3.0]
    assert type(found) is tf.__internal__.EagerTensor


def first_epoch(tf: Any) -> None:
    import keras

    class Late(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.model._initial_epoch = 2

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(tf.zeros([1, 1]), tf.zeros([1, 1]), epochs=3, verbose=0, callbacks=[Late()])
    assert len(history.history["loss"]) == 1


def save_model(tf: Any) -> None:
    import keras

    saved = []

    class Watched(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
        def _save_model(self) -> None:
            saved.append(1)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.zeros([1, 1]), tf.zeros([1, 1]), epochs=2, verbose=0, callbacks=[Watched("/nowhere")])
    assert len(saved) == 2


def excluded(tf: Any) -> None:
    """From weight decay: where an optimizer remembers it."""
    import keras

    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    variable = keras.Variable([1.0])
    for options, name in (({"var_list": [variable]}, names[0]), ({"var_names": ["bias"]}, names[1])):
        optimizer = keras.optimizers.AdamW()
        assert not any(getattr(optimizer, each, None) for each in names)
        optimizer.exclude_from_weight_decay(**options)
        assert getattr(optimizer, name)


HOOKS: dict[str, Callable[[Any], None]] = {
    "_id": op_id,
    "_is_function": functions_of_a_graph,
    "_get_function": functions_of_a_graph,
    "_set_attr": set_attribute,
    "_add_scope_exit_callback": scope_exit,
    "_gradient_function": gradient_function,
    "pywrap_tfe": gradient_function,
    "backprop": gradient_function,
    "_call_flat": call_flat,
    "_initial_epoch": first_epoch,
    "_save_model": save_model,
    "_exclude_from_weight_decay": excluded,
    "_exclude_from_weight_decay_pattern": excluded,
}


@pytest.mark.parametrize("hook", dict.fromkeys(HOOKS.values()), ids=lambda hook: hook.__name__)
def test_the_hook_does_what_we_think(hook: Callable[[Any], None]) -> None:
    tf, _ = load()
    hook(tf)


def test_every_private_name_that_we_use_has_a_test() -> None:
    used = set()
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                used |= set() if own or node.attr.startswith(OURS) else {node.attr}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.python"):
                used |= {name.name for name in node.names}
    assert used == set(HOOKS)
