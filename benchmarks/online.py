"""A server under load that nobody holds back: fuseq beside CTranslate2 in two servers, on the same processors.

For every server at its best setting: calls a second while 95% of the callers are answered within 50, 200 and 500 ms;
latencies at 50% and 80% of its saturation; and what becomes of the callers at 150% of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.bars import Advance, bar
from benchmarks.capacity import LIMITS_MS, MOST_POINTS, Point, Search
from benchmarks.models import Subject
from benchmarks.records import Recorder
from benchmarks.servers.process import Kind, Server
from serving.core.errors import FuseqError

OURS = "fuseq"
IN_FLIGHT = 128  # callers of the closed loop that finds a server's best setting
SHARES = (0.5, 0.8, 1.5)  # of the saturation


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    inputs: tuple[int, ...] = (1, 16)  # sentences in a call
    seconds: float = 10.0  # of a load
    points: int = MOST_POINTS
    repeats: int = 2  # of the loads at shares of the saturation
    sweep: bool = True
    beam: int = 1
    timeout: float = 5.0  # after which a user gives up
    in_flight: int = IN_FLIGHT


def kinds(cores: int, inputs: int) -> list[Kind]:
    """The servers that are installed, with the settings worth trying for calls of so many sentences."""
    spread = [(1, 1), (1, cores), (cores, 1)] if cores > 1 else [(1, 1)]
    plain = [
        {"quantization": "int8", "inter": inter, "intra": intra, "max_batch": size, **environment}
        for inter, intra in reversed(spread)
        for size in (32, 64)
        for environment in ({}, {"env": {"CT2_USE_MKL": "1"}})
    ]
    lit = [
        {
            "quantization": "int8",
            "inter": 1,
            "intra": intra,
            "max_batch": size,
            "processes": processes,
            "batch_timeout": wait,
            "api_servers": 1,
        }
        for processes, intra in reversed(spread)
        for size in (-(-32 // inputs), -(-128 // inputs))  # calls
        for wait in (0.001, 0.005)
    ]
    found = [
        Kind(OURS, "grpc", "benchmarks.servers.ours", "onnxruntime", ({},)),
        Kind("CTranslate2, grpc.aio", "grpc", "benchmarks.servers.ctranslate2_grpc", "ctranslate2", tuple(plain)),
        Kind("CTranslate2, LitServe", "http", "benchmarks.servers.ctranslate2_litserve", "litserve", tuple(lit)),
    ]
    return [kind for kind in found if importlib.util.find_spec(kind.package) is not None]


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every subject with every number of sentences a call."""
    steps = len(subjects) * len(plan.inputs) * (plan.points + plan.repeats * len(SHARES))
    with bar(console, "online", steps) as advance:
        for subject in subjects:
            for inputs in plan.inputs:
                _Race(subject, inputs, plan, recorder, advance).run()


class _Race:
    """All servers with one subject and one number of sentences a call."""

    def __init__(self, subject: Subject, inputs: int, plan: Plan, recorder: Recorder, advance: Advance) -> None:
        self._subject, self._inputs, self._plan = subject, inputs, plan
        self._recorder, self._advance = recorder, advance
        self._seed = 0

    def run(self) -> None:
        """Find each server's best setting, then search all their capacities in turn, then the shares."""
        with ExitStack() as stack:
            servers = [stack.enter_context(self._best(kind)) for kind in kinds(len(self._plan.cpus), self._inputs)]
            searches = {server.kind.name: self._search(server) for server in servers}
            for _ in range(self._plan.points):
                for server in servers:
                    self._step(server, searches[server.kind.name])
                self._advance(f"{self._subject.name}, {self._inputs} a call")
            self._capacities(servers, searches)
            for server, share, number in self._shares(servers):
                rate = share * searches[server.kind.name].saturation()
                if rate:
                    found = self._open_loop(server, rate)
                    self._add("share", server, share=share, repeat=number, **found)

    def _shares(self, servers: list[Server]) -> Iterator[tuple[Server, float, int]]:
        for share in SHARES:
            for number in range(self._plan.repeats):
                for server in servers:
                    yield server, share, number
                self._advance(f"{self._subject.name}, {share:.0%} of saturation")

    def _best(self, kind: Kind) -> Server:
        """A running server at the setting that answers most calls when it is never idle."""
        settings = kind.settings if self._plan.sweep else kind.settings[:1]
        rates: list[tuple[float, dict[str, Any]]] = []
        failures: list[str] = []
        for setting in settings if len(settings) > 1 else ():
            try:
                with Server(kind, self._subject, setting, self._plan.cpus) as server:
                    rates.append((self._closed_loop(server, self._plan.seconds / 3)["answered"], setting))
            except FuseqError as error:
                failures.append(str(error))
        if len(settings) > 1 and not rates:
            raise FuseqError(failures[0])
        chosen = max(rates, key=lambda pair: pair[0])[1] if rates else settings[0]
        return Server(kind, self._subject, chosen, self._plan.cpus)

    def _search(self, server: Server) -> Search:
        """Starts at a tenth of what the server answers when it is never idle."""
        rate = self._closed_loop(server, self._plan.seconds / 3)["answered"]
        return Search(max(1.0, rate / 10), LIMITS_MS, self._plan.points, rate)

    def _step(self, server: Server, search: Search) -> None:
        rate = search.next_load()
        if rate is None:
            return
        found = self._open_loop(server, rate)
        p95 = found["p95_ms"] if found["p95_ms"] is not None else float("inf")
        search.add(Point(rate, found["answered"], p95, found["offered"]))
        self._add("load", server, rate=round(rate, 2), **found)

    def _capacities(self, servers: list[Server], searches: dict[str, Search]) -> None:
        for limit in LIMITS_MS:
            ours = searches[OURS].throughput(limit)
            for server in servers:
                theirs = searches[server.kind.name].throughput(limit)
                self._add("capacity", server, limit_ms=limit, calls_per_s=round(theirs, 2),
                          sentences_per_s=round(theirs * self._inputs, 2),
                          ours_faster=round(ours / theirs, 4) if theirs else None,
                          saturation=round(searches[server.kind.name].saturation(), 2))  # fmt: skip

    def _open_loop(self, server: Server, rate: float) -> dict[str, Any]:
        self._seed += 1
        seconds = self._plan.seconds
        return server.load(rate=rate, seconds=seconds, warm_up=seconds / 5, seed=self._seed, **self._common())

    def _closed_loop(self, server: Server, seconds: float) -> dict[str, Any]:
        in_flight = max(8, self._plan.in_flight // self._inputs)
        return server.load(in_flight=in_flight, seconds=seconds, **self._common())

    def _common(self) -> dict[str, Any]:
        return {"inputs": self._inputs, "beam": self._plan.beam, "timeout": self._plan.timeout}

    def _add(self, record: str, server: Server, **fields: Any) -> None:
        self._recorder.add(f"online-{record}", subject=self._subject.name, inputs=self._inputs, beam=self._plan.beam,
                           server=server.kind.name, setting=server.setting, **fields)  # fmt: skip
