"""A cut between operators that TensorFlow would rewrite together: other last bits, or the same ones with an option."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import tensorwire as tw
from tests.harness.jobs import for_each, run_job
from tests.tensorflow.test_operators import load


def results(job: tw.Job, rewritten: bool, cut: bool) -> list[Any]:
    """``exp`` on one worker, and on the other one what makes ``expm1`` and ``rsqrt`` of it in one process."""
    tf, twt = load()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": rewritten})
    on: Callable[[int], Any] = (
        (lambda rank: tf.device(f"/job:worker/task:{rank}")) if cut else lambda _: contextlib.nullcontext()
    )
    draw = np.random.default_rng(0)
    x, y = (tf.constant(draw.standard_normal(1000), tf.float32) for _ in range(2))
    with twt.worker(0) if cut else contextlib.nullcontext():
        a = tf.Variable(draw.standard_normal(1000).astype("f4"))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with on(0):
            p = tf.exp(a * x)
        with on(1):
            return p - 1.0, y / tf.sqrt(p)

    return [each.numpy() for each in (twt.distribute(step) if cut else step)(x, y)]


def test_a_cut_has_the_bits_of_one_process_without_arithmetic_optimization() -> None:
    (alone,) = run_job(for_each, results, [(False, False), (True, False)], workers=1, servers=0).ok()
    for worker in run_job(for_each, results, [(False, True), (True, True)], servers=0).ok():
        for rewritten, found, wanted in zip((False, True), worker, alone, strict=True):
            same = [np.array_equal(mine, other) for mine, other in zip(found, wanted, strict=True)]
            assert all(same) is not rewritten, "docs/tensorflow-functions.md says when results differ"
            for mine, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
