"""What is refused at construction or in a step: in one typed line that names it, and nothing is left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import in_turn, run_job
from tests.torch.refusals import Refusal, not_refused


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
    (errors.ArgumentError, "have the name 'a'", lambda: optimizer([("a", parameter()), ("a", parameter())])),
    (errors.ArgumentError, "named_parameters", lambda: optimizer(torch.nn.Linear(2, 2).parameters())),
    (errors.ArgumentError, "momentun", lambda: optimizer([("a", parameter())], momentun=0.9)),
    (errors.Unsupported, "'lr' is a Tensor", lambda: optimizer([("a", parameter())], lr=torch.tensor(0.1))),
    (errors.Unsupported, "LBFGS", lambda: tw.torch.StoreOptimizer([("a", parameter())], torch.optim.LBFGS)),
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


def construct(job: tw.Job) -> list[str]:
    """A refused construction says why, and leaves nothing behind."""
    wrong = not_refused((kind, says, lambda made=made: optimizer([("p", made())])) for kind, says, made in PARAMETERS)
    wrong += not_refused(ARGUMENTS)
    p = parameter()
    sgd = optimizer([("a", p)])
    p.grad = torch.ones(3)
    sgd.step()
    assert torch.equal(p.detach(), torch.full((3,), 0.5))
    return wrong


def many_names(job: tw.Job) -> list[str]:
    """More names than fit into the address book are refused before servers wait for them."""
    import tensorwire.store.store_layout as store_layout

    most, store_layout.MOST_ENTRY_BYTES = store_layout.MOST_ENTRY_BYTES, 10_000  # type: ignore[attr-defined]
    long = [(f"{i}" * 300, parameter()) for i in range(50)]
    wrong = not_refused([(errors.ArgumentError, "shorter names", lambda: optimizer(long))])
    store_layout.MOST_ENTRY_BYTES = most  # type: ignore[attr-defined]
    optimizer([("a", parameter())])
    return wrong


def add(job: tw.Job) -> list[str]:
    """A refused group leaves nothing behind."""
    p, q = parameter(), parameter()
    sgd = optimizer([("a", p)])
    groups: list[tuple[str, Any]] = [
        ("no 'params'", {"lr": 1.0}),
        ("a parameter group must be a dict", [("b", q)]),
        ("given twice", {"params": [("b", p)]}),
        ("have the name 'a'", {"params": [("a", q)]}),
        ("larger", {"params": [("b", q)], "lr": 10**400}),
    ]
    add = sgd.add_param_group
    wrong = not_refused((errors.ArgumentError, says, lambda group=group: add(group)) for says, group in groups)
    sgd.add_param_group({"params": [("b", q)], "lr": 0.25})
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    sgd.step()
    assert torch.equal(p.detach(), torch.full((3,), 0.5))
    assert torch.equal(q.detach(), torch.full((3,), 0.75))
    return wrong


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
    assert (p == 0.5).all()
    return []


def steps(job: tw.Job, overlap: bool = False) -> list[str]:
    """A refused step says why, and the next one works."""
    p = parameter()
    sgd = optimizer([("p", p)], overlap=overlap)
    wrong = []

    def attempt(says: str) -> None:
        wrong.extend(not_refused([(errors.ArgumentError, says, sgd.step)]))

    for says, make in [
        ("the gradient of 'p' is a fake tensor", lambda: FakeTensorMode().from_tensor(torch.zeros(3))),
        ("the gradient of 'p' has no memory: it is wrapped by torch.func", wrapped),
        ("the gradient of 'p' has no memory: its storage", lambda: freed().detach()),
    ]:
        p.grad = make()
        attempt(says)
    p.grad = torch.ones(3)
    del sgd.param_groups[0]["momentum"]
    attempt("option 'momentum' was deleted")
    sgd.param_groups[0]["momentum"] = 0
    sgd.param_groups[0]["lr"] = 10**400
    attempt("option 'lr' is larger")
    sgd.param_groups[0]["lr"] = 0.5
    sgd.max_grad_norm = "x"  # type: ignore[assignment]
    attempt("max_grad_norm")
    sgd.max_grad_norm = None
    sgd.step()
    sgd.wait()
    assert torch.equal(p.detach(), torch.full((3,), 0.5))
    return wrong


def rows(job: tw.Job) -> list[str]:
    """An embedding that makes sparse gradients only since it has an optimizer."""
    embedding = torch.nn.Embedding(10, 4)
    sgd = optimizer(embedding)
    embedding.sparse = True
    embedding(torch.tensor([1, 2])).sum().backward()
    assign = partial(embedding.load_state_dict, embedding.state_dict(), assign=True)
    return not_refused([(errors.Unsupported, "sparse gradient", sgd.step), (errors.Unsupported, "assign", assign)])


def negated(job: tw.Job) -> list[str]:
    """Tensors that are negative by a mark, and not by their bits, keep their sign."""
    values = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    assert values.is_neg()
    p = torch.nn.Parameter(values)
    sgd = optimizer([("p", p)], lr=1.0)
    assert p.tolist() == [-0.0, -1.0, -2.0]
    p.grad = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    sgd.step()
    assert p.tolist() == [1.0, 0.0, -1.0]
    return []


PROGRAMS = [construct, many_names, add, one_worker_does_not_come, steps, partial(steps, overlap=True), rows, negated]


def test_what_is_refused() -> None:
    assert run_job(in_turn, *PROGRAMS).ok() == [[[]] * len(PROGRAMS)] * 2


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
