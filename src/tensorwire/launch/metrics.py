"""OpenMetrics of a whole job: the launcher serves its members' reports by `prometheus_client`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tensorwire.addresses import address_text
from tensorwire.control.address import split_address
from tensorwire.control.coordinator import Report
from tensorwire.errors import ArgumentError
from tensorwire.observe import Counters

LABELS = ("role", "index", "node")
_HELP = {
    "messages": "Writes, reads, signals and atomics handed to a device.",
    "bytes": "Payload of messages, in bytes.",
    "mapped_bytes": "Payload that was born in mapped memory and sent by signal alone.",
    "copies": "User-space copies of payload.",
    "copied_bytes": "Bytes of those copies.",
    "registrations": "Regions allocated or registered.",
    "rpcs": "Requests on the control connection.",
    "pickles": "Objects pickled while they are counted.",
    "pushes": "Buckets of gradients that a worker sent to servers.",
    "applied": "Pushes that a server applied by themselves.",
    "merged": "Pushes that a server applied together with others.",
    "discarded": "Pushes that changed nothing.",
    "host_waits": "Times that the thread that trains waited for copies from or to an accelerator.",
}


def parse_metrics_address(text: str) -> tuple[str, int]:
    """``PORT``, on the loopback interface, or ``HOST:PORT``. Raises `ArgumentError`."""
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    try:
        return split_address(text)
    except ArgumentError:
        raise ArgumentError(f"--metrics takes PORT or HOST:PORT, not {text!r}") from None


class JobCollector(Collector):
    """The members' latest reports as metrics. ``nodes``: on which node each member runs."""

    def __init__(self, stats: Callable[[], Mapping[str, Report]], nodes: Mapping[str, int]) -> None:
        self._stats, self._nodes = stats, nodes

    def collect(self) -> Iterator[Metric]:
        """One family a counter; steps, seconds by span, and the age of each report."""
        step = GaugeMetricFamily("tensorwire_step", "Steps of the training so far.", labels=LABELS)
        age = GaugeMetricFamily("tensorwire_report_age_seconds", "Since the process's last report.", labels=LABELS)
        spent = CounterMetricFamily(
            "tensorwire_seconds", "Seconds spent, by part: see the spans.", labels=(*LABELS, "part")
        )
        said = GaugeMetricFamily(
            "tensorwire_reported", "The latest value that job.report got.", labels=(*LABELS, "name")
        )
        samples = CounterMetricFamily("tensorwire_samples", "Samples that the script reported.", labels=LABELS)
        counted = {
            name: CounterMetricFamily(f"tensorwire_{name}", _HELP.get(name, name), labels=LABELS)
            for name in Counters.__dataclass_fields__
        }
        now = time.monotonic()
        for member, report in sorted(self._stats().items()):
            role, _, index = member.partition(" ")
            who = [role, index, str(self._nodes.get(member, ""))]
            step.add_metric(who, report.stats.steps)
            age.add_metric(who, now - report.at)
            samples.add_metric(who, report.stats.samples)
            for name, value in sorted(report.stats.values.items()):
                said.add_metric([*who, name], value)
            for part, seconds in sorted(report.stats.seconds.items()):
                spent.add_metric([*who, part], seconds)
            for name, family in counted.items():
                family.add_metric(who, report.stats.counters.get(name, 0))
        yield from (step, age, spent, said, samples, *counted.values())


class MetricsServer:
    """Serves ``collector`` at ``interface`` and ``port`` until `close`; port 0: any. Raises `ArgumentError` if it
    cannot listen.
    """

    def __init__(self, interface: str, port: int) -> None:
        self._registry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, interface, self._registry)
        except OSError as error:
            raise ArgumentError(f"--metrics cannot listen on {interface}:{port}: {error.strerror or error}") from None
        self.address = f"http://{address_text(interface, self._server.server_port)}/metrics"

    def serve(self, collector: Collector) -> None:
        """From now on ``collector`` answers."""
        self._registry.register(collector)

    def close(self) -> None:
        """Stops. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
