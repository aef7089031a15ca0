"""Lightning, accelerate and the Trainer of transformers, as they are, with parameters on a device: the bits of the CPU.

Both workers of a job see the same data. Each library is told of the device by the means that it has for that. One job a
library, because importing one takes seconds; its cases run one after the other.
"""

from __future__ import annotations

import contextlib
import gc
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
from tests.torch.test_stock_libraries import batches, model, state, words, words_model

if why := simulated.unavailable():
    pytest.skip(why, allow_module_level=True)

pytestmark = pytest.mark.slow

DEVICE = "sim:0"
SEEDS = (0, 1)
Outcome = tuple[dict[str, torch.Tensor], Any]  # the model that a training ends with, and what else it saw
Case = Callable[[str, Path], Outcome]  # of the device, and an empty folder


def store(net: torch.nn.Module, **options: Any) -> tw.torch.StoreOptimizer:
    return tw.torch.StoreOptimizer(
        net.named_parameters(), torch.optim.AdamW, **{"lr": 0.01, "bucket_bytes": BUCKET, **options}
    )


def waiting(optimizer: tw.torch.StoreOptimizer, whether: bool) -> contextlib.AbstractContextManager[None]:
    """Around backward: no gradient is pushed, because more will be added to it."""
    return optimizer.no_sync() if whether else contextlib.nullcontext()


def whole(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in state(net).items()}


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

        def teardown(self) -> None: ...

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> Any:
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

    where: dict[str, Any] = {"accelerator": "cpu"}
    if on != "cpu":
        where = {"strategy": SingleDeviceStrategy(device=on, accelerator=Simulated())}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        devices=1, max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False, **where, **quiet, **options
    )


def lightning_module(net: torch.nn.Module, make: Callable[[torch.nn.Module], Any], overlapped: bool = False) -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.seen: list[Any] = []
            self.places: set[str] = set()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            self.places |= {batch[0].device.type, next(self.net.parameters()).device.type}
            optimizer: Any = self.optimizers()
            self.seen.append(optimizer.param_groups[0]["lr"])
            self.more = index % 2 == 0
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.seen.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make(self.net)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": StepLR(optimizer, 2), "interval": "step"},
            }

    class Overlapped(Module):
        """Lightning steps with closures, and computes gradients in them, as a store that overlaps cannot."""

        def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
            optimizer: Any = self.optimizers()
            with waiting(optimizer.optimizer, self.more):
                loss.backward()  # type: ignore[no-untyped-call]

        def optimizer_step(self, epoch: int, batch: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.optimizer.step()

        def on_train_end(self) -> None:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.wait()  # Lightning moves the model to the CPU next

    return (Overlapped if overlapped else Module)()


def lightning_fitted(on: str, overlapped: bool, **options: Any) -> Outcome:
    made = []

    def make(net: torch.nn.Module) -> Any:
        made.append(store(net, **{} if overlapped else {"overlap": False}))
        return made[0]

    module = lightning_module(model(), make, overlapped)
    trainer = lightning_trainer(on, **options)
    trainer.fit(module, batches())
    assert module.places == {torch.device(on).type}
    return whole(module.net), (trainer.global_step, [float(each) for each in module.seen])


def lightning_clipped(on: str, _: Path) -> Outcome:
    return lightning_fitted(on, overlapped=False, gradient_clip_val=0.1)


def lightning_overlapped(on: str, _: Path) -> Outcome:
    return lightning_fitted(on, overlapped=True)


def lightning_refused(_: Path) -> list[str]:
    """A model on the CPU at construction; and the steps of Lightning with overlap."""
    net = model()
    optimizer = store(net)
    early = lightning_module(net, lambda _: optimizer)
    late = lightning_module(model(), store)
    return [
        said(lambda: lightning_trainer(DEVICE).fit(early, batches()), errors.ParameterModified),
        said(lambda: lightning_trainer(DEVICE).fit(late, batches()), errors.Unsupported),
    ]


# ---- accelerate


@contextlib.contextmanager
def told(on: str) -> Iterator[None]:
    """accelerate, and so the Trainer, take this device."""
    from accelerate.state import AcceleratorState

    with mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=on):
        AcceleratorState._reset_state(True)
        yield
    AcceleratorState._reset_state(True)


def accelerate_loop(on: str, overlapped: bool, early: bool = False) -> Outcome:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = model() if early else model().to(accelerator.device)
    ours = store(net) if overlapped else store(net, overlap=False)
    net, optimizer, scheduler, data = accelerator.prepare(net, ours, StepLR(ours, 2), batches())
    seen = []
    for (x,) in data:
        assert x.device.type == next(net.parameters()).device.type == torch.device(on).type
        with accelerator.accumulate(net), waiting(ours, not accelerator.sync_gradients):
            loss = net(x).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and not overlapped:
                seen.append(accelerator.clip_grad_norm_(net.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += [loss.detach(), optimizer.param_groups[0]["lr"]]
    ours.wait()
    return whole(net), [float(each) for each in seen]


def accelerate_clipped(on: str, _: Path) -> Outcome:
    with told(on):
        return accelerate_loop(on, overlapped=False)


def accelerate_overlapped(on: str, _: Path) -> Outcome:
    with told(on):
        return accelerate_loop(on, overlapped=True)


def accelerate_refused(_: Path) -> list[str]:
    """A model on the CPU at construction, which prepare() moves."""
    with told(DEVICE):
        return [said(lambda: accelerate_loop(DEVICE, True, early=True), errors.ParameterModified)]


# ---- the Trainer of transformers


def trainer(on: str, folder: Path, overlapped: bool, early: bool = False, stock: bool = False, **options: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        dataloader_pin_memory=False,
        **{"gradient_accumulation_steps": 2, **options},
    )
    net = words_model() if early else words_model().to(arguments.device)
    optimizer = store(net) if overlapped else store(net, overlap=False)

    class Overlapped(transformers.Trainer):
        """Without what changes gradients between backward and step: the Trainer "clips" to inf even if told not to."""

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            assert next(self.model.parameters()).device.type == torch.device(on).type
            with waiting(optimizer, not self.accelerator.sync_gradients):
                return super().training_step(*arguments, **options)

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            return None

    kind = Overlapped if overlapped and not stock else transformers.Trainer
    return kind(model=net, args=arguments, train_dataset=words(), optimizers=(optimizer, None))


def transformers_training(on: str, folder: Path, overlapped: bool, **options: Any) -> Outcome:
    with told(on):
        made = trainer(on, folder, overlapped, **options)
        assert made.args.device == next(made.model.parameters()).device == torch.device(on)
        made.train()
        made.optimizer.optimizer.wait()
        seen = [{k: e[k] for k in ("loss", "grad_norm", "learning_rate") if k in e} for e in made.state.log_history]
        return whole(made.model), seen


def transformers_clipped(on: str, folder: Path) -> Outcome:
    return transformers_training(on, folder, overlapped=False, max_grad_norm=0.1)


def transformers_overlapped(on: str, folder: Path) -> Outcome:
    return transformers_training(on, folder, overlapped=True, max_grad_norm=0.0)


def transformers_refused(folder: Path) -> list[str]:
    """A model on the CPU at construction; and gradients that are pushed when the Trainer changes them."""
    with told(DEVICE):
        early = trainer(DEVICE, folder, overlapped=False, early=True)
        once = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
        late = trainer(DEVICE, folder, overlapped=True, stock=True, **once)
        return [said(early.train, errors.ParameterModified), said(late.train, errors.GradientModified)]


LIBRARIES = {
    "lightning": [lightning_clipped, lightning_overlapped],
    "accelerate": [accelerate_clipped, accelerate_overlapped],
    "transformers": [transformers_clipped, transformers_overlapped],
}
