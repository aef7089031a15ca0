"""Lightning, accelerate and the Trainer of transformers with parameters on a device: the bits of the CPU.

Each library is told of the device by the means that it has for that. Both workers of a job see the same data. One job a
library, because importing one takes seconds; its cases run one after the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import tensorwire as tw
from tensorwire import errors
from tests.accelerator import simulated
from tests.accelerator.programs import BUCKET, prepare
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.torch.test_stock_libraries import batches, model, state, words, words_model

if why := simulated.unavailable():
    pytest.skip(why, allow_module_level=True)

pytestmark = pytest.mark.slow

DEVICE = "sim:0"
STEPS = 4  # of two batches each
Outcome = tuple[dict[str, torch.Tensor], Any]  # the model that a training ends with, and what else it saw


def store(net: torch.nn.Module, overlapped: bool) -> tw.torch.StoreOptimizer:
    """``overlapped``: as is the default on a device."""
    options: dict[str, Any] = {} if overlapped else {"overlap": False}
    return tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=0.01, bucket_bytes=BUCKET, **options)


def accumulating(optimizer: tw.torch.StoreOptimizer, more: bool) -> contextlib.AbstractContextManager[None]:
    """Around backward. ``more``: other gradients will be added to these, which are not pushed."""
    return optimizer.no_sync() if more else contextlib.nullcontext()


def is_on(where: str, *tensors: torch.Tensor) -> bool:
    return {tensor.device for tensor in tensors} == {torch.device(where)}


def ended(net: torch.nn.Module, optimizer: Any, seen: list[Any]) -> Outcome:
    """Nobody waits for the last values: who gets them from the model does."""
    outcome = {name: value.cpu() for name, value in state(net).items()}, [float(each) for each in seen]
    optimizer.close()
    assert simulated.registered() == 0
    return outcome


def said(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


# ---- Lightning


def lightning_trainer(on: str, **options: Any) -> Any:
    import lightning.pytorch as lightning
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Simulated(Accelerator):
        """What Lightning asks of a kind of device that it does not know."""

        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index)

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(DEVICE)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "sim"

    if on == "cpu":
        options["accelerator"] = "cpu"
    else:
        options["strategy"] = SingleDeviceStrategy(on, accelerator=Simulated())
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        devices=1, max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False, **quiet, **options
    )


def lightning_module(net: torch.nn.Module, optimizer: Callable[[], Any], own_steps: bool = False) -> Any:
    """``optimizer()``: makes it, when Lightning asks for it."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.seen: list[Any] = []
            self.more = False

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            assert is_on(str(self.device), batch[0], *self.net.parameters())
            self.more = index % 2 == 0
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.seen += [loss.detach(), self.trainer.optimizers[0].param_groups[0]["lr"]]
            return loss

        def configure_optimizers(self) -> Any:
            made = optimizer()
            return {"optimizer": made, "lr_scheduler": {"scheduler": StepLR(made, 2), "interval": "step"}}

    class OwnSteps(Module):
        """Lightning calls ``step(closure)``, and does forward and backward in it; an overlapped step takes none."""

        def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
            ours: Any = self.trainer.optimizers[0]
            with accumulating(ours, self.more):
                loss.backward()  # type: ignore[no-untyped-call]

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.optimizer.step()

    return (OwnSteps if own_steps else Module)()


def lightning_training(on: str, overlapped: bool, **options: Any) -> Outcome:
    """The optimizer is constructed when Lightning asks for it: the model, which the user has not moved, was."""
    net = model()
    module = lightning_module(net, lambda: store(net, overlapped), own_steps=overlapped)
    trainer = lightning_trainer(on, **options)
    trainer.fit(module, batches())
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    return ended(net, trainer.optimizers[0], module.seen)


def lightning_clipped(on: str, _: Path) -> Outcome:
    return lightning_training(on, overlapped=False, gradient_clip_val=0.1)


def lightning_overlapped(on: str, _: Path) -> Outcome:
    return lightning_training(on, overlapped=True)


def lightning_refused(_: Path) -> list[str]:
    early = model()
    optimizer = store(early, overlapped=False)
    late = model()
    return [
        said(
            lambda: lightning_trainer(DEVICE).fit(lightning_module(early, lambda: optimizer), batches()),
            errors.ParameterModified,
        ),
        said(
            lambda: lightning_trainer(DEVICE).fit(lightning_module(late, lambda: store(late, True)), batches()),
            errors.Unsupported,
        ),
    ]


# ---- accelerate


@contextlib.contextmanager
def told(on: str) -> Iterator[None]:
    """accelerate, and so the Trainer, take this device; the Trainer would prefer CUDA."""
    from accelerate.state import AcceleratorState

    with mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=on, CUDA_VISIBLE_DEVICES=""):
        AcceleratorState._reset_state(True)
        yield
    AcceleratorState._reset_state(True)


def accelerate_loop(on: str, overlapped: bool, clips: bool, moves: bool = True) -> Outcome:
    """``moves``: the model, before the optimizer is constructed."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    net: Any = model()
    if moves:
        net = net.to(accelerator.device)
    ours = store(net, overlapped)
    net, optimizer, scheduler, data = accelerator.prepare(net, ours, StepLR(ours, 2), batches())
    seen = []
    for (x,) in data:
        assert is_on(on, x, *net.parameters())
        with accelerator.accumulate(net):
            loss = net(x).square().mean()
            with accumulating(ours, not accelerator.sync_gradients):
                accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(net.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += [loss.detach(), optimizer.param_groups[0]["lr"]]
    assert scheduler.scheduler.last_epoch == STEPS
    return ended(net, ours, seen)


def accelerate_clipped(on: str, _: Path) -> Outcome:
    with told(on):
        return accelerate_loop(on, overlapped=False, clips=True)


def accelerate_overlapped(on: str, _: Path) -> Outcome:
    with told(on):
        return accelerate_loop(on, overlapped=True, clips=False)


def accelerate_refused(_: Path) -> list[str]:
    with told(DEVICE):
        return [
            said(lambda: accelerate_loop(DEVICE, False, clips=False, moves=False), errors.ParameterModified),
            said(lambda: accelerate_loop(DEVICE, True, clips=True), errors.GradientModified),
        ]


# ---- the Trainer of transformers


def trainer(folder: Path, overlapped: bool, own_steps: bool = False, moves: bool = True, **options: Any) -> Any:
    """``moves``: the model, before the optimizer is constructed."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    net: Any = words_model()
    if moves:
        net = net.to(arguments.device)
    optimizer = store(net, overlapped)

    class OwnSteps(transformers.Trainer):
        """The Trainer accumulates where it likes, and with ``max_grad_norm=0`` still multiplies gradients, by 1."""

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            with accumulating(optimizer, not self.accelerator.sync_gradients):
                return super().training_step(*arguments, **options)

        def _get_grad_norm(self, *_: Any, **__: Any) -> None:
            return None

    kind: Any = OwnSteps if own_steps else transformers.Trainer
    return kind(model=net, args=arguments, train_dataset=words(), optimizers=(optimizer, None))


def transformers_training(on: str, folder: Path, overlapped: bool, max_grad_norm: float) -> Outcome:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": max_grad_norm}
    with told(on):
        made = trainer(folder, overlapped, own_steps=overlapped, **options)
        optimizer = made.optimizer
        made.train()
    assert is_on(on, *made.model.parameters())
    assert made.state.global_step == made.lr_scheduler.last_epoch == STEPS
    history = made.state.log_history[:STEPS]
    return ended(
        made.model, optimizer, [e[k] for e in history for k in ("loss", "grad_norm", "learning_rate") if k in e]
    )


def transformers_clipped(on: str, folder: Path) -> Outcome:
    return transformers_training(on, folder, overlapped=False, max_grad_norm=0.1)


def transformers_overlapped(on: str, folder: Path) -> Outcome:
    return transformers_training(on, folder, overlapped=True, max_grad_norm=0.0)


def transformers_refused(folder: Path) -> list[str]:
    with told(DEVICE):
        early = trainer(folder, overlapped=False, moves=False)
        late = trainer(folder, overlapped=True, max_grad_norm=0.0)
        return [said(early.train, errors.ParameterModified), said(late.train, errors.GradientModified)]


# ---- jobs

# Of each library: trainings that do not overlap and that do, and what is said of a model that was not moved before the
# optimizer was constructed, and of what overlap does not go with.
LIBRARIES: dict[str, tuple[Callable[[str, Path], Outcome], Callable[[str, Path], Outcome], Any]] = {
    "lightning": (lightning_clipped, lightning_overlapped, lightning_refused),
    "accelerate": (accelerate_clipped, accelerate_overlapped, accelerate_refused),
    "transformers": (transformers_clipped, transformers_overlapped, transformers_refused),
}
WITH_OVERLAP = {
    "lightning": "with overlap=True step() takes no closure",
    "accelerate": "clip with StoreOptimizer(max_grad_norm=), or use overlap=False",
    "transformers": "clip with StoreOptimizer(max_grad_norm=), or use overlap=False",
}


def equal(ours: Outcome, theirs: Outcome) -> bool:
    (mine, seen), (alone, expected) = ours, theirs
    return mine.keys() == alone.keys() and all(torch.equal(mine[k], alone[k]) for k in mine) and seen == expected


def run_cases(job: tw.Job, library: str, folder: Path) -> tuple[list[str], bool, list[str]]:
    """What has other bits than on the CPU, whether the trainings differ from each other, and what is said."""
    prepare(0)
    *trainings, refused = LIBRARIES[library]
    stock = [train("cpu", folder) for train in trainings]
    both = zip(trainings, stock, strict=True)
    wrong = [train.__name__ for train, expected in both if not equal(train(DEVICE, folder), expected)]
    return wrong, not equal(*stock), refused(folder)


@pytest.mark.parametrize("library", mostly_long([*LIBRARIES], LIBRARIES.keys() - {"accelerate"}))  # the Trainer has it
def test_a_library_trains_on_a_device_as_on_the_cpu(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for wrong, clipped, (early, overlapped) in run_job(run_cases, library, tmp_path, fresh=True).ok():
        assert wrong == []
        assert clipped
        assert "move the model before constructing the optimizer" in early
        assert WITH_OVERLAP[library] in overlapped
        assert "\n" not in early + overlapped
