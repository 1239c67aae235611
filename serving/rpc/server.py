"""The server: binds the ports, warms the models up, serves until a signal, drains."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from fuseq.v1 import translator_pb2_grpc as stubs
from serving.config import Settings, split_address
from serving.core.errors import ConfigError
from serving.metrics import Metrics, MetricsServer
from serving.registry import Registry
from serving.rpc.interceptors import CallInterceptor, Gate
from serving.rpc.servicer import TranslatorServicer

log = logging.getLogger("fuseq.server")

SERVICE = "fuseq.v1.Translator"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# What is left to do once no call is inside: send the last answers, end the watches of health.
FAREWELL_SECONDS = 0.5


class Server:
    """One process's service. `start` binds the ports, `load` opens the models, `drain` ends it all."""

    def __init__(self, settings: Settings, *, share_threads: bool = False) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.registry = Registry(settings, self.metrics, share=share_threads)
        self.port = 0
        self.metrics_port = 0
        self._gate = Gate()
        self._health = HealthServicer()
        self._metrics_server: MetricsServer | None = None
        self._grpc = grpc.aio.server(
            interceptors=[CallInterceptor(self.metrics, self._gate)],
            options=[
                ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent sharer
                ("grpc.max_receive_message_length", settings.max_message_mib * 2**20),
                ("grpc.max_send_message_length", -1),
            ],
        )
        servicer = TranslatorServicer(self.registry, settings, self.metrics)
        stubs.add_TranslatorServicer_to_server(servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)

    async def start(self) -> None:
        """Bind both ports and answer health checks, NOT_SERVING at first.

        Raises:
            ConfigError: a port cannot be had.
        """
        for name in ("", SERVICE):
            await self._health.set(name, NOT_SERVING)
        listen = self.settings.listen
        try:
            self.port = self._grpc.add_insecure_port(listen)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigError(f"cannot listen on {listen}: in use or not an address of this machine; choose --listen")
        self._metrics_server = MetricsServer(self.metrics, *split_address(self.settings.metrics))
        self.metrics_port = self._metrics_server.port
        await self._grpc.start()

    async def load(self, bundles: Sequence[Path], stop: asyncio.Event | None = None) -> None:
        """Open the bundles, warm them up, and only then let calls in; never once `stop` is set."""
        await asyncio.get_running_loop().run_in_executor(None, self.registry.open, bundles)
        if stop is not None and stop.is_set():
            return
        self._gate.open()
        for name in ("", SERVICE):
            await self._health.set(name, SERVING)

    async def drain(self, grace: float, hurry: asyncio.Event | None = None) -> None:
        """Say NOT_SERVING, refuse new calls, let those inside finish, then stop everything.

        Args:
            grace: seconds that calls may take to finish; those that do not end as UNAVAILABLE.
            hurry: ends the wait when set.
        """
        await self._health.enter_graceful_shutdown()
        self._gate.close("the server is shutting down")
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._gate.wait_empty())]
        if hurry is not None:
            waits.append(asyncio.create_task(hurry.wait()))
        done, _ = await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        if waits[0] not in done:
            log.warning("some calls did not finish in time; they end as UNAVAILABLE")
        for wait in waits:
            wait.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.registry.stop)
        await self._grpc.stop(FAREWELL_SECONDS)
        if self._metrics_server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._metrics_server.close)


async def _serve(settings: Settings, bundles: Sequence[Path]) -> None:
    server = Server(settings, share_threads=True)
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    grace = 0.0
    try:
        await server.start()
        await server.load(bundles, stop)
        if stop.is_set():
            log.info("told to stop before it was ready")
            return
        grace = settings.grace
        host = split_address(settings.listen)[0]
        metrics_host = split_address(settings.metrics)[0]
        for model in server.registry:
            log.info("model %s", model)
        log.info("serving gRPC on %s:%d, metrics on %s:%d", host, server.port, metrics_host, server.metrics_port)
        await stop.wait()
        log.info("draining for up to %g s; a second signal stops at once", grace)
    finally:
        await server.drain(grace, hurry)
    log.info("stopped")


def run(settings: Settings, bundles: Sequence[Path]) -> None:
    """Serve until SIGTERM or SIGINT; returns after a drain.

    Raises:
        FuseqError: a port, a bundle or the device cannot be used.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    asyncio.run(_serve(settings, bundles))
