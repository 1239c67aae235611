"""How cost grows: with concurrency, with the length of the output, and over ten thousand requests (not at all).

And what a short sentence waits for that comes while long ones are decoded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.bars import bar
from benchmarks.contenders import Contender, installed
from benchmarks.models import Subject
from benchmarks.peers import OURS
from benchmarks.peers.base import Ids, Search
from benchmarks.records import Recorder

ROWS = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lengths: tuple[int, ...] = (8, 16, 32, 64, 128)  # of the output; as far as the model's limit reaches
    seconds: float = 5.0
    rows: int = 8  # that decode together while the length is measured
    requests: int = 10_000
    samples: int = 40  # of the memory over all requests
    long_rows: int = 32  # of a short sentence's neighbours
    long_tokens: int = 100
    short_tokens: int = 4


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every subject."""
    steps = len(subjects) * (len(plan.concurrency) + len(plan.lengths) + 2)
    with bar(console, "growth", steps) as advance:
        for subject in subjects:
            with Contender(OURS, subject.weights, {"rows": ROWS}, plan.cpus) as engine:
                for count in plan.concurrency:
                    recorder.add("concurrency", subject=subject.name, **at_once(engine, subject, count, plan))
                    advance(f"{subject.name}, {count} at once")
            for length in plan.lengths:
                if found := of_length(subject, length, plan):
                    recorder.add("length", subject=subject.name, **found)
                advance(f"{subject.name}, {length} tokens")
            for record in join(subject, plan):
                recorder.add("join", subject=subject.name, **record)
            advance(f"{subject.name}, a short one among long ones")
            recorder.add("leak", subject=subject.name, **leak(subject, plan))
            advance(f"{subject.name}, {plan.requests} requests")


def at_once(engine: Contender, subject: Subject, count: int, plan: Plan) -> dict[str, Any]:
    """Tokens a second with `count` sentences in the engine all the time."""
    batch, search = subject.batch(max(64, count)), subject.search(1).to_json()
    engine.call("in_flight", batch=batch, search=search, concurrency=count, seconds=plan.seconds / 5)
    found = engine.call("in_flight", batch=batch, search=search, concurrency=count, seconds=plan.seconds)
    return {
        "at_once": count,
        "tokens_per_s": round(found["tokens"] / found["seconds"], 1),
        "sentences_per_s": round(found["sentences"] / found["seconds"], 2),
        "rss_mib": round(found["rss_kib"] / 1024, 1),
    }


def of_length(subject: Subject, length: int, plan: Plan) -> dict[str, Any]:
    """What a token costs in an output of exactly `length`; nothing where the model's limit is lower."""
    from serving.core.manifest import open_bundle

    if length > open_bundle(subject.weights.path("bundle")).manifest.limits.target:
        return {}
    batch, search = subject.batch(plan.rows), replace(subject.search(1), forced=length)
    with Contender(OURS, subject.weights, {"rows": plan.rows}, plan.cpus) as engine:
        engine.call("step_times", batch=batch, search=search.to_json())
        rounds = [engine.call("step_times", batch=batch, search=search.to_json()) for _ in range(3)]
        rss, _ = engine.memory()
    times = [[seconds for _, seconds in found["steps"]] for found in rounds]
    total = float(np.median([sum(steps) for steps in times]))
    best = min(times, key=sum)
    tail = max(1, len(best) // 4)
    return {
        "length": length,
        "us_per_token": round(1e6 * total / (length * len(batch)), 2),
        "first_quarter_us": round(1e6 * float(np.median(best[:tail])) / len(batch), 2),
        "last_quarter_us": round(1e6 * float(np.median(best[-tail:])) / len(batch), 2),
        "rss_mib": round(rss / 1024, 1),
    }


def join(subject: Subject, plan: Plan) -> list[dict[str, Any]]:
    """A short sentence alone, and coming while `long_rows` long ones are decoded: ours, and CTranslate2's (case 59)."""
    long, short = subject.batch(plan.long_rows), subject.sources[0]
    peers = {OURS: {}, "ctranslate2": {"quantization": "int8", "inter": len(plan.cpus), "intra": 1, "split": 0}}
    records = []
    for peer, setting in peers.items():
        if peer != OURS and (peer not in subject.peers or not installed(peer)):
            continue
        with Contender(peer, subject.weights, setting, plan.cpus) as contender:
            contender.load([short])
            search = Search(forced=plan.short_tokens)
            alone = [contender.run(search) for _ in range(5)]
            limits = [plan.long_tokens, plan.short_tokens]
            found = [contender.call("join", long=long, short=short, limits=limits) for _ in range(5)]
        records.append(
            {
                "peer": peer,
                "alone_ms": round(1e3 * float(np.median(alone)), 3),
                "joining_ms": round(1e3 * float(np.median([times["short"] for times in found])), 3),
                "long_ms": round(1e3 * float(np.median([times["long"] for times in found])), 3),
            }
        )
    return records


def leak(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Resident memory over mixed requests: the slope after the first quarter, in bytes a request (case 76)."""
    draw = random.Random(0)
    each = max(1, plan.requests // plan.samples)
    sizes: list[float] = []
    with Contender(OURS, subject.weights, {}, plan.cpus) as engine:
        for _ in range(plan.samples):
            batch, search = _mixed(subject, draw, each)
            engine.load(batch)
            engine.run(search)
            sizes.append(engine.memory()[0] / 1024)
    settled = sizes[len(sizes) // 4 :]
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0]) if len(settled) > 1 else 0.0
    return {
        "requests": each * plan.samples,
        "bytes_per_request": round(slope * 2**20 / each, 1),
        "first_mib": round(sizes[0], 1),
        "last_mib": round(sizes[-1], 1),
        "rss_mib": [round(size, 1) for size in sizes],
    }


def _mixed(subject: Subject, draw: random.Random, count: int) -> tuple[Ids, Search]:
    """Sources of every length under a search drawn anew: greedy or a beam, outputs short or long."""
    sources = [draw.choice(subject.sources) for _ in range(count)]
    cut = [[*source[: draw.randint(1, len(source)) - 1], source[-1]] for source in sources]
    return cut, Search(draw.choice((1, 1, 2, 4)), subject.limit, draw.choice((0, 1, 4, 16)) or subject.forced)
