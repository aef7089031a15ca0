"""Two workers train one Keras model by ``model.fit``, each on half of the data.

tensorwire run --workers 2 --servers 1 -- python examples/tensorflow_fit.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import keras
import numpy as np

import tensorwire as tw
from tensorwire.tensorflow import AverageMetrics, BackupAndRestore, StoreOptimizer

SAMPLES, BATCH, EPOCHS = 8192, 64, 6


def points() -> tuple[np.ndarray, np.ndarray]:
    """Points of the plane, and in which of two spirals each lies."""
    rng = np.random.default_rng(0)
    spiral = rng.integers(0, 2, SAMPLES)
    angle = 6 * np.sqrt(rng.random(SAMPLES))
    turned = angle + np.pi * spiral
    place = angle[:, None] * np.stack([np.cos(turned), np.sin(turned)], axis=1) / 6
    return (place + 0.02 * rng.standard_normal(place.shape)).astype("float32"), spiral


def main() -> None:
    """Trains, and prints the accuracy on worker 0."""
    with tw.init() as job:
        layers = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1, activation="sigmoid")])
        model.compile(StoreOptimizer(keras.optimizers.Adam(5e-3)), "binary_crossentropy", metrics=["accuracy"])
        x, y = points()
        history = model.fit(
            x[job.rank :: job.num_workers],
            y[job.rank :: job.num_workers],
            batch_size=BATCH,
            epochs=EPOCHS,
            callbacks=[AverageMetrics(), BackupAndRestore(os.environ.get("BACKUP", "backup"))],
            verbose=0,
        )
        if job.rank == 0:
            for epoch, accuracy in enumerate(history.history["accuracy"], start=1):
                print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
