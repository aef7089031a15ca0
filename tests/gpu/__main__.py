"""``python -m tests.gpu``: whether the store is right on an accelerator, and how fast it is."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

ABOUT = """Trains on this machine's accelerator with parameters and state in the store, and prints tables:

  registration  of which host memory the driver takes a page-lock, how long that takes, how fast copies are (30 s)
  bits          the store's values, bit by bit beside torch.optim's on the CPU with the same gradients (60 s)
  step          a GPT-2 of 1.5 billion parameters: time, memory and waits, beside AdamW on the device and libraries
                that offload it: FSDP2, and torchao and DeepSpeed where they are installed (the rest)"""
END = """An error in a part is one line, and the others go on. Status 0: all parts ran, and no value was wrong; 1: they
did not, or one was; 2: there is no accelerator. Whether targets are met is printed and changes no status.

To try the program without an accelerator: python -m tests.gpu --device sim --quick"""
PARTS = {"registration": 60.0, "bits": 120.0, "step": float("inf")}  # with the seconds that each may take at most
LEAST_SECONDS = 10.0  # with less, none begins


class Run:
    """A run of the program: its options, its clock, and what it has found."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        self.options, self.kind = options, kind
        self.began = time.monotonic()
        self.deadline = self.began + options.budget
        self.found: dict[str, Any] = {"machine": machine(), "device": kind, "quick": options.quick}
        self.wrong: list[str] = []

    def say(self, text: str) -> None:
        """Progress, which is no result."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def part(self, name: str) -> None:
        """Runs a part, and prints what came of it."""
        from tests.gpu.programs import Failed, one_line

        self.say(f"{name} begins")
        began = time.monotonic()
        ends = min(self.deadline, began + PARTS[name])
        try:
            if ends - began < LEAST_SECONDS:
                raise Failed(f"left out: {max(0.0, ends - began):.0f} s are left of the budget")
            if name == "step":
                self._step(ends)
            else:
                self._rows(name, ends)
        except Exception as error:  # the other parts go on
            self.wrong.append(f"{name}: {one_line(error)}")
            print(f"{self.wrong[-1]}\n", flush=True)
        self.found.setdefault("seconds", {})[name] = time.monotonic() - began
        self.save()

    def _rows(self, name: str, ends: float) -> None:
        """A part that is one program, which answers with rows until it answers None."""
        from tests.gpu import bits, registration
        from tests.gpu.programs import Failed, Program

        part = {"registration": registration, "bits": bits}[name]
        rows: list[dict[str, Any]] = []
        with Program(part.measure, self.kind, self.options.quick, seconds=0) as program:
            try:
                while (answer := program.get(ends - time.monotonic())) is not None:
                    rows += answer
                    self.say(f"{name}: {len(rows)} rows")
            except Failed as error:
                self.wrong.append(f"{name}: {error}")
        self.found[name] = rows
        part.show(rows)
        found = part.wrong(rows)
        self.wrong += [f"{name}: {line}" for line in found]
        print(flush=True)

    def _step(self, ends: float) -> None:
        from tests.gpu import model, step
        from tests.gpu.arms import Load

        options = self.options
        shape = replace(model.TINY if options.quick else model.XL, checkpoints=options.checkpoints)
        load = Load(self.kind, shape, options.batch or (2 if options.quick else 0), 2)
        cores = len(os.sched_getaffinity(0))
        plan = step.Plan(load, options.rounds, options.steps, tuple(options.servers), cores)
        self.found["step"] = step.measure(plan, ends, self.say)
        step.show(self.found["step"])
        print(flush=True)

    def save(self) -> None:
        """All that there is so far."""
        if self.options.json is not None:
            self.options.json.write_text(json.dumps({**self.found, "wrong": self.wrong}, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """The exit status."""
    options = parse(arguments)
    from tests.gpu import devices

    try:
        kind = devices.choose(options.device)
    except devices.NoDevice as error:
        print(f"tests.gpu: {error}", file=sys.stderr)
        return 2
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: options.cores])  # for all that starts from here on
    signal.signal(signal.SIGTERM, _terminated)  # so that programs are ended, too
    run = Run(options, kind)
    print(" | ".join(f"{key}: {value}" for key, value in run.found["machine"].items()), flush=True)
    for name in PARTS if "all" in options.part else dict.fromkeys(options.part):
        run.part(name)
    for line in run.wrong:
        print(f"WRONG: {line}")
    run.say("done")
    return 1 if run.wrong else 0


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=ABOUT, epilog=END, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=[*PARTS, "all"], help="may be repeated; the default is all of them"
    )
    parser.add_argument("--device", choices=["cuda", "xpu", "sim"], help="default: what PyTorch finds here")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything (%(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each part")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--cores", type=int, metavar="N", help="use the first N of the allowed cores")
    steps = parser.add_argument_group("of the part step")
    steps.add_argument("--batch", type=int, help="default: what makes forward and backward take 0.5 s")
    steps.add_argument(
        "--servers", type=int, nargs="+", metavar="N", help="processes of the store: 1 2 4, or quick 1 2"
    )
    steps.add_argument("--rounds", type=int, help="in which the arms take turns: 3, or quick 1")
    steps.add_argument("--steps", type=int, default=4, help="that are timed in each round (%(default)s)")
    steps.add_argument("--checkpoints", action="store_true", help="backward computes layers again, to save memory")
    options = parser.parse_args(arguments)
    options.part = options.part or ["all"]
    options.servers = options.servers or ([1, 2] if options.quick else [1, 2, 4])
    options.rounds = options.rounds or (1 if options.quick else 3)
    numbers = [options.budget, options.rounds, options.steps, *options.servers, options.cores or 1, options.batch or 1]
    if min(numbers) < 1:
        parser.error("numbers have to be at least 1")
    return options


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the device."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
