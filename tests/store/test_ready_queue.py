"""In which order a server takes buckets."""

from __future__ import annotations

from tensorwire.store.ready_queue import ReadyQueue
from tensorwire.store.sharding import ParameterSpec, make_plan


def ready_queue(count: int, *, overlap: bool = True) -> ReadyQueue:
    plan = make_plan([ParameterSpec(str(i), (1024,), "float32") for i in range(count)], 1, bucket_bytes=4096)
    return ReadyQueue(plan.buckets[0], overlap=overlap)


def test_of_those_that_are_there_the_first_layers_is_next() -> None:
    found = ready_queue(5)
    there = {3, 2}
    taken = []
    for bucket in found.of_round(there.__contains__, lambda bucket, seconds: there.update({4})):
        taken.append(bucket)
        if bucket == 3:
            there.update({0, 1})
    assert taken == [2, 3, 0, 1, 4]
    # Looked for in the order in which they came, taken in that of the layers.
    there.clear()
    looked: list[int] = []

    def come(bucket: int, seconds: float) -> None:
        looked.append(bucket)
        there.add(bucket)

    assert list(found.of_round(there.__contains__, come)) == looked == [2, 3, 0, 1, 4]


def test_without_overlap_they_are_taken_as_they_came() -> None:
    found = ready_queue(4, overlap=False)
    there: set[int] = set()

    def come(bucket: int, seconds: float) -> None:
        there.add(next(b for b in (3, 1, 2, 0) if b not in there))

    assert list(found.of_round(there.__contains__, come)) == [3, 1, 2, 0]
    assert list(found.of_round({0, 1, 2, 3}.__contains__, come)) == [3, 1, 2, 0]


def test_one_that_nobody_expects_is_found_among_many_and_patience_grows_to_a_bound() -> None:
    there: set[int] = set()
    waits: list[float] = []

    def poll(bucket: int, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            there.add(40)
        elif len(waits) == 10:
            there.update(range(50))

    taken = list(ready_queue(50).of_round(there.__contains__, poll))
    assert taken == [40, *range(40), *range(41, 50)]
    assert waits[:2] == [0.001, 0.002]
    assert max(waits) == waits[8] == 0.064
    assert waits[9] == 0.001
