"""Metrics: they add up in every scrape, are documented, and the text is what a scraper reads."""

from __future__ import annotations

import random
import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FuseqError,
    InvalidInput,
    Overloaded,
    Unavailable,
)
from serving.metrics import METRICS, OUTCOMES, Load, Metrics, MetricsServer, outcome_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "service.md"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """(name, sorted labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(metrics: Metrics) -> Samples:
    registry = CollectorRegistry()
    registry.register(metrics)
    return parse(generate_latest(registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, tuple(sorted(labels.items())))]


def balance(samples: Samples, kind: str) -> tuple[float, float]:
    """Received, and the sum of what became of them."""
    ended = sum(value(samples, f"fuseq_{kind}_total", outcome=outcome) for outcome in OUTCOMES)
    return value(samples, f"fuseq_{kind}_received_total"), ended + value(samples, f"fuseq_{kind}_in_flight")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (InvalidInput("x"), "error"),
        (DeadlineExceeded("x"), "error"),
        (ValueError("x"), "error"),
        (Cancelled("x"), "cancelled"),
        (Overloaded("x"), "rejected"),
        (Unavailable("x"), "rejected"),
    ],
)
def test_outcomes(error: BaseException | None, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_case_81_every_scrape_adds_up_while_calls_come_and_go() -> None:
    metrics = Metrics()
    stop = threading.Event()
    endings: list[FuseqError | None] = [None, InvalidInput(""), Cancelled(""), Overloaded(""), DeadlineExceeded("")]

    def callers(seed: int) -> None:
        generator = random.Random(seed)
        while not stop.is_set():
            metrics.request_started()
            metrics.inputs_started(2)
            metrics.inputs_failed([InvalidInput("")])
            metrics.input_done(0.1, 0.2, 0.3, 0.6, 5, 4)
            metrics.request_ended(generator.choice(endings))

    threads = [threading.Thread(target=callers, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        seen = set()
        for _ in range(80):
            samples = scrape(metrics)
            for kind in ("requests", "inputs"):
                received, accounted = balance(samples, kind)
                assert received == accounted
                seen.add(received)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(seen) > 10  # the scrapes did see different moments
    assert value(scrape(metrics), "fuseq_requests_in_flight") == 0
    assert value(scrape(metrics), "fuseq_inputs_in_flight") == 0


def test_case_82_gauges_and_the_histograms_of_one_input_belong_together() -> None:
    metrics = Metrics()
    metrics.add_model(("m", "1", "int8", "cpu"), lambda: Load(queued=7, active_rows=3))
    metrics.inputs_started(1)
    metrics.input_done(queue=0.5, encode=0.25, decode=1.0, total=1.75, tokens_in=9, tokens_out=8)
    metrics.step_done(rows=3, seconds=0.002)
    samples = scrape(metrics)
    assert value(samples, "fuseq_queue_depth", model="m") == 7
    assert value(samples, "fuseq_active_rows", model="m") == 3
    parts = [value(samples, f"fuseq_{part}_seconds_sum") for part in ("queue", "encode", "decode")]
    assert sum(parts) == value(samples, "fuseq_total_seconds_sum") == 1.75
    counts = {value(samples, f"fuseq_{part}_seconds_count") for part in ("queue", "encode", "decode", "total")}
    assert counts == {1}
    assert value(samples, "fuseq_queue_seconds_bucket", le="0.25") == 0
    assert value(samples, "fuseq_queue_seconds_bucket", le="0.5") == 1  # a limit belongs to its bucket
    assert value(samples, "fuseq_rows_per_step_sum") == 3
    assert value(samples, "fuseq_tokens_in_total") == 9
    assert value(samples, "fuseq_model_info", model="m", version="1", precision="int8", device="cpu") == 1


def test_buckets_are_cumulative_and_end_with_everything() -> None:
    metrics = Metrics()
    for seconds in (0.00005, 0.003, 0.003, 99.0):
        metrics.step_done(1, seconds)
    samples = scrape(metrics)
    buckets = [v for (name, _), v in samples.items() if name == "fuseq_step_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(samples, "fuseq_step_seconds_count") == 4
    assert value(samples, "fuseq_step_seconds_bucket", le="1.0") == 3


def test_case_84_the_series_do_not_depend_on_what_happened() -> None:
    metrics = Metrics()
    metrics.add_model(("m", "1", "int8", "cpu"), lambda: Load(0, 0))
    before = set(scrape(metrics))
    for error in (None, InvalidInput("a"), Cancelled("b"), Overloaded("c"), FuseqError("d")):
        metrics.request_started()
        metrics.request_ended(error)
    assert set(scrape(metrics)) == before


def test_every_metric_is_documented_as_it_is() -> None:
    rows = re.findall(r"^\| `(fuseq_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", DOCS.read_text("utf-8"), re.M)
    written = {name: (kind, labels, text) for name, kind, labels, text in rows}
    declared = {m.name: (m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help) for m in METRICS}
    assert written == declared


def test_every_declared_metric_is_scraped() -> None:
    metrics = Metrics()
    metrics.add_model(("m", "1", "int8", "cpu"), lambda: Load(0, 0))
    scraped = {name for name, _ in scrape(metrics)}
    for declared in METRICS:
        assert (declared.name if declared.kind != "histogram" else declared.name + "_bucket") in scraped


def test_over_http_and_a_port_in_use() -> None:
    metrics = Metrics()
    metrics.request_started()
    server = MetricsServer(metrics, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            samples = parse(answer.read().decode())
        assert value(samples, "fuseq_requests_in_flight") == 1
        assert value(samples, "process_resident_memory_bytes") > 0
        with pytest.raises(ConfigError, match="--metrics"):
            MetricsServer(metrics, "127.0.0.1", server.port)
    finally:
        server.close()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99_999), ("a" * 300, 1), ("nohost.invalid", 1)])
def test_an_address_that_is_none_is_one_line(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="choose another --metrics"):
        MetricsServer(Metrics(), host, port)


def test_a_silent_connection_loses_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.metrics.SILENCE_SECONDS", 0.1)
    server = MetricsServer(Metrics(), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            assert silent.recv(1) == b""  # the server hung up
    finally:
        server.close()


def test_a_model_may_be_added_while_a_scrape_goes_on() -> None:
    metrics = Metrics()
    labels = iter([(f"m{number}", "1", "int8", "cpu") for number in range(9)])

    def load() -> Load:
        if (more := next(labels, None)) is not None:
            metrics.add_model(more, load)
        return Load(0, 0)

    metrics.add_model(("first", "1", "int8", "cpu"), load)
    assert list(metrics.collect())
    assert len(list(metrics.collect())) == len(METRICS)
