"""From a trained model to a bundle, as the stages it goes through.

load -> graphs -> fuse -> search head -> verify -> calibrate -> quantize -> verify -> gate -> bundle
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from export.bundle import Draft, new_bundle
from export.calibrate import SENTENCES, Ranges, calibrate, random_sources
from export.errors import ExportError
from export.fusions import fuse
from export.gate import Quality, check_loss, measure_quality
from export.graphs import IR_VERSION, OPSET, Stage, build_stages, trained_tables
from export.heads import add_search_head
from export.nodes import operators
from export.quantize import METHOD, Report, quantize
from export.report import NEIGHBOURS
from export.sessions import Sessions
from export.subject import Subject
from export.verify import check_cached_decoding, check_independence, check_levels, check_parity, measure_parity
from export.weights import save_graphs
from serving.core.manifest import (
    Bundle,
    GraphSet,
    Limits,
    Manifest,
    Precision,
    SearchDefaults,
    Special,
    StateEntry,
    Tools,
    open_bundle,
)

FP32: Precision = "fp32"
INT8: Precision = "int8"
BOTH: tuple[Precision, ...] = (FP32, INT8)
FILES = {"encode": "encoder", "step": "step", "align": "align"}  # stage -> file name
SCORE_DRIFT = 1e-5  # how far a score may move with a row's neighbours (fp32 and int8)
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "fuseq")


@dataclass(frozen=True, slots=True)
class Options:
    """How it is exported."""

    precisions: tuple[Precision, ...] = BOTH  # the last one is the bundle's default
    version: str = "1"
    search: SearchDefaults = field(default_factory=SearchDefaults)
    max_loss: float = 0.5  # BLEU that int8 may lose against fp32
    gate: bool = True
    force: bool = False


class Reporter(Protocol):
    """Hears how an export comes along."""

    def begin(self, what: str, total: int | None = None) -> None: ...
    def advance(self, count: int = 1) -> None: ...


class Silent:
    """Reports nothing."""

    def begin(self, what: str, total: int | None = None) -> None: ...
    def advance(self, count: int = 1) -> None: ...


def export_bundle(subject: Subject, output: Path, options: Options, report: Reporter | None = None) -> Bundle:
    """Export `subject` to the folder `output`.

    Raises:
        ExportError: a stage cannot be exported or fused, or `output` must not be replaced.
        ParityError: a graph does not compute what the model computes.
        GateError: int8 loses too much quality.
    """
    report = report or Silent()
    _check_options(subject, options)
    with new_bundle(output, options.force) as draft:
        report.begin("PyTorch to ONNX", 3 if subject.model.has_alignment else 2)
        stages = build_stages(subject.model, on_stage=report.advance)
        fusions = {name: fuse(stage) for name, stage in stages.items()}
        add_search_head(stages["step"])
        for file, content in subject.codecs.contents.items():
            (draft.folder / file).write_bytes(content)

        sets = {FP32: _fp32(subject, stages, fusions, draft, report)}
        if INT8 in options.precisions:
            sets[INT8] = _int8(subject, stages, fusions, draft, report)
        manifest = draft.seal(_manifest(subject, options, sets))

        if options.gate and subject.dev is not None:
            sets = _gate(Bundle(draft.folder, manifest), sets, subject, options, report)
        report.begin("Writing")
        _drop_unwanted(draft, sets, options)
        draft.seal(_manifest(subject, options, sets))
        draft.publish()
    return open_bundle(output)


def _check_options(subject: Subject, options: Options) -> None:
    if not options.precisions:
        raise ExportError("no precision to export; name fp32, int8 or both")
    if INT8 in options.precisions and options.gate and subject.dev is None:
        raise ExportError(
            "int8 needs a development set to prove its quality, and there is none that can be read from here;"
            " give --dev SOURCE TARGET, or --no-gate"
        )


def _fp32(
    subject: Subject, stages: dict[str, Stage], fusions: dict[str, dict[str, int]], draft: Draft, report: Reporter
) -> GraphSet:
    """Save the fp32 graphs and prove them against PyTorch."""
    files, sessions = _save(FP32, stages, draft)
    report.begin("Parity of fp32 with PyTorch", 15)
    parity = measure_parity(subject.model, sessions, lambda cell: report.advance())
    check_parity(parity)
    report.begin("Cached against uncached decoding")
    check_cached_decoding(subject.model, sessions)
    return _proved(FP32, subject, stages, fusions, draft, files, sessions, parity, {})


def _int8(
    subject: Subject, stages: dict[str, Stage], fusions: dict[str, dict[str, int]], draft: Draft, report: Reporter
) -> GraphSet:
    """Quantize the stages, save them and prove that rows do not disturb each other."""
    ranges = _ranges(subject, stages, draft, report)
    report.begin("Quantizing")
    tables = trained_tables(subject.model)
    done = {name: quantize(stage, tables, ranges) for name, stage in stages.items()}
    files, sessions = _save(INT8, stages, draft)
    report.begin("Distance of int8 from PyTorch", 15)
    parity = measure_parity(subject.model, sessions, lambda cell: report.advance())
    return _proved(INT8, subject, stages, fusions, draft, files, sessions, parity, _summary(done))


def _ranges(subject: Subject, stages: dict[str, Stage], draft: Draft, report: Reporter) -> Ranges:
    """Ranges of activations, from sentences of the development set, or from random ids where there is none."""
    model = subject.model
    if subject.dev is None:
        sources = random_sources(model.sizes)
    else:
        codec = subject.codecs.source.codec()
        texts = [text for text in subject.dev.sources if text.strip()][:: max(1, len(subject.dev.sources) // SENTENCES)]
        longest = model.sizes.source_limit - 1
        sources = [[*codec.encode(text)[:longest], codec.special.eos] for text in texts[:SENTENCES]]
    report.begin("Calibrating int8", len(sources))
    return calibrate(stages, draft.folder, model.state_spec(), model.sizes, sources, report.advance)


def _summary(done: dict[str, Report]) -> dict[str, Any]:
    """What was quantized, and what was left and why, over all stages."""
    weights = {
        f"int8 in {stage}": ", ".join(f"{count} {kind}" for kind, count in sorted(one.quantized.items()))
        for stage, one in done.items()
    }
    kept = sorted({f"{name}: {reason}" for one in done.values() for name, reason in one.kept.items()})
    return {"method": METHOD, **weights, "left in fp32": kept}


def _save(precision: Precision, stages: dict[str, Stage], draft: Draft) -> tuple[dict[str, str], Sessions]:
    files = {name: f"{FILES[name]}.{precision}.onnx" for name in stages}
    save_graphs(draft.folder, {files[name]: stage.model for name, stage in stages.items()}, f"weights.{precision}.bin")
    return files, Sessions(draft.folder, files)


def _proved(
    precision: Precision,
    subject: Subject,
    stages: dict[str, Stage],
    fusions: dict[str, dict[str, int]],
    draft: Draft,
    files: dict[str, str],
    sessions: Sessions,
    parity: dict[str, float],
    quantized: dict[str, Any],
) -> GraphSet:
    """The checks of every precision, and its part of the manifest."""
    try:
        drift = check_independence(subject.model, sessions, SCORE_DRIFT)
        check_levels(draft.folder, files, subject.model)
    except ExportError as error:
        raise type(error)(f"{precision}: {error}") from error
    return GraphSet(
        graphs=files,
        parity={**{stage: float(f"{value:.3g}") for stage, value in parity.items()}, NEIGHBOURS: drift},
        fusions=fusions,
        operators={name: operators(stage.graph) for name, stage in stages.items()},
        quantized=quantized,
    )


def _gate(
    bundle: Bundle, sets: dict[Precision, GraphSet], subject: Subject, options: Options, report: Reporter
) -> dict[Precision, GraphSet]:
    """Translate the development set with every precision; fp32 is the measure of the others."""
    dev = subject.dev
    assert dev is not None
    found: dict[Precision, Quality] = {}
    for precision in sets:
        report.begin(f"Quality of {precision}", len(dev.sources))
        found[precision] = measure_quality(bundle, precision, dev, report.advance)
    reference = found[FP32]
    qualities = {FP32: reference.details} | {
        precision: check_loss(quality, reference, precision, options.max_loss)
        for precision, quality in found.items()
        if precision != FP32
    }
    return {precision: one.model_copy(update={"quality": qualities[precision]}) for precision, one in sets.items()}


def _drop_unwanted(draft: Draft, sets: dict[Precision, GraphSet], options: Options) -> None:
    """Remove the graphs of precisions that only served to check the others."""
    for precision in [one for one in sets if one not in options.precisions]:
        for file in (*sets.pop(precision).graphs.values(), f"weights.{precision}.bin"):
            (draft.folder / file).unlink()


def _manifest(subject: Subject, options: Options, sets: dict[Precision, GraphSet]) -> Manifest:
    sizes = subject.model.sizes
    special = sizes.special
    return Manifest(
        name=subject.name,
        version=options.version,
        source_language=subject.source_language,
        target_language=subject.target_language,
        architecture=subject.architecture,
        architecture_config=subject.architecture_config,
        state=tuple(
            StateEntry(name=t.name, dtype=t.dtype, axes=t.axes, role=t.role) for t in subject.model.state_spec()
        ),
        source_codec=subject.codecs.source.entry,
        target_codec=subject.codecs.target.entry,
        special=Special(pad=special.pad, bos=special.bos, eos=special.eos, unk=special.unk),
        limits=Limits(source=sizes.source_limit, target=sizes.target_limit),
        search=options.search,
        precisions={name: sets[name] for name in sets},
        default_precision=options.precisions[-1],
        tools=Tools(opset=OPSET, ir=IR_VERSION, versions=_versions()),
        provenance=subject.provenance,
        files={},
    )


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # fuseq, run from its sources
            continue
    return versions
