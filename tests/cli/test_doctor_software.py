"""``tensorwire doctor`` on PyTorch, the compiler and GPUs."""

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


def test_gpus_are_counted_by_model_and_reported_as_unused(tmp_path: Path) -> None:
    nvidia, amd = tmp_path / "nvidia", tmp_path / "amd"
    assert software.gpus(nvidia, amd).value == "none seen"
    for slot in ("0000:01:00.0", "0000:02:00.0"):
        (nvidia / slot).mkdir(parents=True)
        (nvidia / slot / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 42\n")
    for node, units in (("0", 0), ("1", 304)):
        (amd / node).mkdir(parents=True)
        (amd / node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n")
    found = software.gpus(nvidia, amd)
    assert found.value == "2 NVIDIA H200, 1 AMD: not used yet, parameters live on the CPU"
    assert (found.level, found.number) == ("fine", 3)
