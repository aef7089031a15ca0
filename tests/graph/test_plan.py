"""The plan: frozen, printable, the same wherever it is made, and what it adds up to."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.graph import Plan, TensorSpec, Unknown, analyze
from tensorwire.graph.plan import Traffic
from tests.graph.sketch import Sketch


def example() -> Plan:
    s = Sketch("abc")
    s.input("x")
    s.parameter("w", on="b")
    s.op("h", "x", on="a")
    s.several("norm", "h", "w", on="b")
    s.item("mean", "norm", 1)
    s.op("n", "mean", on="b", shape=None)
    s.op("last", "mean", "n", on="c", shape=(Unknown("s0", 100), 4))
    s.op("free", on="c", shape=(Unknown("s1"),))
    s.op("end", "last", "free", "h", "w", on="a")
    s.out("end", "ac", caller=True)
    return analyze(s.graph()).plan


TEXT = """\
graph sketch on a, b, c
edge w: b -> a: float32[64], static, 256 bytes, lent
edge h: a -> b: float32[64], static, 256 bytes, at 0+0, born in h
edge mean: b -> c: float32[64], static, 256 bytes, at 0+0, born in norm as output 1
edge n: b -> c: a number, value, 8 bytes, at 256+0, by value
edge last: c -> a: float32[s0, 4], bounded, 1600 bytes, at 0+0, born in last
edge free: c -> a: float32[s1], dynamic, of any size, at 1856+0, born in free
edge end: a -> c: float32[64], static, 256 bytes, at 256+0, copied: the caller gets it
outbox a: 4096 bytes
outbox b: 4096 bytes
outbox c: 4096 bytes
output end: a, c
input x: a
h = op: a
norm = several: b
mean = item: b
n = op: b
last = op: c
free = op: c
end = op: a"""


def test_text() -> None:
    assert example().text == TEXT


def test_the_digest_is_that_of_the_text() -> None:
    plan = example()
    assert plan.digest == example().digest
    other = dataclasses.replace(plan, edges=(dataclasses.replace(plan.edges[0], slot=64), *plan.edges[1:]))
    assert other.digest != plan.digest


def test_strides_are_in_the_text() -> None:
    """Workers that disagree on them would read the wrong elements."""
    shown = [TensorSpec((2, 3), "int8", stride) for stride in (None, (3, 1), (1, 2))]
    assert [str(spec) for spec in shown] == ["int8[2, 3]", "int8[2, 3]", "int8[2, 3] strides [1, 2]"]
    unknown = Unknown("s0", 9)
    assert str(TensorSpec((unknown, 3), "int8", (3, 1))) == "int8[s0, 3]"
    assert str(TensorSpec((2, unknown), "int8", (unknown, 1))) == "int8[2, s0] strides [s0, 1]"
    assert str(TensorSpec((2, 1), "int8", (1, 7))) == "int8[2, 1]"


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().edges = ()  # type: ignore[misc]


def test_what_crosses_between_two_workers() -> None:
    assert example().traffic == (
        Traffic("a", "b", 1, 256, 1, 0, 0, 0, 0),
        Traffic("a", "c", 1, 256, 0, 0, 1, 0, 0),
        Traffic("b", "a", 1, 256, 0, 1, 0, 0, 0),
        Traffic("b", "c", 2, 264, 1, 0, 0, 1, 0),
        Traffic("c", "a", 2, 1600, 2, 0, 0, 0, 1),
    )


def test_registered_memory() -> None:
    plan = example()
    assert plan.outbox == (("a", 4096), ("b", 4096), ("c", 4096))
    # From b to a goes but a parameter, which has memory of its own.
    assert plan.inboxes == {("a", "b"): 4096, ("a", "c"): 4096, ("b", "c"): 4096, ("c", "a"): 4096}
    assert plan.lent == {"b": 256}


def test_json_holds_all_of_it() -> None:
    plan = example()
    written = json.loads(json.dumps(plan.to_json()))
    assert written["digest"] == plan.digest.hex()
    assert written["edges"][2] == {
        "name": "mean",
        "source": "b",
        "targets": ["c"],
        "kind": "static",
        "spec": {"shape": [64], "dtype": "float32", "stride": None, "offset": 0},
        "nbytes": 256,
        "birthplace": "norm",
        "index": 1,
        "copied": "",
        "slot": 0,
        "offset": 0,
        "lent": False,
        "if_small": False,
        "header": 512,
    }
    assert written["edges"][4]["spec"]["shape"] == [{"text": "s0", "most": 100}, 4]
    assert (written["edges"][5]["nbytes"], written["edges"][5]["slot"]) == (None, 1856)
    assert written["traffic"][3]["values"] == 1
    assert written["inboxes"][0] == {"worker": "b", "of": "a", "nbytes": 4096}
    assert [node["name"] for node in written["nodes"]] == ["h", "norm", "mean", "n", "last", "free", "end"]
    assert (written["outputs"], written["inputs"]) == (
        [{"name": "end", "workers": ["a", "c"]}],
        [{"name": "x", "workers": ["a"]}],
    )


DIGEST = """\
import random
from tensorwire.graph import analyze
from tests.graph.programs import Writer
print(analyze(Writer(random.Random(7), 4, 200).program.graph()).plan.digest.hex())"""


def test_every_process_makes_the_same_plan() -> None:
    """Whatever the order of its sets."""
    root = Path(__file__).parents[2]
    found = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", DIGEST]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 1
