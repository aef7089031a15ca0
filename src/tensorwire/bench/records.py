"""The record of a measurement, and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensorwire.sizes import size_text as size_text

COUNTED = "0 copies, registrations, RPCs"  # a target of counts, which no load changes

# What was timed, by the field `mode` of a record.
MODES = {
    "ping-pong": "both ends write and wait for the other's signal; half of a round trip",
    "passive-target": "a write, until it is complete; the target's process sleeps",
    "waiting-target": "the same; the target's process waits for a signal (polls, then blocks)",
    "transfer": "tensors streamed over one edge, at most two under way; time per tensor",
    "transfer-mapped": "the same from the consumer's own slot: no byte moved",
    "whole": "`transfer` with `torch.add` into the sent memory and `sum` of what was received",
    "whole-mapped": "the same in the consumer's own slot: no byte moved",
    "one-way": "a stream of writes, two under way (verbs: 4); time per write",
    "one-signal": "`one-way` with one signal, after the last write",
    "both-ways": "`one-way` from both ends at once; the slower direction",
    "step-copied": "gradients copied from private memory, pushed, applied, and pulled",
    "step-born": "the same with gradients born in their slots",
    "step-mapped": "`step-born` with mapped slots and parameters: only the update moves bytes",
    "exchange-copied": "`step-copied` without the update",
    "exchange-born": "`step-born` without the update",
    "exchange-mapped": "`step-mapped` without the update: no byte moved",
    "push": "gradients, until all are in the server's memory; nothing comes back yet",
    "pull": "from the last other worker's push until a worker has all parameters; nothing goes the other way",
    "push-and-pull": "gradients one way and parameters the other at once; the time of both",
    "pushpull": "every key pushed from its slot, summed and pulled; the time of all",
    "push-then-pull": "one key pushed from, then pulled into, the program's own arrays; the time of both",
    "crossing-in-a-call": "tensors that cross one after the other in a call, each after an addition; time per crossing",
    "crossing-per-call": "the same with two crossings in a call",
    "addition": "the additions of such a call, on one worker",
    "transfer-alone": "a crossing without its addition",
    "servers-step": "a step of training by worker 0, with variables and their updates on worker 1",
    "halves-step": "a step of training, each worker with the variables and operators of a part of the network",
    "sync-step": "a step of training in which two workers average their gradients; the slowest worker",
    "async-step": "a step of training in which a server takes the gradients of each of two workers by themselves",
    "push-list": "pushes of 64 keys per call, applied one by one; time per push",
    "push-one": "pushes of one key per call, applied one by one; time per push",
    "push-to-answer": "one key after the other pushed and pulled; the mean time from a push to its answer",
    "rows": "a batch of rows of a table pulled, and one pushed; the time of both",
    "paced-step": "training at a stated pace; time per step of the slowest worker",
    "training-step": "forward, backward and update; the slowest worker",
    "convergence": "a whole training; its seconds, and in `details` the accuracy that it reached",
    "read-training": "a version read into the reader's own tensors, while worker 0 trains and publishes every step",
    "read-idle": "the same while nobody trains",
    "file-mapped": "a version's file opened by safetensors, and a tensor made of each of its; no byte is touched",
    "file-loaded": "the same with each tensor copied into the reader's own",
    "step-published": "a step of training, with its share of a version",
    "commit": "a version that is staged, copied into a reader's module: the reader's pause",
    "at-once-mapped": "`file-mapped` by several readers at once; the slowest",
    "at-once-read": "`read-idle` by several readers at once; the slowest",
    "file-read": "a version's file read into the program's own memory by one `readinto`",
    "mount-here": "a version's file read through a mount on the trainer's machine; processors' seconds of all programs",
    "mount-warm": "the same of a mount as from another machine, of what the kernel has in its memory",
    "mount-cold": "the same of what it has not",
    "step-loaded": "a step of training, with its share of a load of the newest version by another program",
    "file-pushed": "a key written to its file and synchronized, until the server has applied it",
    "weights": "from a reader's request until its own tensors hold the weights of the worker that trains",
    "killed": "from just before kill -9 of the peer to the waiter's PeerLost",
    "stopped": "from just before SIGSTOP of the peer to the waiter's PeerLost",
}


@dataclass(frozen=True)
class Target:
    """What a figure should reach: at most ``seconds``, and at least a share of the speed of peers in the same run.

    What was not measured is left out. ``worst``: by the slowest round. ``sums``: so many times the seconds of peers,
    which are added to ``seconds``.
    """

    seconds: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    worst: bool = False
    sums: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        most = [name if times == 1 else f"{times:g} x {name}" for name, times in self.sums.items()]
        most += [] if self.seconds is None else [time_text(self.seconds)]
        parts = [f"<= {' + '.join(most)}"] if most else []
        parts += [f">= {share:.2f} of {name}" for name, share in self.shares.items()]
        return " and ".join(parts)

    def met(self, seconds: float, others: Mapping[str, float]) -> bool | None:
        """Whether it was reached; ``others``: seconds of each group in this run. None: nothing to compare with."""
        results = []
        if (self.seconds is not None or self.sums) and all(name in others for name in self.sums):
            sums = sum(times * others[name] for name, times in self.sums.items())
            results.append(seconds <= sums + (self.seconds or 0.0))
        results += [others[name] / seconds >= share for name, share in self.shares.items() if name in others]
        return all(results) if results else None


@dataclass(frozen=True)
class Record:
    """One figure. ``seconds`` is the median over rounds, ``low`` and ``high`` the fastest and slowest round.

    docs/benchmarks.md says what each ``mode`` is.
    ``ratio`` is the share of the limit's speed, ``limit_value / seconds``; it and ``met`` are None on a busy machine.
    ``copies``, ``rpcs`` and ``registrations`` are counts an operation on both ends together; None where nobody counts
    them. ``details``: what else is told of a step of training, such as its parts in seconds. ``how``: how a peer was
    run, where that is told.
    """

    bench: str
    device: str
    peer: str
    mode: str
    workload: str
    bytes: int
    seconds: float
    low: float
    high: float
    rounds: int
    bytes_per_second: float | None = None
    limit: str | None = None
    limit_value: float | None = None
    ratio: float | None = None
    copies: float | None = None
    rpcs: float | None = None
    registrations: float | None = None
    target: str | None = None
    met: bool | None = None
    details: Mapping[str, float] | None = None
    how: str | None = None

    def unjudged(self) -> Record:
        """The same without ratio and verdict, as on a busy machine; a verdict on counts or accuracy stays."""
        lasting = self.target == COUNTED or self.mode == "convergence"
        return replace(self, ratio=None, met=self.met if lasting else None)


def time_text(seconds: float) -> str:
    """Seconds for people: three digits and a unit."""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    value = seconds * factor
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"
