"""Measuring a model on a test set: a training run decoded with PyTorch, or a bundle as a server would run it.

PyTorch is loaded only for a training run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from export.bulk import Watch, translate_all
from serving.core.errors import ConfigError, InvalidInput, NotFound
from serving.core.manifest import MANIFEST_NAME, open_bundle
from serving.core.types import SearchOptions, StopReason
from serving.engine.sessions import open_stages
from training.corpus import read_lines
from training.metrics import Scores, score
from training.split import SplitFolder


@dataclass(frozen=True, slots=True)
class TestSet:
    """Sentences with one or more references each; the first is the one that single-reference scores use."""

    __test__ = False  # it is not a test, whatever its name makes a test runner think

    name: str
    sources: list[str]
    references: list[list[str]]
    languages: tuple[str, str] = ("", "")
    sha256: str = ""  # of the split

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidInput(f"{self.name} has no sentences")


def open_part(folder: Path, part: str) -> TestSet:
    """A part of a split on disk, with all its references.

    Raises:
        NotFound: there is no split, or it has no such part.
        InvalidInput: a file was altered since the split was made.
    """
    split = SplitFolder.open(folder)
    if part not in split.parts():
        raise NotFound(f"the split in {folder} has no part {part!r}; it has {', '.join(split.parts())}")
    split.verify()
    pairs, record = list(split.pairs(part)), split.record
    references = [[pair.target] for pair in pairs]
    if f"{part}.refs.jsonl" in record.files:
        references = split.references(part)
    name = f"{record.recipe} {part}"
    return TestSet(name, [pair.source for pair in pairs], references, (record.source, record.target), record.sha256)


def open_files(source: Path, references: Sequence[Path]) -> TestSet:
    """A file of sentences and one or more files of references, line by line.

    Raises:
        NotFound: a file is not there.
        InvalidInput: the files have not the same number of lines.
    """
    sources = list(read_lines(source))
    columns = [list(read_lines(path)) for path in references]
    for path, column in zip(references, columns, strict=True):
        if len(column) != len(sources):
            raise InvalidInput(f"{path} has {len(column)} lines, {source} {len(sources)}; they are not parallel")
    return TestSet(source.name, sources, [list(row) for row in zip(*columns, strict=True)])


@dataclass(frozen=True, slots=True)
class Output:
    """What a model made of one sentence."""

    text: str
    stop_reason: StopReason
    truncated: bool  # whether the source was cut to the model's limit


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model made of a test set, and how."""

    outputs: list[Output]
    seconds: float
    how: dict[str, str | int]  # what decoded: kind, architecture, precision, beam, ...


def translate(target: Path, test: TestSet, beam: int | None, precision: str | None, watch: Watch) -> Outputs:
    """Translate a test set with a bundle, or with a training run or a weights file in it.

    Args:
        beam: the bundle's default, or that of the run's evaluations, for None.
        precision: of a bundle; its default for None.

    Raises:
        NotFound: there is no bundle and no run.
        ConfigError: the model translates between other languages, or a run was asked for a precision.
        FuseqError: the model cannot be opened, or a sentence could not be translated.
    """
    if (target / MANIFEST_NAME).is_file():
        return _with_bundle(target, test, beam, precision, watch)
    if target.is_dir() and not (target / "config.json").is_file():
        raise NotFound(f"{target} is neither a bundle (with a {MANIFEST_NAME}) nor a training run (with a config.json)")
    if precision is not None:
        raise ConfigError(f"{target} is no bundle, and only bundles have precisions; leave --precision out")
    return _with_run(target, test, beam, watch)


def _check_languages(test: TestSet, source: str, target: str) -> None:
    if all(test.languages) and source and target and test.languages != (source, target):
        known = "-".join(test.languages)
        raise ConfigError(f"the model translates {source}-{target}, but {test.name} is {known}; name another test set")


def _with_run(target: Path, test: TestSet, beam: int | None, watch: Watch) -> Outputs:
    from training.checkpoint import load_trained  # PyTorch
    from training.decode import decode

    trained = load_trained(target)
    config = trained.config
    _check_languages(test, config.data.source_language, config.data.target_language)
    options = SearchOptions(beam=beam or config.evaluation.beam)
    ids = [trained.codec.encode(text) if text.strip() else [] for text in test.sources]
    limit = config.limits.source - 1  # the end symbol takes one
    begin = time.perf_counter()
    found = decode(trained.model, [source[:limit] for source in ids], options, progress=watch)
    seconds = time.perf_counter() - begin
    outputs = [
        Output(trained.codec.decode(best[0].tokens), best[0].stop_reason, len(source) > limit)
        if best
        else Output("", StopReason.EOS, False)
        for source, best in zip(ids, found, strict=True)
    ]
    how: dict[str, str | int] = {"kind": "training run", "architecture": str(config.model["architecture"])}
    return Outputs(outputs, seconds, {**how, "step": int(trained.details["step"] or 0), "beam": options.beam})


def _with_bundle(target: Path, test: TestSet, beam: int | None, precision: str | None, watch: Watch) -> Outputs:
    bundle = open_bundle(target)
    manifest = bundle.manifest
    _check_languages(test, manifest.source_language, manifest.target_language)
    stages = open_stages(bundle, precision)
    options = manifest.search.options()
    options = replace(options, beam=beam or options.beam)
    bulk = translate_all(bundle, stages, test.sources, options, watch)
    outputs = [Output(one.text, one.stop_reason, one.truncated) for one in bulk.translations]
    how: dict[str, str | int] = {"kind": "bundle", "architecture": manifest.architecture, "precision": stages.precision}
    return Outputs(
        outputs, bulk.seconds, {**how, "device": stages.device, "workers": bulk.workers, "beam": options.beam}
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What came out. Shares are of all sentences, 0 to 1."""

    scores: Scores  # against the first reference of each sentence
    all_references: Scores | None  # where a sentence has more than one
    empty: float  # nothing for a source that says something
    copied: float  # the source again, where no reference is the source
    looping: float  # cut as a repetition, or at the largest length
    faulty: float  # any of these
    truncated: int  # sources that were cut to the model's limit

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(test: TestSet, outputs: Sequence[Output]) -> Report:
    """Scores and shares of faulty outputs."""
    texts = [output.text for output in outputs]
    scores = score(texts, [references[:1] for references in test.references])
    several = any(len(references) > 1 for references in test.references)
    rows = list(zip(test.sources, test.references, outputs, strict=True))
    empty = [bool(source.strip()) and not output.text.strip() for source, _, output in rows]
    copied = [_is_copy(source, references, output.text) for source, references, output in rows]
    looping = [output.stop_reason is not StopReason.EOS for output in outputs]
    count = len(rows)
    return Report(
        scores=scores,
        all_references=score(texts, test.references) if several else None,
        empty=sum(empty) / count,
        copied=sum(copied) / count,
        looping=sum(looping) / count,
        faulty=sum(map(any, zip(empty, copied, looping, strict=True))) / count,
        truncated=sum(output.truncated for output in outputs),
    )


def _is_copy(source: str, references: Sequence[str], text: str) -> bool:
    said = source.strip()
    return bool(said) and text.strip() == said and said not in {reference.strip() for reference in references}
