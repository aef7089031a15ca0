"""What `import tensorwire.tensorflow` says where TensorFlow cannot be imported, or is another version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import pytest

from tensorwire import errors


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_one_line_says_why_tensorflow_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.MissingPackage, match=r"pip install '\.\[tensorflow\]'") as raised:
        importlib.import_module("tensorwire.tensorflow")
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.15.0")
    with pytest.raises(errors.Unsupported, match=r"written for TensorFlow 2\.21, and this is 2\.15\.0"):
        importlib.import_module("tensorwire.tensorflow")
