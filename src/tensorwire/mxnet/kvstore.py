"""The store as a KVStore of MXNet.

Gradients of Gluon's parameters move into the slots that pushes send from. Weights stay in MXNet's memory, because
oneDNN changes their layout in place when a network is evaluated.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import mxnet as mx
import numpy as np

import tensorwire
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.keyvalue import KeyValue
from tensorwire.keyvalue.key_arguments import as_key
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.mxnet import engine, gradients
from tensorwire.mxnet.key_requests import KeyRequests
from tensorwire.mxnet.server_rule import RULE, UPDATES, is_elementwise, numbers_of, over, settings_of
from tensorwire.mxnet.worker_keys import DenseKey, Key, KeyParts, RowKey, parts_of
from tensorwire.store.compression import check_dtypes
from tensorwire.store.course import Course
from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.sharding import ParameterSpec

_COLLECTIVE_SECONDS = 600.0
_BUCKET_BYTES = 2 << 20  # smaller: transfers and updates overlap more; larger: fewer messages


class KVStore(mx.kvstore.KVStore):  # type: ignore[misc]  # of its kind, or Trainer refuses sparse gradients
    """A KVStore for ``gluon.Trainer`` and ``Module``, and by itself. Every worker makes one.

    ``mx.kv.create("dist_tensorwire_sync")`` makes one with `Sync`, ``"dist_tensorwire_async"`` with `Async` and
    ``"dist_tensorwire_ssp_async"`` with `SSP`.

    Args:
        mode: `Sync`, `Async` or `SSP`, as for `tensorwire.store.KeyValue`.

    Raises:
        ArgumentError: This process is no worker of a job, or the mode is none of these.
    """

    def __init__(self, mode: Sync | Async | SSP = Sync()) -> None:  # noqa: B008  # frozen
        self.handle = None  # MXNet's own object, which there is none of
        self._updater: Any = None
        if not isinstance(mode, (Sync, Async, SSP)):
            raise ArgumentError(f"mode must be Sync(), Async() or SSP() of tensorwire.store, not {mode!r:.100}")
        self._mode, self._worker = mode, _this_worker()
        self._optimizer: Any = None
        self._compression: str | None = None
        self._keys: dict[Key, DenseKey | KeyParts | RowKey] = {}
        self._pending: dict[Key, Any] = {}  # what `init` was given, until something is done with it
        self._early: set[Key] = set()  # keys that were made before their `broadcast`
        self._store: KeyValue | None = None
        self._requests = KeyRequests()
        self._course = Course(self._worker.member)  # of what has been asked for; that of the keys: of what has left
        self._inside = False  # a unit
        atexit.register(engine.forget_errors)  # after this worker has left
        self._worker.at_close(self._leave)  # before that of the keys, which are made later
        self._worker.leave_earlier()  # or MXNet's engine would have stopped, if it was imported after `init`

    def __del__(self) -> None:
        """Nothing: there is no object of MXNet's to free."""

    def __getstate__(self) -> Any:
        raise TypeError("a store cannot be pickled: every worker makes its own")

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether servers can run optimizers: they can."""
        return capability.lower() == "optimizer"

    @property
    def type(self) -> str:
        """The name, in which MXNet looks for "dist", "_sync" and "async"."""
        return "dist_tensorwire_sync" if isinstance(self._mode, Sync) else "dist_tensorwire_async"

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._worker.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        return self._worker.num_workers

    # ---- what is set before there are keys

    def set_optimizer(self, optimizer: Any) -> None:
        """Servers update by an optimizer of MXNet's. Every worker calls it, before there are keys.

        Args:
            optimizer: The optimizer, whose learning rate, weight decay and ``rescale_grad`` count as they are when a
                key is pushed; all else as it is now. Its schedule counts this worker's pushes.

        Raises:
            ArgumentError: There are keys already, or this is no optimizer of MXNet's.
            Unsupported: It cannot be sent to servers.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ArgumentError(f"set_optimizer() takes an optimizer of mx.optimizer, not {optimizer!r:.100}")
        if self._keys:
            raise ArgumentError(
                "set the optimizer before keys are pushed or pulled: they keep the rule they were made with"
            )
        settings_of(optimizer)
        self._optimizer, self._updater = optimizer, _Updater(optimizer)

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Pushes are coded. Every worker calls it, before there are keys.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, as in MXNet; or ``"fp16"``, ``"bf16"``,
                ``"topk"`` with ``"fraction"``, or ``"int8"`` with ``"block"``.

        Raises:
            ArgumentError: There are keys already, or there is no such code.
        """
        if self._keys:
            raise ArgumentError("set the compression before keys are pushed or pulled")
        known = {"2bit": ("threshold", 0.5), "topk": ("fraction", 0.01), "int8": ("block", 256)}
        if not isinstance(compression_params, Mapping):
            raise ArgumentError(
                f"compression is a dictionary, such as {{'type': '2bit'}}, not {compression_params!r:.100}"
            )
        settings = dict(compression_params)
        kind = settings.pop("type", None)
        if kind in known:
            name, default = known[kind]
            code = f"{kind}({settings.pop(name, default)})"
        elif kind in ("fp16", "bf16"):
            code = kind
        else:
            raise ArgumentError(
                f"there is no compression of type {kind!r:.100}; there are 2bit, fp16, bf16, topk, int8"
            )
        if settings:
            raise ArgumentError(f"compression {kind} has no setting {next(iter(settings))!r:.100}")
        self._compression = code

    # ---- keys

    def init(self, key: Any, value: Any) -> None:
        """Makes keys, whose first values are those of worker 0. Every worker calls it, in the same order.

        The keys of calls before the first other one get to the servers together.

        Args:
            key: A string or an integer, or a list of them.
            value: An NDArray, dense or row_sparse, or a list of them.

        Raises:
            ArgumentError: A key exists already, or is neither a string nor an integer. No key was made.
            Unsupported: The store does not hold this dtype, or compression does not code it. No key was made.
        """
        self._check()
        made: dict[Key, Any] = {}
        for each, values in _pairs(key, value):
            if each in self._keys or each in self._pending or each in made:
                raise ArgumentError(f"key {each!r} exists already")
            _check_new(each, values[0], self._compression)
            made[each] = values[0].copy()
        self._pending.update(made)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, and then `pull`. Raises as these.

        Args:
            key: As for `init`.
            value: As for `init`.
            out: As for `pull`.
            priority: As for `push`.
        """
        params = getattr(self._optimizer, "param_dict", {})
        for each, values in _pairs(key, value):
            if each in params and each not in self._early:
                self._init_all(params)
            if each in self._early:
                self._early.discard(each)
            else:
                self.init(each, values)
        self.pull(key, out, priority)
        moved = []
        for each, _ in _pairs(key, value):
            found = self._keys[each]
            if each in params and isinstance(found, DenseKey) and gradients.move(params[each], found.slot):
                moved.append(params[each])
        gradients.build_anew(moved)

    def _init_all(self, params: dict[int, Any]) -> None:
        """Trainer comes with one parameter after the other: the first brings all that there are."""
        for key, param in params.items():
            if key not in self._keys and not param._deferred_init and param._stype == "default":
                self.init(key, param.list_data()[0])
                self._early.add(key)

    def _place(self) -> None:
        """What `init` was given gets to the servers."""
        self._check()
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        params = getattr(self._optimizer, "param_dict", {})
        store = self._key_value()
        dense: dict[Key, dict[Key, Any]] = {}  # each in parts
        for key, value in pending.items():
            sparse = value.stype != "default" or getattr(params.get(key), "_grad_stype", "default") != "default"
            if sparse:
                self._keys[key] = RowKey(store, key, value, self._requests)
            elif self._optimizer is None:
                dense[key] = parts_of(key, value.asnumpy())
            else:  # which may look at all of a key
                dense[key] = {key: value.asnumpy()}
        parts = {name: part for each in dense.values() for name, part in each.items()}
        if parts:
            store.init(list(parts), list(parts.values()))
        for key, each in dense.items():
            if len(each) > 1:
                self._keys[key] = KeyParts(store, key, pending[key], list(each), self._requests)
            else:
                self._keys[key] = DenseKey(store, key, self._requests)

    def _check(self) -> None:
        """Raises the error of an earlier call, or `StepInterrupted` where one was interrupted."""
        self._requests.check()
        if not self._inside:
            self._course.check()

    def _key_value(self) -> KeyValue:
        if self._store is None:
            settings: dict[str, Any] = {}
            if self._optimizer is not None:
                settings = {**settings_of(self._optimizer), "lr": 0.0, "wd": 0.0, "rescale_grad": 1.0}
            rule, cut = (RULE, is_elementwise(self._optimizer)) if settings else ("assign", False)
            self._store = KeyValue(
                self._mode,
                rule,
                bucket_bytes=_BUCKET_BYTES,
                compression=self._compression,
                elementwise=cut,
                **settings,
            )
        return self._store

    def _found(self, key: Any) -> DenseKey | KeyParts | RowKey:
        self._place()
        if key not in self._keys:
            raise ArgumentError(f"there is no key {key!r:.100}: call init() first")
        return self._keys[key]

    def _numbers(self, key: Key) -> dict[str, float]:
        return {} if self._optimizer is None else numbers_of(self._optimizer, key)

    @contextlib.contextmanager
    def unit(self, what: str) -> Iterator[None]:
        """Around calls of which all or none take place; inside of another unit, they are a part of that.

        After an exception in it, later calls raise `StepInterrupted`.
        """
        if self._inside:
            yield
            return
        self._check()
        try:
            self._inside = True
            with self._course.unit(what):
                yield
        finally:
            self._inside = False

    # ---- push and pull

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Pushes gradients, or values where there is no optimizer. It returns before they are there.

        Args:
            key: A key, or a list of them.
            value: For each key an NDArray, or the list of a worker's devices, which are summed.
            priority: Of requests that wait, those of higher priority go first.

        Raises:
            ArgumentError: There is no such key, or a value does not fit. Nothing was pushed.
            StepInterrupted: An exception ended an earlier call in the middle.
            JobEnded: The job ended; the message says why.
        """
        pairs = [(self._found(each), each, values) for each, values in _pairs(key, value)]
        for found, _, values in pairs:
            found.check(values, ())
        with self.unit("a push of keys"):
            for found, each, values in pairs:
                found.push(values, self._numbers(each), priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Fetches values into arrays, whose readers wait for them.

        Args:
            key: A key, or a list of them.
            out: For each key an NDArray, or a list of them.
            priority: As for `push`.
            ignore_sparse: Whether to leave out row_sparse arrays, which `row_sparse_pull` fetches.

        Raises:
            ArgumentError: There is no such key, or an array does not fit.
            StepInterrupted: An exception ended an earlier call in the middle.
            JobEnded: The job ended; the message says why.
        """
        pairs = []
        for each, outs in _pairs(key, out):
            dense = [array for array in outs if array.stype == "default"]
            if len(dense) < len(outs) and not ignore_sparse:
                raise Unsupported("pull() fetches into dense arrays: use row_sparse_pull() for row_sparse ones")
            if dense:
                pairs.append((self._found(each), dense))
                pairs[-1][0].check((), dense)
        with self.unit("a pull of keys"):
            for found, dense in pairs:
                found.pull(dense, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, and then `pull`, in one request. Raises as these.

        Args:
            key: As for `push`.
            value: As for `push`.
            out: As for `pull`; None: the values come into the arrays of ``value``.
            priority: As for `push`.
        """
        outs = [each for _, each in _pairs(key, value if out is None else out)]
        pairs = [(self._found(each), each, values) for each, values in _pairs(key, value)]
        for (found, _, values), into in zip(pairs, outs, strict=True):
            found.check(values, into)
        with self.unit("a pushpull of keys"):
            for (found, each, values), into in zip(pairs, outs, strict=True):
                found.push_and_pull(values, into, self._numbers(each), priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Fetches some rows of keys that are row_sparse. It returns when they are there.

        Args:
            key: A key, or a list of them.
            out: For each key a row_sparse NDArray, or a list of them.
            priority: Nothing: there is nothing that such a call could overtake.
            row_ids: The rows' numbers, an NDArray, or as many as there are arrays.

        Raises:
            ArgumentError: There is no such key, or it has no rows.
            StepInterrupted: An exception ended an earlier call in the middle.
            JobEnded: The job ended; the message says why.
        """
        pairs = _pairs(key, out)
        several = isinstance(row_ids, (list, tuple))
        for number, (each, outs) in enumerate(pairs):
            found = self._found(each)
            if not isinstance(found, RowKey):
                raise ArgumentError(f"key {each!r} is dense: give init() a row_sparse array")
            ids = row_ids[number if len(pairs) > 1 else 0] if several else row_ids
            for place, array in enumerate(outs):
                found.fetch(array, row_ids[place] if several and len(pairs) == 1 and len(row_ids) == len(outs) else ids)

    # ---- the rest

    def barrier(self) -> None:
        """Returns when all workers have called it and this one's earlier pushes have been applied.

        Raises:
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        self._place()
        self._settle()
        self._worker.collectives.barrier(_COLLECTIVE_SECONDS)

    _barrier = barrier

    def _settle(self) -> None:
        try:
            mx.nd.waitall()
        finally:
            self._requests.check()

    def _leave(self) -> None:
        """What was asked for takes place before this worker leaves: Python runs ahead of MXNet's engine."""
        try:
            self._settle()
        finally:
            for key in self._keys.values():
                key.count_unsent()
            if self._store is not None:  # which then refuses to leave, too: others are not to go on with what there is
                self._store._follow(self._course)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Writes the keys' values, and the servers' state, to a file in numpy's npz format. One worker may call it.

        Args:
            fname: The file.
            dump_optimizer: Nothing: learning rate and schedule are the script's, and counts of updates are written.

        Raises:
            ArgumentError: The file cannot be written.
            Unsupported: There are keys with rows.
        """
        self._place()
        self._settle()
        self._key_value().save(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Sets the keys, and the servers' state, from a file. Every worker calls it; worker 0 reads the file.

        Args:
            fname: A file that `save_optimizer_states` wrote, with any number of servers.

        Raises:
            ArgumentError: The file cannot be read, or is not of these keys. Nothing was changed.
        """
        self._place()
        self._settle()
        self._key_value().load(fname)
        counts = self._worker.collectives.broadcast(_updates(fname) if self.rank == 0 else None, 0, _COLLECTIVE_SECONDS)
        if self._optimizer is not None:
            pushes = 1 if isinstance(self._mode, Sync) else self.num_workers
            self._optimizer._index_update_count.update({key: -(-count // pushes) for key, count in counts})
            self._optimizer.num_update = max([0, *self._optimizer._index_update_count.values()])

    def set_updater(self, updater: Any) -> None:
        """Refused: servers update, by an optimizer. Raises `Unsupported`."""
        raise Unsupported("an update function would run in workers, and values are on servers: use set_optimizer()")

    _set_updater = set_updater


def _this_worker() -> Worker:
    """This process as a worker: of the job that it has joined, or joins now. Raises as `tensorwire.init`."""
    try:
        return current_worker()
    except ArgumentError:
        tensorwire.init()
        return current_worker()


class _Updater:
    """What Trainer looks at after it has loaded states."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def _check_new(key: Any, value: Any, compression: str | None) -> None:
    """Refuses what no key can be, before it is placed together with others. Raises `ArgumentError` or `Unsupported`."""
    as_key(key)
    dtype = np.dtype(value.dtype)
    try:
        over(np.zeros(1, dtype))
    except ValueError as error:
        raise Unsupported(f"key {key!r} cannot be {dtype.name}: {error}") from None
    check_dtypes([ParameterSpec(str(key), value.shape, dtype.name)] if compression else [])


def _pairs(key: Any, value: Any) -> list[tuple[Key, list[Any]]]:
    """Each key with its arrays. Raises `ArgumentError`."""
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(key):
            raise ArgumentError(f"{len(key)} keys need a list of as many arrays")
        return [pair for each, one in zip(key, value, strict=True) for pair in _pairs(each, one)]
    arrays = list(value) if isinstance(value, (list, tuple)) else [value]
    if not arrays or not all(isinstance(array, mx.nd.NDArray) for array in arrays):
        raise ArgumentError(f"key {key!r:.100} needs an NDArray, or a list of them")
    return [(key, arrays)]


def _updates(path: str) -> list[tuple[Key, int]]:
    """How often each key of a file was updated."""
    from tensorwire.store.key_files import read_arrays

    _, arrays = read_arrays(path)
    return [(saved.key, int(array.reshape(-1)[0])) for saved, array in arrays if saved.name == UPDATES]


def _named(name: str, mode: Sync | Async | SSP) -> None:
    """Registers the store under a name of MXNet's, which is that of a class in lower case."""

    def make(self: KVStore) -> None:
        KVStore.__init__(self, mode)

    mx.kvstore.KVStoreBase.register(type(name, (KVStore,), {"__init__": make, "__module__": __name__}))


_named("dist_tensorwire_sync", Sync())
_named("dist_tensorwire_async", Async())
_named("dist_tensorwire_ssp_async", SSP())
