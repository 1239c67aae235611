"""Every metric of the server, and the one state they are all read from.

A scrape takes one lock and copies the whole state, so what must add up adds up in every scrape:

    fuseq_requests_received_total = sum of fuseq_requests_total over outcomes + fuseq_requests_in_flight

and likewise for inputs. No label ever holds anything that a caller sent.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from socketserver import StreamRequestHandler
from typing import Literal, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector

from serving.core.errors import Cancelled, ConfigError, FuseqError, Overloaded, Unavailable

SILENCE_SECONDS = 10.0  # that a connection for metrics may wait for its request
OUTCOMES = ("ok", "error", "cancelled", "rejected")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric: its name as scraped, kind, help, label names and, for a histogram, its buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_OUTCOME = "ok; error (bad request, deadline, fault); cancelled (by the caller); rejected (no room, starting, draining)"

METRICS = (
    Declared("fuseq_requests_received_total", "counter", "Translate calls that arrived"),
    Declared("fuseq_requests_total", "counter", f"Translate calls that ended, by outcome: {_OUTCOME}", ("outcome",)),
    Declared("fuseq_requests_in_flight", "gauge", "Translate calls that arrived and have not ended"),
    Declared("fuseq_inputs_received_total", "counter", "Inputs of the calls that were read"),
    Declared("fuseq_inputs_total", "counter", "Inputs that ended, by outcome as for calls", ("outcome",)),
    Declared("fuseq_inputs_in_flight", "gauge", "Inputs that were read and have not ended"),
    Declared("fuseq_queue_depth", "gauge", "Inputs that wait for a row", ("model",)),
    Declared("fuseq_active_rows", "gauge", "Rows that are being decoded", ("model",)),
    Declared("fuseq_rows_per_step", "histogram", "Rows that one decoder step ran", (), ROWS),
    Declared("fuseq_step_seconds", "histogram", "Time of one decoder step", (), STEP_SECONDS),
    Declared("fuseq_queue_seconds", "histogram", "Time an input that ended ok waited for a row", (), SECONDS),
    Declared("fuseq_encode_seconds", "histogram", "Time an input that ended ok spent in the encoder", (), SECONDS),
    Declared("fuseq_decode_seconds", "histogram", "Time an input that ended ok spent in decoding", (), SECONDS),
    Declared("fuseq_total_seconds", "histogram", "Time an input that ended ok spent in the engine", (), SECONDS),
    Declared("fuseq_tokens_in_total", "counter", "Source tokens of inputs that ended ok"),
    Declared("fuseq_tokens_out_total", "counter", "Target tokens of the best hypotheses of inputs that ended ok"),
    Declared(
        "fuseq_model_info", "gauge", "1 for each model that is served", ("model", "version", "precision", "device")
    ),
)

Labels = tuple[str, ...]


def outcome_of(error: BaseException | None) -> str:
    """The outcome under which a call or input that ended with `error` is counted."""
    if error is None:
        return "ok"
    if isinstance(error, Cancelled):
        return "cancelled"
    if isinstance(error, Overloaded | Unavailable):
        return "rejected"
    return "error"


class _Histogram:
    """Counts per bucket, not cumulated; the last one is above every limit."""

    __slots__ = ("counts", "limits", "total")

    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        pairs, seen = [], 0
        for limit, count in zip([*map(float, self.limits), float("inf")], self.counts, strict=True):
            seen += count
            pairs.append(("+Inf" if limit == float("inf") else repr(limit), float(seen)))
        return pairs


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do at one moment."""

    queued: int
    active_rows: int


class Metrics(Collector):
    """The state behind the metrics, and the collector that reads it. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._loads: dict[str, Callable[[], Load]] = {}
        for declared in METRICS:
            if declared.kind == "histogram":
                self._histograms[declared.name] = _Histogram(declared.buckets)
            else:
                start: dict[Labels, float] = {} if declared.labels else {(): 0.0}
                self._values[declared.name] = start
        for name in ("fuseq_requests_total", "fuseq_inputs_total"):
            self._values[name] = {(outcome,): 0.0 for outcome in OUTCOMES}

    def _add(self, name: str, amount: float, labels: Labels = ()) -> None:
        self._values[name][labels] += amount

    def add_model(self, labels: Labels, load: Callable[[], Load]) -> None:
        """Report a model: `labels` are those of fuseq_model_info, `load` is asked at every scrape."""
        with self._lock:
            self._values["fuseq_model_info"][labels] = 1.0
            self._loads[labels[0]] = load

    def request_started(self) -> None:
        """A call arrived."""
        with self._lock:
            self._add("fuseq_requests_received_total", 1)
            self._add("fuseq_requests_in_flight", 1)

    def request_ended(self, error: BaseException | None) -> None:
        """A call that had arrived ended, well for None."""
        with self._lock:
            self._add("fuseq_requests_in_flight", -1)
            self._add("fuseq_requests_total", 1, (outcome_of(error),))

    def inputs_started(self, count: int) -> None:
        """A call's inputs were read."""
        with self._lock:
            self._add("fuseq_inputs_received_total", count)
            self._add("fuseq_inputs_in_flight", count)

    def inputs_failed(self, errors: Iterable[FuseqError]) -> None:
        """Inputs ended with these errors."""
        with self._lock:
            for error in errors:
                self._add("fuseq_inputs_in_flight", -1)
                self._add("fuseq_inputs_total", 1, (outcome_of(error),))

    def input_done(
        self, queue: float, encode: float, decode: float, total: float, tokens_in: int, tokens_out: int
    ) -> None:
        """An input ended well. Times in seconds."""
        with self._lock:
            self._add("fuseq_inputs_in_flight", -1)
            self._add("fuseq_inputs_total", 1, ("ok",))
            self._histograms["fuseq_queue_seconds"].observe(queue)
            self._histograms["fuseq_encode_seconds"].observe(encode)
            self._histograms["fuseq_decode_seconds"].observe(decode)
            self._histograms["fuseq_total_seconds"].observe(total)
            self._add("fuseq_tokens_in_total", tokens_in)
            self._add("fuseq_tokens_out_total", tokens_out)

    def step_done(self, rows: int, seconds: float) -> None:
        """The engine ran one decoder step."""
        with self._lock:
            self._histograms["fuseq_rows_per_step"].observe(rows)
            self._histograms["fuseq_step_seconds"].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """One consistent copy of everything."""
        with self._lock:
            ask = dict(self._loads)  # models may be added meanwhile
        loads = {model: load() for model, load in ask.items()}  # without the lock: engines have their own
        with self._lock:
            for model, now in loads.items():
                self._values["fuseq_queue_depth"][(model,)] = now.queued
                self._values["fuseq_active_rows"][(model,)] = now.active_rows
            values = {name: dict(series) for name, series in self._values.items()}
            histograms = {name: (h.cumulated(), h.total) for name, h in self._histograms.items()}
        for declared in METRICS:
            if declared.kind == "histogram":
                buckets, total = histograms[declared.name]
                yield HistogramMetricFamily(declared.name, declared.help, buckets=buckets, sum_value=total)
                continue
            family = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            metric = family(declared.name, declared.help, labels=declared.labels)
            for labels, value in values[declared.name].items():
                metric.add_metric(labels, value)
            yield metric


class MetricsServer:
    """Serves the metrics over HTTP from a thread of its own."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(metrics)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError, UnicodeError) as error:  # the last two: a port over 65535, a host that is none
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {reason}; choose another --metrics") from None
        # A connection that says nothing must not keep its thread for ever.
        handler = cast(type[StreamRequestHandler], self._server.RequestHandlerClass)
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": SILENCE_SECONDS})
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
