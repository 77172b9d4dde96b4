"""Metrics for Prometheus, and logs with one line of JSON per request. Neither has anything of the texts."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dragoman.progress import INFO, is_shown
from dragoman.serving.model_pool import ModelPool
from dragoman.serving.request_context import RequestContext
from dragoman.serving.workers import WorkerPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNLOGGED = frozenset({"/health", "/ready", "/metrics"})  # unless they fail


class ServerMetrics:
    """The metrics of one application."""

    def __init__(self, pool: ModelPool, workers: WorkerPool, is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry}
        labels = ("method", "route", "status")
        self.requests = Counter("dragoman_requests", "requests by route and status", labels, **own)
        self.seconds = Histogram("dragoman_request_seconds", "duration of requests", ("route",), buckets=SECONDS, **own)
        self.texts = Counter("dragoman_texts", "texts of requests", ("route",), **own)
        self.characters = Counter("dragoman_characters", "characters of the texts of requests", ("route",), **own)
        self.registry.register(StateCollector(pool, workers, is_ready))

    def observe(self, request: RequestContext, seconds: float) -> None:
        """Count a request that has been answered."""
        method = request.method if request.method in HTTP_METHODS else "other"  # clients may send any word
        self.requests.labels(method, request.path_template, request.status).inc()
        self.seconds.labels(request.path_template).observe(seconds)
        if request.texts:
            self.texts.labels(request.path_template).inc(request.texts)
            self.characters.labels(request.path_template).inc(request.characters)

    def render(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """What is read when the metrics are asked for: queue, models and their batches."""

    def __init__(self, pool: ModelPool, workers: WorkerPool, is_ready: Callable[[], bool]) -> None:
        self.pool, self.workers, self.is_ready = pool, workers, is_ready

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("dragoman_requests_waiting", "requests in the queue", self.workers.waiting)
        yield GaugeMetricFamily("dragoman_requests_running", "requests in threads", self.workers.running)
        yield GaugeMetricFamily("dragoman_ready", "1 if the server accepts requests", float(self.is_ready()))
        leases = GaugeMetricFamily("dragoman_model_leases", "requests that use a model", labels=["model"])
        sentences = CounterMetricFamily("dragoman_sentences", "sentences that a model has translated", labels=["model"])
        steps = CounterMetricFamily("dragoman_decoding_steps", "steps of batches of sentences", labels=["model"])
        slots = CounterMetricFamily("dragoman_decoding_slots", "sentences in the batches of steps", labels=["model"])
        for name, model in list(self.pool.models.items()):
            counts = model.engine.counts
            leases.add_metric([name], model.leases)
            sentences.add_metric([name], counts.sentences)
            steps.add_metric([name], counts.steps)
            slots.add_metric([name], counts.slots)
        yield from (leases, sentences, steps, slots)


class RequestLog:
    """Writes lines of JSON to stderr: one per request, and one per unexpected error with its traceback."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled, self.lock = enabled, threading.Lock()

    def log_request(self, request: RequestContext, seconds: float) -> None:
        if request.path_template in UNLOGGED and request.status < 400:
            return
        self.write(
            "info",
            id=request.id,
            method=request.method,
            route=request.path_template,
            status=request.status,
            ms=round(1000 * seconds, 1),
            characters=request.characters,
            key=request.key.name if request.key else None,
        )

    def log_error(self, identifier: str, path_template: str, error: BaseException) -> None:
        """Log the traceback without the message of the error, which may quote a text."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        self.write("error", id=identifier, route=path_template, error=type(error).__name__, traceback=lines)

    def write(self, level: str, **fields: Any) -> None:
        if not (self.enabled and is_shown(INFO)):
            return
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "level": level, **fields}) + "\n"
        with self.lock:
            sys.stderr.write(line)
            sys.stderr.flush()
