"""What `import tensorwire.mxnet` says where MXNet cannot be imported."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from tensorwire import errors


@pytest.mark.skipif(importlib.util.find_spec("mxnet") is not None, reason="MXNet is installed")
def test_one_line_says_why_mxnet_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.Unsupported) as raised:
        importlib.import_module("tensorwire.mxnet")
    said = str(raised.value)
    assert "\n" not in said
    assert any(part in said for part in ("Python 3.10 or 3.11", "numpy before 2", "pip install '.[mxnet]'"))
    monkeypatch.setattr(np, "__version__", "1.26.4")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(errors.MissingPackage, match=r"pip install '\.\[mxnet\]'"):
        importlib.import_module("tensorwire.mxnet")
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(errors.Unsupported, match=r"Python 3\.12 lacks"):
        importlib.import_module("tensorwire.mxnet")
