"""What a user of ``python -m benchmarks`` asks for."""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire.bench import suite

QUICK_SHRINK = 16


@dataclass(frozen=True)
class Options(suite.Options):
    """None and empty: the default of the benchmark."""

    part: str = ""
    links: tuple[str, ...] = ()
    connect: str = ""
    peers: tuple[str, ...] = ()
    peer_python: str | None = None
    steps: int = 3
    overlap: bool = False
    report: str = ""
    modes: tuple[str, ...] = ()
    datas: tuple[str, ...] = ()
    seconds: float = 20.0
    width: int = 256
    counts: tuple[int, ...] = ()

    @property
    def shrink(self) -> int:
        """What divides the models' hidden sizes."""
        return QUICK_SHRINK if self.quick else 1
