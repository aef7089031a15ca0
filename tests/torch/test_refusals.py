"""What is refused at construction or in a step: in one typed line that names it, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import in_turn, run_job

Refusal = tuple[type[Exception], str, Callable[[], Any]]


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape or (3,)))


def optimizer(named: Any, **options: Any) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(named, torch.optim.SGD, **{"lr": 0.5, **options})


def held(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def wrapped() -> torch.Tensor:
    """A tensor of torch.func that has outlived its transform."""
    found: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.ones(3))
    return found[0]


def freed() -> torch.nn.Parameter:
    p = parameter(3)
    p.untyped_storage().resize_(0)
    return p


def without_params() -> list[dict[str, Any]]:
    return [{"params": [("a", parameter())]}, {"lr": 0.1}]


PARAMETERS: list[Refusal] = [
    (errors.ArgumentError, "'p' is a fake tensor", lambda: held(FakeTensorMode().from_tensor(torch.zeros(10)))),
    (errors.ArgumentError, "'p' is a meta tensor", lambda: held(torch.zeros(3, device="meta"))),
    (errors.ArgumentError, "'p' has no memory: it is wrapped by torch.func", wrapped),
    (errors.ArgumentError, "'p' has no memory: its storage", freed),
    (
        errors.Unsupported,
        "'p' is not an ordinary dense tensor: it is sparse_coo",
        lambda: held(torch.eye(3).to_sparse()),
    ),
    (errors.Unsupported, "it is sparse_csr", lambda: held(torch.eye(3).to_sparse_csr())),
    (errors.Unsupported, "it is mkldnn", lambda: held(torch.eye(3).to_mkldnn())),
    (
        errors.Unsupported,
        "it is nested",
        lambda: held(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)),
    ),
    (errors.Unsupported, "'p' has no shape yet", torch.nn.parameter.UninitializedParameter),
    (errors.Unsupported, "'p' has dtype complex64", lambda: held(torch.zeros(2, dtype=torch.complex64))),
    (errors.ArgumentError, "'p' is the result of an operation", lambda: parameter() * 2),
    (errors.ArgumentError, "'p' is a int", lambda: 5),
]
ARGUMENTS: list[Refusal] = [
    (errors.ArgumentError, "got no parameters", lambda: optimizer(torch.nn.ReLU())),
    (errors.ArgumentError, "got a int for its parameters", lambda: optimizer(5)),
    (errors.ArgumentError, "parameter group 1 has no 'params'", lambda: optimizer(without_params())),
    (errors.ArgumentError, "given twice", lambda: optimizer([("a", p := parameter()), ("b", p)])),
    (errors.ArgumentError, "max_grad_norm", lambda: optimizer([("a", parameter())], max_grad_norm="x")),
    (errors.ArgumentError, "max_grad_norm", lambda: optimizer([("a", parameter())], max_grad_norm=float("nan"))),
    (errors.ArgumentError, "bucket_bytes", lambda: optimizer([("a", parameter())], bucket_bytes="4MiB")),
    (errors.ArgumentError, "bucket_bytes", lambda: optimizer([("a", parameter())], bucket_bytes=1 << 70)),
    (errors.ArgumentError, "bucket_bytes", lambda: optimizer([("a", parameter())], bucket_bytes=4096.0)),
    (errors.ArgumentError, "'lr' is larger", lambda: optimizer([("a", parameter())], lr=10**400)),
    (errors.ArgumentError, "not None", lambda: tw.torch.StoreOptimizer([("a", parameter())], None)),  # type: ignore[arg-type]
    (errors.ArgumentError, "Unicode", lambda: optimizer([("a\udc80", parameter())])),
    (errors.ArgumentError, "cannot be sent", lambda: optimizer([{"params": [("a", parameter())], "note": "\udc80"}])),
    (
        errors.ArgumentError,
        "group 0: Invalid learning",
        lambda: optimizer([{"params": [("a", parameter())], "lr": -1.0}]),
    ),
    (
        errors.ArgumentError,
        "group 0: Muon only",
        lambda: tw.torch.StoreOptimizer([("a", parameter())], torch.optim.Muon),
    ),
    (errors.ArgumentError, "Nesterov", lambda: optimizer([("a", parameter())], nesterov=5)),
]


def refuses(kind: type[Exception], says: str, call: Callable[[], Any]) -> str:
    """What is wrong with a refusal, or nothing."""
    try:
        call()
    except kind as error:
        return "" if says in str(error) and "\n" not in str(error) else f"{says!r}: {error}"
    except Exception as error:
        return f"{says!r}: {type(error).__name__}: {error}"
    return f"{says!r}: not refused"


def construct(job: tw.Job) -> list[str]:
    """A refused construction says why, and leaves nothing behind."""
    wrong = []
    for kind, says, make in PARAMETERS:
        wrong.append(refuses(kind, says, lambda made=make: optimizer([("p", made())])))
    for refusal in ARGUMENTS:
        wrong.append(refuses(*refusal))
    p = parameter()
    sgd = optimizer([("a", p)])
    p.grad = torch.ones(3)
    sgd.step()
    if not torch.equal(p.detach(), torch.full((3,), 0.5)):
        wrong.append("the step after it")
    return [w for w in wrong if w]


def many_names(job: tw.Job) -> list[str]:
    """More names than fit into the address book are refused before servers wait for them."""
    import tensorwire.store.store_layout as store_layout

    most, store_layout.MOST_ENTRY_BYTES = store_layout.MOST_ENTRY_BYTES, 10_000  # type: ignore[attr-defined]
    long = [(f"{i}" * 300, parameter()) for i in range(50)]
    wrong = refuses(errors.ArgumentError, "shorter names", lambda: optimizer(long))
    store_layout.MOST_ENTRY_BYTES = most  # type: ignore[attr-defined]
    optimizer([("a", parameter())])
    return [w for w in (wrong,) if w]


def add(job: tw.Job) -> list[str]:
    """A refused group leaves nothing behind."""
    p, q = parameter(), parameter()
    sgd = optimizer([("a", p)])
    wrong = [
        refuses(errors.ArgumentError, "no 'params'", lambda: sgd.add_param_group({"lr": 1.0})),
        refuses(errors.ArgumentError, "a parameter group must be a dict", lambda: sgd.add_param_group([("b", q)])),  # type: ignore[arg-type]
        refuses(errors.ArgumentError, "given twice", lambda: sgd.add_param_group({"params": [("b", p)]})),
        refuses(errors.ArgumentError, "have the name 'a'", lambda: sgd.add_param_group({"params": [("a", q)]})),
        refuses(errors.ArgumentError, "larger", lambda: sgd.add_param_group({"params": [("b", q)], "lr": 10**400})),
    ]
    sgd.add_param_group({"params": [("b", q)], "lr": 0.25})
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    sgd.step()
    if not (torch.equal(p.detach(), torch.full((3,), 0.5)) and torch.equal(q.detach(), torch.full((3,), 0.75))):
        wrong.append("the step after it")
    return [w for w in wrong if w]


def one_worker_does_not_come(job: tw.Job) -> list[str]:
    """The comparison of plans runs out of time; both workers come again."""
    client = job._worker.member.client
    compare = client.compare
    if job.rank == 0:
        client.compare = lambda *a: compare(*a, timeout=0.1)  # type: ignore[method-assign]
        with pytest.raises(errors.WaitTimeout, match="only worker 0 of 2 came"):
            optimizer([("a", parameter())])
        client.compare = compare  # type: ignore[method-assign]
    job.barrier()
    p = parameter()
    sgd = optimizer([("a", p)])
    p.grad = torch.ones(3)
    sgd.step()
    return [] if bool((p == 0.5).all()) else ["the step after it"]


def fake_gradient() -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.zeros(3))


def freed_gradient() -> torch.Tensor:
    g = torch.zeros(3)
    g.untyped_storage().resize_(0)
    return g


def steps(job: tw.Job, overlap: bool = False) -> list[str]:
    """A refused step says why, and the next one works."""
    p = parameter()
    sgd = optimizer([("p", p)], overlap=overlap)
    wrong = []
    for says, make in [
        ("the gradient of 'p' is a fake tensor", fake_gradient),
        ("the gradient of 'p' has no memory: it is wrapped by torch.func", wrapped),
        ("the gradient of 'p' has no memory: its storage", freed_gradient),
    ]:
        p.grad = make()
        wrong.append(refuses(errors.ArgumentError, says, sgd.step))
    p.grad = torch.ones(3)
    del sgd.param_groups[0]["momentum"]
    wrong.append(refuses(errors.ArgumentError, "option 'momentum' was deleted", sgd.step))
    sgd.param_groups[0]["momentum"] = 0
    sgd.param_groups[0]["lr"] = 10**400
    wrong.append(refuses(errors.ArgumentError, "option 'lr' is larger", sgd.step))
    sgd.param_groups[0]["lr"] = 0.5
    sgd.max_grad_norm = "x"  # type: ignore[assignment]
    wrong.append(refuses(errors.ArgumentError, "max_grad_norm", sgd.step))
    sgd.max_grad_norm = None
    sgd.step()
    sgd.wait()
    if not torch.equal(p.detach(), torch.full((3,), 0.5)):
        wrong.append("the step after it")
    return [w for w in wrong if w]


def steps_with_overlap(job: tw.Job) -> list[str]:
    return steps(job, overlap=True)


def negated(job: tw.Job) -> list[str]:
    """Tensors that are negative by a mark, and not by their bits, keep their sign."""
    values = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    assert values.is_neg()
    p = torch.nn.Parameter(values)
    sgd = optimizer([("p", p)], lr=1.0)
    found = [p.tolist()]
    p.grad = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    sgd.step()
    found.append(p.tolist())
    return [] if found == [[-0.0, -1.0, -2.0], [1.0, 0.0, -1.0]] else [str(found)]


PROGRAMS = [construct, many_names, add, one_worker_does_not_come, steps, steps_with_overlap, negated]


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_what_is_refused(device: str) -> None:
    assert run_job(in_turn, *PROGRAMS, device=device).ok() == [[[]] * len(PROGRAMS)] * 2


def breaks_late(job: tw.Job) -> None:
    """Something fails after the servers have begun the store."""
    import tensorwire.store.store_client as client

    if job.rank == 1:

        def fail(*_: Any) -> None:
            raise errors.OutOfMemory("no room for the window")

        client.Window = fail  # type: ignore[assignment,misc]
    try:
        optimizer([("a", parameter())])
    except errors.OutOfMemory:
        job._worker.member.client.ended.wait()  # a script that goes on all the same


def test_a_construction_that_fails_after_servers_began_ends_the_job() -> None:
    ended = run_job(breaks_late)
    assert ended.cause is not None
    assert str(ended.cause) == "worker 1 raised OutOfMemory: no room for the window"
    assert "JobEnded" in ended.errors[0]
