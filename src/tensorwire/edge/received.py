"""What an edge with headers brings: a tensor's memory for as long as it is needed, a value, or the producer's error."""

from __future__ import annotations

from tensorwire._native import Hold
from tensorwire.edge.header import ERROR, Header, Value
from tensorwire.edge.tensor import Spec
from tensorwire.errors import ArgumentError, ProducerFailed


class Received:
    """A tensor that arrived: ``memory`` holds the elements of ``spec``, contiguous, in the order of their indices.

    The memory is its own until ``release()``, or until this object and everything that looks into the memory are gone:
    arrays and tensors made of it keep it. Usable as a context manager that releases it.
    """

    __slots__ = ("_hold", "spec")

    def __init__(self, hold: Hold, spec: Spec) -> None:
        self._hold = hold
        self.spec = spec

    @property
    def memory(self) -> memoryview:
        """Its bytes. Raises `ArgumentError` after ``release()``."""
        if self._hold.released:
            raise ArgumentError("this tensor was released: keep it until it was used")
        return memoryview(self._hold)

    def release(self) -> None:
        """Gives the memory back at once: what still looks into it sees what comes there next. Idempotent."""
        self._hold.release()

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<received {self.spec}{', released' if self._hold.released else ''}>"


def value_of(header: Header) -> Value:
    """The value that was sent. Raises the error that was sent instead: `ProducerFailed`."""
    if header.kind == ERROR:
        raise ProducerFailed(f"step {header.step} of this edge failed at its producer: {header.text}")
    return header.value
