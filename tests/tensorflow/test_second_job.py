"""A process that is in one job after the other: keys, functions and embeddings of the first are no hindrance."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tensorwire.testing.patience import patient

SCRIPT = """
import sys
import tensorflow as tf
import tensorwire as tw
from tensorwire.tensorflow import distribute, recv, send, worker

rank, ports = int(sys.argv[1]), sys.argv[2:]


@tf.function
def of_one_job():
    return send(tf.ones([2]), "k", to=1) if rank == 0 else recv("k", [2], source=0)


for number, port in enumerate(ports):
    with tw.init(rank=rank, world_size=2, servers=0, rendezvous=f"127.0.0.1:{port}") as job:
        if rank == 0:
            with tf.GradientTape() as tape:
                x = tf.Variable([float(number), 1.0])
                token = send(2 * x, "k", to=1)
            print("gradient", tape.gradient(token, x).numpy().tolist())
            send(tf.constant(["a"] * (1 + number)), "text", to=1, shape=[None])
        else:
            with tf.GradientTape() as tape:
                y = recv("k", [2], source=0)
                loss = tf.reduce_sum((1.0 + number) * y)
            tape.gradient(loss, [])
            print("received", y.numpy().tolist(), recv("text", [None], tf.string, source=0).shape)
        with worker(1):
            v = tf.Variable(1.0 + number)

        @distribute
        @tf.function
        def cut(x):
            with tf.device("/job:worker/task:1"):
                return v * x

        print("cut", float(cut(tf.constant(3.0))))
        try:
            of_one_job()
        except tf.errors.AbortedError:  # of the receive; a failed send is told by the next one
            print("aborted")
        job.barrier()
print("done")
"""


def test_a_second_job_of_a_process_may_use_the_same_keys(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (first, second)]
    settings = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TENSORWIRE_TIMEOUT": str(patient(20.0))}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *ports],
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=patient(90.0)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    sent, received = (out.splitlines() for out, _ in said)
    assert sent == ["gradient [2.0, 2.0]", "cut 3.0", "gradient [4.0, 4.0]", "cut 6.0", "done"]
    assert received == [
        "received [0.0, 2.0] (1,)",
        "cut 3.0",
        "received [2.0, 2.0] (2,)",
        "cut 6.0",
        "aborted",
        "done",
    ]
