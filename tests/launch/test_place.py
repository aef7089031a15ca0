"""Where a process stands, from what its starter put into the environment; nothing is started here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tensorwire.control.settings import failure_times
from tensorwire.errors import ArgumentError
from tensorwire.launch.place import (
    Place,
    find_place,
    grace_seconds,
    is_loopback,
    listening_interface,
    server_threads,
    worker_environment,
)

RUN = {
    "TENSORWIRE_COORDINATOR": "127.0.0.1:4000",
    "TENSORWIRE_RANK": "1",
    "TENSORWIRE_WORKERS": "3",
    "TENSORWIRE_SERVERS": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "40007", "SLURM_NNODES": "1"}
SLURM = {**BATCH, "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}

CLUSTER = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}


def tf_config(cluster: object, kind: str = "worker", index: int = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


CASES: list[tuple[dict[str, str], Place]] = [
    ({}, Place("alone", 0, 1, 1, None, False)),
    ({"TENSORWIRE_SERVERS": "3"}, Place("alone", 0, 1, 3, None, False)),
    (RUN, Place("run", 1, 3, 2, "127.0.0.1:4000", False)),
    ({**RUN, "TENSORWIRE_COORDINATOR": "10.0.0.1:4"}, Place("run", 1, 3, 2, "10.0.0.1:4", True)),
    ({**RUN, **TORCHRUN, **SLURM}, Place("run", 1, 3, 2, "127.0.0.1:4000", False)),
    (TORCHRUN, Place("torchrun", 2, 4, 4, None, False)),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2", "TENSORWIRE_SERVERS": "1"}, Place("torchrun", 2, 4, 1, None, True)),
    ({**TORCHRUN, **SLURM}, Place("torchrun", 2, 4, 4, None, False)),
    (RANKS, Place("ranks", 1, 2, 2, "127.0.0.1:5000", False)),
    ({**RANKS, **SLURM}, Place("ranks", 1, 2, 2, "127.0.0.1:5000", False)),
    ({"RANK": "0", "WORLD_SIZE": "1"}, Place("ranks", 0, 1, 1, "127.0.0.1:29500", False)),
    ({**RANKS, "MASTER_ADDR": "node7"}, Place("ranks", 1, 2, 2, "node7:5000", True)),
    ({"RANK": "1"}, Place("alone", 0, 1, 1, None, False)),
    (SLURM, Place("ranks", 3, 4, 4, "127.0.0.1:20007", False)),
    ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Place("alone", 0, 1, 1, None, False)),
    (BATCH, Place("alone", 0, 1, 1, None, False)),
    ({**BATCH, **RUN}, Place("run", 1, 3, 2, "127.0.0.1:4000", False)),
    (
        {**SLURM, "SLURM_NNODES": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "77"},
        Place("ranks", 3, 4, 4, "n1:77", True),
    ),
    ({**SLURM, "TENSORWIRE_SERVERS": "2"}, Place("ranks", 3, 4, 2, "127.0.0.1:20007", False)),
    (tf_config(CLUSTER, index=1), Place("ranks", 1, 2, 2, "10.0.0.1:2222", True)),
    (tf_config({**CLUSTER, "chief": ["127.0.0.1:9"]}, index=1), Place("ranks", 2, 3, 3, "127.0.0.1:9", False)),
    (tf_config({**CLUSTER, "chief": ["h:9"], "evaluator": ["h:1"]}, "chief"), Place("ranks", 0, 3, 3, "h:9", True)),
    ({**tf_config(CLUSTER), **RANKS}, Place("ranks", 1, 2, 2, "127.0.0.1:5000", False)),
    ({"TF_CONFIG": ""}, Place("alone", 0, 1, 1, None, False)),
    ({"TF_CONFIG": '{"model_dir": "x"}'}, Place("alone", 0, 1, 1, None, False)),
]


@pytest.mark.parametrize(("environment", "place"), CASES)
def test_the_place_that_an_environment_gives(environment: dict[str, str], place: Place) -> None:
    assert find_place(environment) == place


def test_arguments_win_over_every_environment() -> None:
    for environment in ({}, RUN, TORCHRUN, RANKS, SLURM):
        place = find_place(environment, rank=1, world_size=5, rendezvous="[::1]:9", servers=2)
        assert place == Place("ranks", 1, 5, 2, "[::1]:9", False)


def test_a_batch_script_of_slurm_that_is_alone_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Slurm's variables are there without srun, too, as those of task 0."""
    for environment in (SLURM, {**BATCH, "SLURM_NTASKS": "1"}, {**BATCH, **RANKS}):
        find_place(environment)
    assert caplog.messages == []
    find_place(BATCH)
    assert caplog.messages == [
        "this process is the only worker: srun did not start it, though Slurm gives the job 4 tasks"
    ]


WRONG: list[tuple[dict[str, str], str]] = [
    ({**RUN, "TENSORWIRE_RANK": "3"}, "rank 3 is not one of 3 workers"),
    ({**RUN, "TENSORWIRE_RANK": "one"}, "TENSORWIRE_RANK must be a whole number, not 'one'"),
    ({**RUN, "TENSORWIRE_COORDINATOR": "here"}, "an address must be HOST:PORT, not 'here'"),
    ({k: v for k, v in RUN.items() if k != "TENSORWIRE_WORKERS"}, "TENSORWIRE_WORKERS is not set"),
    ({**TORCHRUN, "RANK": "-1"}, "rank -1 is not one of 4 workers"),
    ({**TORCHRUN, "TENSORWIRE_SERVERS": "-1"}, "must be 0 or more, not -1"),
    ({"TENSORWIRE_SERVERS": "-1"}, "must be 0 or more, not -1"),
    ({"TENSORWIRE_SERVERS": "many"}, "TENSORWIRE_SERVERS must be a whole number"),
    ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}, "LOCAL_WORLD_SIZE is not set"),
    ({**RANKS, "WORLD_SIZE": "0"}, "rank 1 is not one of 0 workers"),
    ({**RANKS, "MASTER_PORT": "http"}, "an address must be HOST:PORT, not '127.0.0.1:http'"),
    ({**RANKS, "MASTER_PORT": "70000"}, "an address must be HOST:PORT"),
    ({**RANKS, "MASTER_ADDR": ""}, "an address must be HOST:PORT"),
    ({**SLURM, "SLURM_NNODES": "2"}, "set MASTER_ADDR"),
    ({**SLURM, "SLURM_NTASKS": "x"}, "SLURM_NTASKS must be a whole number"),
    ({**SLURM, "SLURM_NTASKS": "9" * 20}, "the workers of a job: at most 65536, not 99999999999999999999"),
    ({**RUN, "TENSORWIRE_WORKERS": "65537"}, "the workers of a job: at most 65536, not 65537"),
    ({**RUN, "TENSORWIRE_SERVERS": "65537"}, "the servers of a job: at most 65536, not 65537"),
    ({**RANKS, "WORLD_SIZE": "1000000"}, "the workers of a job: at most 65536, not 1000000"),
    ({"TENSORWIRE_SERVERS": "513"}, "the servers that one worker starts: at most 512, not 513"),
    ({**TORCHRUN, "TENSORWIRE_SERVERS": "2049"}, "the servers that one worker starts: at most 512, not 513"),
    ({**RANKS, "MASTER_PORT": "²³"}, "an address must be HOST:PORT"),
    ({"TF_CONFIG": "worker 0"}, "TF_CONFIG is not the JSON of a cluster and a task"),
    ({"TF_CONFIG": '{"cluster": {"worker": "h:1"}}'}, "TF_CONFIG is not the JSON of a cluster and a task"),
    (tf_config({**CLUSTER, "ps": ["h:1"]}), "TF_CONFIG has tasks of type 'ps'"),
    (tf_config(CLUSTER, index=2), "task 2 of type 'worker' is no worker of its cluster"),
    (tf_config({**CLUSTER, "evaluator": ["h:1"]}, "evaluator"), "task 0 of type 'evaluator' is no worker"),
    (tf_config({"worker": ["here"]}), "an address must be HOST:PORT, not 'here'"),
]


@pytest.mark.parametrize(("environment", "why"), WRONG)
def test_a_wrong_environment_is_refused_in_one_line(environment: dict[str, str], why: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        find_place(environment)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [{"rank": 0}, {"world_size": 2}, {"rendezvous": "h:1"}, {"rank": 0, "rendezvous": "h:1"}]
)
def test_rank_world_size_and_rendezvous_belong_together(arguments: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="belong together"):
        find_place(RANKS, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"servers": "2"}, "init(servers=) takes a whole number, not '2'"),
        ({"servers": 1.5}, "init(servers=) takes a whole number, not 1.5"),
        ({"servers": float("nan")}, "init(servers=) takes a whole number, not nan"),
        ({"servers": True}, "init(servers=) takes a whole number, not True"),
        ({"servers": 10**9}, "the servers of a job: at most 65536, not 1000000000"),
        ({"servers": -1}, "the number of servers must be 0 or more, not -1"),
        ({"rank": "0", "world_size": 1, "rendezvous": "h:1"}, "init(rank=) takes a whole number, not '0'"),
        ({"rank": 0, "world_size": 1.0, "rendezvous": "h:1"}, "init(world_size=) takes a whole number, not 1.0"),
        ({"rank": 0, "world_size": 1, "rendezvous": 5}, "init(rendezvous=) takes the text HOST:PORT, not 5"),
        ({"rank": 0, "world_size": 1, "rendezvous": b"h:1"}, "init(rendezvous=) takes the text HOST:PORT, not b'h:1'"),
    ],
)
def test_arguments_of_wrong_types_and_sizes_are_refused_in_one_line(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        find_place({}, **arguments)  # type: ignore[arg-type]
    assert str(caught.value) == why


def test_integers_of_numpy_are_whole_numbers() -> None:
    place = find_place({}, rank=np.int64(1), world_size=np.int32(2), rendezvous="127.0.0.1:1", servers=np.uint8(3))  # type: ignore[arg-type]
    assert place == Place("ranks", 1, 2, 3, "127.0.0.1:1", False)
    assert {type(place.rank), type(place.workers), type(place.servers)} == {int}


def test_what_is_on_this_machine() -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.9.1:1"):
        assert is_loopback(address)
        assert listening_interface(address, {}) == "127.0.0.1"
    for address in ("10.0.0.1:1", "node7:1", "[fe80::1]:1"):
        assert not is_loopback(address)


def test_the_interface_to_listen_on() -> None:
    assert listening_interface("10.0.0.1:1", {"TENSORWIRE_IFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(ArgumentError, match="no interface 'nosuch0'"):
        listening_interface("10.0.0.1:1", {"TENSORWIRE_IFACE": "nosuch0"})
    with pytest.raises(ArgumentError, match="no route to the rendezvous"):
        listening_interface("no.such.host.invalid:1", {})


def test_times() -> None:
    assert failure_times({}) == (1.0, 8.0, 10.0)
    assert failure_times({"TENSORWIRE_FAILURE_TIMEOUT": "3"}) == pytest.approx((0.3, 2.4, 3.0))
    assert grace_seconds({"TENSORWIRE_GRACE": "2"}) == 2.0
    for text in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(ArgumentError, match="must be a number of seconds above 0"):
            grace_seconds({"TENSORWIRE_GRACE": text})
        with pytest.raises(ArgumentError, match="must be a number of seconds above 0"):
            failure_times({"TENSORWIRE_FAILURE_TIMEOUT": text})


def test_threads_of_a_server() -> None:
    assert (server_threads({}), server_threads({"TENSORWIRE_SERVER_THREADS": "3"})) == (1, 3)
    for text in ("many", "1.5", "0", "-1"):
        with pytest.raises(ArgumentError, match=f"TENSORWIRE_SERVER_THREADS must be .*, not '?{text}"):
            server_threads({"TENSORWIRE_SERVER_THREADS": text})


def test_the_environment_of_a_worker() -> None:
    assert worker_environment({"A": "b"}, rank=3) == {"A": "b", "TENSORWIRE_RANK": "3"}
