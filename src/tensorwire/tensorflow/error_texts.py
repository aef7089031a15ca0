"""Tensorwire's errors as texts, and back: they pass through TensorFlow, which has errors of its own."""

from __future__ import annotations

import re

import tensorflow as tf

from tensorwire import errors
from tensorwire.errors import JobEnded, PeerLost, TensorwireError
from tensorwire.launch.worker import Worker

# TensorFlow puts names of its nodes before and behind it.
_TEXT = re.compile(r"tensorwire: (?:([A-Z]\w+): )?(.*?)(?: \[Op:.*)?$", re.MULTILINE)


def as_text(error: Exception) -> tuple[int, str]:
    """The code of TensorFlow's error, and its message."""
    code = tf.errors.ABORTED if isinstance(error, (PeerLost, JobEnded)) else tf.errors.FAILED_PRECONDITION
    return code, failure_text("", error)


def failure_text(what: str, error: Exception) -> str:
    """A message about ``what`` failed, if anything is said of it, from which the error can be told."""
    name = "" if isinstance(error, (PeerLost, JobEnded)) else f"{type(error).__name__}: "
    return f"tensorwire: {name}{what}{': ' if what else ''}{error}"


def translated(error: BaseException) -> TensorwireError | None:
    """The error of ours that one of TensorFlow's stands for. A peer that is gone is mostly a consequence."""
    kinds = tf.errors.AbortedError, tf.errors.FailedPreconditionError, tf.errors.UnknownError  # the last by Python
    if not isinstance(error, kinds):
        return None
    found = _TEXT.search(str(error))
    if found is None:
        return None
    name, text = found.groups()
    kind = getattr(errors, name, None) if name else PeerLost
    return kind(text) if isinstance(kind, type) and issubclass(kind, TensorwireError) else None


def register(worker: Worker) -> None:
    """Where such an error ends the worker, the job learns what it stands for."""
    if translated not in worker.translations:
        worker.translations.append(translated)
