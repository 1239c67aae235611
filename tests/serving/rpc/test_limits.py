"""What a server can hold decides what a request may ask for, and never what a plain request gets."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.config import Settings
from serving.core.errors import BundleError, InvalidInput
from serving.core.manifest import MANIFEST_NAME
from serving.local import LocalTranslator
from serving.rpc.server import SERVICE, Server
from tests.serving.engine.tiny import write_bundle
from tests.serving.rpc.harness import Running, request, running


@pytest.fixture
def beaming(attending: Path, tmp_path: Path) -> Path:
    """A bundle whose own default is a beam of 4."""
    path = Path(shutil.copytree(attending, tmp_path / "beaming"))
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    manifest["search"] = {"beam": 4}
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("settings", [{"rows": 2}, {"max_beam": 2}])
def test_a_default_beam_over_the_servers_limit_is_cut_to_it(beaming: Path, settings: dict[str, int]) -> None:
    with running(beaming, **settings) as server, server.client() as client, server.stub() as stub:
        plain = client.translate("the cat")
        assert plain.text == client.translate("the cat", beam=2).text
        listed = stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert (listed.max_beam, listed.models[0].defaults.beam) == (2, 2)
        with pytest.raises(InvalidInput, match="beam 4: must be 1 to 2"):
            client.translate("the cat", beam=4)


def test_memory_for_fewer_rows_is_a_smaller_largest_beam(beaming: Path) -> None:
    with running(beaming, rows=4096, memory_mib=1, workers=1) as server, server.stub() as stub:
        rows = server.snapshot().capacity
        assert stub.ListModels(pb.ListModelsRequest(), timeout=10).max_beam == min(32, rows)
    with LocalTranslator(beaming, settings=Settings(rows=2)) as translator:
        assert translator.submit("the cat").result(60).text


def test_a_long_prefix_does_not_keep_the_server_from_others(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = shared.server.registry.get().translator
    inside, let_go, threads = threading.Event(), threading.Event(), []
    prepare = type(translator).prepare

    def slow(self: object, text: str, *rest: object) -> object:
        if text == "slow":
            threads.append(threading.current_thread())
            inside.set()
            let_go.wait(10)
        return prepare(self, text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(translator), "prepare", slow)
    message = pb.TranslateRequest(inputs=[pb.Input(text="slow", prefix="x " * 20_000)])
    with shared.stub() as stub, grpc.insecure_channel(shared.address) as channel:
        call = stub.Translate.future(message, timeout=60)
        assert inside.wait(10)
        begin = time.monotonic()
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        took = time.monotonic() - begin
        let_go.set()
        assert call.result().results[0].status.code == pb.CODE_INVALID_ARGUMENT
    assert took < 5
    assert threads != [shared._thread]  # the one that all calls share


def test_told_to_stop_while_it_starts_a_server_never_says_that_it_serves(attending: Path) -> None:
    async def check() -> None:
        server, stop = Server(Settings(listen="127.0.0.1:0", metrics="127.0.0.1:0")), asyncio.Event()
        await server.start()
        try:
            stop.set()
            await server.load([attending], stop)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE), timeout=10
                )
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stubs.TranslatorStub(channel).Translate(request("a"), timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            await server.drain(0.0)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"special": {"pad": 0, "bos": 1, "eos": 50, "unk": 3}}, "control symbols"),
        ({"state": ["row", 2, "source", 4]}, "do not fit its state"),
        ({"state": ["row", 2, 8]}, "do not fit its state"),
    ],
)
def test_a_manifest_that_contradicts_its_files_does_not_start(
    tmp_path: Path, change: dict[str, object], match: str
) -> None:
    path = write_bundle(tmp_path / "bundle", "attending").path
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    if "state" in change:
        manifest["state"][2]["axes"] = change["state"]
    else:
        manifest.update(change)
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=match) as caught:
        Running([path])
    assert "\n" not in str(caught.value)
