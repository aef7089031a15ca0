"""The committed type stub says what the built module has."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "-m nanobind.stubgen -q -D -m tensorwire._native -p src/_native/stub.patterns -o src/tensorwire/_native.pyi"


def test_the_stub_is_what_the_build_would_generate(tmp_path: Path) -> None:
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind, which generates the stub, is not installed")
    made = tmp_path / "_native.pyi"
    subprocess.run([sys.executable, *RUN.split()[:-1], made], check=True, cwd=ROOT)
    committed = ROOT / "src/tensorwire/_native.pyi"
    assert ast.dump(ast.parse(made.read_text())) == ast.dump(ast.parse(committed.read_text())), "run: python " + RUN


def test_the_stub_names_everything_there_is() -> None:
    module = importlib.import_module("tensorwire._native")
    tree = ast.parse((ROOT / "src/tensorwire/_native.pyi").read_text())
    named = {getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None) for node in tree.body}
    assert {name for name in vars(module) if not name.startswith("_")} <= named
