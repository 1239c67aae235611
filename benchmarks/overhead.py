"""What a server costs beside its arithmetic: processor time by part, idle, in memory, and until the first answer."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bars import bar
from benchmarks.models import Subject
from benchmarks.records import Recorder
from benchmarks.servers.instrumented import RUNTIME
from benchmarks.servers.process import Kind, Server
from serving.core.errors import FuseqError

PLAIN = Kind("fuseq", "grpc", "benchmarks.servers.ours", "onnxruntime", ({},))
INSTRUMENTED = Kind("fuseq, timed", "grpc", "benchmarks.servers.instrumented", "onnxruntime", ({},))
FEW_ROWS, MANY_ROWS = 8, 136  # that memory per row is read off


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    seconds: float = 10.0
    in_flight: int = 128
    repeats: int = 3
    idle_seconds: float = 5.0


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every subject."""
    with bar(console, "overhead", 3 * len(subjects)) as advance:
        for subject in subjects:
            parts = [by_part(subject, plan) for _ in range(plan.repeats)]
            middle = sorted(parts, key=lambda found: found["outside"])[len(parts) // 2]
            recorder.add("overhead", subject=subject.name, **middle)
            advance(f"{subject.name}: processor time by part")
            recorder.add("idle", subject=subject.name, **idle(subject, plan))
            advance(f"{subject.name}: idle")
            recorder.add("memory", subject=subject.name, **memory(subject, plan))
            advance(f"{subject.name}: memory")


def by_part(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Shares of the server's processor time while it is never idle; `outside` is all but ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "parts.jsonl"
        with Server(INSTRUMENTED, subject, {"report": str(report)}, plan.cpus) as server:
            server.load(in_flight=plan.in_flight, seconds=plan.seconds / 5)
            before = _snapshot(server, report, 1)
            load = server.load(in_flight=plan.in_flight, seconds=plan.seconds)
            after = _snapshot(server, report, 2)
    spent = {part: after["parts"].get(part, 0.0) - before["parts"].get(part, 0.0) for part in after["parts"]}
    total = sum(spent.values())
    shares = {part: round(seconds / total, 4) for part, seconds in sorted(spent.items(), key=lambda item: -item[1])}
    return {
        "calls_per_s": load["answered"],
        "processors": round(total / plan.seconds, 3),
        "outside": round(1 - spent.get(RUNTIME, 0.0) / total, 4),
        "parts": shares,
        "not_told_apart": after["missing"],
    }


def _snapshot(server: Server, report: Path, wanted: int, patience: float = 10.0) -> dict[str, Any]:
    """Ask the server for its times and wait for the line."""
    os.kill(server.process.pid, signal.SIGUSR1)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
        if len(lines) >= wanted and lines[-1].endswith("}"):
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        time.sleep(0.02)
    raise FuseqError("the timed server did not report its times")


def idle(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Processor time of a server that nobody calls, and how long it takes to its first answer."""
    starts, shares = [], []
    for _ in range(plan.repeats):
        with Server(PLAIN, subject, {}, plan.cpus) as server:
            starts.append(server.start_seconds)
            time.sleep(min(1.0, plan.idle_seconds))  # what the first answer left behind
            before = server.cpu_seconds()
            time.sleep(plan.idle_seconds)
            shares.append((server.cpu_seconds() - before) / plan.idle_seconds)
    return {"first_answer_s": round(statistics.median(starts), 3), "idle_cpu": round(statistics.median(shares), 5)}


def memory(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Resident memory after work, and what a further row costs."""
    found = {}
    for rows in (FEW_ROWS, MANY_ROWS):
        with Server(PLAIN, subject, {"rows": rows}, plan.cpus) as server:
            started = server.rss_mib()
            server.load(in_flight=2 * MANY_ROWS, seconds=plan.seconds / 5)
            found[rows] = (started, server.rss_mib())
    each = (found[MANY_ROWS][1] - found[FEW_ROWS][1]) / (MANY_ROWS - FEW_ROWS)
    return {
        "started_mib": round(found[FEW_ROWS][0], 1),
        "worked_mib": {str(rows): round(after, 1) for rows, (_, after) in found.items()},
        "row_mib": round(each, 4),
    }
