"""The images to train on: Fashion-MNIST where Debian puts it, any folder of IDX files, or scikit-learn's digits."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import idx2numpy
import numpy as np
from idx2numpy.FormatError import FormatError
from numpy.typing import NDArray

from tensorwire.errors import ArgumentError

SIDE = 28
CLASSES = 10
# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
# The training labels tell Fashion-MNIST from other data in the same format, wherever it lies.
FASHION_LABELS = 0x2ED6E46A


@dataclass(frozen=True)
class Data:
    """Images as rows of 784 bytes, labels from 0 to 9. ``gate``: the test accuracy a short training must reach."""

    name: str
    where: str
    gate: float | None
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]

    def __str__(self) -> str:
        return (
            f"{self.name}, {len(self.train_labels):,} training and {len(self.test_labels):,} test images ({self.where})"
        )


def load(choice: str | None) -> Data:
    """``choice``: a folder, ``digits``, or None for the best there is here. Raises `ArgumentError`."""
    if choice == "digits":
        return _digits()
    if choice is not None:
        return _folder(Path(choice))
    return _folder(DEBIAN) if DEBIAN.is_dir() else _digits()


def _folder(folder: Path) -> Data:
    """The four files of the MNIST format, each plain or with .gz."""
    if not folder.is_dir():
        raise ArgumentError(f"--data: there is no folder {folder}")
    train, train_labels = _pair(folder, "train")
    test, test_labels = _pair(folder, "t10k")
    fashion = zlib.crc32(train_labels.astype(np.uint8).tobytes()) == FASHION_LABELS
    name = "Fashion-MNIST" if fashion else folder.resolve().name
    return Data(name, str(folder), 0.75 if fashion else None, train, train_labels, test, test_labels)


def _pair(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = _read(folder, f"{part}-images-idx3-ubyte")
    labels = _read(folder, f"{part}-labels-idx1-ubyte")
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE) or len(images) == 0:
        raise ArgumentError(
            f"--data: the {part} images in {folder} are {images.dtype} of shape {list(images.shape)}, "
            f"not uint8 [n, {SIDE}, {SIDE}]"
        )
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise ArgumentError(
            f"--data: the {part} labels in {folder} are {labels.dtype} of shape {list(labels.shape)}, "
            f"not uint8 [{len(images)}], one an image"
        )
    if labels.max() >= CLASSES:
        raise ArgumentError(f"--data: the {part} labels in {folder} go up to {labels.max()}, not {CLASSES - 1}")
    return images.reshape(len(images), SIDE * SIDE), labels.astype(np.int64)


def _read(folder: Path, name: str) -> NDArray[np.generic]:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise ArgumentError(f"--data: {folder} holds no {name}, with or without .gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            array: NDArray[np.generic] = np.array(idx2numpy.convert_from_file(file))  # the library's is read-only
    except (FormatError, OSError, EOFError, zlib.error, MemoryError, OverflowError) as error:
        raise ArgumentError(f"--data: {path} is not an IDX file: {error}") from None
    return array


def _digits() -> Data:
    """Real 8x8 digits, enlarged; a fifth is held out."""
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    large = zoom(digits.images, (1, SIDE / 8, SIDE / 8), order=1)  # bilinear; values from 0 to 16
    rows = np.clip(np.rint(large * (255 / 16)), 0, 255).astype(np.uint8).reshape(len(large), SIDE * SIDE)
    labels = digits.target.astype(np.int64)
    a, b, c, d = train_test_split(rows, labels, test_size=0.2, random_state=0, stratify=labels)
    return Data("digits", "scikit-learn's, 8x8 enlarged to 28x28", 0.90, a, c, b, d)
