"""Gradients of compiled replicas are born in the store's slots: nothing is copied, and nobody sees a difference.

Each scenario runs twice in one job: compiled, and as it is. Losses, gradients and parameters are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
DEVICES = [("shm", 2), pytest.param("tcp", 1, marks=pytest.mark.long)]  # with that many servers


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

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what a step does before ``optimizer.step()``."""
        before = counters.snapshot()
        yield
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


def both(job: tw.Job, scenario: Scenario, **options: Any) -> tuple[list[int], list[int]]:
    """Copies of each step, compiled and not."""
    runs = []
    for compiled in (True, False):
        torch.manual_seed(0)
        run = Run(job, compiled, Net(), **options)
        scenario(run)
        runs.append(run)
    ours, stock = runs
    assert len(ours.seen) == len(stock.seen) > 0
    assert all(map(torch.equal, ours.seen, stock.seen))
    return ours.copies, stock.copies


def check(scenario: Scenario, device: str, servers: int) -> tuple[list[int], list[int]]:
    """The copies of each step; all workers have as many."""
    first, second = run_job(both, scenario, device=device, servers=servers).ok()
    assert first == second
    copies: tuple[list[int], list[int]] = first
    return copies


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
    for number in range(4):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            assert len(run.born()) == (TRAINED if run.compiled else 0)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_tied_frozen_and_unused_parameters(device: str, servers: int) -> None:
    ours, stock = check(plain, device, servers)
    assert ours[1:] == [0, 0, 0]
    assert min(stock) > 0


def accumulate(run: Run) -> None:
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            for part in range(3):
                run.loss(10 * number + part).backward()
            assert len(run.born()) == (TRAINED if run.compiled else 0)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_accumulation_over_three_backward_passes(device: str, servers: int) -> None:
    assert check(accumulate, device, servers)[0][1:] == [0, 0]


def zeros(run: Run) -> None:
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad(set_to_none=False)
            run.loss(number).backward()


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_that_are_set_to_zero_stay_in_their_slots(device: str, servers: int) -> None:
    assert check(zeros, device, servers)[0][1:] == [0, 0]


def own(run: Run) -> None:
    for number in range(3):
        with run.step():
            for p in run.net.parameters():
                p.grad = torch.full_like(p, 0.5)
            run.loss(number).backward()
            assert not run.born()


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_of_users_are_added_to_and_copied(device: str, servers: int) -> None:
    ours, stock = check(own, device, servers)
    assert ours == stock


def altered(run: Run) -> None:
    """A gradient that begins where its slot does, and shows one element of it many times."""
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            bias = run.net.get_parameter("first.bias")
            assert bias.grad is not None
            bias.grad = bias.grad[:1].expand(64)


def test_a_gradient_that_shows_its_slot_in_another_way_is_copied() -> None:
    check(altered, "shm", 1)


def negated(job: tw.Job) -> list[float]:
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = Optimizer([("p", p)], torch.optim.SGD, lr=1.0)
    p.grad = torch._neg_view(torch.ones(8))
    optimizer.step()
    found: list[float] = p.tolist()
    return found


def test_a_gradient_that_is_negated_when_it_is_read() -> None:
    assert run_job(negated, workers=1).ok() == [[1.0] * 8]


def retained(run: Run) -> None:
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            loss = run.loss(number)
            loss.backward(retain_graph=True)
            with torch.no_grad():
                run.net.eval()
                run.loss(100 + number)
                run.net.train()
            loss.backward()


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_a_graph_that_is_retained_and_an_evaluation_between(device: str, servers: int) -> None:
    assert check(retained, device, servers)[0][1:] == [0, 0]


def clipped(run: Run) -> None:
    run.optimizer.max_grad_norm = 0.01
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            torch.nn.utils.clip_grad_norm_(run.net.parameters(), 0.1)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_clipping_before_and_on_the_servers(device: str, servers: int) -> None:
    assert check(clipped, device, servers)[0][1:] == [0, 0]


def changed(run: Run) -> None:
    weight, bias, norm = run.net.first.weight, run.net.first.bias, run.net.norm.weight
    for number in range(4):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            weight.grad.mul_(0.5)
            bias.grad = bias.grad + 1
            norm.grad = None


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_that_are_changed_replaced_and_dropped(device: str, servers: int) -> None:
    assert check(changed, device, servers)[0][1:] == [1, 1, 1]  # what was replaced


def swapped(run: Run) -> None:
    """Gradients in each other's slots."""
    one, other = run.net.tied.bias, run.net.norm.weight
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            one.grad, other.grad = other.grad, one.grad


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_that_are_swapped(device: str, servers: int) -> None:
    check(swapped, device, servers)


def held(run: Run) -> None:
    """Whoever keeps a gradient has its values, whatever is pushed later."""
    kept, copies = [], []
    for number in range(4):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            kept.extend(p.grad for p in run.net.parameters() if p.grad is not None)
            copies.extend(p.grad.clone() for p in run.net.parameters() if p.grad is not None)
    assert all(map(torch.equal, kept, copies))
    run.seen.extend(kept)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_that_users_keep(device: str, servers: int) -> None:
    check(held, device, servers)


def asked(run: Run) -> None:
    """torch.autograd.grad gives what is the caller's, and backward(inputs=) some of the gradients."""
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            mine = torch.autograd.grad(run.loss(number), [run.net.first.weight, run.net.norm.bias])
            before = [m.clone() for m in mine]
            run.loss(10 + number).backward(inputs=[run.net.tied.weight, run.net.first.weight])
        assert all(map(torch.equal, mine, before))
        run.seen.extend(mine)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_gradients_that_are_asked_for(device: str, servers: int) -> None:
    assert check(asked, device, servers)[0][1:] == [0, 0]


def loaded(run: Run) -> None:
    """Values that are loaded take the way of gradients, and before them."""
    for number in range(3):
        with run.step():
            run.optimizer.zero_grad()
            run.loss(number).backward()
            run.net.load_state_dict({k: v * 0.5 for k, v in run.net.state_dict().items()})


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_values_that_are_loaded_between_backward_and_step(device: str, servers: int) -> None:
    first, second = run_job(both, loaded, device=device, servers=servers).ok()
    assert first[0][1:] > second[0][1:] == [0, 0]  # worker 0 pushes the values


def overlapped(run: Run) -> None:
    for number in range(4):
        with run.step():
            run.optimizer.zero_grad()
            with run.optimizer.no_sync():
                run.loss(10 + number).backward()
            run.loss(number).backward()
    run.optimizer.wait()


def with_overlap(job: tw.Job) -> tuple[list[int], list[int]]:
    return both(job, overlapped, overlap=True)


@pytest.mark.parametrize(("device", "servers"), DEVICES)
def test_pushing_while_backward_runs(device: str, servers: int) -> None:
    for ours, stock in run_job(with_overlap, device=device, servers=servers).ok():
        assert ours[1:] == [0, 0, 0]
        assert min(stock) > 0


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


def layer_by_layer(job: tw.Job) -> list[int]:
    runs = []
    for compiled in (True, False):
        torch.manual_seed(0)
        run = Run(job, False, Layers())
        for layer in run.net.layers if compiled else ():
            layer.compile(backend="tensorwire")
        for number in range(3):
            with run.step():
                run.optimizer.zero_grad()
                run.loss(number).backward()
                assert len(run.born()) == (8 if compiled else 0)
        runs.append(run)
    assert all(map(torch.equal, runs[0].seen, runs[1].seen))
    return runs[0].copies


def test_one_graph_for_several_modules() -> None:
    for copies in run_job(layer_by_layer, device="shm").ok():
        assert copies[-1] == 0


def alone(job: tw.Job) -> tuple[int, list[bool]]:
    """The requests, and whether gradients are those of eager code, on a worker that is the only one to compile."""
    torch.manual_seed(job.rank)
    net = Net()
    before = counters.snapshot()
    if job.rank == 0:
        torch.compile(net, backend="tensorwire")(batch(job, 0)).backward()
    rpcs = counters.since(before).rpcs
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(batch(job, 0)).backward()
    wanted = [p.grad for p in net.parameters()]
    return rpcs, [g is None or torch.equal(g, w) for g, w in zip(got, wanted, strict=True)]


def test_a_model_that_nobody_placed_asks_nobody() -> None:
    for rpcs, same in run_job(alone, servers=0).ok():
        assert rpcs == 0
        assert all(same)


def refused(job: tw.Job) -> str:
    run = torch.compile(Net(), backend="tensorwire")
    try:
        run(torch.zeros(8, 33))
    except Exception as error:
        return type(error).__name__
    return ""


def test_an_error_in_a_replica_is_the_users_alone() -> None:
    assert all(run_job(refused, servers=0).ok())
