"""The FCN-5 demo: small real runs, and its refusals."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensorwire.errors import ArgumentError
from tensorwire.trace.parts import parts_of_trace, read_trace, typical
from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import Result, Sandbox

idx2numpy = pytest.importorskip("idx2numpy")
sklearn_datasets = pytest.importorskip("sklearn.datasets")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "fcn5"
ROWS = [
    *("data", "model", "mode", "device", "steps", "loss", "test accuracy", "throughput"),
    *("step", "  compute", "  update", "  exposed communication", "  idle"),
    *("bytes out", "bytes back", "copies", "messages", "RPCs", "registrations"),
]
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def start(sandbox: Sandbox, *command: str, **environment: str) -> Result:
    """Runs ``python command``; fails if it leaves a process or a file of its own behind."""
    temporary = sandbox.folder / "temporary"
    temporary.mkdir()
    # torch's compiler makes a cache folder when it is imported.
    elsewhere = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(sandbox.folder / "inductor")}
    done = sandbox.start(sys.executable, *command, **elsewhere, **environment).finish()
    assert list(temporary.iterdir()) == []
    sandbox.nothing_left()
    return done


def demo(sandbox: Sandbox, *options: str) -> tuple[str, dict[str, Any]]:
    """What a run with digits that reaches the gate prints, and its figures."""
    figures = sandbox.folder / "figures.json"
    command = [str(FOLDER / "demo.py"), "--data", "digits", "--width", "256", "--json", str(figures), *options]
    done = start(sandbox, *command)
    assert (done.status, done.err) == (0, ""), done.out + done.err
    table = done.out[done.out.index("\nFCN-5 (") :].splitlines()[2:]
    assert [line[:24].rstrip() for line in table] == ROWS
    record: dict[str, Any]
    (record,) = json.loads(figures.read_text())
    assert record["accuracy"] >= record["gate"] == 0.90
    assert (record["rpcs"], record["registrations"], record["returned_bytes"]) == (0, 0, 0)
    return done.out, record


def load_data() -> ModuleType:
    """The example's module ``data``."""
    spec = importlib.util.spec_from_file_location("fcn5_data", FOLDER / "data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


data = load_data()


def images(n: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images that a class can be read off: a bright row at a place of its own, in noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, n).astype(np.uint8)
    pictures = random.integers(0, 100, (n, 28, 28)).astype(np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        picture[2 * label + 3] = 255
    return pictures, labels


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """A folder in MNIST's format, half of it compressed."""
    folder = tmp_path / "rows"
    folder.mkdir()
    arrays = [*images(600, 1), *images(200, 2)]
    for number, (name, array) in enumerate(zip(FILES, arrays, strict=True)):
        content = idx2numpy.convert_to_string(array)
        if number % 2:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_a_small_run_reaches_the_gate_and_shows_every_row(sandbox: Sandbox) -> None:
    printed, record = demo(sandbox, "--seconds", "5")
    assert "data: digits, 1,437 training and 360 test images" in printed
    assert record["parameters"] == 784 * 256 + 3 * 256 * 256 + 256 * 10 + 4 * 256 + 10
    # All workers count the same in every steady step: the gradients out, a head and the one bucket's signal.
    assert record["messages"] == 2
    assert record["copied_bytes"] == 4 * record["parameters"]
    assert 0 < record["mapped_bytes"] - record["copied_bytes"] < 4096  # the head of the round
    assert record["copies"] == 10


@pytest.mark.long
@pytest.mark.parametrize("mode", ["decoupled", "async", "diloco", "ssp", "easgd", "localsgd", "streaming"])
def test_every_mode_reaches_the_gate_and_its_table_is_true(sandbox: Sandbox, mode: str) -> None:
    _, record = demo(sandbox, "--seconds", "6", "--mode", mode)
    assert record["mode"] == mode
    first, second = record["steps_by_worker"]
    assert first == record["steps"]
    if mode in ("ssp", "localsgd", "diloco", "streaming"):  # those who wait for each other
        assert first == second
    # What a worker sends, and gets, per step: the model, or a tenth of it.
    share = 1.0 if mode in ("async", "ssp") else 0.1
    # At least a fifth of the steps is counted; an exchange more or less is at their ends, or sets values.
    model, few = 4 * record["parameters"], 5 / record["steps"]
    for copied in ("copied_bytes", "copied_back"):
        assert 0.8 * (share - few) <= record[copied] / model <= 1.2 * (share + few)
    parts = [record[name] for name in ("compute", "update", "exposed", "idle")]
    assert sum(parts) == pytest.approx(record["seconds"], rel=0.15)


@pytest.mark.long
def test_a_missed_gate_is_one_line_and_a_failure(sandbox: Sandbox) -> None:
    options = ["--data", "digits", "--width", "1", "--seconds", "1", "--workers", "1"]
    done = start(sandbox, str(FOLDER / "demo.py"), *options)
    assert done.status == 1
    assert "gate 90%: MISSED" in done.out
    assert done.one_line().startswith("tensorwire: the test accuracy ")
    assert done.one_line().endswith("% is below 90%")


@pytest.mark.long
def test_the_script_trains_on_a_folder_of_idx_files_and_the_parts_of_its_steps_add_up(
    sandbox: Sandbox, idx_folder: Path
) -> None:
    trace = sandbox.folder / "trace"
    trace.mkdir()
    script = [sys.executable, str(FOLDER / "train.py"), "--data", str(idx_folder), "--width", "64", "--seconds", "2"]
    launcher = ["-m", "tensorwire.cli", "run", "--workers", "2", "--servers", "2", "--device", "tcp", "--"]
    done = start(sandbox, *launcher, *script, TENSORWIRE_TRACE=str(trace), OMP_NUM_THREADS="1")
    assert done.status == 0, done.out + done.err
    records = read_trace(trace)
    assert sorted(records) == ["server-0", "server-1", "worker-0", "worker-1"]
    result: Any = records["worker-0"].facts["result"]
    assert result["accuracy"] > 0.9
    assert result["device"] == "tcp"
    parts = parts_of_trace(records)
    assert len(parts) == 2 * result["steps"]
    assert sum(p.accounted for p in parts) == pytest.approx(sum(p.seconds for p in parts), rel=0.05)
    step = typical(parts)
    assert step.accounted == pytest.approx(step.seconds, rel=0.05)
    assert min(step.compute, step.update, step.exposed) > 0
    for name in ("worker-0", "worker-1"):
        steady: Any = records[name].facts["steady"]
        assert steady["steps"] > 0
        assert (steady["rpcs"], steady["registrations"], steady["mapped_bytes"]) == (0, 0, 0)
        assert steady["bytes"] > steady["steps"] * 4 * result["parameters"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nowhere"], "--data: there is no folder nowhere"),
        (["rows", "--batch", "301"], "2 x 301 images a step are more than the 600 there are: use a smaller --batch"),
    ],
)
@pytest.mark.usefixtures("idx_folder")
def test_wrong_options_are_one_line_and_status_2(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.chdir(sandbox.folder)
    done = start(sandbox, str(FOLDER / "demo.py"), "--data", *options)
    assert (done.status, done.err) == (2, f"tensorwire: {says}\n")


def test_idx_files_are_read_plain_and_compressed(idx_folder: Path) -> None:
    found = data.load(str(idx_folder))
    expected, labels = images(600, 1)
    assert str(found) == f"rows, 600 training and 200 test images ({idx_folder})"
    assert np.array_equal(found.train_images, expected.reshape(600, 784))
    assert np.array_equal(found.train_labels, labels)
    assert found.gate is None


def test_digits_are_enlarged_and_split() -> None:
    found = data.load("digits")
    assert found.train_images.shape == (1437, 784)
    assert found.test_images.shape == (360, 784)
    assert found.train_images.max() == 255
    assert found.gate == 0.90


def test_the_best_data_there_is_are_found(monkeypatch: pytest.MonkeyPatch, idx_folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "DEBIAN", idx_folder)
    assert data.load(None).name == "rows"
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "nowhere")
    assert data.load(None).name == "digits"


def idx(*shape: int, value: int = 0, dtype: type = np.uint8) -> bytes:
    written: bytes = idx2numpy.convert_to_string(np.full(shape, value, dtype))
    return written


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, None, r"holds no t10k-images-idx3-ubyte, with or without \.gz"),
        (0, lambda content: content[: len(content) // 2], "train-images-idx3-ubyte is not an IDX file"),
        (1, lambda content: content[:-20], r"train-labels-idx1-ubyte\.gz is not an IDX file"),
        (1, lambda _: b"labels", r"train-labels-idx1-ubyte\.gz is not an IDX file"),
        (0, lambda _: b"P5 28 28 255", "train-images-idx3-ubyte is not an IDX file"),
        (0, lambda _: b"\0\0\x08\x03" + b"\xff" * 12, "train-images-idx3-ubyte is not an IDX file"),
        (0, lambda _: idx(600, 8, 8), r"train images in .* are uint8 of shape \[600, 8, 8\], not uint8 \[n, 28, 28\]"),
        (
            0,
            lambda _: idx(600, 28, 28, dtype=np.float32),
            r"train images in .* are (>f4 of shape \[600, 28, 28\]|float32)",
        ),
        (1, lambda _: gzip.compress(idx(599)), r"train labels in .* are uint8 of shape \[599\], not uint8 \[600\]"),
        (1, lambda _: gzip.compress(idx(600, value=10)), "train labels in .* go up to 10, not 9"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    idx_folder: Path, number: int, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    path = next(idx_folder.glob(f"{FILES[number]}*"))
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArgumentError, match=message) as caught:
        data.load(str(idx_folder))
    assert "\n" not in str(caught.value)
