"""What a job does, as text: the files below ``control/``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import msgspec

from tensorwire.control import frames
from tensorwire.control.coordinator import Report
from tensorwire.control.names import STATS, member_name
from tensorwire.edge.tensor import DTYPES
from tensorwire.launch.published import Published
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.events import events_since
from tensorwire.store.versions.listing import list_versions
from tensorwire.store.versions.version_layout import Manifest

_SECONDS = 5.0  # that servers may take to answer


class ControlFiles:
    """The files of ``published``. ``newest``: what the newest version says of itself; None: there is none."""

    def __init__(self, published: Published, newest: Callable[[], Manifest | None]) -> None:
        self._published, self._newest = published, newest
        self._events, self._count = "", 0
        self._lock = threading.Lock()
        self.names: dict[str, Callable[[], str]] = {
            "clock": self._clock,
            "events": self.events,
            "metrics": self._metrics,
            "mode": lambda: _lines(self._specs, lambda spec: repr(spec.mode)),
            "readers.json": self._readers,
            "rule": lambda: _lines(self._specs, lambda spec: spec.rule),
            "servers.json": self._servers,
            "version": self._version,
        }

    @property
    def _specs(self) -> list[StoreSpec]:
        spec = self._published.spec
        return list(spec.parts.values()) or [spec]

    def _version(self) -> str:
        newest = self._newest()
        return "" if newest is None else f"{newest.version}\n"

    def _clock(self) -> str:
        newest = self._newest()
        return "" if newest is None else f"{newest.step}\n"

    def events(self) -> str:
        """What has happened, a line each, from when this process first looked; later calls only add to it."""
        with self._lock:
            while True:
                found = events_since(self._published.member, self._published.store, self._count, _SECONDS)
                if found.first > self._count and self._count:
                    self._events += f"{found.first - self._count} events are not kept any more\n"
                self._events += "".join(f"{line}\n" for line in found.lines)
                self._count = found.first + len(found.lines)
                if not found.lines:
                    return self._events

    def _readers(self) -> str:
        found = list_versions(self._published.member, self._published.store, _SECONDS)
        return _as_json([msgspec.to_builtins(reader) for reader in found.readers])

    def _stats(self) -> dict[str, frames.Stats]:
        servers = self._published.member.client.welcome.servers
        names = [member_name("server", index) for index in range(servers)]
        answers = self._published.member.client.ask(names, STATS, b"", _SECONDS)
        found = {name: frames.decode(answer) for name, answer in answers.items()}
        return {name: stats for name, stats in found.items() if isinstance(stats, frames.Stats)}

    def _servers(self) -> str:
        """Where parameters are, and how much servers have done."""
        servers = self._published.member.client.welcome.servers
        plan, stats = self._published.spec.plan(servers), self._stats()
        said = []
        for index in range(servers):
            name = member_name("server", index)
            mine = [b for shard, buckets in enumerate(plan.buckets) if plan.server_of(shard) == index for b in buckets]
            pieces = [piece for bucket in mine for piece in bucket.pieces]
            load = stats.get(name)
            said.append(
                {
                    "server": name,
                    "address": self._published.member.card(name).interface,
                    "bytes": sum((p.stop - p.start) * DTYPES[plan.tensors[p.tensor].dtype] for p in pieces),
                    "buckets": len(mine),
                    "parameters": sorted({plan.tensors[p.tensor].name for p in pieces}),
                    "load": None if load is None else {"counters": load.counters, "seconds": load.seconds},
                }
            )
        return _as_json(said)

    def _metrics(self) -> str:
        from prometheus_client import CollectorRegistry
        from prometheus_client.openmetrics.exposition import generate_latest

        from tensorwire.launch.metrics import JobCollector

        found = {name: Report(stats, time.monotonic()) for name, stats in self._stats().items()}
        registry = CollectorRegistry()
        registry.register(JobCollector(lambda: found, {}))
        text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
        return text.decode()


def _lines(specs: list[StoreSpec], say: Callable[[StoreSpec], str]) -> str:
    """What the stores have, each word once."""
    return "".join(f"{line}\n" for line in dict.fromkeys(map(say, specs)))


def _as_json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
