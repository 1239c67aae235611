"""The load generator against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.generator import Load, batches, generate, grpc_messages
from fuseq.v1 import translator_pb2 as pb
from tests.serving.engine.tiny import write_bundle
from tests.serving.rpc.harness import running

TEXTS = ("ab ba", "ba", "a b c")


def load(address: str, **values: object) -> Load:
    return Load(address, TEXTS, **{"seconds": 0.5, "limit": 6, **values})  # type: ignore[arg-type]


def test_calls_take_the_texts_in_turn() -> None:
    assert batches(load("grpc://x", inputs=1)) == [["ab ba"], ["ba"], ["a b c"]]
    assert batches(load("grpc://x", inputs=2)) == [["ab ba", "ba"], ["a b c", "ab ba"]]
    assert batches(load("grpc://x", inputs=5)) == [["ab ba", "ba", "a b c", "ab ba", "ba"]]


def test_messages_ask_for_the_search_of_these_benchmarks() -> None:
    [first, *_] = grpc_messages(load("grpc://x", beam=4, forced=3))
    request = pb.TranslateRequest.FromString(first)
    assert [item.text for item in request.inputs] == ["ab ba"]
    assert (request.options.beam, request.options.forced_length) == (4, 3)
    assert request.options.length_penalty == 0.0
    assert request.options.allow_repetition


def test_open_and_closed_loop_on_a_server(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny", "attending").path
    with running(bundle) as server:
        address = f"grpc://{server.address}"
        found = asyncio.run(generate(load(address, rate=40.0, inputs=2, forced=3)))
        assert found["counts"] == {"ok": found["calls"]}
        assert server.snapshot().ok == 2 * found["calls"] > 0
        assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"]
        closed = asyncio.run(generate(load(address, in_flight=3, seconds=0.3)))
        assert closed["counts"]["ok"] >= 3


def test_an_absent_server_is_no_answer() -> None:
    found = asyncio.run(generate(load("grpc://127.0.0.1:1", rate=20.0, seconds=0.3, timeout=0.5)))
    assert set(found["counts"]) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert found["p95_ms"] is None
    assert found["answered"] == 0


def test_over_http(tmp_path: Path) -> None:
    web = pytest.importorskip("aiohttp.web")

    async def main() -> tuple[dict[str, object], list[dict[str, object]]]:
        seen: list[dict[str, object]] = []

        async def predict(request: object) -> object:
            body = await request.json()  # type: ignore[attr-defined]
            seen.append(body)
            if len(seen) % 4 == 0:
                return web.json_response({}, status=503)
            return web.json_response({"texts": body["texts"]})

        app = web.Application()
        app.router.add_post("/predict", predict)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await generate(load(f"http://127.0.0.1:{port}/predict", rate=60.0, beam=2)), seen
        finally:
            await runner.cleanup()

    found, seen = asyncio.run(main())
    assert seen[0] == {"texts": ["ab ba"], "beam": 2}
    counts = found["counts"]
    assert isinstance(counts, dict)
    assert counts["HTTP 503"] == len(seen) // 4
    assert counts["ok"] == len(seen) - len(seen) // 4
