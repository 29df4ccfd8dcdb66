"""Numbers of workers as metrics of Prometheus: a collector that asks when it is scraped, and their text.

Every metric has the label ``worker``. Names follow Prometheus' conventions: base units, and ``_total`` for counters.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from gradwire.errors import ConfigurationError
from gradwire.telemetry.measurements import BUCKETS_S, Counter, Histogram, WorkerNumbers
from gradwire.versions import GRADWIRE_VERSION

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Scraped(NamedTuple):
    """A worker as it was found by a scrape.

    Attributes:
        worker: Its name.
        numbers: What it answered; None if it is not running, or did not answer in time.
        num_restarts: How often it was restarted.
    """

    worker: str
    numbers: WorkerNumbers | None
    num_restarts: int = 0


class _Gauge(NamedTuple):
    name: str
    text: str
    value: Callable[[WorkerNumbers], int | None]


_GAUGES = (
    _Gauge("gradwire_resident_memory_bytes", "Resident memory of the worker's process.", lambda found: found.rss_bytes),
    _Gauge(
        "gradwire_calls_running",
        "Calls being executed by the worker, including those waiting for other calls.",
        lambda found: found.num_running,
    ),
    _Gauge(
        "gradwire_calls_queued",
        "Calls that wait for a free thread of the worker, or until it serves calls.",
        lambda found: found.num_queued,
    ),
    _Gauge("gradwire_contexts", "Autograd contexts that the worker takes part in.", lambda found: found.num_contexts),
    _Gauge("gradwire_backward_running", "Backward passes in progress on the worker.", lambda found: found.num_passes),
)

_COUNTERS = {
    "calls": ("gradwire_calls", "Calls that the worker has made, by their outcome.", ("function", "outcome")),
    "backward_passes": ("gradwire_backward_passes", "Backward passes that began on the worker.", ("mode", "outcome")),
}

_HISTOGRAMS = {
    "call_duration": ("gradwire_call_duration_seconds", "Duration of calls that the worker made.", ("function",)),
    "run_duration": (
        "gradwire_run_duration_seconds",
        "Duration of functions that others called on the worker.",
        ("function",),
    ),
    "queue_duration": (
        "gradwire_queue_duration_seconds",
        "Time that calls waited for a free thread of the worker.",
        (),
    ),
    "backward_duration": (
        "gradwire_backward_duration_seconds",
        "Duration of backward passes that began on the worker.",
        ("mode",),
    ),
    "optimizer_step_duration": (
        "gradwire_optimizer_step_duration_seconds",
        "Duration of optimizer steps.",
        ("optimizer",),
    ),
    "checkpoint_duration": (
        "gradwire_checkpoint_duration_seconds",
        "Duration of the parts of saves and loads.",
        ("operation",),
    ),
}


def import_prometheus() -> Any:
    """Return the module `prometheus_client`.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigurationError(
            "metrics need prometheus_client, which is not installed: pip install 'gradwire[metrics]'"
        ) from error
    return prometheus_client


class MetricsCollector:
    """A collector for a registry of `prometheus_client`.

    Args:
        scrape: Called for each scrape; returns the workers.
    """

    def __init__(self, scrape: Callable[[], Iterable[Scraped]]) -> None:
        import_prometheus()
        self._scrape = scrape

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this does not ask the workers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Ask the workers, and yield their metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        scraped = list(self._scrape())
        build = InfoMetricFamily("gradwire_build", "Versions of gradwire, torch and Python.")
        versions = {"version": GRADWIRE_VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
        build.add_metric([], versions)
        yield build
        up = GaugeMetricFamily("gradwire_worker_up", "Whether the worker runs and answers.", labels=["worker"])
        restarts = CounterMetricFamily("gradwire_worker_restarts", "Restarts of the worker.", labels=["worker"])
        for item in scraped:
            up.add_metric([item.worker], float(item.numbers is not None))
            restarts.add_metric([item.worker], item.num_restarts)
        yield up
        yield restarts
        found = [(item.worker, item.numbers) for item in scraped if item.numbers is not None]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["worker"])
            for worker, numbers in found:
                if (number := value(numbers)) is not None:
                    gauge.add_metric([worker], number)
            yield gauge
        served = CounterMetricFamily("gradwire_calls_served", "Calls that the worker has answered.", labels=["worker"])
        rrefs = GaugeMetricFamily(
            "gradwire_rrefs",
            "Values on the worker that others refer to (owned), and references to values of others (held).",
            labels=["worker", "role"],
        )
        wire = CounterMetricFamily(
            "gradwire_wire_bytes",
            "Bytes exchanged with another worker, through sockets and shared memory.",
            labels=["worker", "direction", "peer"],
        )
        for worker, numbers in found:
            served.add_metric([worker], numbers.num_served)
            rrefs.add_metric([worker, "owned"], numbers.num_values)
            rrefs.add_metric([worker, "held"], numbers.num_references)
            for traffic in _without_repeats(numbers.traffic, lambda item: item.peer):
                wire.add_metric([worker, "sent", traffic.peer], traffic.sent)
                wire.add_metric([worker, "received", traffic.peer], traffic.received)
        yield from (served, rrefs, wire)
        yield from _measured(found)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        prometheus = import_prometheus()
        registry = prometheus.CollectorRegistry(auto_describe=False)
        registry.register(self)
        return bytes(prometheus.generate_latest(registry))


_T = TypeVar("_T")


def _without_repeats(items: Iterable[_T], key: Callable[[_T], Hashable]) -> Iterable[_T]:
    """Return the last item of each key: Prometheus refuses all metrics of a scrape that has a series twice."""
    return {key(item): item for item in items}.values()


def _series(item: Counter | Histogram) -> Hashable:
    return item.name, item.labels


def _measured(found: list[tuple[str, WorkerNumbers]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    counters = {
        key: CounterMetricFamily(name, text, labels=["worker", *labels])
        for key, (name, text, labels) in _COUNTERS.items()
    }
    histograms = {
        key: HistogramMetricFamily(name, text, labels=["worker", *labels])
        for key, (name, text, labels) in _HISTOGRAMS.items()
    }
    for worker, numbers in found:
        for counter in _without_repeats(numbers.counters, _series):  # what a worker reports is not trusted
            if counter.name in counters and len(counter.labels) == len(_COUNTERS[counter.name][2]):
                counters[counter.name].add_metric([worker, *counter.labels], counter.value)
        for item in _without_repeats(numbers.histograms, _series):
            if item.name in histograms and len(item.labels) == len(_HISTOGRAMS[item.name][2]):
                bounds = [*map(str, BUCKETS_S), "+Inf"]
                buckets = list(zip(bounds, itertools.accumulate(item.counts), strict=True))
                histograms[item.name].add_metric([worker, *item.labels], buckets, item.sum_s)
    yield from counters.values()
    yield from histograms.values()
