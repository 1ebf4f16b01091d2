"""Prometheus metrics of a server. Labels are bounded: names that nobody serves are counted under one name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from headway.serving.live.types import Engine, Inference

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNKNOWN = "unknown"

# When a series began is one series more for each, and nobody asks for it.
disable_created_metrics()

M = TypeVar("M", Counter, Histogram)

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_AGES = (60, 600, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400, 30 * 86400)


class ServeMetrics:
    """What one server counts. Figures of the engine are read when somebody looks."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._series: dict[tuple[str, ...], Any] = {}
        by_version = ("model", "version")
        self._requests = Counter(
            "headway_requests", "Inference requests by answer code.", (*by_version, "code"), registry=self.registry
        )
        self._seconds = Histogram(
            "headway_request_seconds",
            "From a request's head to its answer.",
            by_version,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._wait = Histogram(
            "headway_queue_wait_seconds",
            "What answered rows waited for others.",
            by_version,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._rows = Counter("headway_predictions", "Answered rows.", by_version, registry=self.registry)
        self._degraded = Counter(
            "headway_degraded_predictions", "Answered rows that are degraded.", by_version, registry=self.registry
        )
        self._age = Histogram(
            "headway_feature_age_seconds",
            "Age of a view's newest value at the observation.",
            ("model", "version", "view"),
            registry=self.registry,
            buckets=_AGES,
        )
        self._views = Counter(
            "headway_feature_status",
            "Answered rows by status of a view.",
            ("model", "view", "status"),
            registry=self.registry,
        )
        self._labels = Counter("headway_labels", "Labels received by outcome.", ("status",), registry=self.registry)
        self._label_requests = Counter(
            "headway_label_requests", "Requests with labels by answer code.", ("code",), registry=self.registry
        )
        self.in_flight = Gauge("headway_in_flight_requests", "Requests being answered.", registry=self.registry)
        self.registry.register(_EngineFigures(engine))

    def inference(self, model: str, version: str, code: str, seconds: float) -> None:
        """Count one inference request, answered with `code` (`ok` or one of the error table)."""
        self._of("requests", self._requests, model, version, code).inc()
        self._of("seconds", self._seconds, model, version).observe(seconds)

    def answered(self, answers: Sequence[Inference]) -> None:
        """Count answered rows, what they waited and how old their features are."""
        served = answers[0].served
        model, version = served.endpoint_id, str(served.version)
        self._of("rows", self._rows, model, version).inc(len(answers))
        wait = self._of("wait", self._wait, model, version)
        for found in answers:
            wait.observe(found.queue_wait_us / 1_000_000)
            if found.degraded:
                self._of("degraded", self._degraded, model, version).inc()
            for view, fresh in found.views.items():
                self._of("views", self._views, model, view, fresh.status).inc()
                if fresh.age is not None:
                    self._of("age", self._age, model, version, view).observe(fresh.age)

    def _of(self, name: str, metric: M, *labels: str) -> M:
        """The series of these labels, looked up once: finding it costs more than counting."""
        key = (name, *labels)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = metric.labels(*labels)
        return cast("M", found)

    def labels(self, code: str, outcomes: Sequence[Mapping[str, object]]) -> None:
        """Count one request with labels and what became of its items."""
        self._label_requests.labels(code).inc()
        for outcome in outcomes:
            self._labels.labels(str(outcome.get("status"))).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineFigures:
    """What the engine knows of itself, asked at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering asks the engine nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        status = self._engine.status()
        spool = status.spool
        yield GaugeMetricFamily("headway_spool_bytes", "Inference log waiting on disk.", value=spool.bytes)
        yield GaugeMetricFamily("headway_spool_limit_bytes", "What the inference log may hold.", value=spool.limit)
        yield GaugeMetricFamily("headway_spool_records", "Predictions waiting on disk.", value=spool.records)
        yield GaugeMetricFamily("headway_spool_segments", "Files of the inference log.", value=spool.segments)
        yield CounterMetricFamily("headway_spool_dropped", "Answers that were not logged.", value=spool.dropped)
        yield CounterMetricFamily("headway_spool_torn", "Unfinished records found and skipped.", value=spool.torn)
        yield GaugeMetricFamily("headway_queue_rows", "Rows that wait for the model.", value=status.queue_rows)
        ready, _ = self._engine.ready()
        yield GaugeMetricFamily("headway_ready", "1 while requests are taken.", value=int(ready))
        if status.catalog_age_s is not None:
            yield GaugeMetricFamily(
                "headway_catalog_contact_age_seconds", "Since the catalog last answered.", value=status.catalog_age_s
            )
        yield _by("headway_pointer_epoch", "Epoch of the endpoint that answers.", "model", status.epochs)
        yield _by(
            "headway_degraded_server",
            "Codes that the server itself gives with every answer.",
            "model",
            {m: len(codes) for m, codes in status.degraded.items()},
        )
        now = self._engine.now()
        ages = {s: (now - mark) / 1_000_000 for s, mark in status.watermarks.items() if mark is not None}
        yield _by("headway_source_age_seconds", "World time since a source's newest loaded row.", "source", ages)


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
