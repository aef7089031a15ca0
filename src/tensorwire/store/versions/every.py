"""When an optimizer makes versions for readers, and how many it keeps: what ``publish=`` takes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tensorwire.errors import ArgumentError
from tensorwire.sizes import size_text
from tensorwire.store.sharding import StorePlan

MOST_BUFFERS = 64


@dataclass(frozen=True)
class Every:
    """A version for readers after every ``steps`` steps, besides those that ``publish()`` and readers ask for.

    A version lies in one of ``buffers`` snapshot buffers on the servers' machine, each of the size of the parameters:
    one is published, and one is free to be filled. What a reader has open is never overwritten. Where readers hold all
    buffers but the published one, there is no room for the next version.

    Args:
        steps: Steps between two versions, 1 or more. None: only ``publish()`` and readers ask for them.
        buffers: How many snapshot buffers there are, 2 to 64.
        when_held: What happens where no buffer is free: ``"skip"``: the version is left out, and the training goes on;
            ``"wait"``: it waits for a buffer.

    Raises:
        ArgumentError: An argument is out of its range.
    """

    steps: int | None = None
    buffers: int = 2
    when_held: str = "skip"

    def __post_init__(self) -> None:
        if self.steps is not None and (isinstance(self.steps, bool) or not isinstance(self.steps, int)):
            raise ArgumentError(f"Every takes a whole number of steps, not {self.steps!r:.100}")
        if self.steps is not None and self.steps < 1:
            raise ArgumentError(f"Every takes 1 step or more, not {self.steps}")
        whole = isinstance(self.buffers, int) and not isinstance(self.buffers, bool)
        if not whole or not 2 <= self.buffers <= MOST_BUFFERS:
            raise ArgumentError(f"buffers must be 2 to {MOST_BUFFERS}, not {self.buffers!r:.100}")
        if self.when_held not in ("skip", "wait"):
            raise ArgumentError(f"when_held must be 'skip' or 'wait', not {self.when_held!r:.100}")


def parse_publish(publish: object) -> Every | None:
    """What ``publish=`` means: None for False, `Every()` for True. Raises `ArgumentError` for anything else."""
    if publish is None or publish is False:
        return None
    if publish is True:
        return Every()
    if isinstance(publish, Every):
        return publish
    raise ArgumentError(f"publish must be True, False or tw.store.Every(steps), not {publish!r:.100}")


class PublishSpec(msgspec.Struct, frozen=True):
    """What servers have to know of it."""

    buffers: int

    def describe(self, plan: StorePlan) -> str:
        """One line for people: what the versions of a plan take."""
        nbytes = self.buffers * sum(tensor.nbytes for tensor in plan.tensors)
        return f"{self.buffers} snapshot buffers for readers take {size_text(nbytes)} on the machine of server 0"
