"""Versions and readers as jobs begin and end: who finds a job, what stays of one that was killed, and who is harmed."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tensorwire as tw
from tensorwire import Job
from tensorwire.cli.versions import versions
from tensorwire.errors import ArgumentError, AuthenticationError, TensorwireError, WaitTimeout
from tensorwire.observe import failpoints
from tensorwire.store import Every
from tensorwire.store.versions.version_files import CURRENT, MODEL, job_folder
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox
from tests.levels import mostly_slow
from tests.store.test_versions import SIZES, counting, only, parameters, reading

TRAIN = """
    import torch
    p = torch.nn.Parameter(torch.zeros(3000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, publish=tw.store.Every(1))
    print("job", job.name)
    print("address", os.environ["TENSORWIRE_COORDINATOR"])
    while True:
        p.grad = -torch.ones_like(p)
        store.step()
"""
READ = """
    import tensorwire as tw, torch
    with tw.store.connect(*sys.argv[1:]) as reader:
        reader.wait(5)
        print("reading")
        while True:
            version, got = reader.pull(1)
            assert (got["p"] == version.step).all()
"""


# ---- other programs


def stock(job: Job) -> list[bool]:
    """The libraries' own loaders, in an empty process's place."""
    from safetensors.torch import load_file
    from torch.distributed import checkpoint as dcp

    torch.manual_seed(job.rank)
    net = torch.nn.Linear(30, 40)
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True)
    found = []
    with reading(job) as reader:
        reader.wait()
        path = reader.path
        assert path == (job_folder(job.name) / "store-0" / CURRENT).resolve() / MODEL
        other = torch.nn.Linear(30, 40)
        other.load_state_dict(load_file(path), strict=True)
        found.append(torch.equal(other.weight, net.weight))
        state = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path.parent)), no_dist=True)
        found += [torch.equal(state[name], value) for name, value in net.state_dict().items()]
    job.barrier()
    optimizer.close()
    return found


def test_stock_libraries_load_a_live_version() -> None:
    assert run_job(stock, servers=2).ok() == [[True] * 3] * 2


def sharded(job: Job, meeting: str) -> list[bool]:
    """Two processes with other parts of the tensors than the servers have, by rows and by columns."""
    from torch import distributed
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    net = torch.nn.Linear(30, 40)
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True, bucket_bytes=4096)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=job.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    want, found = {name: value.clone() for name, value in net.state_dict().items()}, []
    with reading(job) as reader:
        reader.wait()
        for columns in (False, True):
            cut = {name: value.dim() - 1 if columns else 0 for name, value in want.items()}
            state = {n: distribute_tensor(torch.zeros_like(v), mesh, [Shard(cut[n])]) for n, v in want.items()}
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(reader.path.parent)))
            for name, value in want.items():
                part = value.chunk(2, dim=cut[name])[job.rank]
                found.append(torch.equal(state[name].to_local(), part))
    distributed.destroy_process_group()
    job.barrier()
    optimizer.close()
    return found


def test_distributed_checkpoints_load_a_live_version_into_other_shards(tmp_path: Path) -> None:
    assert run_job(sharded, str(tmp_path / "meeting"), servers=3).ok() == [[True] * 4] * 2


# ---- who finds a job


def test_a_job_is_found_by_its_name_or_its_address(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [sandbox.run(sandbox.script(TRAIN), "--servers", "2", workers=1) for _ in range(2)]
    names, addresses = [job.said("job") for job in jobs], [job.said("address") for job in jobs]
    for name in names:
        with tw.store.connect(name) as reader:
            version, got = reader.pull(2)
            assert (got["p"] == version.step).all()
    monkeypatch.setenv("TENSORWIRE_SECRET_FILE", sandbox.secret())
    with pytest.raises(AuthenticationError):
        tw.store.connect(addresses[0])
    with pytest.raises(
        ArgumentError, match="no job 'ffffffff' of this user publishes versions on this machine"
    ) as lost:
        tw.store.connect("ffffffff", timeout=0.0)
    with pytest.raises(ArgumentError, match="several jobs publish versions here: ") as several:
        tw.store.connect()
    assert all(name in str(raised.value) for name in names for raised in (lost, several))
    for job in jobs:
        job.signal(signal.SIGINT)
        assert job.finish().status == 130
    sandbox.all_gone()
    assert not any(job_folder(name).exists() for name in names)


def test_several_machines_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORWIRE_SECRET_FILE", raising=False)
    with pytest.raises(ArgumentError, match="TENSORWIRE_SECRET_FILE"):
        tw.store.connect("127.0.0.1:9")


def without_publish(job: Job) -> str:
    """A job whose second optimizer alone publishes."""
    params = [("p", torch.nn.Parameter(torch.zeros(3)))]
    silent = tw.torch.StoreOptimizer(params, torch.optim.SGD, lr=1.0)
    with pytest.raises(ArgumentError, match="construct it with publish=True"):
        silent.publish()
    optimizer, _ = counting(True)
    with reading(job) as reader:
        assert set(reader.tensors) == {f"p{i}" for i in range(len(SIZES))}
    with pytest.raises(WaitTimeout) as raised, reading(job, number=1, timeout=0.1):
        pass
    job.barrier()
    for each in (silent, optimizer):
        each.close()
    return str(raised.value)


def test_the_number_counts_optimizers_that_publish() -> None:
    for why in run_job(without_publish).ok():
        assert why.startswith("the job publishes no versions of number 1 after 0.1 s: is the optimizer with publish= ")


def listed(job: Job) -> tuple[list[tuple[int, str]], list[tuple[str, int, int, list[str]]]]:
    optimizer, step = counting(True)
    found = []
    if job.rank == 0:
        other = torch.nn.ParameterDict(dict(parameters()))
        with reading(job) as reader, reading(job) as keeper, reading(job, "tcp") as idle:
            kept = keeper.stage(1)
            step()
            optimizer.publish()
            reader.load_into(other, 2)
            while not any(each.counter for each in optimizer.readers()):
                pass  # the word is on its way
            assert optimizer.readers() == idle.listing().readers
            found = idle.listing()
            names = {reader.name: "took", keeper.name: "keeps", idle.name: "idle"}
            kept.close()
        versions = [(each.step, each.state) for each in found.versions]
        readers = sorted((names[r.reader], r.counter, r.step, sorted(r.seconds)) for r in found.readers)
        assert {each.machine for each in found.readers} == {f"{socket.gethostname()}, process {os.getpid()}"}
        while optimizer.readers():
            pass  # they are gone, one by one
    else:
        step()
        versions, readers = [], []
    job.barrier()
    optimizer.close()
    return versions, readers


def test_versions_and_readers_are_listed() -> None:
    (versions, readers), _ = run_job(listed).ok()
    assert versions == [(1, "published"), (0, "draining")]
    phases = ["convert", "pause", "read", "verify"]
    assert readers == [("idle", 0, 0, []), ("keeps", 0, 0, []), ("took", 2, 1, phases)]


def shown(job: Job) -> list[str]:
    optimizer, _ = counting(True)
    lines = []
    if job.rank == 0:
        with reading(job) as reader:
            reader.load_into(torch.nn.ParameterDict(dict(parameters())))
            while not any(each.counter for each in optimizer.readers()):
                pass
            lines = CliRunner().invoke(versions, [job.name], catch_exceptions=False).output.splitlines()
    job.barrier()
    optimizer.close()
    return lines


def test_the_command_shows_versions_and_readers() -> None:
    (lines, _) = run_job(shown).ok()
    assert lines[0].split() == ["version", "step", "state"]
    name, step, state = lines[1].split()
    assert (name.startswith("0.1."), step, state) == (True, "0", "published")
    assert lines[3] == "1 reader"
    assert lines[4].split() == ["reader", "version", "step", "pause", "read", "verify", "convert"]
    assert name in lines[5]


# ---- ends


def train_on(job: Job, role: str, state: str) -> None:
    if role == "worker":
        failpoints.fail_at("worker", 0, 3, state)
    _, step = counting(Every(1))
    for _ in range(50):
        step()
        job.barrier()


@pytest.mark.parametrize(
    ("role", "state"), [("primary", "filled"), ("primary", "version_published"), ("worker", "headed")]
)
def test_whoever_is_killed_the_next_job_finds_nothing_of_it(role: str, state: str) -> None:
    prepare = partial(failpoints.fail_at, "primary", 0, 3, state) if role == "primary" else None
    ended = run_job(train_on, role, state, prepare=prepare, workers=1)
    assert ended.cause is not None
    assert ended.cause.who == ("server 0" if role == "primary" else "worker 0")
    assert ended.codes.count(-signal.SIGKILL) == 1


WHO = ["server_process", "tensorwire.cli run", "script0"]


@pytest.mark.parametrize("who", mostly_slow(WHO, ["tensorwire.cli run"]))
def test_no_folder_outlives_a_job_of_which_somebody_was_killed(sandbox: Sandbox, who: str) -> None:
    job = sandbox.run(sandbox.script(TRAIN), workers=1)
    folder = job_folder(job.said("job"))
    reader = sandbox.python(sandbox.script(READ, init=False), folder.name.split("-")[-1])
    reader.expect("reading")
    os.kill(sandbox.find(who) if who != "script0" else job.number("pid-0"), signal.SIGKILL)
    assert job.finish().status != 0
    assert "JobEnded" in reader.finish().err
    sandbox.all_gone()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_killed_or_stopped_harms_nobody(sandbox: Sandbox, number: signal.Signals) -> None:
    stop = sandbox.folder / "stop"
    script = sandbox.script(TRAIN.replace("while True:", f"while not os.path.exists({str(stop)!r}):"))
    job = sandbox.run(script, workers=1)
    reader = sandbox.python(sandbox.script(READ, init=False), job.said("job"))
    reader.expect("reading")
    reader.signal(number)
    again = sandbox.python(sandbox.script(READ, init=False), job.said("job"))
    again.expect("reading")
    again.signal(signal.SIGKILL)
    stop.touch()
    result = job.finish()
    assert (result.status, result.err.count("Error")) == (0, 0)
    reader.signal(signal.SIGKILL)
    reader.finish()


def ended_well(job: Job) -> list[str]:
    optimizer, step = counting(Every(1))
    reader = None
    if job.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORWIRE_DEVICE", "auto")
            reader = tw.store.connect(job.name)
        staged = reader.stage(1)
    step()
    optimizer.close()
    job.barrier()
    if reader is None:
        return []
    assert only(staged.tensors) == 0.0, "who has a version keeps it"
    with pytest.raises(TensorwireError) as raised:
        reader.pull(3)
    reader.close()
    return [type(raised.value).__name__]


def test_who_has_a_version_keeps_it_when_the_store_is_closed() -> None:
    assert run_job(ended_well).ok()[0] == ["RemoteAccessError"]
