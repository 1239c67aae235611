"""From the first port to the last answer: start, health, signals, drain."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fuseq import Client
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.config import Settings
from serving.core.errors import ConfigError, DeadlineExceeded, NotFound, Unavailable
from serving.rpc.server import SERVICE, Server
from tests.serving.rpc.harness import Running, outcomes, process, request, running, scrape, until, value

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG: dict[str, Any] = {"forced_length": 60, "beam": 8}


def health(channel: grpc.Channel, service: str = SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status)


def test_health_knows_the_server_and_the_service_and_nothing_else(shared: Running) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        assert health(channel, "") == health(channel) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health(channel, "fuseq.v1.Nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_until_the_models_are_warm_health_says_no_and_calls_are_unavailable(attending: Path) -> None:
    async def check() -> None:
        server = Server(Settings(listen="127.0.0.1:0", metrics="127.0.0.1:0"))
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                checks = health_pb2_grpc.HealthStub(channel)
                for service in ("", SERVICE):
                    answer = await checks.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                    assert answer.status == NOT_SERVING
                translator = stubs.TranslatorStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await translator.Translate(request("a"), timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "starting" in (caught.value.details() or "")
                await server.load([attending])
                answer = await checks.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
                assert answer.status == SERVING
                assert (await translator.Translate(request("a"), timeout=10)).results[0].status.code == pb.CODE_OK
        finally:
            await server.drain(0.0)

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_case_71_a_signal_drains(attending: Path, number: signal.Signals) -> None:
    """NOT_SERVING first, calls in flight finish, new ones are refused, the exit status is 0."""
    with process(attending, arguments=["--rows", "8"]) as server:
        with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert next(watch).status == SERVING
            stub = stubs.TranslatorStub(channel)
            calls = [stub.Translate.future(request(*["some text"] * 4, **LONG), timeout=60) for _ in range(5)]
            assert until(lambda: outcomes(scrape(server.metrics_port))["in_flight"] == 5)
            server.process.send_signal(number)
            assert next(watch).status == NOT_SERVING
            assert not any(call.done() for call in calls[1:])  # health changed before the work was done
            with pytest.raises(grpc.RpcError) as caught:
                stub.Translate(request("new"), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            for call in calls:
                assert [result.status.code for result in call.result().results] == [pb.CODE_OK] * 4
        assert server.wait() == 0
        assert "stopped" in server.log[-1]


def test_what_does_not_finish_within_the_grace_ends_unavailable_and_the_exit_status_is_0(attending: Path) -> None:
    with process(attending, arguments=["--rows", "8", "--grace", "0.2"]) as server:
        with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
            call = stubs.TranslatorStub(channel).Translate.future(request(*["text"] * 900, **LONG), timeout=60)
            assert until(lambda: outcomes(scrape(server.metrics_port))["in_flight"] == 1)
            server.process.send_signal(signal.SIGTERM)
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait() == 0


def test_a_second_signal_ends_the_grace(attending: Path) -> None:
    patient = process(attending, arguments=["--rows", "8", "--grace", "600"])
    with patient as server, grpc.insecure_channel(server.address) as channel:
        call = stubs.TranslatorStub(channel).Translate.future(request(*["text"] * 1000, **LONG), timeout=60)
        assert until(lambda: outcomes(scrape(server.metrics_port))["in_flight"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: health(channel) == NOT_SERVING)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert call.code() is not None


def test_an_idle_server_stops_at_once(attending: Path) -> None:
    with process(attending) as server:
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - begin < 10  # the grace is 30 s


def test_killed_clients_leave_the_server_whole(attending: Path) -> None:
    caller = (
        "import sys, fuseq\n"
        "with fuseq.Client(sys.argv[1]) as client:\n"
        "    print('calling', flush=True)\n"
        "    client.translate(['text'] * 500, forced_length=60, beam=8)\n"
    )
    with process(attending, arguments=["--rows", "8"]) as server:
        callers = [
            subprocess.Popen([sys.executable, "-c", caller, server.address], stdout=subprocess.PIPE) for _ in range(2)
        ]
        assert until(lambda: outcomes(scrape(server.metrics_port))["in_flight"] == 2, 30)
        for client in callers:
            client.kill()
            client.communicate()
        assert until(lambda: outcomes(scrape(server.metrics_port))["in_flight"] == 0)
        assert until(lambda: value(scrape(server.metrics_port), "fuseq_active_rows", model="tiny-attending") == 0)
        assert outcomes(scrape(server.metrics_port))["cancelled"] == 2
        with Client(server.address) as client:
            assert client.translate("still here").tokens


def failing_start(*arguments: str) -> str:
    """The one line that a server which cannot start leaves on standard error."""
    command = [sys.executable, "-m", "fuseq", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("flag", ["--listen", "--metrics"])
def test_a_port_in_use_is_a_one_line_error(attending: Path, flag: str) -> None:
    other = {"--listen": "--metrics", "--metrics": "--listen"}[flag]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = failing_start(str(attending), flag, address, other, "127.0.0.1:0")
    assert address in line
    assert flag in line


def test_two_servers_do_not_share_a_port_silently(attending: Path) -> None:
    with running(attending) as first, pytest.raises(ConfigError, match="--listen"):
        Running([attending], listen=first.address)


def test_a_bundle_that_is_none_and_two_of_one_name(attending: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not a bundle"):
        Running([tmp_path])
    with pytest.raises(ConfigError, match="names must differ"):
        Running([attending, attending])


def test_a_server_stopped_before_it_was_ready(tmp_path: Path) -> None:
    async def check() -> None:
        server = Server(Settings(listen="127.0.0.1:0", metrics="127.0.0.1:0"))
        await server.start()
        port = server.port
        await server.drain(0.0)
        with (
            Client(f"127.0.0.1:{port}", attempts=1, timeout=1) as client,
            pytest.raises((Unavailable, DeadlineExceeded)),
        ):
            client.translate("a")

    asyncio.run(check())
