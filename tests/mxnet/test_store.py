"""The store by itself, as MXNet's KVStore: keys, devices, sparse arrays, what it refuses, and how it ends."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import foreign
from tensorwire.store.fates import Fate
from tensorwire.trace.push_fates import read_fates
from tests.harness.jobs import for_each, in_turn, run_job


def store_of(kind: str = "dist_tensorwire_sync") -> tuple[Any, Any]:
    import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet
    import mxnet as mx

    return mx, mx.kv.create(kind)


# ---- keys


def push_and_pull(job: tw.Job) -> list[Any]:
    mx, kv = store_of()
    assert (kv.rank, kv.num_workers, kv.type) == (job.rank, 2, "dist_tensorwire_sync")
    shapes = {3: (7, 5), "name": (4,), 5: (1,)}
    kv.init(list(shapes), [mx.nd.ones(shape) * (1 + job.rank) for shape in shapes.values()])
    out = {key: mx.nd.zeros(shape) for key, shape in shapes.items()}
    kv.pull(list(shapes), list(out.values()))
    first = [array.asnumpy() for array in out.values()]
    kv.push(3, mx.nd.ones((7, 5)) * (job.rank + 1))
    kv.pull(3, out[3])
    devices = [mx.nd.ones((4,), mx.cpu(0)), 2 * mx.nd.ones((4,), mx.cpu(1))]
    outs = [mx.nd.zeros((4,), mx.cpu(0)), mx.nd.zeros((4,), mx.cpu(1))]
    kv.pushpull("name", devices, out=outs)
    into = mx.nd.ones((1,)) * 5
    kv.pushpull(5, into)
    kv.barrier()
    return [*first, out[3].asnumpy(), outs[0].asnumpy(), outs[1].asnumpy(), into.asnumpy()]


def large(job: tw.Job) -> tuple[int, list[bool]]:
    """A key that is cut, pushed from two devices, and pulled into a weight whose layout oneDNN has changed."""
    mx, kv = store_of()
    net = mx.gluon.nn.Dense(2100, in_units=2100)
    net.initialize()
    net(mx.nd.ones((8, 2100))).wait_to_read()
    value = np.arange(2100 * 2100, dtype="f4").reshape(2100, 2100)
    kv.init("large", mx.nd.zeros(value.shape))
    found = []
    for step in range(1, 3):
        kv.push("large", [mx.nd.array(value * step, mx.cpu(device)) for device in range(2)])
        kv.pull("large", out=net.weight.data())
        found.append(np.array_equal(net.weight.data().asnumpy(), value * step * 4))
        net(mx.nd.ones((8, 2100))).wait_to_read()
    into = mx.nd.array(value.T)
    kv.pushpull("large", into)
    found.append(np.array_equal(into.asnumpy(), value.T * 2))
    kv.barrier()
    return len(kv._keys["large"]._parts), found


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_pushes_are_summed_over_devices_and_workers_and_large_keys_are_cut(device: str) -> None:
    for found, cut in run_job(in_turn, push_and_pull, large, servers=2, device=device).ok():
        for array, value in zip(found, (1, 1, 1, 3, 6, 6, 10), strict=True):
            np.testing.assert_array_equal(array, np.full_like(array, value))
        assert cut == (2, [True] * 3)


def many_pushes(job: tw.Job) -> float:
    """ps-lite's own check of a worker: pushes of 100,000 values within a window, then a pull."""
    mx, kv = store_of()
    kv.set_optimizer(mx.optimizer.create("test"))  # adds what is pushed
    count, repeats = 100_000, 50
    drawn = mx.nd.array(np.random.RandomState(job.rank).uniform(0, 1, count))
    kv.init(0, mx.nd.zeros((count,)))
    for _ in range(repeats):
        kv.push(0, drawn)
    out = mx.nd.zeros((count,))
    kv.pull(0, out)
    wanted = sum(np.random.RandomState(rank).uniform(0, 1, count).astype("f4") for rank in range(2)) * repeats
    return float(np.abs(out.asnumpy() - wanted).max() / repeats)


def updates_of(job: tw.Job, name: str, options: dict[str, Any], dtype: str) -> list[Any]:
    """A key after updates on the servers, and one updated here."""
    mx, kv = store_of()
    if "lr_scheduler" in options:  # which counts pushes
        options = {**options, "lr_scheduler": mx.lr_scheduler.FactorScheduler(step=2, factor=0.5)}
    optimizer, own = (mx.optimizer.create(name, **options) for _ in range(2))
    kv.set_optimizer(optimizer)
    value = np.linspace(-1, 1, 24).reshape(4, 6).astype(dtype)
    weight, out = mx.nd.array(value, dtype=dtype), mx.nd.zeros((4, 6), dtype=dtype)
    kv.init("w", weight)
    updater = mx.optimizer.get_updater(own)
    for step in range(5):
        gradient = mx.nd.array(np.sin(value.astype("f8") * (1 + step)), dtype=dtype)
        for each in (optimizer, own):
            each.set_learning_rate(0.1 / (1 + step)) if each.lr_scheduler is None else None
        kv.push("w", gradient)
        updater("w", gradient, weight)
        mx.nd.waitall()
    kv.pull("w", out)
    return [out.asnumpy(), weight.asnumpy()]


OPTIMIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("sgd", {"momentum": 0.9, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": 0.4}, "float32"),
    ("sgd", {"momentum": 0.9, "multi_precision": True}, "float16"),
    ("nag", {"momentum": 0.9}, "float32"),
    ("adam", {}, "float32"),
    ("adam", {}, "float64"),
    ("adamax", {}, "float32"),
    ("adagrad", {}, "float32"),
    ("adadelta", {}, "float32"),
    ("rmsprop", {"centered": True}, "float32"),
    ("ftrl", {}, "float32"),
    ("ftml", {}, "float32"),
    ("signum", {}, "float32"),
]


def test_an_optimizer_on_servers_gives_the_bits_of_the_same_one_here() -> None:
    cases = [
        *OPTIMIZERS,
        ("sgd", {"learning_rate": 0.2, "lr_scheduler": "halves"}, "float32"),
    ]
    (results,) = run_job(for_each, updates_of, [*cases, ("lamb", {}, "float32")], workers=1).ok()
    np.testing.assert_allclose(*results.pop(), rtol=1e-5)  # in the last bits of norms they differ
    for case, (served, own) in zip(cases, results, strict=True):
        np.testing.assert_array_equal(served, own, str(case))


OWN = """
import mxnet as mx
@mx.optimizer.register
class {name}(mx.optimizer.Optimizer):
    def create_state(self, index, weight): return None
    def update(self, index, weight, grad, state): weight[:] = weight - 2 * grad
"""


def own(job: tw.Job, folder: str, name: str, changes: bool) -> Any:
    mx, kv = store_of()
    sys.path.insert(0, folder)
    cls = getattr(importlib.import_module(name.lower()), name)
    if changes:  # as if this worker had read another file than the server will
        foreign.hashes_of = lambda modules: {module: "0" * 64 for module in modules if "own" in module}
    kv.set_optimizer(cls())
    kv.init("k", mx.nd.zeros((2,)))
    out = mx.nd.zeros((2,))
    kv.pushpull("k", mx.nd.ones((2,)), out=out)
    return out.asnumpy().tolist()


def test_servers_run_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "owndouble.py").write_text(OWN.format(name="OwnDouble"))
    assert run_job(own, str(tmp_path), "OwnDouble", False, workers=1).ok() == [[-2.0, -2.0]]


def test_servers_that_have_another_optimizer_of_that_name_say_so(tmp_path: Path) -> None:
    (tmp_path / "ownchanged.py").write_text(OWN.format(name="OwnChanged"))
    cause = run_job(own, str(tmp_path), "OwnChanged", True, workers=1).cause
    assert "is not the ownchanged that workers have: install one everywhere" in str(cause)


def compressed(job: tw.Job, settings: dict[str, Any]) -> Any:
    mx, kv = store_of()
    kv.set_gradient_compression(settings)
    kv.init(0, mx.nd.zeros((4096,)))
    out = mx.nd.zeros((4096,))
    kv.pushpull(0, mx.nd.ones((4096,)) * 0.75, out=out)
    return out.asnumpy()


CODES: list[tuple[dict[str, Any], float]] = [
    ({"type": "2bit", "threshold": 0.5}, 1.0),
    ({"type": "fp16"}, 1.5),
    ({"type": "int8", "block": 64}, 1.5),
]


def test_compressed_pushes() -> None:
    for found in run_job(for_each, compressed, [(settings,) for settings, _ in CODES]).ok():
        for array, (settings, value) in zip(found, CODES, strict=True):
            np.testing.assert_allclose(array, np.full(4096, value), rtol=0.01, err_msg=str(settings))


# ---- each push by itself


SHAPE = (30, 7)


def push_at_own_pace(job: tw.Job) -> list[list[Any]]:
    """What a worker pushed, and the values that it pulled after each push."""
    mx, kv = store_of("dist_tensorwire_async")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01))
    kv.init("w", mx.nd.ones(SHAPE))
    drawn, pushed, pulled = np.random.RandomState(job.rank), [], []
    for _ in range(20 + 5 * job.rank):
        pushed.append(drawn.randn(*SHAPE).astype("f4"))
        out = mx.nd.zeros(SHAPE)
        kv.push("w", mx.nd.array(pushed[-1]))
        kv.pull("w", out)
        pulled.append(out.asnumpy())
    return [pushed, pulled]


def apply(job: tw.Job, pushes: list[Any]) -> list[Any]:
    """The value before, between and after updates by MXNet's own optimizer."""
    import tensorwire.mxnet  # noqa: F401  # isort: skip  # before mxnet
    import mxnet as mx

    updater = mx.optimizer.get_updater(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01))
    weight = mx.nd.ones(SHAPE)
    versions = [weight.asnumpy()]
    for pushed in pushes:
        updater("w", mx.nd.array(pushed), weight)
        versions.append(weight.asnumpy())
    return versions


def test_pushes_that_are_applied_alone_equal_their_replay(tmp_path: Path) -> None:
    """The server's own record says in what order they came."""
    workers = run_job(push_at_own_pace, workers=3, device="tcp", fates=tmp_path).ok()
    fates = sorted((f for f in read_fates([tmp_path]) if isinstance(f, Fate)), key=lambda fate: fate.version)
    assert [fate.version for fate in fates] == list(range(1, 20 + 25 + 30 + 1))
    (versions,) = run_job(apply, [workers[fate.worker][0][fate.round - 1] for fate in fates], workers=1).ok()
    for rank, (_, pulled) in enumerate(workers):
        own = [fate.version for fate in fates if fate.worker == rank]
        for value, first in zip(pulled, own, strict=True):
            assert any(np.array_equal(value, version) for version in versions[first:])


# ---- rows


def rows(job: tw.Job) -> list[Any]:
    mx, kv = store_of()
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    weight = mx.nd.ones((20, 3)).tostype("row_sparse")
    kv.init("table", weight)
    pushed = mx.nd.sparse.row_sparse_array((np.full((2, 3), 1.0 + job.rank, "f4"), [1, 5 + job.rank]), shape=(20, 3))
    kv.push("table", pushed)
    out = mx.nd.sparse.zeros("row_sparse", (20, 3))
    kv.row_sparse_pull("table", out=out, row_ids=mx.nd.array([1, 6, 5, 1]))
    whole = mx.nd.zeros((20, 3))
    kv.pull("table", out=whole)
    return [out.indices.asnumpy(), out.data.asnumpy(), whole.asnumpy()]


def embed(job: tw.Job, sparse: bool) -> Any:
    mx, kv = store_of()
    net = mx.gluon.nn.Embedding(50, 4, sparse_grad=sparse)
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "adagrad", {"learning_rate": 0.1}, kvstore=kv)
    for step in range(4):
        drawn = np.random.RandomState(10 * step + job.rank).randint(0, 50, (6,))
        with mx.autograd.record():
            loss = (net(mx.nd.array(drawn)) ** 2).sum()
        loss.backward()
        trainer.step(2)
    return net.weight.data().asnumpy()


def test_rows_are_pushed_and_pulled_by_their_numbers() -> None:
    wanted = np.ones((20, 3), "f4")
    wanted[1], wanted[5], wanted[6] = 1 - 1.5, 1 - 0.5, 1 - 1.0
    programs = rows, partial(embed, sparse=True), partial(embed, sparse=False)
    results = run_job(in_turn, *programs).ok()
    for (indices, found, whole), sparse, dense in results:
        assert indices.tolist() == [1, 5, 6]
        np.testing.assert_array_equal(found, wanted[[1, 5, 6]])
        np.testing.assert_array_equal(whole, wanted)
        for embedded in (sparse, dense):  # gradients of rows are as good as those of whole tables
            np.testing.assert_allclose(embedded, results[0][2], rtol=1e-6)


# ---- gluon's parameters


def slots(job: tw.Job) -> list[Any]:
    from tensorwire.observe import counters

    mx, kv = store_of()
    net = mx.gluon.nn.Dense(64, in_units=32)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
    copies = []
    for _ in range(3):
        with mx.autograd.record():
            loss = (net(mx.nd.ones((2, 32))) ** 2).sum()
        loss.backward()
        before = counters.copies
        trainer.step(2)
        mx.nd.waitall()
        copies.append(counters.copies - before)
    params = [net.weight, net.bias]
    there = [any(p.grad() is key.slot for key in kv._keys.values()) for p in params]
    return [copies, there]


def accumulate(job: tw.Job) -> list[Any]:
    """``grad_req="add"``, and then other arrays for a parameter."""
    mx, kv = store_of()
    net = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Zero())
    net.weight.grad_req = "add"
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=kv)
    found = []
    for step in range(4):
        if step == 2:
            net.collect_params().reset_ctx(mx.cpu(0))
        if step == 3:
            net.collect_params().zero_grad()
        for _ in range(2):
            with mx.autograd.record():
                loss = net(mx.nd.ones((1, 2))).sum()
            loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        found.append(float(net.weight.data()[0, 0].asscalar()))
    return found


def test_gradients_many_pushes_and_parameters_that_move() -> None:
    """Backward puts gradients where pushes leave from."""
    for (copies, there), moved, lost in run_job(in_turn, slots, accumulate, many_pushes).ok():
        assert copies[1:] == [0, 0]
        assert there == [True, True]
        assert moved == [-4.0, -12.0, -16.0, -20.0]
        assert lost < 1e-5


def states(job: tw.Job, folder: str) -> list[Any]:
    """A training that is saved on the way, and one that goes on from there."""
    mx, kv = store_of()
    mx.random.seed(1)
    x = mx.nd.array(np.random.RandomState(job.rank).rand(4, 8))

    def step(net: Any, trainer: Any) -> None:
        with mx.autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(8)

    def trained(store: Any, path: str = "") -> tuple[Any, Any]:
        net = mx.gluon.nn.Dense(3, in_units=8)
        net.initialize()
        if path:
            net.load_parameters(path)
        return net, mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1}, kvstore=store)

    whole = trained(kv)
    for _ in range(3):
        step(*whole)
    mx.nd.waitall()
    if job.rank == 0:
        whole[0].save_parameters(f"{folder}/net")
        whole[1].save_states(f"{folder}/states")
    kv.barrier()
    resumed = trained(tensorwire_store(), f"{folder}/net")
    resumed[1].load_states(f"{folder}/states")
    assert resumed[1]._optimizer.num_update == 3
    for _ in range(2):
        step(*whole)
        step(*resumed)
    return [net.weight.data().asnumpy() for net, _ in (whole, resumed)]


def tensorwire_store() -> Any:
    import tensorwire.mxnet

    return tensorwire.mxnet.KVStore()


def fit(job: tw.Job) -> Any:
    mx, kv = store_of()
    mx.random.seed(7)
    np.random.seed(7)
    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=16, name="a"), act_type="relu")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=2, name="b"), name="softmax"))
    drawn = np.random.RandomState(job.rank)
    x = drawn.rand(64, 8).astype("f4")
    iterator = mx.io.NDArrayIter(x, (x.sum(1) > 4).astype("f4"), 16)
    module.fit(iterator, num_epoch=12, kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.5})
    mx.nd.waitall()
    (_, accuracy), *_ = module.score(iterator, "acc")
    return accuracy, {name: array.asnumpy() for name, array in module.get_params()[0].items()}


def test_module_trains_and_a_training_goes_on_from_saved_states(tmp_path: Path) -> None:
    first, second = run_job(in_turn, partial(states, folder=str(tmp_path)), fit).ok()
    for (whole, resumed), (accuracy, arrays) in (first, second):
        np.testing.assert_array_equal(whole, resumed)
        assert accuracy > 0.8
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, second[1][1][name])


# ---- what is refused


def refused(job: tw.Job) -> list[str]:
    mx, kv = store_of()
    from tensorwire.mxnet import KVStore

    said = []

    def attempt(call: Any) -> None:
        with pytest.raises((errors.TensorwireError, TypeError)) as raised:
            call()
        said.append(str(raised.value))

    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    attempt(lambda: kv.pull("nothing", mx.nd.zeros((1,))))
    attempt(lambda: kv.set_optimizer("sgd"))
    attempt(lambda: kv.set_optimizer(mx.optimizer.create("nadam")))
    attempt(lambda: kv.set_optimizer(mx.optimizer.create("dcasgd")))
    attempt(lambda: kv.set_gradient_compression({"type": "1bit"}))
    attempt(lambda: kv.set_gradient_compression("2bit"))
    attempt(lambda: kv.set_updater(print))
    attempt(lambda: KVStore(mode="sync"))
    kv.init("a", mx.nd.zeros((2,)))
    attempt(lambda: kv.init("a", mx.nd.zeros((2,))))
    attempt(lambda: kv.init(["b", None], [mx.nd.zeros((2,))] * 2))  # and "a" stays
    attempt(lambda: kv.init(["b", 1.5], [mx.nd.zeros((2,))] * 2))
    attempt(lambda: kv.init(["b", "c"], [mx.nd.zeros((2,)), mx.nd.zeros((2,), dtype="int8")]))
    attempt(lambda: kv.push("a", mx.nd.zeros((3,))))
    attempt(lambda: kv.push(["a", "b"], [mx.nd.zeros((2,))]))
    attempt(lambda: kv.set_optimizer(mx.optimizer.create("sgd")))
    attempt(lambda: kv.row_sparse_pull("a", mx.nd.zeros((2,)), row_ids=mx.nd.zeros((1,))))
    for name in ("tensorwire_sync", "device_tensorwire", "dist_tensorwire_synch"):
        with pytest.raises(errors.ArgumentError, match=f"there is no store '{name}'; there are dist_tensorwire_async"):
            mx.kv.create(name)
    with pytest.raises(errors.ArgumentError, match="there is no store"):
        mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="tensorwire").step(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="device")._init_kvstore()
    said.append(str(warned[0].message))
    return said


def test_what_is_refused() -> None:
    first, _ = run_job(refused).ok()
    wanted = [
        "there is no key 'nothing'",
        "takes an optimizer of mx.optimizer",
        "keeps one schedule",
        "DCASGD has a dict as 'weight_previous'",
        "no compression of type '1bit'",
        "compression is a dictionary",
        "use set_optimizer()",
        "mode must be",
        "exists already",
        "a string or an integer, not None",
        "a string or an integer, not 1.5",
        "key 'c' cannot be int8",
        "must be float32[2]",
        "2 keys need a list",
        "before keys are pushed",
        "is dense",
        "trains by itself, and its job has 2",
    ]
    assert len(first) == len(wanted)
    for said, part in zip(first, wanted, strict=True):
        assert part in said


# ---- order


class Answered:
    """A request that is answered at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


def order_of(job: tw.Job, priorities: list[int]) -> list[int]:
    """The priorities of requests in the order in which they began, behind one that was held up."""
    import tensorwire.mxnet  # noqa: F401
    from tensorwire.mxnet.key_requests import KeyRequests

    requests, begun, done = KeyRequests(), [], threading.Semaphore(0)
    held, all_there = threading.Event(), threading.Event()

    def held_up() -> Answered:
        held.set()
        all_there.wait()
        return Answered()

    def begin(priority: int) -> Answered:
        begun.append(priority)
        return Answered()

    def ended(_: object) -> None:
        done.release()

    requests.submit(held_up, ended, 0)
    held.wait()
    for priority in priorities:
        requests.submit(partial(begin, priority), ended, priority)
    all_there.set()
    for _ in range(1 + len(priorities)):
        done.acquire()
    return begun


def test_of_requests_that_wait_those_of_higher_priority_begin_first() -> None:
    assert run_job(order_of, [-3, -1, 0, -1, 5], workers=1).ok() == [[5, 0, -1, -1, -3]]


# ---- faults


def gone(job: tw.Job) -> None:
    """A pull that is under way when the servers are gone."""
    mx, kv = store_of()
    from tensorwire.mxnet import engine

    out = mx.nd.zeros((100,))
    kv.init(0, mx.nd.zeros((100,)))
    kv.pull(0, out)
    out.wait_to_read()
    kv._store.pull = lambda *_, **__: Gone()
    kv.pull(0, out)
    with pytest.raises(mx.MXNetError, match="JobEnded: server 0 is gone"):
        out.asnumpy()
    with pytest.raises(errors.JobEnded, match="server 0 is gone"):
        kv.pull(0, out)
    engine.forget_errors()
    kv._requests.error = None


class Gone:
    """A request that has no answer."""

    def wait(self) -> None:
        """The job ends."""
        raise errors.JobEnded("server 0 is gone")


def test_a_pull_that_fails_gives_no_old_values() -> None:
    run_job(gone, workers=1).ok()
