"""Whether saved state fits a store and its rule; asked before anything changes.

A small probe shows the state of torch's optimizers, if this process has torch. Of other rules' state, only shapes and
dtypes can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tensorwire.errors import ArgumentError
from tensorwire.store.kept import KeptArray
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.server_state import Stateful
from tensorwire.store.sharding import PARAMETER_DTYPES, ParameterSpec
from tensorwire.store.state_transfer import GROUP, MASTER, NUMBER, Entry
from tensorwire.store.store_layout import StoreSpec

_HALF = ("float16", "bfloat16")
_Kept = dict[tuple[int, str], Entry]  # by tensor and name


def check_kept(spec: StoreSpec, options: bytes, kept: Sequence[KeptArray]) -> None:
    """Raises `ArgumentError` for what the rule, under a packed option block, does not keep for these tensors."""
    seen: set[tuple[int, str, str]] = set()
    for each in kept:
        tensor = spec.tensors[each.tensor]
        what = f"{each.name!r} of {tensor.name!r}"
        if each[:3] in seen:
            raise ArgumentError(f"{what} is in the state twice")
        seen.add(each[:3])
        if wrong := _misshapen(each, tensor, table=spec.table is not None):
            raise ArgumentError(f"{what} {wrong}")
    if is_foreign(spec.rule):
        return
    try:
        at_once, later = _probe(spec, options)
    except ImportError:
        return
    for each in kept:
        _check_known(spec, each, later)
    for number, tensor in enumerate(spec.tensors):
        names = {each.name for each in kept if each.tensor == number} - {MASTER}
        needed = {name for at, name in (later if names else at_once) if at == number}
        if missing := sorted(needed - names):
            raise ArgumentError(f"the state of {tensor.name!r} has no {missing[0]!r}, which {spec.rule} needs")


def _misshapen(each: KeptArray, tensor: ParameterSpec, *, table: bool) -> str:
    """What is wrong with an array for any rule; empty if nothing is."""
    array = each.array
    if not isinstance(array, np.ndarray) or array.dtype.name not in PARAMETER_DTYPES or not array.dtype.isnative:
        return f"is of {getattr(array, 'dtype', type(array).__name__)}, which no server keeps"
    if each.kind not in ("", NUMBER, GROUP):
        return f"is of the unknown kind {each.kind!r}"
    if each.kind and (array.size != 1 or each.rows):
        return f"is a number, and has the shape {list(array.shape)}"
    if each.rows and (array.shape[:1] != tensor.shape[:1] if table else array.shape != tensor.shape):
        return f"has the shape {list(array.shape)}, and its values have {list(tensor.shape)}"
    return ""


def _check_known(spec: StoreSpec, each: KeptArray, known: Mapping[tuple[int, str], Entry]) -> None:
    tensor = spec.tensors[each.tensor]
    found = known.get((each.tensor, each.name))
    if each.name == MASTER and tensor.dtype in _HALF:
        found = Entry(each.tensor, MASTER, "float32", tensor.shape, not spec.whole, 0, 0)
    if found is None:
        raise ArgumentError(f"the state of {tensor.name!r} has {each.name!r}, which {spec.rule} does not keep")
    lengths = zip(found.shape, tensor.shape, strict=False)
    shape = tensor.shape if found.rows else tuple(n if small > 1 else 1 for small, n in lengths)
    if (each.array.dtype.name, each.array.shape) != (found.dtype, each.array.shape if found.kind else shape):
        raise ArgumentError(
            f"{each.name!r} of {tensor.name!r} is {each.array.dtype}{list(each.array.shape)} in the state, and should "
            f"be {found.dtype}{list(shape)}"
        )
    if (each.kind, each.rows) != (found.kind, found.rows):
        raise ArgumentError(f"{each.name!r} of {tensor.name!r} is kept in another way than {spec.rule} keeps it")


def _probe(spec: StoreSpec, options: bytes) -> tuple[_Kept, _Kept]:
    """What the rule keeps before its first update, and after it, for tensors with lengths of at most 2."""
    tensors = [ParameterSpec(t.name, tuple(min(n, 2) for n in t.shape), t.dtype, t.group) for t in spec.tensors]
    small = msgspec.structs.replace(spec, tensors=tensors)
    if spec.table is not None:
        from tensorwire.store.row_rules import make_row_rule

        values = np.zeros(tensors[0].shape, tensors[0].dtype)
        rows = make_row_rule(small, 0, values)
        at_once = _kept(rows)
        rows.update(np.arange(1), values[:1].copy(), options)
        return at_once, _kept(rows)
    from tensorwire.store.key_rules import make_key_rule

    plan = small.plan(1)
    rule = make_key_rule(small, plan, 0, memoryview(bytearray(plan.shard_bytes[0])))
    at_once = _kept(rule)
    for bucket in plan.buckets[0]:
        rule.update(bucket.index, [Push(0, memoryview(bytearray(bucket.nbytes)), b"\1")], options)
    return at_once, _kept(rule)


def _kept(rule: Stateful) -> _Kept:
    return {(entry.tensor, entry.key): entry for part in rule.state() for entry, _ in part}
