"""Where a worker is: its machine, worker 0's address; and a process group of torch.distributed made from that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError
from tensorwire.launch.process_group import interface_of
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox, free_port
from tests.launch.test_nodes import both
from tests.launch.test_starters import by_hand, finish

TOLD = "print('local', job.local_rank, 'of', job.local_workers, 'at', job.address)\n"
REDUCES = """
import torch
job.init_process_group()
from torch import distributed
total = torch.full((3,), float(job.rank + 1))
distributed.all_reduce(total)
print("sum", *total.tolist(), "backend", distributed.get_backend())
"""
SUM = "sum 3.0 3.0 3.0 backend gloo"


def rank_and_address(job: tw.Job) -> tuple[int, int, str, str]:
    return job.local_rank, job.local_workers, job.address, repr(job)


def test_workers_of_one_machine() -> None:
    told = "<tensorwire.Job: worker {} of 3, 0 servers, started by tensorwire run, running>"
    assert run_job(rank_and_address, workers=3, servers=0).ok() == [
        (rank, 3, "127.0.0.1", told.format(rank)) for rank in range(3)
    ]


def elsewhere(job: tw.Job) -> tuple[int, int]:
    """Worker 1 claims to be on another machine."""
    card, found = job._worker.member.card, {}
    for rank in range(job.num_workers):
        one = card(f"worker {rank}")
        found[f"worker {rank}"] = one
    away = found["worker 0"].where
    away = type(away)("another boot", away.network, away.user, away.users)
    found["worker 1"] = type(found["worker 1"])(away, None, None, None)
    job._worker.member.where = found[job._worker.member.name].where
    job._worker.member.card = lambda name, timeout=0.0: found[name]  # type: ignore[method-assign]
    return job.local_rank, job.local_workers


def test_workers_of_several_machines_are_counted_by_machine() -> None:
    assert run_job(elsewhere, workers=3, servers=0).ok() == [(0, 2), (0, 1), (1, 2)]


# ---- process groups


def groups(job: tw.Job) -> list[str]:
    job.init_process_group(timeout=torch.distributed.default_pg_timeout)
    job.init_process_group()  # it is there
    total = torch.tensor([job.rank + 1.0])
    torch.distributed.all_reduce(total)
    told = [str(total.item()), os.environ["GLOO_SOCKET_IFNAME"]]
    torch.distributed.destroy_process_group()
    job.init_process_group()
    told.append(torch.distributed.get_backend())
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(ArgumentError, match="already has a process group"):
        job.init_process_group()
    with pytest.raises(ArgumentError, match="takes no rank, store: the job knows"):
        job.init_process_group(rank=0, store=None)
    job.close()
    told.append(str(torch.distributed.is_initialized()))  # it was not the job's
    torch.distributed.destroy_process_group()
    return told


def test_a_process_group_once_and_again() -> None:
    assert run_job(groups).ok() == [["3.0", "lo", "gloo", "True"]] * 2


def ends(job: tw.Job) -> bool:
    job.init_process_group()
    job.close()
    return torch.distributed.is_initialized()


def test_the_group_ends_with_the_job() -> None:
    assert run_job(ends, servers=0).ok() == [False, False]


@pytest.mark.long
def test_two_jobs_of_tensorwire_run_at_once(sandbox: Sandbox) -> None:
    script = sandbox.script(TOLD + REDUCES)
    for result in finish([sandbox.run(script, OMP_NUM_THREADS="1") for _ in range(2)]):
        assert (result.status, result.err) == (0, "")
        assert result.out.count(SUM) == 2
        assert {f"local {rank} of 2 at 127.0.0.1" for rank in range(2)} <= set(result.out.splitlines())
    sandbox.nothing_left()


@pytest.mark.slow
def test_ranks_by_hand_and_slurm(sandbox: Sandbox) -> None:
    programs = by_hand(sandbox, TOLD + REDUCES)
    script = sandbox.script(TOLD + REDUCES)
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0"}
    slurm["OMP_NUM_THREADS"] = "1"
    programs += [sandbox.python(script, SLURM_PROCID=str(rank), **slurm) for rank in range(2)]
    for rank, result in enumerate(finish(programs)):
        assert (result.status, result.err) == (0, "")
        assert SUM in result.out
        assert f"local {rank % 2} of 2 at 127.0.0.1" in result.out
    sandbox.nothing_left()


@pytest.mark.slow
def test_two_nodes(sandbox: Sandbox) -> None:
    """Both are on this machine, which is what their workers are counted by."""
    for rank, result in enumerate(finish(both(sandbox, TOLD + REDUCES))):
        assert (result.status, result.err) == (0, "")
        assert SUM in result.out
        assert f"local {rank} of 2 at 127.0.0.1" in result.out
    sandbox.nothing_left()


def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("::1") is None


def test_without_torch_one_line_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tensorwire as tw\n"
        "with tw.init(servers=0) as job:\n"
        "    try: job.init_process_group()\n"
        "    except tw.errors.Unsupported as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "job.init_process_group needs PyTorch, which is not installed here\n"
