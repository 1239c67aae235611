"""What is exported: a model with all that belongs to it, from a training run or put together by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.core.codecs import Codec, SentencePieceCodec, make_codec
from serving.core.errors import FuseqError, InvalidInput
from serving.core.manifest import CodecEntry, Provenance
from training.checkpoint import Trained, load_trained
from training.corpus import Pair, read_parallel
from training.models.base import Model
from training.runner import read_pairs

CODEC_FILE = "codec.model"
MOST_SENTENCES = 2000  # of a development set


@dataclass(frozen=True, slots=True)
class DevelopmentSet:
    """Sentences with one reference each. `name` is what the manifest calls it."""

    name: str
    sources: Sequence[str]
    references: Sequence[str]


@dataclass(frozen=True, slots=True)
class CodecFiles:
    """A codec as a bundle holds it: its entry in the manifest, and what the files that the entry names hold."""

    entry: CodecEntry
    contents: Mapping[str, bytes]

    def codec(self) -> Codec:
        """The codec itself."""
        return make_codec(self.entry, self.contents)


@dataclass(frozen=True, slots=True)
class Codecs:
    """Those of both sides, often the same."""

    source: CodecFiles
    target: CodecFiles

    @classmethod
    def joint(cls, model: bytes, normalisation: str = "") -> Codecs:
        """One SentencePiece model for both languages, as trainings here have it."""
        size = SentencePieceCodec(model).size
        entry = CodecEntry(kind=SentencePieceCodec.kind, file=CODEC_FILE, size=size, normalisation=normalisation)
        both = CodecFiles(entry, {CODEC_FILE: model})
        return cls(both, both)

    @property
    def contents(self) -> dict[str, bytes]:
        """Every file by name."""
        return {**self.source.contents, **self.target.contents}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is exported: a model in evaluation mode with its codecs and where it comes from."""

    model: Model
    codecs: Codecs
    architecture: str
    architecture_config: dict[str, Any]
    name: str
    source_language: str = ""
    target_language: str = ""
    provenance: Provenance = field(default_factory=Provenance)
    dev: DevelopmentSet | None = None


def load_subject(checkpoint: Path, dev: tuple[Path, Path] | None = None, name: str | None = None) -> Subject:
    """Load a training run: its best model, or the one of a given weights file.

    Args:
        checkpoint: the run's folder, or a weights file inside it.
        dev: source and reference file; for None those of the run's configuration, if they can be read.
        name: of the bundle; for None the configuration's.

    Raises:
        NotFound, ConfigError: there is no such run, or it is incomplete.
        InvalidInput: a file of `dev` is not there or the two are not parallel.
    """
    trained = load_trained(checkpoint)
    config = trained.config
    architecture_config = {key: value for key, value in config.model.items() if key != "architecture"}
    return Subject(
        trained.model,
        Codecs.joint(trained.vocabulary, config.vocabulary.normalisation),
        str(config.model["architecture"]),
        architecture_config,
        name or config.name,
        config.data.source_language,
        config.data.target_language,
        _provenance(trained),
        read_development_set(*dev) if dev is not None else _own_development_set(trained),
    )


def read_development_set(source: Path, target: Path) -> DevelopmentSet:
    """Two files, line by line, the first 2,000 sentences."""
    return _development_set(read_parallel(source, target), f"{source.name}, {target.name}")


def _own_development_set(trained: Trained) -> DevelopmentSet | None:
    """That of the configuration; None where its files have gone."""
    files = trained.config.data.dev
    try:
        names = [path.name for path in (files.file, files.source, files.target) if path is not None]
        return _development_set(read_pairs(files), ", ".join(names))
    except FuseqError:
        return None


def _development_set(pairs: Iterable[Pair], name: str) -> DevelopmentSet:
    kept = [pair for pair, _ in zip(pairs, range(MOST_SENTENCES), strict=False)]
    if not kept:
        raise InvalidInput(f"the development set {name} is empty")
    digest = hashlib.sha256("".join(f"{pair.source}\t{pair.target}\n" for pair in kept).encode()).hexdigest()
    sources, references = [pair.source for pair in kept], [pair.target for pair in kept]
    return DevelopmentSet(f"{name} (first {len(kept)}, SHA-256 {digest[:16]})", sources, references)


def _provenance(trained: Trained) -> Provenance:
    """What the run recorded of its data, and the configuration that it was trained with."""
    details = dict(trained.details)
    named = {key: str(details.pop(key, "") or getattr(trained.config.data, field)) for key, field in _NAMED.items()}
    config = trained.config.model_dump(mode="json", exclude={"data", "run"})
    return Provenance(**named, details={"training": details, "config": config})


_NAMED = {"data": "name", "licence": "licence", "attribution": "attribution"}  # manifest -> configuration
