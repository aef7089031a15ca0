"""Tensors whose size is known only when they are sent: any sizes, in any order, strings and variants, and liars.

What holds for those of one size, too: gradients, cancelled receives, and limits of time.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.testing.patience import patient
from tests.harness.jobs import for_each, in_turn, run_job
from tests.levels import mostly_long
from tests.tensorflow.test_operators import load, load_with_a_limit

DEVICES = pytest.mark.parametrize("device", ["shm", "tcp"])
CHUNK = 256 << 10
FULL = (CHUNK - 256) // 4  # as many beside the header
# Elements of float32: none, one less and more than fill slots, and more than all slots hold.
SIZES = [3, 0, 1, FULL - 1, FULL, FULL + 1, FULL + CHUNK // 4, FULL + CHUNK // 4 + 1, 7 * CHUNK // 4 + 5, 2, 0, 40000]


def numbers(size: int) -> Any:
    return np.random.default_rng(size).standard_normal(size).astype("f4")


def many_sizes(job: tw.Job, traced: bool) -> list[Any]:
    tf, twt = load()
    from tensorwire.observe import counters

    def cross(tensor: Any) -> Any:
        if job.rank == 0:
            return twt.send(tensor, "key", to=1, shape=[None])
        return twt.recv("key", [None], source=0)

    if traced:
        cross = tf.function(cross, input_signature=[tf.TensorSpec([None], tf.float32)])
    wrong = []
    for size in SIZES:
        before = counters.snapshot()
        found = cross(numbers(size))
        copied = counters.since(before).copied_bytes
        if job.rank == 1 and not (found.numpy().tobytes() == numbers(size).tobytes() and copied == 4 * size):
            wrong.append((size, found.shape, copied))
    return wrong


MANY = 40  # more than a key keeps until they have left


def out_of_order(job: tw.Job) -> list[int]:
    """Steps of our own, in another order at either end, some of many chunks; most are kept until they are asked for."""
    tf, twt = load()

    def tensor(step: int) -> Any:
        return tf.fill([step * 10_000, 2], float(step))

    wrong = []
    for step in np.random.default_rng(job.rank).permutation(np.arange(1, MANY + 1)).tolist():
        if job.rank == 0:
            twt.send(tensor(step), "any order", to=1, step=step, shape=[None, 2])
        else:
            found = twt.recv("any order", [None, 2], source=0, step=step)
            if (found.numpy() != tensor(step).numpy()).any():
                wrong.append(step)
    return wrong


# ---- strings and variants


TEXTS: list[Any] = [
    "plain",
    ["", "grüße", "日本語", "\U0001f40d", b"\x00\xff"],
    [["a", "b"], ["c", "d" * 100]],
    [],
    ["x" * 3_000_000, "y"],
    [str(number) for number in range(50_000)],
]


def strings(job: tw.Job) -> list[int]:
    tf, twt = load()
    wrong = []
    for number, text in enumerate(TEXTS):
        wanted = tf.constant(text, tf.string)
        if job.rank == 0:
            twt.send(wanted, "texts", to=1, shape=tf.TensorShape(None))
        else:
            found = twt.recv("texts", tf.TensorShape(None), tf.string, source=0)
            if not np.array_equal(found.numpy(), wanted.numpy()):
                wrong.append(number)
    return wrong


def variants(job: tw.Job) -> list[Any]:
    """A list of tensors, a list of lists, an optional, an empty one; and a data set, which TensorFlow cannot decode."""
    tf, twt = load()
    raw = tf.raw_ops

    def listed(*tensors: Any) -> Any:
        made = raw.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tensors[0].dtype)
        for each in tensors:
            made = raw.TensorListPushBack(input_handle=made, tensor=each)
        return made

    words = listed(tf.constant("one"), tf.constant(["two", "three"]))
    nested = listed(words, words)
    optional = raw.OptionalFromValue(components=[tf.range(200_000)])
    if job.rank == 0:
        for each in (words, nested, optional, raw.OptionalNone()):
            twt.send(each, "variants", to=1)
        with pytest.raises(tf.errors.UnimplementedError) as raised:
            twt.send(tf.data.Dataset.range(3)._variant_tensor, "variants", to=1)
        twt.send(words, "variants", to=1)
        return [raised.value.message]

    def received() -> Any:
        return twt.recv("variants", [], tf.variant, source=0)

    def first(handle: Any, dtype: Any) -> Any:
        return raw.TensorListGetItem(input_handle=handle, index=0, element_shape=-1, element_dtype=dtype)

    found = [first(received(), tf.string).numpy(), first(first(received(), tf.variant), tf.string).numpy()]
    (value,) = raw.OptionalGetValue(optional=received(), output_types=[tf.int32], output_shapes=[[None]])
    found += [int(tf.reduce_max(value)), bool(raw.OptionalHasValue(optional=received()))]
    return [*found, int(raw.TensorListLength(input_handle=received()))]


# ---- gradients


BATCHES = {None: [16, 3, 0, 40], 16: [16, 16, 16]}  # by the length that is declared


def weight(tf: Any, *shape: int) -> Any:
    return tf.Variable(np.random.default_rng(shape).standard_normal(shape).astype("f4") / 5)


def batch(size: int, width: int) -> Any:
    return np.random.default_rng((size, width)).standard_normal((size, width)).astype("f4")


def half_a_model(job: tw.Job, traced: bool, size: int | None) -> list[Any]:
    """A layer on each worker; the tensor between them, and its gradient, cross."""
    tf, twt = load()
    w = weight(tf, 20, 30) if job.rank == 0 else weight(tf, 30, 4)

    key = f"hidden {traced} {size}"

    def first(x: Any) -> None:
        with tf.GradientTape() as tape:
            token = twt.send(tf.nn.relu(x @ w), key, to=1, shape=[size, 30])
        w.assign_sub(0.1 * tape.gradient(token, w))

    def second(y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((twt.recv(key, [size, 30], source=0) @ w - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))

    step, width = (first, 20) if job.rank == 0 else (second, 4)
    if traced:
        step = tf.function(step, input_signature=[tf.TensorSpec([size, width])])
    for rows in BATCHES[size]:
        step(batch(rows, width))
    return w.numpy()


def whole_model(job: tw.Job, size: int | None) -> list[Any]:
    tf, _ = load()
    first, second = weight(tf, 20, 30), weight(tf, 30, 4)
    for rows in BATCHES[size]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.nn.relu(batch(rows, 20) @ first) @ second - batch(rows, 4)) ** 2)
        for w, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            w.assign_sub(0.1 * gradient)
    return [first.numpy(), second.numpy()]


HALVES = [(True, None), (False, None), (True, 16)]


def test_gradients_have_the_shape_of_what_was_sent() -> None:
    (whole,) = run_job(for_each, whole_model, [(None,), (16,)], workers=1, servers=0).ok()
    for traced_and_size, *found in zip(HALVES, *run_job(for_each, half_a_model, HALVES, servers=0).ok(), strict=True):
        for mine, wanted in zip(found, whole[traced_and_size[1] is not None], strict=True):
            np.testing.assert_array_equal(mine, wanted)


def no_gradient(job: tw.Job) -> bool:
    """Of whole numbers, strings and variants no gradient crosses."""
    tf, twt = load()
    with tf.GradientTape() as tape:
        x = tf.Variable([1.0, 2.0])
        if job.rank == 0:
            listed = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.zeros([0], tf.int32))
            result = twt.send(tf.strings.as_string(x), "text", to=1) + twt.send(listed, "list", to=1)
        else:
            twt.recv("text", [None], tf.string, source=0)
            listed = twt.recv("list", [], tf.variant, source=0)
            result = tf.raw_ops.TensorListStack(
                input_handle=listed, element_shape=tf.zeros([0], tf.int32), element_dtype=tf.float32
            )
    return tape.gradient(result, x) is None


@DEVICES
def test_sizes_orders_strings_and_variants_arrive(device: str) -> None:
    """Each size is copied once; variants arrive if TensorFlow can encode them."""
    sizes = [partial(many_sizes, traced=traced) for traced in (False, True)]
    programs = *sizes, out_of_order, strings, no_gradient, variants
    (*sent, (said,)), (*received, found) = run_job(in_turn, *programs, servers=0, device=device).ok()
    assert sent == received == [[], [], [], [], True]
    assert found == [b"one", b"one", 199_999, False, 2]
    assert "variants from worker 0 to worker 1 cannot carry this tensor: it holds a tensorflow::Dataset" in said
    assert "\n" not in said.partition(" [Op:")[0]


# ---- errors


def failed_sends(job: tw.Job) -> str:
    """Sends to an end that is another one: when 16 of them wait, the next one waits for its failure."""
    tf, twt = load()
    if job.rank == 0:

        def send_all() -> None:
            for _ in range(18):
                twt.send([1.0], "key", to=1, shape=[None])

        with pytest.raises(tf.errors.AbortedError) as raised:
            send_all()
        return str(raised.value.message)
    with pytest.raises(tf.errors.AbortedError) as raised:
        twt.recv("key", [1], source=0)
    return str(raised.value.message)


def test_after_a_failed_send_the_next_one_says_so() -> None:
    said = run_job(failed_sends, servers=0).ok()
    assert "carries is 'float32[?]' here and 'float32[1]' there" in said[0]
    assert "carries is 'float32[1]' here and 'float32[?]' there" in said[1]


def mismatched(job: tw.Job) -> list[str]:
    tf, twt = load()
    ends = [
        ("static", [3], None, [None], tf.float32),
        ("both static", [1], None, [2], tf.float32),
        ("dtype", [3], [None], [None], tf.int32),
        ("rank", [3], [None], [None, None], tf.float32),
        ("any rank", [3], [None], tf.TensorShape(None), tf.float32),
        ("length", [3, 4], [None, 4], [None, 5], tf.float32),
    ]
    said = []
    for key, shape, declared, taken, dtype in ends:
        if job.rank == 0:
            twt.send(tf.zeros(shape), key, to=1, shape=declared)
            continue
        with pytest.raises(tf.errors.AbortedError) as raised:
            twt.recv(key, taken, dtype, source=0)
        said.append(raised.value.message)
    job.barrier()
    return said


def test_ends_that_differ_are_told_apart() -> None:
    parts = [
        "carries is 'float32[?]' here and 'float32[3]' there",
        "carries is 'float32[2]' here and 'float32[1]' there",
        "carries is 'int32[?]' here and 'float32[?]' there",
        "carries is 'float32[?, ?]' here and 'float32[?]' there",
        "carries is 'float32[...]' here and 'float32[?]' there",
        "a tensor of shape [3,4] came, and this takes [?,5]",
    ]
    said = run_job(mismatched, servers=0).ok()[1]
    assert len(said) == len(parts)
    for each, part in zip(said, parts, strict=True):
        assert part in each


ALL_SLOTS = bytes(4 * CHUNK)  # of what is refused no more is sent
BYTES, FLOAT, ENCODED = {"dtype": 1}, {"dtype": 9}, {"kind": 5, "dtype": 1}  # fields of headers


def encoded(dtype: str, *lengths: int, content: bytes = b"", variants: Sequence[bytes] = ()) -> bytes:
    """A tensor as TensorFlow encodes it."""
    load()
    from tensorflow.core.framework import tensor_pb2

    kind = {"float32": 1, "string": 7, "variant": 21}[dtype]
    proto = tensor_pb2.TensorProto(dtype=kind, tensor_content=content)
    for length in lengths:
        proto.tensor_shape.dim.add(size=length)
    for each in variants:
        proto.variant_val.add().ParseFromString(each)
    return proto.SerializeToString()


def lies() -> list[tuple[str, dict[str, Any], bytes, str]]:
    """The dtype of an edge, what comes, and what is said of it."""
    return [
        ("float32", BYTES, bytes(4), "dtype number 1"),
        ("string", BYTES, bytes(4), "dtype number 1"),
        ("float32", {**FLOAT, "step": 0, "lengths": (1,)}, bytes(4), "step 0"),
        ("float32", {**FLOAT, "nbytes": 1 << 58, "lengths": (1 << 56,)}, ALL_SLOTS, "no memory"),
        ("float32", FLOAT, bytes(8), "8 bytes for a tensor of other lengths"),
        ("string", {**ENCODED, "nbytes": 1 << 40, "lengths": (1 << 40,)}, ALL_SLOTS, "tensor of 1099511627776 bytes"),
        ("string", ENCODED, encoded("string", 1 << 40, content=b"12345678"), "fewer bytes than elements"),
        ("string", ENCODED, encoded("string", -2), "lengths cannot be"),
        ("string", ENCODED, encoded("string", 2, content=b"\x7f\x7f"), "cannot decode"),
        ("string", ENCODED, encoded("float32", 1, content=bytes(4)), "not encoded as TensorFlow does it"),
        ("variant", ENCODED, b"\xff\xff\xff", "not encoded as TensorFlow does it"),
        ("variant", ENCODED, encoded("variant", 1), "another number of elements"),
        ("variant", ENCODED, encoded("variant", 1, variants=[b"\x0a\x01x"]), "TensorFlow cannot decode it"),
        # A tensor of variants in a variant, whose content says that it is longer than it is.
        ("variant", ENCODED, encoded("variant", 1, variants=[b"\x1a\x05\x08\x15\x22\x01\x7f"]), "not encoded as"),
    ]


KEPT: list[Any] = []  # what is refused never leaves


def lie(job: tw.Job) -> list[str]:
    """Worker 0 sends what it likes, by the functions that the operators call."""
    tf, twt = load()
    from tensorwire.tensorflow.operator_edges import Carried, edge_name, operator_edges
    from tests.edge.async_functions import Outcome, functions, header_of

    edges, said = operator_edges(), []
    connected: queue.SimpleQueue[int] = queue.SimpleQueue()
    if job.rank == 0:
        edges._know = lambda key, address, failure: connected.put(address)
    for number, (dtype, fields, message, _) in enumerate(lies()):
        key, shape = f"lie {number}", tf.TensorShape(None)
        if job.rank == 0:
            name = edge_name(key, "worker 0", "worker 1")
            edges.connect(name, "producer", "worker 1", Carried(tf.as_dtype(dtype), shape))
            data, outcome = ctypes.create_string_buffer(message, len(message) or 1), Outcome()
            header = header_of(1, len(message), **fields)
            KEPT.append((data, outcome))
            functions.send(connected.get(timeout=patient(60.0)), header, ctypes.addressof(data), outcome.call, None)
            continue
        with pytest.raises(tf.errors.OpError) as raised:
            twt.recv(key, shape, dtype, source=0)
        said.append(raised.value.message)
    job.barrier()
    return said


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_a_peer_that_lies_gets_an_error(device: str) -> None:
    said = run_job(lie, servers=0, device=device).ok()[1]
    assert len(said) == len(lies())
    for each, (*_, part) in zip(said, lies(), strict=True):
        assert part in each


def twice(job: tw.Job) -> list[str]:
    """A step that comes twice breaks an edge."""
    tf, twt = load()
    said: list[str] = []
    if job.rank == 0:
        for step in (5, 5, 6):
            twt.send([1.0], "key", to=1, step=step, shape=[None])
        job.barrier()
        return said
    for _ in range(2):
        with pytest.raises(tf.errors.AbortedError) as raised:
            twt.recv("key", [None], source=0, step=6)
        said.append(raised.value.message)
    said.append(str(float(twt.recv("key", [None], source=0, step=5)[0])))
    job.barrier()
    return said


def test_a_step_comes_once() -> None:
    _, said = run_job(twice, servers=0).ok()
    assert ["step 5 was sent twice" in each for each in said] == [True, True, False]
    assert said[2] == "1.0"


def die_in_a_message(job: tw.Job) -> str:
    """Worker 1 dies with a part of a message in the slots, which hold no more."""
    tf, twt = load()
    if job.rank == 0:
        twt.recv("large", [None], source=1)
    else:
        twt.send([1.0], "large", to=0, shape=[None])
        twt.send(tf.zeros([20 * CHUNK]), "large", to=0, shape=[None])
        job.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    job.barrier()
    try:
        twt.recv("large", [None], source=1)
    except tf.errors.AbortedError as error:
        job._worker.member.client.ended.wait()  # who leaves before gets `JobEnded` while it does
        return str(error.message)
    return ""


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_a_worker_that_dies_in_a_message_ends_its_receive(device: str) -> None:
    ended = run_job(die_in_a_message, servers=0, device=device)
    assert ended.cause is not None
    assert "worker 1" in str(ended.cause)
    assert "tensorwire: receiving large from worker 1 to worker 0 cannot happen: " in ended.results[0]


def cancel(job: tw.Job, shape: list[Any]) -> list[Any]:
    """The message of a receive that was cancelled is kept, and the next receive gets the next one."""
    tf, twt = load()
    from tensorflow.python.eager import cancellation  # private to TensorFlow 2.21

    if job.rank == 1:
        job.barrier()
        for number in (1.0, 2.0):
            twt.send(tf.fill([CHUNK], number), "key", to=0, shape=shape)
        return []
    started = threading.Event()
    receive = tf.function(lambda: twt.recv("key", shape, source=1, step=tf.py_function(begin, [], tf.int64)))

    def begin() -> int:
        started.set()
        return 1

    manager = cancellation.CancellationManager()
    cancelable = manager.get_cancelable_function(receive.get_concrete_function())
    said: list[str] = []

    def run() -> None:
        try:
            cancelable()
        except tf.errors.CancelledError as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    manager.start_cancel()
    thread.join()
    job.barrier()
    found = [float(twt.recv("key", shape, source=1, step=step)[-1]) for step in (2, 1)]
    return [*said, *found]


@pytest.mark.parametrize(
    ("device", "shape"),
    mostly_long([("shm", [None]), ("tcp", [None]), ("shm", [CHUNK])], [("tcp", [None]), ("shm", [CHUNK])]),
)
def test_a_receive_can_be_cancelled(device: str, shape: list[Any]) -> None:
    assert run_job(cancel, shape, servers=0, device=device).ok()[0] == ["CancelledError", 2.0, 1.0]


def run_out_of_time(job: tw.Job, shape: list[Any]) -> list[Any]:
    """A message that nobody finishes sending in time; when it has come, it is there."""
    tf, twt = load_with_a_limit(job)
    if job.rank == 1:
        twt.send([1.0], "key", to=0, shape=shape)
        job.barrier()
        twt.send([2.0], "key", to=0, shape=shape)
        return []
    twt.recv("key", shape, source=1)
    with pytest.raises(tf.errors.DeadlineExceededError) as raised:
        twt.recv("key", shape, source=1, step=2)
    job.barrier()
    return [str(raised.value.message), float(twt.recv("key", shape, source=1, step=2)[0])]


@pytest.mark.parametrize("shape", [[None], [1]])
def test_a_receive_that_takes_too_long_says_what_did_not_come(shape: list[Any]) -> None:
    said, value = run_job(run_out_of_time, shape, servers=0).ok()[0]
    assert "tensorwire: receiving key from worker 1 to worker 0 did not happen in time" in said
    assert value == 2.0


def nobody_receives(job: tw.Job) -> list[Any]:
    """A step that is never sent, while 300 others are; those that came can be received afterwards."""
    tf, twt = load()
    if job.rank == 0:
        for step in range(1, 301):
            twt.send(tf.fill([step], step), "n", to=1, step=step, shape=[None])
        job.barrier()
        return []
    with pytest.raises(tf.errors.FailedPreconditionError, match="256 tensors of other steps came, and nobody has"):
        twt.recv("n", [None], tf.int32, source=0, step=1000)
    with pytest.raises(tf.errors.FailedPreconditionError):
        twt.recv("n", [None], tf.int32, source=0, step=300)
    found = [int(tf.reduce_sum(twt.recv("n", [None], tf.int32, source=0, step=step))) for step in range(1, 301)]
    job.barrier()
    return found


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_a_step_that_is_never_sent_does_not_fill_memory(device: str) -> None:
    assert run_job(nobody_receives, device=device).ok()[1] == [step * step for step in range(1, 301)]


def keeps_sixteen(job: tw.Job) -> list[int]:
    """Of a key 16 tensors wait to leave; the next send is done when its own has left."""
    tf, twt = load()
    large, done = tf.zeros([4 * CHUNK]), []
    if job.rank == 0:

        def run() -> None:
            for number in range(18):
                twt.send(large, "key", to=1, shape=[None])
                done.append(number)
                if number == 15:
                    full.set()

        full = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        full.wait()
        before = len(done)  # not more, until worker 1 receives
        job.barrier()
        thread.join()
        return [before, len(done)]
    job.barrier()
    return [int(twt.recv("key", [None], source=0).shape[0]) for _ in range(18)]


def test_a_send_waits_only_when_many_have_not_left() -> None:
    sent, received = run_job(keeps_sixteen, servers=0).ok()
    assert sent == [16, 18]
    assert received == [4 * CHUNK] * 18
