"""An optimizer is used by one thread at a time: others get an error that says so, and nothing is mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import in_turn, run_job


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def backward(net: torch.nn.Module) -> None:
    net(torch.ones(3, 8)).square().mean().backward()


def error_of(call: Callable[[], Any]) -> str:
    """The error of a call in another thread."""
    found = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else ""


def one_in_step(job: tw.Job, overlap: bool) -> None:
    """A second thread is refused, and the first one continues."""
    net = model()
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.1, overlap=overlap)
    backward(net)
    inside, go_on = threading.Event(), threading.Event()
    part = optimizer._parts[0]
    check = part.check_options

    def halt() -> None:
        inside.set()
        go_on.wait()
        check()

    setattr(part, check.__name__, halt)  # the step stops here
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    inside.wait()

    def paused() -> None:
        with optimizer.no_sync():
            pass

    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "wait": optimizer.wait,
        "state_dict": optimizer.state_dict,
        "write_parameters": optimizer.write_parameters,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "add_param_group": lambda: optimizer.add_param_group(
            {"params": [("late", torch.nn.Parameter(torch.zeros(2)))]}
        ),
        **({"no_sync": paused, "backward": lambda: backward(net)} if overlap else {}),
    }
    for name, call in calls.items():
        message = error_of(call)
        assert message.startswith(
            f"ArgumentError: {name}() was called while another thread is in step() of this optimizer: "
        )
        assert "from one thread" in message
    go_on.set()
    stepping.join()
    setattr(part, check.__name__, check)
    optimizer.zero_grad()
    backward(net)
    optimizer.step()
    optimizer.wait()
    stock = model()
    sgd = torch.optim.SGD(stock.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        sgd.zero_grad()
        backward(stock)
        sgd.step()
    assert all(map(torch.equal, net.parameters(), stock.parameters()))


def taking_turns(job: tw.Job) -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    mine = threading.Lock()

    def steps() -> None:
        for _ in range(5):
            with mine:
                p.grad = torch.ones(4)
                optimizer.step()

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert p.tolist() == [-20.0] * 4


def at_once(job: tw.Job) -> None:
    """Threads without any order: each step is done or refused, and the job lives."""
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0)
    p.grad = torch.ones(4)
    done: list[str] = []

    def steps() -> None:
        for _ in range(20):
            try:
                optimizer.step()
                done.append("")
            except errors.ArgumentError as error:
                done.append(str(error))

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [message for message in done if message]
    assert len(done) == 80
    assert all("another thread" in message for message in refused)
    assert p.tolist() == [len(refused) - 80.0] * 4


def test_an_optimizer_of_one_worker() -> None:
    run_job(in_turn, partial(one_in_step, overlap=False), partial(one_in_step, overlap=True), at_once, workers=1).ok()


def parallel_backward(job: tw.Job) -> None:
    """Two backward passes in two threads, of two halves of the parameters, while gradients are pushed."""
    first, second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    named = [*first.named_parameters("first"), *second.named_parameters("second")]
    optimizer = tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=1.0, overlap=True, bucket_bytes=64 << 10)
    start = [p.detach().clone() for _, p in named]
    for _ in range(5):
        optimizer.zero_grad()
        threads = [threading.Thread(target=lambda m=m: m(torch.ones(1, 512)).sum().backward()) for m in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
    optimizer.wait()
    moved = [float((p.detach() - s).mean()) for (_, p), s in zip(named, start, strict=True)]
    assert moved == pytest.approx([-5.0] * 4, rel=1e-4)


def test_threads_that_take_turns() -> None:
    run_job(in_turn, taking_turns, parallel_backward).ok()
