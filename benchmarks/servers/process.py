"""A server in a process of its own: started, waited for, measured from outside, stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.generator import METHOD, Load, grpc_messages, http_messages, send
from benchmarks.models import Subject
from benchmarks.records import ROOT
from serving.core.errors import FuseqError

PATIENCE = 120.0  # seconds to the first answer


@dataclass(frozen=True, slots=True)
class Kind:
    """A server that can be measured."""

    name: str
    protocol: str  # "grpc" or "http"
    module: str  # run as `python -m`
    package: str  # without which it cannot be
    settings: tuple[dict[str, Any], ...]  # worth trying


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server of a subject. Ready when it has answered once."""

    def __init__(self, kind: Kind, subject: Subject, setting: dict[str, Any], cpus: Sequence[int]) -> None:
        """Start it and wait for its first answer.

        Raises:
            FuseqError: it ended, or did not answer in time.
        """
        self.kind, self.subject, self.setting = kind, subject, setting
        self.port = _free_port()
        begin = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        spec = {"port": self.port, "weights": subject.weights.to_json(), "limit": subject.limit,
                "forced": subject.forced, **setting}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", kind.module, json.dumps(spec)],
            cwd=ROOT, stdout=self._log, stderr=self._log, env={**os.environ, **setting.get("env", {})},
        )  # fmt: skip
        os.sched_setaffinity(self.process.pid, cpus)
        try:
            self._wait(begin)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - begin  # to the first answer

    @property
    def address(self) -> str:
        """For `Load`."""
        return (
            f"grpc://127.0.0.1:{self.port}" if self.kind.protocol == "grpc" else f"http://127.0.0.1:{self.port}/predict"
        )

    def load(self, **values: Any) -> dict[str, Any]:
        """Send a load and return what came of it."""
        values = {"forced": self.subject.forced, "limit": self.subject.limit, **values}
        return send(Load(self.address, self.subject.texts, **values))

    def _wait(self, begin: float) -> None:
        first = Load(self.address, self.subject.texts, 1.0, forced=self.subject.forced, limit=self.subject.limit)
        ask = _grpc_answers if self.kind.protocol == "grpc" else _http_answers
        while time.perf_counter() - begin < PATIENCE:
            if self.process.poll() is not None:
                raise FuseqError(f"{self.kind.name} ended: {self._said()}")
            if ask(first):
                return
            time.sleep(0.02)
        raise FuseqError(f"{self.kind.name} gave no answer within {PATIENCE:g} s: {self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def family(self) -> list[psutil.Process]:
        """The process and its children."""
        found = psutil.Process(self.process.pid)
        return [found, *found.children(recursive=True)]

    def rss_mib(self) -> float:
        """Resident memory of all its processes; what they share is counted in each."""
        return float(sum(process.memory_info().rss for process in self.family()) / 2**20)

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self.family()))

    def close(self) -> None:
        """Stop it."""
        if self.process.poll() is None:
            children = self.family()[1:]
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for child in children:
                if child.is_running():
                    child.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _grpc_answers(load: Load) -> bool:
    """Whether one call is answered now, over a connection of its own."""
    import grpc

    with grpc.insecure_channel(load.address.removeprefix("grpc://")) as channel:
        try:
            call: Any = channel.unary_unary(METHOD)
            call(grpc_messages(load)[0], timeout=load.timeout)
        except grpc.RpcError:
            return False
    return True


def _http_answers(load: Load) -> bool:
    """The same over HTTP."""
    body = http_messages(load)[0]
    request = urllib.request.Request(load.address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=load.timeout) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
