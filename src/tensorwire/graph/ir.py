"""The graph: nodes in one global order, each with the tensor that it makes. Imports no framework.

Each framework has an importer that builds it. Every process runs its own nodes in the global order, so edges that wait
cannot wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorwire.control.names import member_name
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError

INPUT = "input"  # of the caller; every process passes one, and only workers that read it need the right values
PARAMETER = "parameter"  # or a buffer: it stays where it is from call to call
SAVED = "saved"  # by the forward graph for its backward graph
GIVEN = (INPUT, PARAMETER, SAVED)  # what is there before the graph runs
CALL = "call"
ITEM = "item"  # one output of an operator that has several


@dataclass(frozen=True, slots=True)
class Unknown:
    """A length that is known only when the graph runs.

    Attributes:
        text: How it is written.
        most: The most it can be; None: not known.
    """

    text: str
    most: int | None = None

    def __str__(self) -> str:
        return self.text


Dim = int | Unknown


def worker_name(rank: int) -> str:
    """What graphs, plans and messages call the worker of that rank."""
    return member_name("worker", rank)


def most(dim: Dim) -> int | None:
    """The most that a length can be; None where nothing bounds it."""
    return dim if isinstance(dim, int) else dim.most


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor.

    Attributes:
        shape: Its lengths.
        dtype: Its name, such as ``float32``.
        stride: In elements, one per dimension; None: contiguous.
        offset: Of a view: elements of its memory in front of it.

    Raises:
        ArgumentError: No edge carries the dtype, or there is another number of strides.
    """

    shape: tuple[Dim, ...]
    dtype: str
    stride: tuple[Dim, ...] | None = None
    offset: Dim = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"an edge carries {', '.join(DTYPES)}; not {self.dtype!r}")
        if self.stride is not None and len(self.stride) != len(self.shape):
            raise ArgumentError(f"a tensor of {len(self.shape)} dimensions has as many strides, not {len(self.stride)}")

    @property
    def static(self) -> bool:
        """Whether its shape is known before the graph runs."""
        return all(isinstance(length, int) for length in (*self.shape, *(self.stride or ()), self.offset))

    @property
    def elements(self) -> int | None:
        """How many it has, at most; None where nothing bounds it."""
        lengths = [most(length) for length in self.shape]
        return None if None in lengths else math.prod(length for length in lengths if length is not None)

    @property
    def extent(self) -> int | None:
        """Elements of memory from its first to its last, at most; None where nothing bounds it."""
        if self.stride is None:
            return self.elements
        if self.elements in (0, None):
            return self.elements
        reach = 1
        for length, step in zip(self.shape, self.stride, strict=True):
            longest, widest = most(length), most(step)
            if widest is None or longest is None:
                return None
            reach += (longest - 1) * widest
        return reach

    @property
    def nbytes(self) -> int | None:
        """Bytes of memory that it spans, at most; None where nothing bounds it."""
        extent = self.extent
        return None if extent is None else extent * DTYPES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether its elements are known to follow one another, row by row."""
        expected: Dim = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride or ()), strict=False):
            if length != 1 and step != expected:
                return False
            if isinstance(length, int) and isinstance(expected, int):
                expected *= length
            else:  # no step in front of it is known to be right
                expected = Unknown("")
        return True

    def __str__(self) -> str:
        strides = "" if self.contiguous else f" strides [{', '.join(map(str, self.stride or ()))}]"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{strides}"


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the graph.

    Attributes:
        name: Its name, unique in the graph.
        op: The operator.
        inputs: The names of its operands.
        kind: ``input``, ``parameter``, ``saved``, ``call`` or ``item``.
        spec: None for what is not a tensor: a number, or the tuple of an operator with several outputs.
        worker: Where the user put it; None: anywhere.
        present: Workers that hold it before the graph runs (inputs and parameters only); None: all.
        alias: The value whose memory its output shares (an item names it itself).
        writes: Inputs that it changes in place.
        fresh: It allocates its output itself.
        cheap: Computing it twice costs less than sending it.
        random: It draws random numbers.
        tuple_: It makes a tuple, which never crosses as such.
        sized: The size of its output is known before it runs.
        index: Of an item: which output.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    kind: str = CALL
    spec: TensorSpec | None = None
    worker: str | None = None
    present: tuple[str, ...] | None = None
    alias: str | None = None
    writes: tuple[str, ...] = ()
    fresh: bool = False
    cheap: bool = False
    random: bool = False
    tuple_: bool = False
    sized: bool = True
    index: int = 0  # of an item: which output


@dataclass(frozen=True, slots=True)
class Output:
    """A value that outlives the graph.

    Attributes:
        name: Its node.
        to: The workers that get it, and no others; empty: those that have it anyway.
        caller: The user gets it, and may change it; otherwise it is kept for the backward graph.
        if_small: Its size is known only when the graph runs. ``to`` get it in the runs in which it is small, otherwise
            its shape.
    """

    name: str
    to: tuple[str, ...] = ()
    caller: bool = False
    if_small: bool = False


@dataclass(frozen=True)
class Graph:
    """What all workers run together.

    Attributes:
        name: Its name in plans and messages.
        workers: The workers.
        nodes: All nodes, in their global order.
        outputs: The values that outlive the graph.
        place: By name, the position in the order.

    Raises:
        ArgumentError: A name is used twice, or before its node.
    """

    name: str
    workers: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...] = ()
    place: Mapping[str, int] = field(init=False, repr=False, compare=False)  # of each name in the order

    def __post_init__(self) -> None:
        place: dict[str, int] = {}
        for number, node in enumerate(self.nodes):
            named = (*node.inputs, *node.writes, *((node.alias,) if node.alias else ()))
            missing = [name for name in named if name not in place]
            if missing or node.name in place:
                what = f"uses {missing[0]!r} before it is there" if missing else "is there twice"
                raise ArgumentError(f"graph {self.name}: node {node.name!r} {what}")
            self._check_workers(
                f"node {node.name!r}", (*((node.worker,) if node.worker else ()), *(node.present or ()))
            )
            place[node.name] = number
        for output in self.outputs:
            if output.name not in place:
                raise ArgumentError(f"graph {self.name}: there is no node {output.name!r} to output")
            self._check_workers(f"output {output.name!r}", output.to)
        object.__setattr__(self, "place", place)

    def _check_workers(self, what: str, workers: Iterable[str]) -> None:
        for worker in workers:
            if worker not in self.workers:
                raise ArgumentError(
                    f"graph {self.name}: {what} is for {worker}, and the job has {', '.join(self.workers)}: "
                    "name one of these, or start more workers"
                )

    def node(self, name: str) -> Node:
        """Finds a node.

        Args:
            name: Its name.

        Returns:
            The node.
        """
        return self.nodes[self.place[name]]
