"""Whole batches at once: one sentence, or many, handed over together and waited for.

A cell is a subject, a beam and a batch size. In every cell each peer is swept over its settings and taken at its best;
then it and we run in turn, and the ratio is that of the medians in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.agreement import compare, require_equal
from benchmarks.bars import bar
from benchmarks.contenders import Contender, ContenderFailed, installed, version_of
from benchmarks.models import Subject
from benchmarks.pairing import interleave, ratio, summarize
from benchmarks.peers import OURS, find_peer
from benchmarks.peers.base import Ids, Search, Setting
from benchmarks.records import Record, Recorder
from benchmarks.tuning import best

MOST_BATCHES = 200
CHUNK = 128  # sentences that are translated together where only the outputs matter
CHECKED = 16  # sentences whose outputs are compared before a subject is timed


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cpus: tuple[int, ...]
    beams: tuple[int, ...] = (1, 4)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    rounds: int = 400
    seconds: float = 10.0  # a pair of contenders in a cell, the sweep apart
    sweep: bool = True  # all settings of the peers; otherwise the first one of each
    peers: tuple[str, ...] = ()  # only these; all for none


def measure(subjects: Sequence[Subject], plan: Plan, recorder: Recorder, console: Console) -> None:
    """Every cell of every subject.

    Raises:
        Disagreement: an engine with the same weights and precision gives other tokens.
    """
    cells = [(s, beam, size) for s in subjects for beam in plan.beams for size in sizes(s, plan)]
    with bar(console, "offline", len(cells)) as advance:
        for subject, beam, size in cells:
            if size == plan.batches[0]:
                check(subject, beam, plan, recorder)
            for record in cell(subject, beam, size, plan):
                recorder.add("offline", **record)
            advance(f"{subject.name} beam {beam} batch {size}")


def sizes(subject: Subject, plan: Plan) -> list[int]:
    """Batch sizes of a subject; real sentences also as one batch of all of them."""
    return [*plan.batches, *([len(subject.sources)] if subject.real and len(plan.batches) > 1 else [])]


def batches(subject: Subject, size: int) -> list[Ids]:
    """What the rounds of a cell translate in turn: real sentences differ, so every round takes the next ones."""
    if not subject.real:
        return [subject.batch(size)]
    count = max(1, min(MOST_BATCHES, len(subject.sources) // size))
    return [subject.sources[size * index : size * (index + 1)] for index in range(count)]


def contestants(subject: Subject, beam: int, size: int, plan: Plan) -> list[str]:
    """The peers that can do this work here: plain loops only know greedy search, and do not cut up what is too much."""
    known = [peer for peer in subject.peers if not plan.peers or peer in plan.peers]
    loops = ("pytorch-eager", "pytorch-compiled", "plain-onnx")
    able = [peer for peer in known if peer not in loops or (beam == 1 and size <= CHUNK)]
    return [peer for peer in able if installed(peer)]


def check(subject: Subject, beam: int, plan: Plan, recorder: Recorder) -> None:
    """Compare every peer's tokens with ours, in fp32 and at the setting of the sweep's first try.

    Raises:
        Disagreement: in fp32 they differ.
    """
    sample, search = subject.batch(min(CHECKED, len(subject.sources))), subject.search(beam)
    mine = _outputs(OURS, subject, dict(find_peer(OURS).exact or {}), sample, search, plan)
    default = _outputs(OURS, subject, {}, sample, search, plan)
    rows = [{"peer": OURS, "against": "fp32", **_agreement(mine, default)}]
    for peer in contestants(subject, beam, len(sample), plan):
        exact = find_peer(peer).exact
        if exact is not None:
            theirs = _outputs(peer, subject, exact, sample, search, plan)
            require_equal(f"{subject.name}, beam {beam}, {peer} in fp32", mine, theirs)
        first = find_peer(peer).settings(len(plan.cpus), len(sample))[0]
        rows.append({"peer": peer, "against": "fp32", "setting": first, "equal_in_fp32": exact is not None,
                     **_agreement(mine, _outputs(peer, subject, first, sample, search, plan))})  # fmt: skip
    for row in rows:
        recorder.add("agreement", subject=subject.name, beam=beam, sentences=len(sample), **row)


def _agreement(mine: Ids, theirs: Ids) -> dict[str, float]:
    found = compare(mine, theirs)
    return {"identical": round(found.identical, 4), "prefix": round(found.prefix, 4)}


def _outputs(peer: str, subject: Subject, setting: Setting, sources: Ids, search: Search, plan: Plan) -> Ids:
    with Contender(peer, subject.weights, setting, plan.cpus) as contender:
        contender.load(*(sources[first : first + CHUNK] for first in range(0, len(sources), CHUNK)))
        return contender.outputs(search)


def cell(subject: Subject, beam: int, size: int, plan: Plan) -> list[Record]:
    """One record a contender, ours first."""
    work, search = batches(subject, size), subject.search(beam)
    records = []
    with Contender(OURS, subject.weights, {}, plan.cpus) as ours:
        all_ours: list[float] = []
        for peer in contestants(subject, beam, size, plan):
            setting = _best_setting(peer, subject, beam, size, plan)
            with Contender(peer, subject.weights, setting, plan.cpus) as theirs:
                times = _pair({OURS: ours, peer: theirs}, work, search, plan)
                all_ours += times[OURS]
                records.append(_record(subject, beam, size, theirs, times))
        if not all_ours:
            all_ours = _pair({OURS: ours}, work, search, plan)[OURS]
        records.insert(0, _record(subject, beam, size, ours, {OURS: all_ours}))
    return records


def _pair(contenders: dict[str, Contender], work: list[Ids], search: Search, plan: Plan) -> dict[str, list[float]]:
    """Times of contenders that run in turn, in each round on the same batch."""
    for contender in contenders.values():
        contender.load(*work)
    runs = {peer: (lambda contender=contender: contender.run(search)) for peer, contender in contenders.items()}
    return interleave(runs, rounds=plan.rounds, seconds=plan.seconds)


def _best_setting(peer: str, subject: Subject, beam: int, size: int, plan: Plan) -> Setting:
    """The fastest of a peer's settings in a cell, on the cell's first batch."""
    batch, search = batches(subject, size)[0], subject.search(beam)

    def attempt(setting: Setting, rounds: int, patience: float) -> float:
        with Contender(peer, subject.weights, setting, plan.cpus) as contender:
            contender.load(batch)
            contender.run(search, patience)  # warm-up
            return statistics.median(contender.run(search, patience) for _ in range(rounds))

    settings = find_peer(peer).settings(len(plan.cpus), size)
    return best(settings, attempt).setting if plan.sweep else settings[0]


def _record(subject: Subject, beam: int, size: int, contender: Contender, times: dict[str, list[float]]) -> Record:
    found = summarize(times[contender.peer])
    total = sum(times[contender.peer])
    rss, peak = contender.memory()
    faster = ratio(times[OURS], times[contender.peer])
    record = {
        "subject": subject.name, "beam": beam, "batch": size, "peer": contender.peer,
        "version": version_of(contender.peer), "setting": contender.setting, "rounds": found.rounds,
        "sentences_per_s": size * found.rounds / total,
        "tokens_per_s": size * found.rounds / total * contender.tokens_per_sentence,
        "p50_ms": 1e3 * found.median, "p95_ms": 1e3 * found.p95, "spread": found.spread,
        "peak_rss_mib": peak / 1024, "rss_mib": rss / 1024, "disk_mib": contender.disk_bytes / 2**20,
        "ours_faster": faster.value, "ours_faster_low": faster.low, "ours_faster_high": faster.high,
    }  # fmt: skip
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in record.items()}


def quality(subject: Subject, beams: Sequence[int], plan: Plan, recorder: Recorder) -> None:
    """BLEU of every contender on real sentences at the setting that it is fastest with, and of ours in fp32."""
    if not subject.references:
        return
    from serving.core.codecs import open_codec
    from serving.core.manifest import open_bundle

    bundle = open_bundle(subject.weights.path("bundle"))
    codec = open_codec(bundle, bundle.manifest.target_codec)
    for beam in beams:
        peers = [OURS, *contestants(subject, beam, CHUNK, plan)]
        settings = [(peer, _fastest(recorder.records, subject.name, beam, peer)) for peer in peers]
        for peer, fastest in [*settings, (OURS, dict(find_peer(OURS).exact or {}))]:
            try:
                ids = _outputs(peer, subject, fastest, subject.sources, subject.search(beam), plan)
            except ContenderFailed as error:
                recorder.add("quality", subject=subject.name, beam=beam, peer=peer, failed=str(error))
                continue
            score = bleu([codec.decode(row) for row in ids], subject.references)
            recorder.add("quality", subject=subject.name, beam=beam, peer=peer, setting=fastest,
                         sentences=len(ids), bleu=round(score, 2))  # fmt: skip


def _fastest(records: Sequence[Record], subject: str, beam: int, peer: str) -> Setting:
    """The setting that was fastest for the largest batch."""
    rows = [
        r for r in records if r["record"] == "offline" and (r["subject"], r["beam"], r["peer"]) == (subject, beam, peer)
    ]
    if not rows:
        return {} if peer == OURS else find_peer(peer).settings(1, 1)[0]
    found: dict[str, Any] = max(rows, key=lambda row: row["batch"])["setting"]
    return found


def bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU by sacreBLEU."""
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(outputs), [list(references)]).score)
