"""Errors of ours that went through TensorFlow are told by their texts; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from tensorwire import errors
from tests.tensorflow.test_operators import load


def through(tf: Any, error: Exception) -> Any:
    """As TensorFlow raises it, with names of its own around the text."""
    from tensorwire.tensorflow.error_texts import as_text

    code, text = as_text(error)
    kind = tf.errors.AbortedError if code == tf.errors.ABORTED else tf.errors.FailedPreconditionError
    return kind(None, None, f"Graph execution error:\n{{{{node x}}}} {text} [Op:TensorwireExchange]")


@pytest.mark.parametrize("kind", [errors.PeerLost, errors.ParameterModified, errors.ArgumentError, errors.WaitTimeout])
def test_an_error_of_ours_comes_back_as_what_it_was(kind: type[Exception]) -> None:
    tf, _ = load()
    from tensorwire.tensorflow.error_texts import translated

    found = translated(through(tf, kind("worker 1: a reason")))
    assert type(found) is kind
    assert str(found) == "worker 1: a reason"


def test_any_other_error_is_its_own_account() -> None:
    tf, _ = load()
    from tensorwire.tensorflow.error_texts import translated

    assert translated(through(tf, KeyError("a mistake"))) is None
    assert translated(tf.errors.AbortedError(None, None, "something else")) is None
    assert translated(ValueError("tensorwire: no error of TensorFlow's")) is None
