"""What PyTorch does on the simulated accelerator: operators, modules, files, threads."""

from __future__ import annotations

import copy
import io
import os
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.accelerator import simulated
from tests.accelerator.training_cases import GPT, VOCABULARY, same_bits, tokens

DEVICE = "sim:0"


def case_two_devices() -> None:
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    with torch.accelerator.device_index(1):
        assert torch.ones(2, device="sim").device == torch.device("sim:1")
        assert torch.accelerator.current_stream().device == torch.device("sim:1")
    assert torch.accelerator.current_device_index() == 0
    x, y = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    for a, b in ((x, y), (x, torch.ones(2)), (torch.ones(2), y)):
        with pytest.raises(RuntimeError, match="same device"):
            a.add_(b)
    with pytest.raises(RuntimeError, match="there is no sim:2"):
        torch.ones(1, device="sim:2")


def case_capturing() -> None:
    stream = torch.accelerator.current_stream()
    assert not stream.is_capturing()
    simulated.capturing(True)
    assert stream.is_capturing()
    simulated.capturing(False)
    assert not stream.is_capturing()


def case_saves_and_loads() -> None:
    for here in ("sim:0", "sim:1", "cpu"):
        model = nn.Linear(3, 2).to(here)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        for there in (None, "cpu", "sim:0", "sim:1"):
            file.seek(0)
            state = torch.load(file, map_location=there)
            assert state["weight"].device == torch.device(there or here)
            assert torch.equal(state["weight"].cpu(), model.weight.cpu())


def case_modules_move_and_are_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    model.to("sim")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.fill_(3)
    assert twin[0].weight.device == torch.device(DEVICE)
    assert not torch.equal(twin[0].weight, model[0].weight)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin[0].weight, model[0].weight)


def case_parameters_get_other_memory() -> None:
    weight = nn.Parameter(torch.ones(2, 3, device=DEVICE))
    nothing = torch.full((), torch.nan, device=DEVICE).expand(2, 3)
    whole = weight.data
    weight.data = nothing
    assert weight.isnan().all().item()
    assert weight.stride() == (0, 0)
    weight.data = whole
    loss = (weight * weight).sum()
    torch.autograd.graph.increment_version(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def case_recurrent_layers_are_refused() -> None:
    x = torch.ones(2, 3, 4, device=DEVICE)
    for layer in (nn.LSTM, nn.GRU):
        with pytest.raises(NotImplementedError, match="LSTM and GRU do not run on the simulated accelerator"):
            layer(4, 4).to(DEVICE)(x)


def case_a_kernel_fails_late() -> None:
    """Whoever waits next learns of it, once; the device goes on."""
    x = torch.ones(3, device=DEVICE)
    bad = torch.tensor([5], device=DEVICE)
    x.index_select(0, bad)
    y = x + 1
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    assert y.sum().item() == 6
    x.index_select(0, bad)
    with pytest.raises(RuntimeError, match="out of range"):
        simulated.settle()
    assert simulated.pending() == 0


def case_numbers_of_the_host_are_read_at_once() -> None:
    """As what a real device's kernels get as arguments: the host may change them while the kernel is pending."""
    x, number = torch.arange(3.0, device=DEVICE), torch.tensor(2.0)
    product = x * number
    x.add_(number)
    number.fill_(5)
    assert product.tolist() == [0, 2, 4]
    assert x.tolist() == [2, 3, 4]


def case_random_numbers_are_the_cpus() -> None:
    def draw(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        found = [torch.rand(5, device=device), torch.randn(4, device=device), torch.randperm(9, device=device)]
        found += [torch.randint(0, 9, (4,), device=device), torch.bernoulli(torch.full((8,), 0.3, device=device))]
        found += [torch.multinomial(torch.tensor([0.1, 0.2, 0.7], device=device), 2)]
        found += [
            torch.poisson(torch.full((4,), 3.0, device=device)),
            nn.init.xavier_normal_(torch.empty(2, 3, device=device)),
        ]
        return [*found, torch.rand(2, device=device, generator=torch.Generator(device).manual_seed(4)), torch.rand(2)]

    wanted = draw("cpu")
    for seed in (0, 1, 5):
        simulated.schedule(seed)
        assert all(same_bits(a.float(), b.float()) for a, b in zip(wanted, draw("sim:0"), strict=True))


def case_operators_of_many_kinds() -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        x, mask = torch.randn(6, 6).to(device), torch.rand(6, 6).to(device) > 0.5
        y = x.clone()
        y[mask] = 0
        y[:, 2] = 1.5
        y[torch.tensor([0, 1])] += 1  # an index on the CPU
        z = torch.empty(0, device=device)
        torch.add(x, y, out=z)
        whole = torch.view_as_complex(torch.stack([x, y], -1))
        return [
            *(y, z, x[mask], mask.nonzero(), x.unique(), *x.topk(3), *x.sort(0), x.cumsum(1), torch.cat([x, y], 1)),
            *(torch.einsum("ij,kj->ik", x, y), x.std(), x.norm(), torch.linalg.inv(x), x.to(torch.float64).exp()),
            *(torch.fft.ifft(torch.fft.fft(whole)).real, whole.conj().imag, whole.abs(), x.int() // 2, mask.any(0)),
            *(torch.where(mask, x, y), F.pad(x, (1, 1)), x.unfold(0, 2, 1), x.t().contiguous(), x.argmax()),
        ]

    wanted = compute("cpu")
    for seed in (0, 1, 6):
        simulated.schedule(seed)
        for n, (a, b) in enumerate(zip(wanted, compute("sim:0"), strict=True)):
            assert same_bits(a.resolve_conj().resolve_neg(), b.cpu().resolve_conj().resolve_neg()), n


def case_sparse_gradients() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(VOCABULARY, 4, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([3, 5, 3], device=device)).square().sum().backward()
            table(torch.tensor([7, 3], device=device)).sum().backward()
            optimizer.step()
        found = table.weight.grad
        assert found is not None
        assert found.is_sparse
        whole = found.coalesce()
        return [whole.indices(), whole.values(), found.to_dense(), (found * 2).cpu().to_dense(), table.weight.data]

    wanted = train("cpu")
    for device in ("sim:0", "sim:1"):
        assert all(same_bits(a, b) for a, b in zip(wanted, train(device), strict=True))


def case_a_forked_process_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device=DEVICE)
        except RuntimeError as error:
            os._exit(7 if "forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def hammer(number: int, stop: threading.Event, failed: list[BaseException]) -> None:
    """Copies, records and waits as fast as it can, on a stream of its own."""
    try:
        device = f"sim:{number % 2}"
        stream, host = torch.Stream(device=device), torch.empty(50, pin_memory=True)
        other = torch.accelerator.current_stream(device)
        with stream:
            while not stop.is_set():
                host.copy_(torch.full((50,), float(number), device=device), non_blocking=True)
                event = torch.Event(device=device)
                event.record(stream)
                other.wait_event(event)
                event.query()
                event.synchronize()
                assert (host == number).all(), host
    except BaseException as error:
        failed.append(error)


def case_many_threads() -> None:
    """Training beside threads that issue and wait all the time: nobody waits for ever, and all numbers are right."""
    for seed in (0, 1, 5, 6):
        simulated.schedule(seed)
        stop, failed = threading.Event(), []
        threads = [threading.Thread(target=hammer, args=(n, stop, failed)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            model, (x, wanted) = GPT().to(DEVICE), (t.to(DEVICE) for t in tokens())
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, -2), wanted.flatten()).backward()
                optimizer.step()
            torch.accelerator.synchronize()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed, failed
        assert all(p.isfinite().all().item() for p in model.parameters())
