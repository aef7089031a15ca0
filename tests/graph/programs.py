"""Random graphs that compute: numpy integers through operators, views, items and changes in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorwire.graph import Graph, Node, Output, TensorSpec, Unknown
from tensorwire.graph.ir import CALL, INPUT, ITEM, PARAMETER, SAVED

Array = Any  # numpy.ndarray of int64, of one dimension
PRIME = 2**31 - 1


def mix(salt: int, length: int, values: list[Any]) -> Array:
    """``length`` numbers that depend on every element of ``values``."""
    found = np.arange(length, dtype=np.int64) * salt % PRIME
    for value in values:
        if isinstance(value, np.ndarray):
            found = (found * 3 + np.resize(value, length) + int(value.sum()) % PRIME) % PRIME
        else:
            found = (found * 5 + int(value)) % PRIME
    return found


@dataclass
class Program:
    """``run[name](operands)`` computes a node; ``given`` is there before."""

    workers: tuple[str, ...]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    run: dict[str, Callable[[list[Any]], Any]] = field(default_factory=dict)
    given: dict[str, Array] = field(default_factory=dict)

    def graph(self) -> Graph:
        return Graph("random", self.workers, tuple(self.nodes), tuple(self.outputs))


class Writer:
    """Writes a random program. ``live``: what may still be used; a tensor with its spec, a number with None."""

    def __init__(self, rng: random.Random, workers: int, size: int) -> None:
        self.rng = rng
        self.program = Program(tuple("abcd"[:workers]))
        self.live: dict[str, TensorSpec | None] = {}
        self.roots: dict[str, str] = {}
        for _ in range(rng.randint(1, 4)):
            self._give()
        steps = (
            [self._op] * 4 + [self._view] * 3 + [self._several, self._split, self._write, self._number, self._varying]
        )
        while len(self.program.nodes) < size:
            rng.choice(steps)()
        for name in rng.sample(sorted(self.live), min(len(self.live), 3)):
            to = tuple(worker for worker in self.program.workers if rng.random() < 0.5)
            self.program.outputs.append(Output(name, to, rng.random() < 0.3))

    def _add(self, op: str, inputs: list[str], spec: TensorSpec | None, run: Any, **more: Any) -> str:
        name = f"{op}{len(self.program.nodes)}"
        worker = self.rng.choice((None, *self.program.workers))
        more = {"worker": worker if more.get("kind", CALL) == CALL else None, **more}
        self.program.nodes.append(Node(name, op, tuple(dict.fromkeys(inputs)), spec=spec, **more))
        if run is not None:
            self.program.run[name] = run
        if not more.get("tuple_"):
            self.live[name] = spec
        alias = more.get("alias")
        self.roots[name] = self.roots[alias] if alias else name
        return name

    def _give(self) -> None:
        workers, length = self.program.workers, self._length()
        kind = self.rng.choice((INPUT, PARAMETER, SAVED))
        some = tuple(worker for worker in workers if self.rng.random() < 0.5) or (self.rng.choice(workers),)
        present = {INPUT: None, PARAMETER: (self.rng.choice(workers),), SAVED: some}[kind]
        name = self._add(kind, [], TensorSpec((length,), "int64"), None, kind=kind, present=present)
        self.program.given[name] = mix(len(name) + len(self.program.nodes), length, [])

    def _length(self) -> int:
        return self.rng.choice((1, 8, 9, 12, 24, 40))

    def _operands(self) -> list[str]:
        return self.rng.choices(sorted(self.live), k=self.rng.randint(1, 3))

    def _tensor(self) -> tuple[str, TensorSpec] | None:
        """A live tensor of a known length above one."""
        found = [(n, s) for n, s in sorted(self.live.items()) if s is not None and s.static and (s.elements or 0) > 1]
        return self.rng.choice(found) if found else None

    def _op(self) -> None:
        salt, length = len(self.program.nodes), self._length()
        flags = {flag: self.rng.random() < 0.2 for flag in ("cheap", "random")}
        fresh = self.rng.random() < 0.8
        run = lambda values: mix(salt, length, values)  # noqa: E731
        self._add("op", self._operands(), TensorSpec((length,), "int64"), run, fresh=fresh, **flags)

    def _number(self) -> None:
        salt = len(self.program.nodes)
        run = lambda values: int(mix(salt, 1, values)[0])  # noqa: E731
        self._add("number", self._operands(), None, run, cheap=self.rng.random() < 0.5)

    def _varying(self) -> None:
        salt, length = len(self.program.nodes), self._length()
        bound = self.rng.choice((length, length + 3, None))
        run = lambda values: mix(salt, length, values)  # noqa: E731
        self._add("varying", self._operands(), TensorSpec((Unknown("s", bound),), "int64"), run, fresh=True)

    def _cut(self, spec: TensorSpec) -> tuple[slice, TensorSpec]:
        length = spec.elements
        assert length is not None
        assert isinstance(spec.offset, int)
        begin = self.rng.randrange(length)
        part = slice(begin, self.rng.randint(begin + 1, length), self.rng.choice((1, 1, 2)))
        step = spec.stride[0] if spec.stride else 1
        assert isinstance(step, int)
        shape = (len(range(*part.indices(length))),)
        return part, TensorSpec(shape, "int64", (step * part.step,), spec.offset + begin * step)

    def _view(self) -> None:
        if (found := self._tensor()) is not None:
            name, spec = found
            part, shown = self._cut(spec)
            self._add("view", [name], shown, lambda values: values[0][part], alias=name)

    def _several(self) -> None:
        salt, lengths = len(self.program.nodes), (self._length(), self._length())
        run = lambda values: tuple(mix(salt + i, length, values) for i, length in enumerate(lengths))  # noqa: E731
        name = self._add("several", self._operands(), None, run, tuple_=True, fresh=self.rng.random() < 0.8)
        for i, length in enumerate(lengths):
            self._item(name, i, TensorSpec((length,), "int64"), None)

    def _split(self) -> None:
        if (found := self._tensor()) is not None:
            base, spec = found
            cuts = [self._cut(spec) for _ in range(3)]
            run = lambda values: tuple(values[0][part] for part, _ in cuts)  # noqa: E731
            name = self._add("split", [base], None, run, tuple_=True, alias=base)
            for i, (_, shown) in enumerate(cuts):
                self._item(name, i, shown, base)

    def _item(self, name: str, index: int, spec: TensorSpec, alias: str | None) -> None:
        self._add("item", [name], spec, lambda values: values[0][index], kind=ITEM, index=index, alias=alias)

    def _write(self) -> None:
        """Changes a tensor. Who shares its memory is not used by its older name any more."""
        if (found := self._tensor()) is None:
            return
        name, spec = found
        others, salt = self._operands(), len(self.program.nodes)

        def run(values: list[Any]) -> Array:
            values[0][:] = mix(salt, len(values[0]), values)
            return values[0]

        root = self.roots[name]
        made = self._add("write", [name, *others], spec, run, alias=name, writes=(name,))
        self.live = {n: s for n, s in self.live.items() if self.roots[n] != root or n == made}
