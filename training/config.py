"""The training configuration: a YAML file, validated as a whole before anything runs.

Every field carries its own description; docs/training.md repeats them as a table.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from serving.core.errors import ConfigError, NotFound
from serving.core.manifest import Label
from training.models.base import find_architecture


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Pair(_Section):
    """A corpus: two files line by line, or one file of pairs. Paths start at the folder of the command."""

    source: Path | None = Field(default=None, description="Sentences, one a line, plain or .gz.")
    target: Path | None = Field(default=None, description="Their translations, line by line.")
    file: Path | None = Field(
        default=None,
        description="Instead of the two: a TSV file of pairs, plain or .gz, or a zip of manythings.org/anki.",
    )


class Data(_Section):
    """Which corpora, and what may be said of them."""

    train: Pair
    dev: Pair
    source_language: str = Field(default="", description="Language code of the sources, for the bundle.")
    target_language: str = Field(default="", description="Language code of the targets, for the bundle.")
    name: str = Field(default="", description="Name of the data; else what `fuseq data` recorded beside it.")
    licence: str = Field(default="", description="Its licence; else what `fuseq data` recorded.")
    attribution: str = Field(default="", description="Whom to credit; else what `fuseq data` recorded.")


class Vocabulary(_Section):
    """The joint SentencePiece model of both languages, with byte fallback (which alone takes 256 pieces)."""

    size: int = Field(default=8000, ge=300, description="Pieces.")
    model: Literal["unigram", "bpe"] = Field(
        default="unigram", description="Kind of SentencePiece model: unigram or bpe."
    )
    normalisation: str = Field(
        default="nmt_nfkc", description="SentencePiece's rule for every text; identity for none."
    )


class Limits(_Section):
    """Longer pairs are left out of the training."""

    source: int = Field(default=256, ge=4, description="Longest source in tokens, end symbol included.")
    target: int = Field(default=256, ge=4, description="Decoder positions: begin symbol and every token.")


_Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(_Section):
    """How weights move."""

    name: Literal["muon", "adamw"] = Field(
        default="adamw", description="adamw, or muon: Muon for hidden matrices and AdamW for the rest."
    )
    rate: float = Field(default=1e-3, ge=0, description="Peak learning rate of AdamW.")
    matrix_rate: float = Field(default=0.02, ge=0, description="Peak learning rate of Muon.")
    betas: tuple[_Decay, _Decay] = Field(default=(0.9, 0.98), description="Decay rates of AdamW's two averages.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay of matrices.")
    clip: float = Field(default=1.0, gt=0, description="Largest norm of the whole gradient.")
    label_smoothing: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the label spread over the vocabulary."
    )


class Schedule(_Section):
    """The learning rate over the steps."""

    kind: Literal["trapezoid", "inverse_root"] = Field(
        default="trapezoid",
        description="trapezoid: warm-up, plateau, linear fall to zero; inverse_root: warm-up, 1/sqrt(step).",
    )
    steps: int = Field(default=10_000, ge=1, description="Optimiser steps of the whole run.")
    warmup: int = Field(default=500, ge=0, description="Steps of the linear rise at the start.")
    decay: float = Field(default=0.4, ge=0, le=1, description="Share of the steps over which a trapezoid falls.")


class Batches(_Section):
    """Batches of similar lengths, by token budget."""

    tokens: int = Field(default=4096, ge=16, description="Most padded positions of the longer side in a batch.")
    pool: int = Field(default=20_000, ge=1, description="Random pairs sorted together by length.")


class Evaluation(_Section):
    """What is measured when, and when to stop."""

    every: int = Field(default=500, ge=1, description="Steps between evaluations; the last step is evaluated, too.")
    sentences: int = Field(default=1000, ge=1, description="Sentences of the development set, from its start.")
    beam: int = Field(default=1, ge=1, description="Beam of the evaluation; 1 is greedy.")
    average: int = Field(
        default=5, ge=1, description="Last snapshots averaged into the model that is evaluated and kept."
    )
    patience: int = Field(default=10, ge=1, description="Evaluations without a better BLEU before the run stops.")
    degenerate_from: float = Field(
        default=0.5,
        ge=0,
        description="Share of the steps from which on degenerate outputs fail the run; over 1: never.",
    )


class Run(_Section):
    """Reproducibility and bookkeeping."""

    seed: int = Field(default=1, ge=0, description="Seed of weights, dropout and the order of the pairs.")
    threads: int = Field(default=0, ge=0, description="Threads; 0 for every core the process may use.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="fp32, bf16 (autocast), or auto: bf16 where the device is fast at it."
    )
    save_every: int = Field(default=250, ge=1, description="Steps between saves: what a kill can cost at most.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="cpu, cuda, or auto: CUDA where there is one."
    )


def _folder_name(name: str) -> str:
    if "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError("names a folder in runs/, so it must hold no slash")
    return name


class Config(_Section):
    """The whole configuration. `model` holds `architecture` and that architecture's own keys."""

    name: Annotated[Label, AfterValidator(_folder_name)] = Field(description="Name of the run and of the bundle.")
    data: Data
    model: dict[str, Any] = Field(description="The architecture and its own keys, see below.")
    vocabulary: Vocabulary = Vocabulary()
    limits: Limits = Limits()
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    batches: Batches = Batches()
    evaluation: Evaluation = Evaluation()
    run: Run = Run()

    def architecture_config(self) -> Any:
        """The architecture's own frozen Config.

        Raises:
            ConfigError: unknown architecture or key, the nearest key named, or a value of the wrong type.
        """
        keys = dict(self.model)
        name = keys.pop("architecture", None)
        if not isinstance(name, str):
            raise ConfigError("model.architecture is missing; name a file of training/models or module:Class")
        config_class = getattr(find_architecture(name), "Config", None)
        if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
            raise ConfigError(f"architecture {name!r} has no dataclass `Config`")
        known = [field.name for field in dataclasses.fields(config_class)]
        for key in keys:
            if key not in known:
                raise ConfigError(_unknown(f"model.{key}", [f"model.{name}" for name in known]))
        try:
            return TypeAdapter(config_class).validate_python(keys)
        except ValidationError as error:
            raise ConfigError(_first_problem(error, "model")) from error
        except (PydanticUserError, PydanticUndefinedAnnotation):  # a Config with types that pydantic does not know
            return config_class(**keys)


def _unknown(key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown key {key!r}; did you mean {nearest[0]!r}?" if nearest else f"unknown key {key!r}"


def _first_problem(error: ValidationError, *parents: str) -> str:
    """One line that names the key of the first thing wrong."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in (*parents, *first["loc"]))
    return _unknown(key, _known_keys(Config)) if first["type"] == "extra_forbidden" else f"{key}: {first['msg']}"


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys.extend(_known_keys(inner, f"{prefix}{name}."))
    return keys


def _override(tree: dict[str, Any], assignment: str) -> None:
    """Apply `a.b=value` (the value is YAML) to the tree."""
    path, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"{assignment!r} is not of the form key=value")
    *parents, leaf = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{path!r}: {parent!r} is a value, not a section")
    tree[leaf] = yaml.safe_load(value)


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a configuration tree.

    Raises:
        ConfigError: one line that names the key, and the nearest known one for an unknown key.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from error
    config.architecture_config()
    return config


def load_config(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file and apply `key=value` overrides.

    Raises:
        NotFound: no such file.
        ConfigError: not valid.
    """
    if not path.is_file():
        raise NotFound(f"no configuration at {path}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} is not a mapping of sections")
        for assignment in overrides:
            _override(tree, assignment)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file: byte {error.start}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return parse_config(tree)
