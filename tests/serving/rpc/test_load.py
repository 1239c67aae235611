"""Many callers at once: everybody gets the own answer, nothing leaks, everything is counted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fuseq import FuseqError
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.core.errors import Cancelled, DeadlineExceeded, Overloaded
from serving.core.types import SearchOptions
from tests.serving.engine.tiny import SOURCE_LIMIT
from tests.serving.rpc.harness import Running, balanced, outcomes, process, request, running, scrape, until, value

LONG: dict[str, Any] = {"forced_length": 60, "beam": 4}  # some tens of milliseconds of work


def idle(server: Running) -> bool:
    now = server.snapshot()
    return now.queued == now.running == now.aligning == now.rows == 0


def settled(server: Running) -> dict[str, float]:
    """The counts of requests once nothing is in flight any more."""
    assert until(lambda: idle(server) and outcomes(server.scrape())["in_flight"] == 0)
    counts = outcomes(server.scrape())
    assert balanced(counts)
    assert balanced(outcomes(server.scrape(), "inputs"))
    assert outcomes(server.scrape(), "inputs")["in_flight"] == 0
    assert value(server.scrape(), "fuseq_active_rows", model="tiny-attending") == 0
    assert value(server.scrape(), "fuseq_queue_depth", model="tiny-attending") == 0
    return counts


def test_a_thousand_concurrent_requests_get_their_own_answers(attending: Path) -> None:
    generator = random.Random(5)
    words = ["cat", "dog", "rain", "park", "hill", "bread"]
    texts = [f"{number} {' '.join(generator.choices(words, k=generator.randint(1, 4)))}" for number in range(1000)]
    options = {"max_length_ratio": 0.0, "max_length_margin": 5}
    with running(attending) as server:
        translator = server.server.registry.get().translator
        expected = translator.translate(texts, SearchOptions(**options))  # type: ignore[arg-type]
        with server.client(timeout=60) as client:
            futures: list[Future[Any]] = [client.submit(text, **options) for text in texts]
            answers = [future.result() for future in futures]
        counts = settled(server)
    for answer, wanted in zip(answers, expected, strict=True):
        assert not isinstance(wanted, FuseqError)
        assert (answer.text, answer.tokens) == (wanted.text, wanted.tokens)
        assert answer.score == pytest.approx(wanted.score, abs=1e-5)
    assert len({round(answer.score, 5) for answer in answers}) > 900  # an answer does tell whose it is
    assert counts["received"] == counts["ok"] == 1000


def test_cancels_deadlines_and_errors_leave_nothing_and_add_up(attending: Path) -> None:
    """Cases 64, 65, 80 and 81: 100 of each, among 100 that end well, and every scrape adds up meanwhile."""
    over = "z" * (SOURCE_LIMIT + 5)
    scrapes: list[dict[str, float]] = []
    stop = threading.Event()
    endless = [f"text {number}" for number in range(128)]  # seconds of work for 8 rows
    with process(attending, arguments=["--rows", "8", "--queue", "50000"]) as server:

        def watch() -> None:
            while not stop.wait(0.02):
                scrapes.append(outcomes(scrape(server.metrics_port)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
            stub = stubs.TranslatorStub(channel)

            def cancelled(number: int) -> Any:
                call = stub.Translate.future(request(*endless, forced_length=60, beam=8), timeout=60)
                time.sleep(0.5 + 0.01 * (number % 20))
                call.cancel()
                return call.code()

            def ended(message: pb.TranslateRequest, timeout: float) -> Any:
                try:
                    return tuple(result.status.code for result in stub.Translate(message, timeout=timeout).results)
                except grpc.RpcError as error:
                    return error.code()

            with ThreadPoolExecutor(400) as pool:
                futures: list[Future[Any]] = []
                for number in range(100):
                    late = request(*endless, forced_length=60, beam=8)
                    futures.append(pool.submit(cancelled, number))
                    futures.append(pool.submit(ended, late, 0.8 + 0.02 * (number % 20)))
                    futures.append(pool.submit(ended, request(f"bad {number}", beam=99), 60.0))
                    futures.append(pool.submit(ended, request(f"good {number}", over), 60.0))
                results = Counter(future.result() for future in futures)

            def at_rest() -> bool:
                now = scrape(server.metrics_port)
                gauges = [value(now, f"fuseq_{kind}_in_flight") for kind in ("requests", "inputs")]
                gauges += [
                    value(now, f"fuseq_{name}", model="tiny-attending") for name in ("active_rows", "queue_depth")
                ]
                return not any(gauges)

            assert until(at_rest)
        stop.set()
        watcher.join()
        last = scrape(server.metrics_port)
    counts, inputs = outcomes(last), outcomes(last, "inputs")
    assert results[grpc.StatusCode.CANCELLED] == 100
    assert results[grpc.StatusCode.DEADLINE_EXCEEDED] == 100
    assert results[grpc.StatusCode.INVALID_ARGUMENT] == 100
    assert results[pb.CODE_OK, pb.CODE_INVALID_ARGUMENT] == 100
    # A call that is gone before the server has read it was not received; every other one is counted once.
    assert counts["ok"] == 100 <= inputs["ok"]  # a late call may have had inputs that were done
    assert counts["rejected"] == 0
    assert 100 < counts["error"] <= 200  # the bad ones and the late ones
    assert 0 < counts["cancelled"] <= 100
    assert balanced(counts)
    assert balanced(inputs)
    assert len(scrapes) > 5
    assert all(map(balanced, scrapes))
    assert max(counts["in_flight"] for counts in scrapes) > 1


def test_case_64_a_cancelled_call_frees_its_rows_at_the_next_step(attending: Path) -> None:
    with running(attending, rows=16) as server, server.stub() as stub:
        call = stub.Translate.future(request(*[f"text {number}" for number in range(900)], **LONG), timeout=60)
        assert until(lambda: server.snapshot().rows > 0)
        call.cancel()
        assert until(lambda: outcomes(server.scrape())["cancelled"] == 1)
        assert until(lambda: idle(server), 1.0)  # the rest would take far longer
        assert server.snapshot().ok < 900
        inputs = outcomes(server.scrape(), "inputs")
        assert inputs["cancelled"] == 900
        assert inputs["in_flight"] == 0


def test_case_65_a_deadline_that_passes_in_the_queue_is_noticed_at_once(attending: Path) -> None:
    with running(attending, rows=4) as server, server.client() as client, server.stub() as stub:
        blocking = stub.Translate.future(request(*[f"block {n}" for n in range(800)], **LONG), timeout=60)
        assert until(lambda: server.snapshot().queued > 700)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.translate("too late", timeout=0.5)
        assert time.monotonic() - begin < 0.5 + 0.5
        assert until(lambda: server.snapshot().expired + server.snapshot().cancelled == 1, 1.0)
        assert server.snapshot().queued > 0  # it did not wait for its turn to be noticed
        blocking.cancel()
        counts = settled(server)
        assert (counts["ok"], counts["error"], counts["cancelled"]) == (0, 1, 1)


def test_a_full_queue_refuses_whole_requests_and_recovers(attending: Path) -> None:
    with running(attending, rows=4, queue=10) as server, server.stub() as stub:
        calls = [stub.Translate.future(request(f"text {number}", **LONG), timeout=60) for number in range(9)]
        assert until(lambda: server.snapshot().received >= 9)
        before = server.snapshot()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Translate(request(*["x"] * 10, **LONG), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        after = server.snapshot()
        assert after.received == before.received  # nothing of it was handed to the engine
        assert all(call.result().results[0].status.code == pb.CODE_OK for call in calls)
        assert len(stub.Translate(request(*["x"] * 10, **LONG), timeout=60).results) == 10
        counts = settled(server)
        assert (counts["ok"], counts["rejected"]) == (10, 1)
        assert outcomes(server.scrape(), "inputs")["rejected"] == 10


def test_single_inputs_beyond_the_queue_are_refused_not_lost(attending: Path) -> None:
    with running(attending, rows=4, queue=8) as server, server.client() as client:
        futures = [client.submit(f"text {number}", **LONG) for number in range(100)]
        ends = Counter(type(future.exception()) for future in futures)
        counts = settled(server)
    assert set(ends) == {type(None), Overloaded}
    assert counts["ok"] == ends[type(None)] >= 8
    assert counts["rejected"] == ends[Overloaded] > 0


def test_clients_that_vanish_mid_call_leave_nothing(attending: Path) -> None:
    with running(attending, rows=8) as server:
        for _ in range(20):
            client = server.client()
            gone = [client.submit(f"text {number}", **LONG) for number in range(10)]
            assert until(lambda: server.snapshot().rows > 0)
            client.close()
            assert all(isinstance(future.exception(), Cancelled) or future.result() for future in gone)
        counts = settled(server)
        assert counts["cancelled"] > 0
        with server.client() as client:
            assert client.translate("still here").tokens
