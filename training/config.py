"""The training configuration: a YAML file, validated as a whole before anything runs."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.core.errors import ConfigError, NotFound
from training.models.base import find_architecture


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pair(_Section):
    """Two files of the same number of lines, plain or gzip; or one TSV / ManyThings zip as `file`."""

    source: Path | None = None
    target: Path | None = None
    file: Path | None = None


class Data(_Section):
    """Which corpora, and what may be said of them."""

    train: Pair
    dev: Pair
    source_language: str = ""
    target_language: str = ""
    licence: str = ""
    attribution: str = ""
    name: str = ""


class Vocabulary(_Section):
    """The joint SentencePiece model."""

    size: int = Field(8000, ge=300)  # byte fallback alone takes 256
    model: Literal["unigram", "bpe"] = "unigram"
    normalisation: str = "nmt_nfkc"


class Limits(_Section):
    """Longest source in tokens (end symbol included) and number of decoder positions; longer pairs are dropped."""

    source: int = Field(256, ge=4)
    target: int = Field(256, ge=4)


class Optimiser(_Section):
    """Muon for hidden matrices and AdamW for the rest, or AdamW for all."""

    name: Literal["muon", "adamw"] = "adamw"
    rate: float = 1e-3  # AdamW's peak learning rate
    matrix_rate: float = 0.02  # Muon's
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0  # largest global gradient norm
    label_smoothing: float = 0.1


class Schedule(_Section):
    """Linear warm-up, then a plateau, then a linear fall to zero over the last `decay` share; or inverse root."""

    kind: Literal["trapezoid", "inverse_root"] = "trapezoid"
    steps: int = Field(10_000, ge=1)
    warmup: int = Field(500, ge=0)
    decay: float = Field(0.4, ge=0, le=1)


class Batches(_Section):
    """Batches of similar lengths, by token budget."""

    tokens: int = Field(4096, ge=16)  # padded positions of the longer side
    pool: int = Field(20_000, ge=1)  # pairs sorted together by length


class Evaluation(_Section):
    """What is measured when, and when to stop."""

    every: int = Field(500, ge=1)
    sentences: int = Field(1000, ge=1)  # of the development set, from its start
    beam: int = Field(1, ge=1)
    average: int = Field(5, ge=1)  # snapshots averaged for each evaluation and the final model
    patience: int = Field(10, ge=1)  # evaluations without a better BLEU before stopping
    degenerate_from: float = Field(0.5, ge=0)  # share of the run after which degenerate outputs fail it; over 1: never


class Run(_Section):
    """Reproducibility and bookkeeping."""

    seed: int = 1
    threads: int = 0  # 0: all cores the process may use
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the device has fast bf16
    save_every: int = Field(250, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Config(_Section):
    """The whole configuration. `model` holds `architecture` and that architecture's own keys."""

    name: str
    data: Data
    model: dict[str, Any]
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
            ConfigError: unknown architecture or key, the nearest key named.
        """
        keys = dict(self.model)
        name = keys.pop("architecture", None)
        if not isinstance(name, str):
            raise ConfigError("model.architecture is missing; name a file of training/models or module:Class")
        config_class = find_architecture(name).Config
        known = [field.name for field in dataclasses.fields(config_class)]
        for key in keys:
            if key not in known:
                raise ConfigError(_unknown(f"model.{key}", [f"model.{name}" for name in known]))
        try:
            return config_class(**keys)
        except TypeError as error:
            raise ConfigError(f"model: {error}") from error


def _unknown(key: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown key {key!r}; did you mean {nearest[0]!r}?" if nearest else f"unknown key {key!r}"


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
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(_unknown(key, _known_keys(Config))) from error
        raise ConfigError(f"{key}: {first['msg']}") from error
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
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return parse_config(tree)
