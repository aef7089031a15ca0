"""A version as a safetensors file: where each tensor lies in it, and its header.

The header is padded with spaces to a whole page, so that data begin at one. Tensors lie without gaps: a gap would have
to be a tensor, which a strict ``load_state_dict`` refuses. Those whose size is a multiple of 64 bytes come first, and
by falling size of their elements, so that each is aligned to its elements at least. What differs from version to
version has a fixed width: the header's size never changes.

Source of the format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up
from tensorwire.store.sharding import ALIGNMENT, PAGE, Bucket, ParameterSpec, StorePlan

SAFE_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_METADATA = b'{"__metadata__":'
_PREFIX = "tensorwire."
_DIGITS = 20  # of a 64-bit number
_HASH = 16  # hexadecimal digits of xxh3, 64 bits


class Version(NamedTuple):
    """The name of a state of the parameters; versions are ordered by it.

    Attributes:
        run: Grows when a checkpoint is loaded.
        counter: Grows with every version of the job, from 1.
        root: The hash over the checksums of all buckets, 32 hexadecimal digits.
        step: How many steps of the training it contains, as worker 0 counts them.
    """

    run: int
    counter: int
    root: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}.{self.counter}.{self.root[:8]}"


@dataclass(frozen=True)
class Manifest:
    """What a version's file says of itself.

    ``run``, ``counter``, ``step``: as in `Version`. ``checksums``: the xxh3 of each bucket, by number. ``updates``: how
    many updates of each bucket it contains, where that may differ; else empty. ``time``: when it was published, in
    nanoseconds since the epoch.
    """

    run: int
    counter: int
    step: int
    checksums: tuple[int, ...]
    updates: tuple[int, ...] = ()
    time: int = 0

    @property
    def version(self) -> Version:
        """Its name."""
        joined = b"".join(number.to_bytes(8, "big") for number in self.checksums)
        return Version(self.run, self.counter, xxhash.xxh3_128_hexdigest(joined), self.step)


@dataclass(frozen=True, slots=True)
class FilePlace:
    """``nbytes`` of tensor ``tensor``: at ``shard`` bytes in the shard of their bucket, and at ``file`` in the file."""

    tensor: int
    shard: int
    file: int
    nbytes: int


class FileTensor(NamedTuple):
    """A tensor of a version: its dtype, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


class VersionLayout:
    """The file of every version of a plan.

    Attributes:
        data: Where the first tensor begins, in bytes.
        nbytes: The size of the file.
        offsets: By tensor: where it begins in the file.
        held: The same by name, with dtypes and shapes.
        buckets: By number: where the pieces of a bucket lie.
    """

    def __init__(self, plan: StorePlan, *, by_bucket: bool) -> None:
        """``by_bucket``: buckets of one version may have different numbers of updates."""
        self._plan, self._by_bucket = plan, by_bucket
        starts, end = _starts(plan.tensors)
        self._table = _table(plan.tensors, starts)
        self._buckets = sorted((b for shard in plan.buckets for b in shard), key=lambda b: b.number)
        blank = tuple(0 for _ in self._buckets)
        self.data = round_up(8 + len(self._text(Manifest(0, 0, 0, blank, blank if by_bucket else ()))), PAGE)
        self.nbytes = self.data + end
        self.offsets = tuple(self.data + start for start in starts)
        self.held = {
            t.name: FileTensor(t.dtype, t.shape, start) for t, start in zip(plan.tensors, self.offsets, strict=True)
        }
        self.buckets = [self.places(bucket) for bucket in self._buckets]

    def places(self, bucket: Bucket) -> list[FilePlace]:
        """Where the pieces of a bucket lie."""
        found = []
        for piece in bucket.pieces:
            size = DTYPES[self._plan.tensors[piece.tensor].dtype]
            at = self.offsets[piece.tensor] + piece.start * size
            nbytes = (piece.stop - piece.start) * size
            if nbytes:
                found.append(FilePlace(piece.tensor, bucket.shard + piece.offset, at, nbytes))
        return found

    def header(self, manifest: Manifest) -> bytes:
        """The first ``data`` bytes of the file."""
        text = self._text(manifest).ljust(self.data - 8)
        return len(text).to_bytes(8, "little") + text

    def _text(self, manifest: Manifest) -> bytes:
        version = manifest.version
        said = {
            "format": "pt",
            f"{_PREFIX}run": f"{version.run:0{_DIGITS}}",
            f"{_PREFIX}counter": f"{version.counter:0{_DIGITS}}",
            f"{_PREFIX}root": version.root,
            f"{_PREFIX}step": f"{manifest.step:0{_DIGITS}}",
            f"{_PREFIX}time": f"{manifest.time:0{_DIGITS}}",
            f"{_PREFIX}checksums": "".join(f"{number:0{_HASH}x}" for number in manifest.checksums),
        }
        if self._by_bucket:
            said[f"{_PREFIX}updates"] = " ".join(f"{number:0{_DIGITS}}" for number in manifest.updates)
        return _METADATA + json.dumps(said).encode() + self._table + b"}"


def _starts(tensors: Sequence[ParameterSpec]) -> tuple[list[int], int]:
    """Where each begins in the data, and where the last ends."""
    order = sorted(
        range(len(tensors)), key=lambda i: (tensors[i].nbytes % ALIGNMENT != 0, -DTYPES[tensors[i].dtype], i)
    )
    starts, end = [0] * len(tensors), 0
    for i in order:
        starts[i] = end
        end += tensors[i].nbytes
    return starts, end


def _table(tensors: Sequence[ParameterSpec], starts: Sequence[int]) -> bytes:
    entries = (
        f",{json.dumps(t.name)}:"
        + json.dumps({"dtype": SAFE_DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [start, start + t.nbytes]})
        for t, start in zip(tensors, starts, strict=True)
    )
    return "".join(entries).encode()


def parse_manifest(header: bytes | memoryview) -> Manifest:
    """What `VersionLayout.header` wrote. Raises `ProtocolError` for anything else, or where the root hash is wrong."""
    try:
        start = bytes(header[8 : 8 + len(_METADATA)])
        if start != _METADATA:
            raise ValueError("its metadata")
        metadata, _ = json.JSONDecoder().raw_decode(bytes(header[8 + len(_METADATA) :]).decode())
        text = metadata[f"{_PREFIX}checksums"]
        checksums = tuple(int(text[at : at + _HASH], 16) for at in range(0, len(text), _HASH))
        updates = tuple(map(int, metadata.get(f"{_PREFIX}updates", "").split()))
        numbers: dict[str, Any] = {key: int(metadata[_PREFIX + key]) for key in ("run", "counter", "step", "time")}
        manifest = Manifest(**numbers, checksums=checksums, updates=updates)
        root = metadata[f"{_PREFIX}root"]
    except (KeyError, ValueError, TypeError) as error:
        raise ProtocolError(f"this is not the file of a version: its header lacks or garbles {error}") from None
    if manifest.version.root != root:
        raise ProtocolError(f"the file says that its root hash is {root}, and its checksums {manifest.version.root}")
    return manifest
