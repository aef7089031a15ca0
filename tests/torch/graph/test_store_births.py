"""Gradients of compiled replicas are born in the store's slots: nothing is copied, and nobody sees a difference.

Each scenario runs twice in one job: compiled, and as it is. Losses, gradients and parameters are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.observe import counters
from tensorwire.torch.graph.memory.gradient_slots import GradientSlot, slot_of
from tests.harness.jobs import run_job
from tests.torch.graph import zoo

Optimizer = tw.torch.StoreOptimizer


class Net(torch.nn.Module):
    """With a weight that is used twice, a frozen parameter, one that nobody uses, and one of an odd size.

    With buckets of 4 KiB its weights are cut into several, on several servers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 64)
        self.tied = torch.nn.Linear(64, 64)
        self.frozen = torch.nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.norm = torch.nn.LayerNorm(64)
        self.odd = torch.nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.tied(torch.relu(self.first(x))))
        x = torch.nn.functional.linear(x, self.tied.weight).relu()
        return self.odd(self.norm(x)).square().mean()


def batch(job: tw.Job, number: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * job.rank + number))


class Run:
    """A model in training, and what is to be the same whether it is compiled or not."""

    def __init__(self, job: tw.Job, compiled: bool, net: torch.nn.Module, **options: Any) -> None:
        self.job, self.compiled, self.net = job, compiled, net
        options = {"lr": 0.1, "momentum": 0.9, "bucket_bytes": 4096, **options}
        self.optimizer = Optimizer(net.named_parameters(), torch.optim.SGD, **options)
        self.run = torch.compile(net, backend="tensorwire") if compiled else net
        self.seen: list[torch.Tensor] = []
        self.copies: list[int] = []  # of each step

    def loss(self, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.run(batch(self.job, number))
        self.seen.append(loss.detach().clone())
        return loss

    def steps(self, **cleared: bool) -> Iterator[int]:
        """Three; the body of the loop is what each does before ``optimizer.step()``."""
        for number in range(3):
            before = counters.snapshot()
            self.optimizer.zero_grad(**cleared)
            yield number
            self.seen.extend(p.grad.clone() for p in self.net.parameters() if p.grad is not None)
            self.optimizer.step()
            self.copies.append(asdict(counters.since(before))["copies"])
            self.seen.extend(p.detach().clone() for p in self.net.parameters())

    def born(self) -> list[str]:
        """The parameters whose gradients lie in their slots."""
        return [name for name, p in self.net.named_parameters() if p.grad is not None and slot(p).holds(p.grad)]


def slot(p: torch.Tensor) -> GradientSlot:
    found = slot_of(p)
    assert found is not None
    return found


TRAINED = 8  # parameters of Net that have gradients
Scenario = Callable[[Run], None]


def both(job: tw.Job, scenario: Scenario) -> tuple[list[int], list[int]]:
    """Copies of each step, compiled and not."""
    runs = []
    for compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = Run(job, compiled, Net(), overlap=scenario is overlapped)
        scenario(run)
        runs.append(run)
    ours, stock = runs
    assert len(ours.seen) == len(stock.seen) > 0
    assert all(map(torch.equal, ours.seen, stock.seen)), scenario.__name__
    return ours.copies, stock.copies


# ---- whole models


def train(job: tw.Job, name: str) -> list[dict[str, int]]:
    """What each of four steps counted, from its forward pass on."""
    seen: list[list[torch.Tensor]] = []
    counted = []
    for compiled in (True, False):
        net = zoo.build(name)
        optimizer = Optimizer(net.named_parameters(), torch.optim.AdamW, lr=1e-3, bucket_bytes=16384)
        run = torch.compile(net, backend="tensorwire") if compiled else net
        losses = []
        for step in range(4):
            before = counters.snapshot()
            optimizer.zero_grad()
            loss = zoo.loss_of(run(**zoo.inputs(name, 10 * step + job.rank)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if compiled:
                counted.append(asdict(counters.since(before)))
        seen.append([*losses, *(t.clone() for t in net.state_dict().values())])
    assert all(map(torch.equal, *seen))
    return counted


@pytest.mark.parametrize(
    ("name", "device", "servers"),
    [
        ("fcn5", "tcp", 2),
        pytest.param("gpt2", "shm", 2, marks=pytest.mark.long),
        pytest.param("inception", "tcp", 2, marks=pytest.mark.long),
    ],
)
def test_a_step_copies_nothing(name: str, device: str, servers: int) -> None:
    for counted in run_job(train, name, device=device, servers=servers).ok():
        assert counted[0]["copies"] > 0  # the first run shows what each operator allocates
        assert all(c["rpcs"] == c["registrations"] == 0 for c in counted[1:])
        assert [c["copies"] for c in counted[1:]] == [0, 0, 0]


# ---- what users do


def plain(run: Run) -> None:
    for number in run.steps():
        run.loss(number).backward()
        assert len(run.born()) == (TRAINED if run.compiled else 0)


def accumulate(run: Run) -> None:
    for number in run.steps():
        for part in range(3):
            run.loss(10 * number + part).backward()
        assert len(run.born()) == (TRAINED if run.compiled else 0)


def zeros(run: Run) -> None:
    """Gradients that are set to zero stay in their slots."""
    for number in run.steps(set_to_none=False):
        run.loss(number).backward()


def own(run: Run) -> None:
    """What is added to gradients of the user is copied."""
    for number in run.steps():
        for p in run.net.parameters():
            p.grad = torch.full_like(p, 0.5)
        run.loss(number).backward()
        assert not run.born()


def altered(run: Run) -> None:
    """A gradient that begins where its slot does, and shows one element of it many times."""
    for number in run.steps():
        run.loss(number).backward()
        bias = run.net.get_parameter("first.bias")
        assert bias.grad is not None
        bias.grad = bias.grad[:1].expand(64)


def retained(run: Run) -> None:
    """A graph goes back twice, with an evaluation between."""
    for number in run.steps():
        loss = run.loss(number)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            run.net.eval()
            run.loss(100 + number)
            run.net.train()
        loss.backward()


def clipped(run: Run) -> None:
    """Here and on the servers."""
    run.optimizer.max_grad_norm = 0.01
    for number in run.steps():
        run.loss(number).backward()
        torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.1)


def changed(run: Run) -> None:
    """In place, replaced, and dropped."""
    weight, bias, norm = run.net.first.weight, run.net.first.bias, run.net.norm.weight
    for number in run.steps():
        run.loss(number).backward()
        weight.grad.mul_(0.5)
        bias.grad = bias.grad + 1
        norm.grad = None


def swapped(run: Run) -> None:
    """Gradients in each other's slots."""
    one, other = run.net.tied.bias, run.net.norm.weight
    for number in run.steps():
        run.loss(number).backward()
        one.grad, other.grad = other.grad, one.grad


def held(run: Run) -> None:
    """Whoever keeps a gradient has its values, whatever is pushed later."""
    kept, copies = [], []
    for number in run.steps():
        run.loss(number).backward()
        kept.extend(p.grad for p in run.net.parameters() if p.grad is not None)
        copies.extend(p.grad.clone() for p in run.net.parameters() if p.grad is not None)
    assert all(map(torch.equal, kept, copies))
    run.seen.extend(kept)


def asked(run: Run) -> None:
    """torch.autograd.grad gives what is the caller's, and backward(inputs=) some of the gradients."""
    for number in run.steps():
        mine = torch.autograd.grad(run.loss(number), [run.net.first.weight, run.net.norm.bias])
        before = [m.clone() for m in mine]
        run.loss(10 + number).backward(inputs=[run.net.tied.weight, run.net.first.weight])
        run.seen.extend(mine)
        assert all(map(torch.equal, mine, before))


def loaded(run: Run) -> None:
    """Values that are loaded take the way of gradients, and before them."""
    for number in run.steps():
        run.loss(number).backward()
        run.net.load_state_dict({k: v * 0.5 for k, v in run.net.state_dict().items()})


def overlapped(run: Run) -> None:
    for number in run.steps():
        with run.optimizer.no_sync():
            run.loss(10 + number).backward()
        run.loss(number).backward()
    run.optimizer.wait()


SCENARIOS: list[Scenario] = [
    *(plain, accumulate, zeros, retained, clipped, asked, overlapped, changed),
    *(own, altered, swapped, held, loaded),
]


def scenarios(job: tw.Job) -> dict[str, tuple[list[int], list[int]]]:
    return {scenario.__name__: both(job, scenario) for scenario in SCENARIOS}


@pytest.mark.parametrize(("device", "servers"), [("shm", 2), pytest.param("tcp", 1, marks=pytest.mark.long)])
def test_what_users_do_with_gradients(device: str, servers: int) -> None:
    first, second = run_job(scenarios, device=device, servers=servers).ok()
    loads, does_not = first.pop("loaded"), second.pop("loaded")
    assert first == second
    for scenario in SCENARIOS[:7]:
        ours, stock = first[scenario.__name__]
        assert ours[1:] == [0, 0], scenario.__name__
        assert min(stock) > 0
    assert first["changed"][0][1:] == [1, 1]  # what was replaced
    assert first["own"][0] == first["own"][1]
    assert loads[0][1:] > does_not[0][1:] == [0, 0]  # worker 0 pushes the values


# ---- one graph for several modules, and what nobody placed


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Layers(torch.nn.Module):
    """Layers that look alike to dynamo: it compiles one graph for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def layer_by_layer(job: tw.Job) -> None:
    runs = []
    for compiled in (True, False):
        torch.manual_seed(0)
        run = Run(job, False, Layers())
        for layer in run.net.layers if compiled else ():
            layer.compile(backend="tensorwire")
        for number in run.steps():
            run.loss(number).backward()
            assert len(run.born()) == (8 if compiled else 0)
        runs.append(run)
    assert all(map(torch.equal, runs[0].seen, runs[1].seen))
    assert runs[0].copies[-1] == 0


def test_one_graph_for_several_modules() -> None:
    run_job(layer_by_layer, device="shm").ok()


def alone(job: tw.Job) -> None:
    """A worker that is the only one to compile sends no requests; an error in a model is the user's."""
    torch.manual_seed(job.rank)
    net = Net()
    before = counters.snapshot()
    run = torch.compile(net, backend="tensorwire")
    if job.rank == 0:
        run(batch(job, 0)).backward()
    assert counters.since(before).rpcs == 0
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(batch(job, 0)).backward()
    wanted = [p.grad for p in net.parameters()]
    assert all(g is None or torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    with pytest.raises(Exception, match=r"shape|size"):
        run(torch.zeros(8, 33))


def test_a_model_that_nobody_placed_asks_nobody() -> None:
    run_job(alone, servers=0).ok()
