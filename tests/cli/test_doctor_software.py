"""``tensorwire doctor`` on PyTorch and the compiler."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tensorwire.doctor import software


def test_the_version_of_pytorch() -> None:
    found = software.pytorch()
    assert (found.value, found.level) == (version("torch"), "fine")


def test_pytorch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(software, "version", missing)
    found = software.pytorch()
    assert (found.value, found.level) == ("not installed", "note")
    assert "pip install '.[torch]'" in found.advice


@pytest.mark.parametrize(("variable", "name"), [({}, "g++"), ({"CXX": "c++-99 -O2"}, "c++-99")])
def test_the_compiler_is_the_one_that_builds_use(tmp_path: Path, variable: dict[str, str], name: str) -> None:
    environment = {"PATH": str(tmp_path), **variable}
    missing = software.compiler(environment)
    assert (missing.value, missing.level) == (f"no {name}", "note")
    assert "install g++, or set CXX" in missing.advice
    (tmp_path / name).touch(mode=0o755)
    found = software.compiler(environment)
    assert found.level == "fine"
    assert found.value.startswith(f"{tmp_path / name} ")
