"""The Trainer of transformers, accelerate and Lightning with a StoreOptimizer, as they are.

Both workers see the same data, so that a loop of one process with the stock optimizer is the reference: the mean of two
equal gradients is exactly one of them. Every worker runs that, too, in the same process. One job a library, because
importing one takes seconds; its cases run one after the other.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import tensorwire as tw
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox
from tests.levels import mostly_slow
from tests.torch.recipes import recipe

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
State = dict[str, torch.Tensor]
Outcome = tuple[State, Any]  # what a case ends with, and what else it saw


def store(net: torch.nn.Module) -> torch.optim.Optimizer:
    return tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.AdamW, lr=0.01)


def stock(net: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)  # as the servers choose
    optimizer._step_supports_amp_scaling = False  # else Lightning refuses to clip in mixed precision; ours has no such
    return optimizer


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def batches(examples: int = 64) -> Any:
    rows = torch.randn(examples, 32, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8)


def state(net: torch.nn.Module) -> State:
    return {k: v.clone() for k, v in net.state_dict().items()}


def check(result: list[tuple[Outcome, Outcome]]) -> Any:
    """Every worker's two runs ended with the same bits, and saw the same; returns what they saw."""
    for (mine, seen), (alone, expected) in result:
        assert mine.keys() == alone.keys()
        assert [k for k in mine if not torch.equal(mine[k], alone[k])] == []
        assert seen == expected
    return result[0][0][1]


def check_recipe(results: list[dict[str, Any]]) -> None:
    """The workers had their own data, and share one model, which has changed."""
    (before, first), (_, second) = (found["recipe"] for found in results)
    assert [k for k in first if not torch.equal(first[k], second[k])] == []
    assert [k for k in first if torch.equal(first[k], before[k])] == []


# ---- Lightning


def lightning_trainer(**options: Any) -> Any:
    import lightning.pytorch as lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def lightning_module(make: Make, manual: bool) -> Any:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.automatic_optimization = not manual
            self.rates: list[float] = []

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
            optimizer: Any = self.optimizers()
            self.rates.append(optimizer.param_groups[0]["lr"])
            if not manual:
                return self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()
            return None

        def configure_optimizers(self) -> Any:
            optimizer = make(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": StepLR(optimizer, 2), "interval": "step"},
            }

    return Module()


def lightning_automatic(make: Make, _: Path) -> Outcome:
    """Steps with closures, mixed precision, clipping, accumulation, a scheduler; the last step is one batch short."""
    module = lightning_module(make, manual=False)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    trainer = lightning_trainer(max_epochs=2, enable_checkpointing=False, **options)
    trainer.fit(module, batches(56))
    return state(module), (trainer.world_size, trainer.global_step, module.rates)


def lightning_resumed(make: Make, folder: Path) -> Outcome:
    """An epoch, a checkpoint, and another epoch of a new module from it."""
    trainer = lightning_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(lightning_module(make, manual=False), batches())
    trainer.save_checkpoint(folder / "first")
    module = lightning_module(make, manual=False)
    trainer = lightning_trainer(max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, batches(), ckpt_path=folder / "first", weights_only=True)
    return state(module), (trainer.global_step, module.rates)


def lightning_manual(make: Make, _: Path) -> Outcome:
    module = lightning_module(make, manual=True)
    trainer = lightning_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, batches())
    return state(module), (trainer.world_size, trainer.global_step, module.rates)


def lightning_finetuning(make: Make, _: Path) -> Outcome:
    """The optimizer has the head alone, until a callback adds the frozen rest without names."""
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = model()[:2], torch.nn.Linear(64, 8)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.backbone(batch[0])).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return make(self.head)

    module = Module()
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005)
    trainer = lightning_trainer(max_epochs=3, enable_checkpointing=False, callbacks=[unfreeze])
    trainer.fit(module, batches())
    return state(module), [len(g["params"]) for g in trainer.optimizers[0].param_groups]


# ---- accelerate


def accelerate_loop(make: Make, _: Path) -> Outcome:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    net = model()
    optimizer = make(net)
    scheduler: Any
    net, optimizer, scheduler, data = accelerator.prepare(net, optimizer, StepLR(optimizer, 2), batches())
    seen = []
    for (x,) in data:
        with accelerator.accumulate(net):
            loss = net(x).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(optimizer.param_groups[0]["lr"])
    return state(net), (accelerator.num_processes, seen)


def accelerate_resumed(make: Make, folder: Path) -> Outcome:
    """Saved after a step, and loaded into the same loop after two more."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net = model()
    optimizer: Any
    net, optimizer = accelerator.prepare(net, make(net))
    seen = []
    for number, (x,) in enumerate(batches()):
        if number == 1:
            accelerator.save_state(str(folder))
        if number == 3:
            accelerator.load_state(str(folder))
        accelerator.backward(net(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(state(net)["0.bias"].sum().item())
    return state(net), seen


# ---- the Trainer of transformers


def words_model() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))


def words() -> Any:
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(make: Make, folder: Path, **options: Any) -> Any:
    import transformers

    net = words_model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=2,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    return transformers.Trainer(
        model=net,
        args=arguments,
        train_dataset=words(),
        optimizers=(make(net), None),
    )


def logged(made: Any) -> tuple[Any, ...]:
    """What the log shows of the training, without times."""
    history = [
        {k: e[k] for k in ("loss", "grad_norm", "learning_rate", "step") if k in e} for e in made.state.log_history
    ]
    return made.args.world_size, history


def transformers_training(make: Make, folder: Path) -> Outcome:
    made = trainer(make, folder, save_strategy="no")
    made.train()
    return state(made.model), logged(made)


def transformers_resumed(make: Make, folder: Path) -> Outcome:
    """Six steps, and the last two of them again, from the checkpoint after four."""
    straight = trainer(make, folder, save_strategy="steps", save_steps=4)
    straight.train()
    resumed = trainer(make, folder, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    again = [torch.equal(v, state(resumed.model)[k]) for k, v in state(straight.model).items()]
    return state(resumed.model), (all(again), logged(resumed))


# ---- jobs

HEADINGS = {
    "lightning": "Lightning",
    "accelerate": "accelerate",
    "transformers": "The Trainer of transformers",
}
LIBRARIES: dict[str, list[Callable[[Make, Path], Outcome]]] = {
    "lightning": [lightning_automatic, lightning_manual, lightning_finetuning, lightning_resumed],
    "accelerate": [accelerate_loop, accelerate_resumed],
    "transformers": [transformers_training, transformers_resumed],
}


def pupil() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return net, torch.utils.data.TensorDataset(torch.randn(64, 32), torch.arange(64) % 4)


def run_recipe(job: tw.Job, library: str, folder: Path) -> tuple[State, State]:
    """What the documentation shows, each worker with its own share of the data: the model before and after."""
    from torch.utils.data import DataLoader, DistributedSampler

    net, data = pupil() if library != "transformers" else (words_model(), words())
    known = {"job": job, "model": net, "data": data, "tw": tw, "torch": torch, "DataLoader": DataLoader}
    known |= {"DistributedSampler": DistributedSampler, "cross_entropy": torch.nn.functional.cross_entropy}
    before = state(net)
    folder.mkdir()
    os.chdir(folder)
    exec(recipe(HEADINGS[library]), known)
    return before, state(net)


def run_cases(job: tw.Job, library: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in LIBRARIES[library]:
        mine, alone = (folder / f"{case.__name__}-{job.rank}-{make.__name__}" for make in (store, stock))
        found[case.__name__] = case(store, mine), case(stock, alone)
    found["recipe"] = run_recipe(job, library, folder / f"recipe-{job.rank}")
    return found


# What the runs of each case saw, in the same way in the job and alone.
SEEN: dict[str, Callable[[Any], bool]] = {
    "lightning_automatic": lambda seen: (*seen[:2], len(set(seen[2]))) == (1, 8, 4),
    "lightning_manual": lambda seen: (*seen[:2], len(set(seen[2]))) == (1, 8, 4),
    "lightning_resumed": lambda seen: (seen[0], len(seen[1])) == (16, 8),
    "lightning_finetuning": lambda seen: seen == [2, 2],
    "accelerate_loop": lambda seen: seen[0] == 1 and len(seen[1]) == 12 and seen[1][1] > 0.1,  # something was clipped
    "accelerate_resumed": lambda seen: len(seen) == 8,
    "transformers_training": lambda seen: seen[0] == 1 and whole(seen[1]),
    "transformers_resumed": lambda seen: seen[0] is True,
}


def whole(history: list[dict[str, float]]) -> bool:
    """All steps of a training are in its log, with losses and norms of gradients."""
    logs = all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in history[:3])
    return logs and [entry["step"] for entry in history] == [2, 4, 6, 6]


@pytest.mark.parametrize("library", mostly_slow([*LIBRARIES], {"accelerate"}))
def test_a_library_trains_on_the_store_as_on_a_stock_optimizer_and_as_documented(library: str, tmp_path: Path) -> None:
    results = run_job(run_cases, library, tmp_path).ok()
    for case in (case.__name__ for case in LIBRARIES[library]):
        seen = check([found[case] for found in results])
        assert SEEN[case](seen), (case, seen)
    check_recipe(results)


@pytest.mark.slow
def test_accelerate_stays_alone_under_torchrun(sandbox: Sandbox) -> None:
    body = f"""
        import tensorwire as tw
        {indent(recipe("Under torchrun"), " " * 8).strip()}
        from accelerate import Accelerator
        print(job.rank, "of", job.num_workers, "has", Accelerator(cpu=True).num_processes)
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = sandbox.start(*command, sandbox.script(body, init=False), OMP_NUM_THREADS="1").finish()
    assert result.status == 0, result.err
    assert sorted(result.out.splitlines()) == ["0 of 2 has 1", "1 of 2 has 1"]
    sandbox.nothing_left()
