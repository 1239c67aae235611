"""One command for a machine with a CUDA device: is it right there, and is it fast there.

Parity with PyTorch, independence of neighbours, and speed beside PyTorch eager and compiled on the same device, in one
JSON. With `--device cpu` it rehearses; what it finds is called a figure of a GPU only where it ran on one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.agreement import compare, require_equal
from benchmarks.bars import bar
from benchmarks.contenders import Contender, ContenderFailed
from benchmarks.models import Subject
from benchmarks.pairing import interleave, ratio, summarize
from benchmarks.peers import OURS, find_peer
from benchmarks.peers.base import Ids, Search, Setting
from benchmarks.records import Recorder

EAGER, COMPILED = "pytorch-eager", "pytorch-compiled"
NEIGHBOURS = 33  # one more than a round number, as a batch is that grew


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is checked, and for how long at most."""

    cpus: tuple[int, ...]
    device: str = "cuda"
    batches: tuple[int, ...] = (1, 32, 128)
    sentences: int = 32
    rounds: int = 20
    seconds: float = 8.0  # a cell
    minutes: float = 7.5  # in all; cells beyond are left out and named
    compiled: bool = True


def describe(device: str) -> dict[str, Any]:
    """What the device is; `gpu` says whether figures are those of one."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return {"gpu": False, "device": device}
    found = torch.cuda.get_device_properties(0)
    return {"gpu": True, "device": found.name, "memory_gib": round(found.total_memory / 2**30, 1),
            "cuda": torch.version.cuda}  # fmt: skip


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every subject, correctness first.

    Raises:
        Disagreement: outputs differ from PyTorch's in fp32, or with a sentence's neighbours.
    """
    begin = time.monotonic()
    recorder.add("device", **describe(plan.device))
    with bar(console, "gpu check", len(subjects) * (2 + len(plan.batches))) as advance:
        for subject in subjects:
            recorder.add("parity", subject=subject.name, **parity(subject, plan))
            advance(f"{subject.name}: parity")
            recorder.add("invariance", subject=subject.name, **invariance(subject, plan))
            advance(f"{subject.name}: neighbours")
        for subject in subjects:
            for size in plan.batches:
                if time.monotonic() - begin > 60 * plan.minutes:
                    recorder.add("left-out", subject=subject.name, batch=size, why="out of time")
                else:
                    for record in speed(subject, size, plan):
                        recorder.add("gpu-speed", subject=subject.name, batch=size, **record)
                advance(f"{subject.name}: batch {size}")


def _outputs(peer: str, subject: Subject, setting: Setting, batch: Ids, search: Search, plan: Plan) -> Ids:
    with Contender(peer, subject.weights, setting, plan.cpus) as contender:
        contender.load(batch)
        return contender.outputs(search)


def parity(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Tokens in fp32 against PyTorch's, and of the default precision against fp32."""
    batch, search = subject.batch(min(plan.sentences, len(subject.sources))), subject.search(1)
    exact = {**(find_peer(OURS).exact or {}), "device": plan.device}
    theirs = _outputs(EAGER, subject, {"device": plan.device}, batch, search, plan)
    mine = _outputs(OURS, subject, exact, batch, search, plan)
    require_equal(f"{subject.name} on {plan.device} in fp32", mine, theirs)
    default = compare(mine, _outputs(OURS, subject, {"device": plan.device}, batch, search, plan))
    return {"sentences": len(batch), "fp32_identical": 1.0, "default_identical": round(default.identical, 4),
            "default_prefix": round(default.prefix, 4)}  # fmt: skip


def invariance(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Every sentence alone and among others of other lengths, at the default precision: the tokens must be the same."""
    count = min(plan.sentences, len(subject.sources))
    cut = [
        [*source[: 1 + number % len(source)][:-1], source[-1]]
        for number, source in enumerate(subject.batch(NEIGHBOURS))
    ]
    mixed, search = [*subject.batch(count), *cut], subject.search(1)
    with Contender(OURS, subject.weights, {"device": plan.device}, plan.cpus) as engine:
        engine.load(mixed)
        together = engine.outputs(search)[:count]
        alone = []
        for source in mixed[:count]:
            engine.load([source])
            alone += engine.outputs(search)
    require_equal(f"{subject.name} on {plan.device}, alone against among {len(mixed)}", alone, together)
    return {"sentences": count, "neighbours": len(mixed) - 1, "identical": 1.0}


def speed(subject: Subject, size: int, plan: Plan) -> list[dict[str, Any]]:
    """Ours beside PyTorch eager and compiled, interleaved."""
    half = {"dtype": "float16"} if plan.device == "cuda" else {"threads": len(plan.cpus)}
    contestants: dict[str, Setting] = {OURS: {"device": plan.device}, EAGER: {"device": plan.device, **half}}
    if plan.compiled:
        contestants[COMPILED] = {"device": plan.device, **half}
    batch, search = subject.batch(size), subject.search(1)
    failed: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = {p: stack.enter_context(Contender(p, subject.weights, s, plan.cpus)) for p, s in contestants.items()}
        for peer, contender in list(running.items()):
            contender.load(batch)
            try:
                contender.run(search)  # compiles
            except ContenderFailed as error:
                if peer == OURS:
                    raise
                failed.append({"peer": peer, "failed": str(error)})
                del running[peer]
        runs = {peer: (lambda contender=contender: contender.run(search)) for peer, contender in running.items()}
        times = interleave(runs, rounds=plan.rounds, seconds=plan.seconds)
        return failed + [_record(peer, contender, size, times) for peer, contender in running.items()]


def _record(peer: str, contender: Contender, size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    found, faster = summarize(times[peer]), ratio(times[OURS], times[peer])
    record = {
        "peer": peer, "setting": contender.setting, "rounds": found.rounds, "sentences_per_s": size / found.median,
        "tokens_per_s": size / found.median * contender.tokens_per_sentence, "p50_ms": 1e3 * found.median,
        "p95_ms": 1e3 * found.p95, "ours_faster": faster.value, "ours_faster_low": faster.low,
        "ours_faster_high": faster.high,
    }  # fmt: skip
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()}


if __name__ == "__main__":  # `python -m benchmarks.gpu_check`
    import sys

    from benchmarks.cli import main

    main(["gpu-check", *sys.argv[1:]])
