"""A consumer's loading code as a list of reads: what it only copies is read into place, the rest is run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tensorwire.sizes import round_up
from tensorwire.store.sharding import ALIGNMENT
from tensorwire.store.versions.read_spans import ReadSpan, Selection
from tensorwire.store.versions.recording import Call, Load, RecordedTensor, Recording, recorded_in
from tensorwire.store.versions.runs import SHORTEST, Rows, crowded, pack, runs, spans, touched
from tensorwire.store.versions.sources import Bytes, Wanted
from tensorwire.store.versions.staging import mark_changed
from tensorwire.store.versions.version_layout import FileTensor, Version

Bring = Callable[[Wanted, Callable[[], None], int | None, float], Version]
_aten = torch.ops.aten


class Loader:
    """Brings versions where a consumer's own loading code would copy them. `Reader.loader` makes one.

    Attributes:
        nbytes (int): How many bytes it reads of each version.
        direct (int): How many of these go straight into their destinations.
    """

    def __init__(self, held: Mapping[str, FileTensor], load: Load, bring: Bring) -> None:
        """``bring`` reads what is wanted, calls what is to run then, and remembers the version."""
        recording = Recording(held, load)
        reads = _reads(recording)
        self._replay = Replay(recording, [call for call in recording.calls if id(call) not in reads])
        placed = _by_storage(reads.values())
        self._targets = [target for call in recording.calls if id(call) in reads for target in call.changes]
        self._wanted = [*placed, *self._replay.wanted]
        self._bring = bring
        self.direct = sum(selection.payload for selection, _ in placed)
        self.nbytes = sum(selection.payload for selection, _ in self._wanted)

    def load(self, min_version: int | None = None, timeout: float = 600.0) -> Version:
        """Brings the newest version into the destinations, under the reader's lock, as ``load`` would.

        No checksums are compared. Where reading fails, destinations may have parts of two versions:
        ``reader.version`` is None until a later call succeeds.

        Args:
            min_version: As for `Reader.pull`.
            timeout: Seconds to wait for the version.

        Returns:
            The version that the destinations have now.

        Raises:
            VersionExpired, WaitTimeout, JobEnded: As for `Reader.pull`.
        """
        return self._bring(self._wanted, self._finish, min_version, timeout)

    def _finish(self) -> None:
        mark_changed(self._targets)
        self._replay.run()


# ---- straight into place

Read = tuple[torch.Tensor, Rows]  # a destination, and runs from the file into its storage


def _reads(recording: Recording) -> dict[int, Read]:
    """By id: the calls that are nothing but reads, of memory that no other call touches."""
    found: dict[int, Read] = {}
    owners: dict[bytes, int] = {}  # copies of the same bytes to the same place are one
    sets: list[Rows] = []
    for call in recording.calls:
        rows = _runs(recording, call)
        if rows is None:
            places = [touched(t) for t in call.tensors if not isinstance(t, RecordedTensor) and t.is_cpu]
            sets += places
            continue
        found[id(call)] = call.args[0], rows
        key = _key(found[id(call)])
        if key not in owners:
            owners[key] = len(sets)
            sets.append(spans(rows, call.args[0]))
    shared = crowded(sets)
    return {i: read for i, read in found.items() if owners[_key(read)] not in shared}


def _key(read: Read) -> bytes:
    target, rows = read
    return spans(rows, target).tobytes() + rows[:, 0].tobytes()


def _runs(recording: Recording, call: Call) -> Rows | None:
    """What to read for a call; None: it is more than reads, or reads of few bytes each."""
    if call.func is not _aten.copy_.default:
        return None
    target, value = call.args[:2]
    if isinstance(target, RecordedTensor) or not target.is_cpu:
        return None
    found = [_part(recording, *part) for part in _parts(recording, target, value)]
    parts = [rows for rows in found if rows is not None]
    return np.concatenate(parts) if len(parts) == len(found) else None


def _part(recording: Recording, target: torch.Tensor, value: object) -> Rows | None:
    """What to read into ``target``, where ``value`` is a view of a tensor of the version."""
    if not isinstance(value, RecordedTensor) or recording.changed(value):
        return None
    start = recording.start(value)
    repeats = any(step == 0 and count > 1 for step, count in zip(value.stride(), value.shape, strict=True))
    if start is None or repeats or (value.dtype, value.shape) != (target.dtype, target.shape):
        return None
    rows = runs(value.twin, target, SHORTEST)
    if rows is not None:
        rows[:, 0] += start
    return rows


def _parts(recording: Recording, target: torch.Tensor, value: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Copies that have the effect of ``target.copy_(value)``: of what ``value`` was put together from."""
    made = recording.made.get(value.number) if isinstance(value, RecordedTensor) else None
    parts = None
    if made is not None and not recording.changed(value) and (value.dtype, value.shape) == (target.dtype, target.shape):
        parts = _put_together(made, target, value)
    if parts is None:
        yield target, value
        return
    for part in parts:
        yield from _parts(recording, *part)


def _put_together(made: Call, target: torch.Tensor, value: RecordedTensor) -> list[tuple[torch.Tensor, Any]] | None:
    args = made.args
    if made.func in (_aten.cat.default, _aten.stack.default):
        dim = args[1] if len(args) > 1 else 0
        if made.func is _aten.stack.default:
            return [*zip(target.unbind(dim), args[0], strict=True)]
        if all(part.dim() == target.dim() for part in args[0]):
            return [*zip(torch.split(target, [part.shape[dim] for part in args[0]], dim), args[0], strict=True)]
    copied = made.func in (_aten.clone.default, _aten._to_copy.default, _aten.detach.default, _aten.alias.default)
    return [(target, args[0])] if copied else None


def _by_storage(reads: Iterable[Read]) -> list[tuple[Selection, Bytes]]:
    """One selection of each storage."""
    found: defaultdict[int, list[Rows]] = defaultdict(list)
    memory: dict[int, Bytes] = {}
    for read in {_key(read): read for read in reads}.values():
        target, rows = read
        storage = target.untyped_storage()
        if len(rows):
            found[storage.data_ptr()].append(rows)
            memory[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return [(_selection(rows), memory[at]) for at, rows in found.items()]


def _selection(parts: Sequence[Rows]) -> Selection:
    rows = np.concatenate(parts)
    return Selection({}, tuple(ReadSpan(*row) for row in rows.tolist()), int(rows[:, 2].sum()))


# ---- the rest


class Replay:
    """Calls that run again for each version, on what they need of it, which is read into memory that is kept.

    Attributes:
        wanted: What to read before.
    """

    def __init__(self, recording: Recording, calls: Sequence[Call]) -> None:
        kept: list[tuple[Call, list[int]]] = []  # with the numbers of the tensors that no later call needs
        needed: set[int] = set()
        leaves: dict[int, tuple[torch.Tensor, int]] = {}
        for call in reversed(calls):
            if call.changes or any(result.number in needed for result in recorded_in(call.results)):
                given = {tensor.number: tensor for tensor in recorded_in((call.args, call.kwargs))}
                kept.append((call, [number for number in given if number not in needed and number not in leaves]))
                for number, tensor in given.items():
                    if (start := recording.start(tensor)) is None:
                        needed.add(number)
                    else:
                        leaves[number] = tensor.twin, start
        self._calls = kept[::-1]
        self._leaves, self.wanted = _scratch(leaves)

    def run(self) -> None:
        """Runs them on what was read."""
        values = dict(self._leaves)
        for call, over in self._calls:
            args, kwargs = tree_map_only(RecordedTensor, lambda t: values[t.number], (call.args, call.kwargs))
            for result, value in zip(call.results, tree_leaves(call.func(*args, **kwargs)), strict=True):
                if isinstance(result, RecordedTensor):
                    values[result.number] = value
            for number in over:
                del values[number]


def _scratch(leaves: Mapping[int, tuple[torch.Tensor, int]]) -> tuple[dict[int, torch.Tensor], Wanted]:
    """Memory for views of tensors of the version, which begin at a byte of the file; the views there; what is read."""
    packed = {number: (*pack(view), start) for number, (view, start) in leaves.items()}
    at: dict[tuple[object, ...], int] = {}
    rows: list[Rows] = []
    end = 0
    places = {}
    for number, (found, view, start) in packed.items():
        key = start, found.tobytes()
        if key not in at:
            at[key] = round_up(end, ALIGNMENT)
            end = at[key] + int(found[:, 2].sum())
            rows.append(found + np.array([start, at[key], 0]))
        places[number] = at[key], view
    memory = np.empty(end, np.uint8)
    tensors = {number: _over(memory[first:], view) for number, (first, view) in places.items()}
    return tensors, [(_selection(rows), memory)] if end else []


def _over(memory: Bytes, view: torch.Tensor) -> torch.Tensor:
    """A view over the beginning of some memory."""
    if not view.numel():
        return torch.empty(view.shape, dtype=view.dtype)
    nbytes = len(memory) // view.dtype.itemsize * view.dtype.itemsize
    return torch.from_numpy(memory[:nbytes]).view(view.dtype).as_strided(view.shape, view.stride())
