"""What carries a cut function's tensors is a choice, and the results are the same."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import run_job
from tests.tensorflow.functions import FUNCTIONS
from tests.tensorflow.test_distribute import run
from tests.tensorflow.test_operators import load


def over(job: tw.Job, number: int, protocol: str) -> tuple[Any, ...]:
    _, twt = load()
    return twt.use_protocol(protocol), *run(job, number, True)


STATIC = [number for number, each in enumerate(FUNCTIONS) if not each.__name__.startswith("unknown_")]


@pytest.mark.parametrize("number", STATIC, ids=lambda n: FUNCTIONS[n].__name__)
def test_over_grpc_a_cut_function_has_the_bits_of_one_process(number: int) -> None:
    ((wanted, variables, _),) = run_job(run, number, False, workers=1, servers=0).ok()
    for rank, (used, found, mine, owners) in enumerate(run_job(over, number, "grpc", servers=0).ok()):
        assert used == "grpc"
        for result, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(result, other)
        for value, owner, other in zip(mine, owners, variables, strict=True):
            if owner == f"worker {rank}":
                np.testing.assert_array_equal(value, other)


def with_a_server(job: tw.Job) -> None:
    tf, twt = load()
    twt.use_protocol("grpc")
    with twt.server(0):
        w = tf.Variable(1.0)
    with pytest.raises(errors.Unsupported, match="gRPC reaches no servers"):
        twt.distribute(lambda: w.assign_add(1.0))()


def test_grpc_reaches_no_servers() -> None:
    run_job(with_a_server).ok()


def automatic(job: tw.Job, folder: str) -> tuple[str, list[Any]]:
    """Worker 1 has no compiler, if there is a folder, for it has no operators either."""
    if folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/{job.rank}"
        if job.rank == 1:
            os.environ["CXX"] = "no-such-compiler"
        else:
            os.environ.pop("XDG_CACHE_HOME")
    used, found, *_ = over(job, 0, "auto")
    return used, found


def test_auto_takes_grpc_where_a_worker_has_no_compiler(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with_edges, without = run_job(automatic, "", servers=0).ok(), run_job(automatic, str(tmp_path), servers=0).ok()
    assert [used for used, _ in with_edges + without] == ["tensorwire"] * 2 + ["grpc"] * 2
    for mine, other in zip(with_edges[0][1], without[1][1], strict=True):
        np.testing.assert_array_equal(mine, other)


def refused(job: tw.Job) -> None:
    tf, twt = load()
    with pytest.raises(errors.ArgumentError, match="'tensorwire', 'grpc' or 'auto', not 'rdma'"):
        twt.use_protocol("rdma")
    tf.zeros([])
    with pytest.raises(errors.ArgumentError, match="before the first tensor"):
        twt.use_protocol("grpc")


def test_a_protocol_is_chosen_once_and_early() -> None:
    run_job(refused, workers=1, servers=0).ok()


def differing(job: tw.Job) -> None:
    _, twt = load()
    twt.use_protocol("grpc" if job.rank else "tensorwire")


def test_workers_choose_the_same_protocol() -> None:
    cause = run_job(differing, servers=0).cause
    assert cause is not None
    assert "worker 1 uses protocol 'grpc', and worker 0 'tensorwire'" in str(cause)


def unknown(job: tw.Job) -> None:
    _, twt = load()
    twt.use_protocol("grpc")
    with pytest.raises(errors.Unsupported, match=r"gRPC carries numbers of .*, of a shape that is known"):
        run(job, [each.__name__ for each in FUNCTIONS].index("unknown_sizes"), True)


def test_grpc_does_not_carry_what_varies() -> None:
    run_job(unknown, servers=0).ok()
