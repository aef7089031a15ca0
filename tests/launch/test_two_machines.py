"""Two machines with one cable: network namespaces and a veth pair. Tensors cross over tcp; a cut cable ends the job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tensorwire.testing.patience import patient
from tests.harness.namespaces import cut_cable, two_namespaces
from tests.harness.sandbox import PUBLISHED, Program, Sandbox

ADDRESSES = ("10.213.7.1", "10.213.7.2")
TRAIN = """
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(job.rank)
    net = torch.nn.Linear(300, 50)
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=0.01, publish=True)
    for step in range(5):
        optimizer.zero_grad()
        net(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    for i in range(2):
        print(f"worker {job.rank} reaches server {i} by {job._worker.member.channel(f'server {i}').device.name}")
    print("sum", sum(p.detach().double().sum().item() for p in net.parameters()))
    optimizer.publish()
    with tw.store.connect(job._worker.member.client.address) as reader:
        copy = torch.nn.Linear(300, 50)
        version = reader.load_into(copy, 2)
        same = all(torch.equal(mine, theirs) for mine, theirs in zip(net.parameters(), copy.parameters()))
        print(f"worker {job.rank} reads version {version.counter} by {reader.route}: {same}")
        job.barrier()
"""


@dataclass
class Machines:
    """Two namespaces; ``run`` starts a node's launcher in its own."""

    sandbox: Sandbox
    names: tuple[str, str]
    secret: str

    def run(self, script: str, node: int) -> Program:
        enter = ["ip", "netns", "exec", self.names[node]]
        launch = [shutil.which("tensorwire") or "tensorwire", "run", "--rendezvous", f"{ADDRESSES[0]}:29871"]
        options = ["--nodes", "2", "--node", str(node), "--", "python", script]
        program = [*enter, *launch, *options]
        environment = {
            "TENSORWIRE_SECRET_FILE": self.secret,
            "TENSORWIRE_FAILURE_TIMEOUT": str(patient(2.0)),
        }
        return self.sandbox.start(*program, **environment)


@pytest.fixture
def machines(sandbox: Sandbox) -> Iterator[Machines]:
    with two_namespaces(ADDRESSES) as names:
        yield Machines(sandbox, names, sandbox.secret())
        sandbox.close()


@pytest.mark.slow
def test_training_on_two_machines(machines: Machines) -> None:
    script = machines.sandbox.script(TRAIN)
    programs = [machines.run(script, node) for node in (0, 1)]
    results = [p.finish() for p in programs]
    assert [(r.status, PUBLISHED.sub("", r.err)) for r in results] == [(0, "")] * 2
    for node, result in enumerate(results):
        assert f"worker {node} reaches server {node} by shm" in result.out
        assert f"worker {node} reaches server {1 - node} by tcp" in result.out
    assert "worker 0 reads version 2 by shm: True" in results[0].out
    assert "worker 1 reads version 2 by tcp: True" in results[1].out
    sums = {line for r in results for line in r.out.splitlines() if line.startswith("sum")}
    assert len(sums) == 1
    machines.sandbox.nothing_left()


def test_a_cut_cable_ends_both_sides(machines: Machines) -> None:
    script = machines.sandbox.script(
        "job.barrier(); print('together'); job._worker.member.client.lookup('nothing', 600.0)"
    )
    programs = [machines.run(script, node) for node in (0, 1)]
    for program in programs:
        program.expect("together")
    cut_cable(machines.names)
    first, second = (p.finish() for p in programs)
    assert first.status != 0
    assert "sent no heartbeat" in first.message()
    assert second.status != 0
    assert "tensorwire: the coordinator is gone" in second.message()
    machines.sandbox.all_gone()
