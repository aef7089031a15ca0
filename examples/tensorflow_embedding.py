"""Two workers learn how users rate items. The tables are on the servers; a worker holds the rows of its batch.

tensorwire run --workers 2 --servers 2 -- python examples/tensorflow_embedding.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import keras
import numpy as np

import tensorwire as tw
from tensorwire.tensorflow import AverageMetrics, StoreEmbedding, StoreOptimizer

USERS, ITEMS, WIDTH, RATINGS, BATCH, EPOCHS = 1_000_000, 100_000, 16, 16_384, 256, 5
TASTES = 4  # what a user likes and what an item is; here they can be read off the numbers


def ratings() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Who rates what, and how: 1 where the taste is met, or else 0."""
    rng = np.random.default_rng(0)
    users, items = (
        rng.choice(USERS, 400)[rng.integers(400, size=RATINGS)],
        rng.integers(ITEMS // 200, size=RATINGS) * 200,
    )
    return {"user": users, "item": items}, (users % TASTES == items // 200 % TASTES).astype("float32")


def table(rows: int) -> StoreEmbedding:
    """A table whose servers run an optimizer of Keras."""
    return StoreEmbedding(rows, WIDTH, keras.optimizers.Adam(0.03), scale=0.3)


def main() -> None:
    """Trains, and prints the loss on worker 0."""
    with tw.init() as job:
        inputs = {name: keras.Input((), name=name, dtype="int64") for name in ("user", "item")}
        user, item = table(USERS)(inputs["user"]), table(ITEMS)(inputs["item"])
        score = keras.layers.Dense(1)(keras.layers.Multiply()([user, item]))
        model = keras.Model(inputs, score)
        model.compile(StoreOptimizer(keras.optimizers.Adam(0.01), on_servers=True), "mse")
        x, y = ratings()
        mine = slice(job.rank, None, job.num_workers)
        history = model.fit(
            {name: each[mine] for name, each in x.items()},
            y[mine],
            batch_size=BATCH,
            epochs=EPOCHS,
            callbacks=[AverageMetrics()],
            verbose=0,
        )
        if job.rank == 0:
            for epoch, loss in enumerate(history.history["loss"], start=1):
                print(f"epoch {epoch}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
