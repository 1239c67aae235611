"""A real server on real ports, in a thread of the test's process or in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from fuseq import Client
from fuseq.v1 import translator_pb2 as pb
from fuseq.v1 import translator_pb2_grpc as stubs
from serving.config import Settings
from serving.engine.observer import Snapshot
from serving.metrics import OUTCOMES
from serving.rpc.server import Server

READY = re.compile(r"serving gRPC on \S+:(\d+), metrics on \S+:(\d+)")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition came true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def scrape(port: int) -> Samples:
    """(name, sorted labels) -> value, as Prometheus would read them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode("utf-8")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Running:
    """A server in this process. Its engine and metrics can be looked into."""

    def __init__(self, bundles: Sequence[Path], **settings: Any) -> None:
        listen = settings.pop("listen", "127.0.0.1:0")
        self.settings = Settings(listen=listen, metrics="127.0.0.1:0", **settings)
        self._bundles = bundles
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(60)
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            self._started.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(self.settings)
        try:
            await self.server.start()
            await self.server.load(self._bundles)
            self._started.set()
            await self._stop.wait()
        finally:
            await self.server.drain(0.0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def client(self, **options: Any) -> Client:
        return Client(self.address, **options)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        """The generated stub, for what the client hides."""
        with grpc.insecure_channel(self.address, options=[("grpc.enable_retries", 0)]) as channel:
            yield stubs.TranslatorStub(channel)

    def snapshot(self, model: str = "") -> Snapshot:
        return self.server.registry.get(model).engine.snapshot()

    def scrape(self) -> Samples:
        return scrape(self.server.metrics_port)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def running(*bundles: Path, **settings: Any) -> Iterator[Running]:
    server = Running(bundles, **settings)
    try:
        yield server
    finally:
        server.close()


class Process:
    """`fuseq serve` in a process of its own."""

    def __init__(self, *bundles: Path, arguments: Sequence[str] = (), listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "fuseq", "serve", *map(str, bundles), "--listen", listen]
        command += ["--metrics", "127.0.0.1:0", "--log-level", "info", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQ_")}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(60)
        found = READY.search("".join(self.log))
        self.port, self.metrics_port = (int(found[1]), int(found[2])) if found else (0, 0)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if READY.search(line):
                self._ready.set()
        self._ready.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self, seconds: float = 30.0) -> int:
        """The exit status."""
        code = self.process.wait(seconds)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def process(*bundles: Path, **options: Any) -> Iterator[Process]:
    server = Process(*bundles, **options)
    try:
        yield server
    finally:
        server.close()


def request(*texts: str, **options: Any) -> pb.TranslateRequest:
    return pb.TranslateRequest(inputs=[pb.Input(text=text) for text in texts], options=pb.Options(**options))


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, tuple(sorted(labels.items())))]


def outcomes(samples: Samples, kind: str = "requests") -> dict[str, float]:
    """received, in_flight and one entry for each outcome."""
    counts = {outcome: value(samples, f"fuseq_{kind}_total", outcome=outcome) for outcome in OUTCOMES}
    counts["received"] = value(samples, f"fuseq_{kind}_received_total")
    counts["in_flight"] = value(samples, f"fuseq_{kind}_in_flight")
    return counts


def balanced(counts: dict[str, float]) -> bool:
    """Whether everything received is accounted for."""
    return counts["received"] == counts["in_flight"] + sum(counts[outcome] for outcome in OUTCOMES)
