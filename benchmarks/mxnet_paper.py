"""Seconds per epoch of RDMA-MXNet's two perceptrons: those measured here, beside those of its paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEAD = ("network", "who", "1 worker", "2", "3", "4")
TITLE = (
    "Seconds per epoch. The paper's are from its own machines, with as many servers as workers: its 5 and 9 times are\n"
    "RDMA beside TCP over 1 Gigabit Ethernet on four machines, so mostly the faster link."
)
# By network and transport, with 1, 2, 3 and 4 workers.
_PAPER: Mapping[str, Mapping[str, tuple[float, float, float, float]]] = {
    "mnist": {
        "TCP over 1 Gigabit Ethernet": (325.2, 356.0, 401.3, 439.2),
        "IP over InfiniBand": (114.9, 122.9, 130.9, 132.8),
        "RDMA": (103.9, 98.5, 97.2, 95.1),
    },
    "cifar": {
        "TCP over 1 Gigabit Ethernet": (202.1, 113.3, 99.1, 72.3),
        "IP over InfiniBand": (40.7, 22.9, 16.7, 11.8),
        "RDMA": (35.7, 17.4, 11.2, 7.6),
    },
}
_PAPER_DATA = {"mnist": "784-2048-1024-10 on MNIST", "cifar": "3072-2048-1024-10 on CIFAR-10"}


@dataclass(frozen=True)
class Epoch:
    """What one store needs for an epoch. ``network``: its short name, and ``title``: for people."""

    network: str
    title: str
    who: str
    workers: int
    seconds: float


def bars(epochs: Sequence[Epoch]) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by network, store and number of workers."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for epoch in epochs:
        found.setdefault(epoch.title, {}).setdefault(epoch.who, {})[str(epoch.workers)] = epoch.seconds
    return found


def rows(epochs: Sequence[Epoch]) -> list[tuple[str, ...]]:
    """For each network those measured here, then the paper's."""
    made = []
    for network, data in _PAPER_DATA.items():
        own = [epoch for epoch in epochs if epoch.network == network]
        for title, stores in bars(own).items():
            for who, seconds in stores.items():
                cells = (f"{seconds[str(n)]:.2f}" if str(n) in seconds else "" for n in range(1, 5))
                made.append((title, who, *cells))
        for transport, figures in _PAPER[network].items() if own else ():
            made.append((data, f"the paper, {transport}", *(f"{figure:.1f}" for figure in figures)))
    return made
