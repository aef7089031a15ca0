"""A client of the parameter store for numpy arrays, without a framework.

It has the calls of MXNet's KVStore and keeps their order per key.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorwire.edge.tensor import Spec
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.keyvalue.handle import Handle, finish_all
from tensorwire.keyvalue.key_arguments import (
    Key,
    as_key,
    as_keys,
    check_readable,
    check_whole,
    number,
    pairs,
    plain_option,
    plan_name,
)
from tensorwire.keyvalue.key_entry import KeyEntry, KeyPull, arrays_for, outs_for
from tensorwire.keyvalue.key_versions import KeyVersions, PublishedCalls, publishing_of
from tensorwire.keyvalue.row_keys import RowKeys
from tensorwire.launch.join_store import join_with
from tensorwire.launch.worker import current_worker
from tensorwire.store.admission import versions
from tensorwire.store.compression import parse_compression
from tensorwire.store.course import Course
from tensorwire.store.foreign import named_by
from tensorwire.store.kept import KeptArray
from tensorwire.store.kept_check import check_kept
from tensorwire.store.key_client import KeyClient
from tensorwire.store.key_files import SavedArray, read_arrays, write_arrays
from tensorwire.store.key_state import fetch_arrays, load_arrays
from tensorwire.store.modes import SSP, Async, Sync, settings_of
from tensorwire.store.request_client import RequestClient, pack_options
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.rule_names import ASSIGN, MEAN, SUM, WHOLE, check_path, is_foreign
from tensorwire.store.sharding import BUCKET_BYTES, PARAMETER_DTYPES, ParameterSpec
from tensorwire.store.state_transfer import VALUE
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.every import Every

_BARRIER_SECONDS = 600.0
_DTYPES = tuple(name for name in PARAMETER_DTYPES if name != "bfloat16")
_UNITS = ["", *(f"a {operation.name.lower()} of keys" for operation in RequestOperation)]  # by operation
_WITHOUT_OPTIONS = (ASSIGN, MEAN, SUM)


class KeyValue(RowKeys, PublishedCalls):
    """Arrays on the servers, by keys. Every worker creates it and its keys at the same place of its program.

    ::

        kv = tw.store.KeyValue()
        kv.init(["w", "b"], [w, b])
        kv.push(["w", "b"], [gw, gb])
        w, b = kv.pull(["w", "b"]).wait()

    A call starts its request and returns a `Handle`. Calls for one key take effect in order, so a pull sees the pushes
    before it. A push copies its array, which may change at once; it waits only for an earlier push of the same key that
    the servers have not yet taken. One thread at a time is in a call.

    Args:
        mode: `Sync`: a key's round closes when all workers have pushed the key, and a pull returns the result of the
            round of the worker's last push. `Async`: every push is applied by itself. `SSP`: as `Async`, and a pull
            waits while this worker's pushes of the key are more than ``staleness`` ahead of the slowest worker's.
        rule: The servers' operation on a push. ``"assign"``: the push becomes the value. ``"sum"``: the servers add it
            to the value. ``"mean"``: the workers' mean becomes the value. Or the push is a gradient, for one of torch's
            optimizers by name, such as ``"SGD"``, or for an optimizer class or a function by import path, such as
            ``"package.module:function"``; servers import it, workers do not. A function gets (parameter, gradient,
            state, options): tensors of torch, or numpy arrays if it has an attribute ``numpy = True``.
        elementwise: Whether a rule given by import path treats every element alike and independently. Then keys are
            cut into buckets, over all servers, and the rule gets flat parts of them; else it gets them whole.
        reduce: How to combine the pushes of a round: ``"sum"`` or ``"mean"``.
        bucket_bytes: Arrays are cut into buckets of this size in bytes, a multiple of 4,096; 4 MiB by default.
        compression: The code of pushed floating-point arrays, as for ``StoreOptimizer``: ``"fp16"``, ``"bf16"``,
            ``"2bit(threshold)"``, ``"topk(fraction)"`` or ``"int8(block)"``. What it leaves out joins the next push.
        publish: Whether other processes get versions of all keys, as files: True, or ``tw.store.Every(buffers=)``. Each
            call of `publish` makes one. ``tw.store.connect()`` reads them.
        **options: Options of the optimizer, such as ``lr``; see `set_options`.

    Attributes:
        rank (int): This worker's rank.
        num_workers (int): How many workers the job has.

    Raises:
        ArgumentError: ``init()`` has not been called, or an argument is wrong.
    """

    def __init__(
        self,
        mode: Sync | Async | SSP = Sync(),  # noqa: B008  # frozen
        rule: str = "assign",
        *,
        reduce: str = "sum",
        bucket_bytes: int = BUCKET_BYTES,
        compression: str | None = None,
        elementwise: bool = False,
        publish: Every | bool = False,
        **options: Any,
    ) -> None:
        self._worker = current_worker()
        super().__init__(self._worker)
        self._versions = KeyVersions(self._worker, self._calls, publishing_of(publish))
        if not isinstance(mode, (Sync, Async, SSP)):
            raise ArgumentError(f"mode must be tw.store.Sync(), Async() or SSP(), not {mode!r:.100}")
        if not isinstance(mode, Sync) and mode.damping:
            raise ArgumentError("keys have no clock that damping could use: pass damping=0")
        if isinstance(mode, Async) and mode.max_staleness is not None:
            raise ArgumentError("staleness is not tracked per key: pass max_staleness=None")
        if reduce not in ("sum", "mean"):
            raise ArgumentError(f"reduce must be 'sum' or 'mean', not {reduce!r:.100}")
        self._mode, self._reduce, self._bucket_bytes, self._elementwise = mode, reduce, bucket_bytes, elementwise
        self._compression = str(parse_compression(compression) or "")
        self._entries: dict[Key, KeyEntry] = {}
        self._stores: list[KeyClient] = []
        self.rank, self.num_workers = self._worker.rank, self._worker.num_workers
        self._finish = partial(finish_all, self._calls.lock, self._stores)  # handles have the calls, too
        self._worker.at_close(self._finish, owner=self._calls)
        self.set_optimizer(rule, **options)

    # ---- rules and keys

    def set_optimizer(self, rule: str, **options: Any) -> None:
        """Sets the rule, and its options, of the keys that are initialized from now on. Call it on every worker.

        Args:
            rule: As for the constructor.
            **options: Options of the optimizer, such as ``lr``.

        Raises:
            ArgumentError: There are keys already, whose rule stays; or an argument is wrong.
        """
        self._calls.check()
        if self._entries or self._tables:
            raise ArgumentError("set the optimizer before init(): keys keep the rule that they were made with")
        if not isinstance(rule, str) or not rule:
            raise ArgumentError(f"rule must be the name of a rule, such as 'sum' or 'SGD', not {rule!r:.100}")
        if is_foreign(rule):
            check_path(rule)
        if rule in _WITHOUT_OPTIONS and options:
            raise ArgumentError(f"the rule {rule!r} has no options, and there is {next(iter(options))!r}")
        self._rule = rule
        self._group = {name: plain_option(name, value) for name, value in options.items()}
        self._numeric = [
            (0, name, -1) for name, value in self._group.items() if isinstance(value, float | int) and value is not True
        ]
        self._numeric = [each for each in self._numeric if not isinstance(self._group[each[1]], bool)]
        self._pack()

    def set_options(self, **options: float) -> None:
        """Changes numeric options of the optimizer, such as ``lr``, for the pushes that follow.

        Every worker's pushes carry its own options; in a round of `Sync`, those of its first rank count.

        Args:
            **options: New values of options that the optimizer was given.

        Raises:
            ArgumentError: The optimizer was not given this option, or the value is not a number.
        """
        self._calls.check()
        known = [name for _, name, _ in self._numeric]
        for name, value in options.items():
            if name not in known:
                raise ArgumentError(f"the optimizer was given no numeric option {name!r}; it has: {', '.join(known)}")
            number(name, value)
        self._group.update(options)
        for table in self._tables.values():
            table.set_options(**options)
        self._pack()

    def _pack(self) -> None:
        self._options = pack_options([number(name, self._group[name]) for _, name, _ in self._numeric])

    def init(self, keys: Key | Sequence[Key], values: Any) -> None:
        """Makes keys with values; those of worker 0 count. Every worker calls it, with the same keys in the same order.

        It waits for the other workers. Keys may be added at any time; those of one call share a plan and threads of the
        servers, so give it as many as you can.

        Args:
            keys: A key, or a list of keys: strings or integers.
            values: An array on the CPU, or a list of arrays.

        Raises:
            ArgumentError: A key exists, or a value is no such array. Nothing was added.
            Unsupported: The store does not hold this dtype, or compression does not code it. Nothing was added.
            PlanMismatch: The workers' keys differ.
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        made: dict[Key, KeyEntry] = {}
        given = pairs(keys, values)
        for key, value in given:
            self._check_new(key, made)
            check_readable(key, value)
            spec = Spec.of(value)
            if spec.dtype not in _DTYPES:
                raise Unsupported(f"key {key!r} has dtype {spec.dtype}; keys hold {', '.join(_DTYPES)}")
            made[key] = KeyEntry(key, spec)
        if made:
            with self._calls:
                self._place(list(made.values()), [value for _, value in given])
                self._entries.update(made)

    def _check_new(self, key: Key, made: Collection[Key] = ()) -> None:
        self._calls.check()
        if key in self._entries or key in self._tables or key in made:
            raise ArgumentError(f"key {key!r} exists already")
        if self._versions.begun:
            raise ArgumentError(f"make key {key!r} before the first publish(): versions for readers have the same keys")

    def assign(self, keys: Key | Sequence[Key], values: Any) -> None:
        """Sets keys to worker 0's values. Every worker calls it; the rule's state stays unchanged.

        Args:
            keys: A key, or a list of keys.
            values: As for `push`; those of worker 0 count.

        Raises:
            ArgumentError: As for `push`. Nothing was changed.
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        entries, arrays = self._given(keys, values)
        with self._calls:
            self._complete_pushes()
            with self._calls.course.unit("assign()"):
                self._worker.collectives.barrier(_BARRIER_SECONDS)
                if self.rank == 0:
                    self._assign(entries, arrays)
                    for entry in entries:
                        entry.wait_for_push(None)
                self._end_assign()

    def broadcast(self, keys: Key | Sequence[Key], values: Any, out: Any = None) -> Handle:
        """`init`, and then `pull`.

        Args:
            keys: As for `init`.
            values: As for `init`.
            out: As for `pull`.

        Returns:
            That of the pull.
        """
        self.init(keys, values)
        return self.pull(keys, out)

    # ---- push and pull

    def push(self, keys: Key | Sequence[Key], values: Any, *, priority: int = 0) -> Handle:
        """Pushes values to keys.

        Args:
            keys: A key, or a list of keys.
            values: An array on the CPU of the key's shape and dtype, or a list of arrays, one a key. In place of one
                array there may be a list of several, which are summed in their order: those of this worker's devices.
                An array from `slot` is not copied.
            priority: Where requests have to wait for a slow link, those of higher priority go first.

        Returns:
            Complete when the servers have applied it, and any later push of the same keys.

        Raises:
            ArgumentError: There is no such key, a key is named twice, or a value does not fit. Nothing was pushed.
            WaitTimeout: An earlier push of a key was not taken in time, because another worker has not pushed the key.
            JobEnded: The job ended; the message says why.
        """
        check_whole("priority", priority)
        entries, arrays = self._given(keys, values)
        with self._calls:
            self._fill(entries, arrays)
            self._request(RequestOperation.PUSH, entries, priority)
            return Handle(self._calls, (), entries, False)

    def pull(self, keys: Key | Sequence[Key], out: Any = None, *, priority: int = 0, copy: bool = True) -> Handle:
        """Fetches the values of keys.

        Args:
            keys: A key, or a list of keys.
            out: Arrays to put the values into, one a key. None: new ones.
            priority: As for `push`.
            copy: False, without ``out``: read-only arrays over memory that the servers write, which changes when the
                next pull of the key begins.

        Returns:
            Its ``wait()`` returns the arrays.

        Raises:
            ArgumentError: There is no such key, a key is named twice, or an array of ``out`` does not fit.
            JobEnded: The job ended; the message says why.
        """
        check_whole("priority", priority)
        entries = self._named(keys)
        outs = outs_for(entries, keys, out)
        with self._calls:
            return self._pull(RequestOperation.PULL, keys, entries, outs, priority, copy)

    def pushpull(
        self, keys: Key | Sequence[Key], values: Any, out: Any = None, *, priority: int = 0, copy: bool = True
    ) -> Handle:
        """`push`, and then `pull`, in one request. Errors are theirs.

        Args:
            keys: A key, or a list of keys.
            values: As for `push`.
            out: As for `pull`.
            priority: As for `push`.
            copy: As for `pull`.

        Returns:
            That of the pull.
        """
        check_whole("priority", priority)
        entries, arrays = self._given(keys, values)
        outs = outs_for(entries, keys, out)
        with self._calls:
            self._fill(entries, arrays)
            return self._pull(RequestOperation.PUSHPULL, keys, entries, outs, priority, copy)

    def slot(self, key: Key) -> np.ndarray[Any, Any]:
        """The memory that the next push of a key is sent from. Compute there to push without a copy.

        Returns when the servers have taken the last push. Call it again after every push.

        Args:
            key: The key.

        Returns:
            An array of the key's shape and dtype.

        Raises:
            ArgumentError: There is no such key.
            WaitTimeout: The servers did not take it in time, because another worker has not pushed the key.
            JobEnded: The job ended; the message says why.
        """
        (entry,) = self._named(as_key(key))
        with self._calls:
            entry.store.wait_for_slot(entry.tensor)
            return entry.slot

    # ---- all workers together

    def barrier(self) -> None:
        """Returns when all workers have called it. Their earlier pushes may still be under way.

        Raises:
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        with self._calls:
            self._worker.collectives.barrier(_BARRIER_SECONDS)

    # ---- versions for readers

    def _published(self) -> list[RequestClient]:
        return [*self._stores, *(table.client for table in self._tables.values())]

    def _complete(self) -> None:
        self._complete_pushes()
        for table in self._tables.values():
            table.wait()

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the values of all keys, and the rule's state, to a file in numpy's npz format.

        One worker may call it alone. Let the others wait at a barrier meanwhile if all keys should be of one round.

        Args:
            path: The file, which is replaced as a whole; a device or a pipe is written into.

        Raises:
            ArgumentError: The file cannot be written; an earlier one is as it was.
            Unsupported: The rule's state has something other than numbers and arrays.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        if self._tables:
            raise ArgumentError(f"save the rows of key {next(iter(self._tables))!r} by save_rows(): they need a folder")
        keys = list(self._entries)
        values = self.pull(keys).wait()
        arrays = [(SavedArray(key, kind=VALUE), value) for key, value in zip(keys, values, strict=True)]
        with self._calls:
            for store in self._stores:
                mine = {e.tensor: e for e in self._entries.values() if e.store is store}
                for kept in fetch_arrays(store, {tensor: e.value for tensor, e in mine.items()}):
                    arrays.append((SavedArray(mine[kept.tensor].key, kept.name, kept.kind, kept.rows), kept.array))
        write_arrays(path, self._rule, arrays)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Sets all keys, and the rule's state, from a file. Every worker calls it; worker 0 reads the file.

        The keys must exist, with the shapes and dtypes of the file; the number of servers may differ.

        Args:
            path: A file that `save` wrote.

        Raises:
            ArgumentError: The file cannot be read, or its keys, values, rule or state do not fit. Nothing was changed.
            WaitTimeout: Another worker or a server did not come in time.
            JobEnded: The job ended; the message says why.
        """
        with self._calls:
            self._complete_pushes()
            arrays, wrong = self._read(path) if self.rank == 0 else ([], "")
            wrong = self._worker.collectives.broadcast(wrong, 0, _BARRIER_SECONDS)
            if wrong:
                raise ArgumentError(wrong)
            with self._calls.course.unit("load()"):
                if self.rank == 0:
                    self._set(arrays)
                self._end_assign()
            self._versions.loaded()

    def _complete_pushes(self) -> None:
        for entry in self._entries.values():
            entry.wait_for_push(None)

    def _end_assign(self) -> None:
        for store in self._stores:
            store.forget()
        self._worker.collectives.barrier(_BARRIER_SECONDS)

    def _read(self, path: str | os.PathLike[str]) -> tuple[list[tuple[SavedArray, Any]], str]:
        """What is in a file, or what is wrong with it."""
        try:
            rule, arrays = read_arrays(path)
            if rule != self._rule:
                raise ArgumentError(f"{path} is of the rule {rule!r}, and the keys have {self._rule!r}")
            there = {saved.key for saved, _ in arrays}
            if there != set(self._entries):
                key = next(iter(there.symmetric_difference(self._entries)))
                raise ArgumentError(
                    f"{path} {'has a' if key in there else 'lacks the'} key {key!r}: load the same keys"
                )
            values = [(saved.key, array) for saved, array in arrays if saved.is_value]
            for key in self._entries:
                found = [array for name, array in values if name == key]
                if len(found) != 1:
                    raise ArgumentError(f"{path} has {len(found)} values of key {key!r}, and should have one")
                self._entries[key].check(found[0], f"value in {path}")
            for store in self._stores:
                check_kept(store.spec, self._options, self._kept(store, arrays))
        except TensorwireError as error:
            return [], str(error) if str(path) in str(error) else f"{path} does not fit: {error}"
        return arrays, ""

    def _kept(self, store: KeyClient, arrays: Sequence[tuple[SavedArray, Any]]) -> list[KeptArray]:
        """What a file has of the state of a store's keys."""
        return [
            KeptArray(entry.tensor, saved.name, saved.kind, saved.rows, array)
            for saved, array in arrays
            if not saved.is_value and (entry := self._entries[saved.key]).store is store
        ]

    def _set(self, arrays: Sequence[tuple[SavedArray, Any]]) -> None:
        """The servers have these values, and keep this. Others send nothing meanwhile."""
        values = [(self._entries[saved.key], array) for saved, array in arrays if saved.is_value]
        self._assign([entry for entry, _ in values], [[array] for _, array in values])
        for store in self._stores:
            load_arrays(store, self._kept(store, arrays), self._options)
        for entry, _ in values:
            entry.wait_for_push(None)

    def _assign(self, entries: Sequence[KeyEntry], arrays: Sequence[Sequence[Any]]) -> None:
        """Begins to set these keys. Others send nothing meanwhile."""
        self._fill(entries, arrays)
        self._request(RequestOperation.ASSIGN, entries, 0)

    def close(self) -> None:
        """Releases all keys. Every worker calls it, in any order; when all have, the servers free their memory.

        Earlier pushes are applied. Any other call then raises `ArgumentError`. Idempotent. An object without
        references, to it or its handles, closes with this worker's next call that makes a store or waits for all
        workers.

        Raises:
            StepInterrupted: An earlier call was interrupted when it was partly sent.
            WaitTimeout: Servers did not answer the last request in time. It is closed all the same.
            JobEnded: The job ended; the message says why.
        """
        if self._calls.closed:
            return
        with self._calls:
            try:
                self._versions.close()
                for table in self._tables.values():
                    table.close()
                self._finish()
            finally:
                self._calls.closed = True
                self._worker.not_at_close(self._finish)
                self._entries.clear()
                self._tables.clear()
                self._stores.clear()

    # ---- the rest

    def _place(self, entries: Sequence[KeyEntry], values: Sequence[Any]) -> None:
        """Gives keys a place on the servers: a store of their own."""
        tensors = [ParameterSpec(plan_name(e.key), e.spec.shape, e.spec.dtype) for e in entries]
        spec = StoreSpec(
            versions(self._rule),
            tensors,
            ASSIGN if self._rule == MEAN else self._rule,
            [self._group],
            self._numeric,
            self._bucket_bytes,
            self._rule in WHOLE or (is_foreign(self._rule) and not self._elementwise),
            "mean" if self._rule == MEAN else self._reduce,
            mode_settings=settings_of(self._mode),
            keys=True,
            compression=self._compression,
            **named_by(self._rule, self._group),
        )
        store = join_with(self._worker, spec, KeyClient, late=True)
        store.course = self._calls.course
        self._stores.append(store)
        for tensor, entry in enumerate(entries):
            entry.place(store, tensor)
        if self.rank == 0 and not store.late:
            with store.course.unit("init()"):
                for entry, value in zip(entries, values, strict=True):
                    store.fill(entry.tensor, value)
                store.request(RequestOperation.ASSIGN, range(len(entries)), self._options)
                store.announce(RequestOperation.READY, self._options)

    def _named(self, keys: Key | Sequence[Key]) -> list[KeyEntry]:
        self._calls.check()
        listed, single = as_keys(keys)
        try:
            entries = [self._entries[key] for key in listed]
        except KeyError as missing:
            raise ArgumentError(f"there is no key {missing.args[0]!r:.100}: call init() first") from None
        if not single and len(set(listed)) < len(listed):
            raise ArgumentError("a call may name a key only once")
        return entries

    def _given(self, keys: Key | Sequence[Key], values: Any) -> tuple[list[KeyEntry], list[list[Any]]]:
        """The keys with the arrays of each, all of which fit."""
        entries = self._named(keys)
        return entries, arrays_for(entries, keys, values)

    def _fill(self, entries: Sequence[KeyEntry], arrays: Sequence[Sequence[Any]]) -> None:
        for entry, several in zip(entries, arrays, strict=True):
            entry.store.wait_for_slot(entry.tensor)
            entry.fill(several)

    def _request(self, operation: RequestOperation, entries: Sequence[KeyEntry], priority: int) -> None:
        with self._calls.course.unit(_UNITS[operation]):
            by_store: dict[KeyClient, list[int]] = {}
            for entry in entries:
                by_store.setdefault(entry.store, []).append(entry.tensor)
            for store, mine in by_store.items():
                store.request(operation, mine, self._options, -priority)

    def _pull(
        self,
        operation: RequestOperation,
        keys: Key | Sequence[Key],
        entries: Sequence[KeyEntry],
        outs: Sequence[Any],
        priority: int,
        copy: bool,
    ) -> Handle:
        for entry in entries:  # its memory is free when the one before has been taken
            if entry.pulling is not None:
                entry.pulling.finish(None)
        with self._calls.course.unit(_UNITS[operation]):
            self._request(operation, entries, priority)
            pulls = [KeyPull(entry, out, copy) for entry, out in zip(entries, outs, strict=True)]
            for entry, pull in zip(entries, pulls, strict=True):
                entry.pulling = pull
        return Handle(self._calls, pulls, (), as_keys(keys)[1])

    def _count_unsent(self, key: Key, pushes: int) -> None:
        """Records pushes of a key that a layer above was asked for, and that will not leave any more."""
        entry = self._entries[key]
        entry.store.count_unsent(entry.tensor, pushes)

    def _follow(self, course: Course) -> None:
        """A call of a layer above may have been interrupted, which ``course`` knows."""
        self._calls.course.follow(course)
