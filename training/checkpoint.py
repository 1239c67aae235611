"""What a run leaves on disk, so that a kill at any moment loses nothing but time.

A run is a folder:

    config.json       the configuration the run was started with
    vocabulary.model  the SentencePiece model
    details.json      counts and hash of the corpus, its split, licence and attribution
    state.pt          everything the next step depends on: weights, optimisers, random state, place in the data
    snapshots/N.pt    weights at step N, averaged for evaluations
    best.pt           the averaged weights of the best evaluation, and its scores
    log.jsonl         one line per evaluation
    curves.png        the log as a picture
    .lock             held while a training writes to the folder

Files are written beside their place, flushed to the disk and renamed, so each is either old or new, never half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError, NotFound
from training.config import Config, parse_config
from training.models.base import Model, Sizes, find_architecture

Weights = dict[str, Tensor]


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that `path` is at every moment the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error


def save_tensors(path: Path, value: object) -> None:
    """Write a tree of tensors and plain values atomically."""
    write_atomically(path, lambda file: torch.save(value, file))


def load_tensors(path: Path) -> Any:
    """Read what `save_tensors` wrote; never runs code from the file.

    Raises:
        NotFound: no such file.
        ConfigError: not a checkpoint.
    """
    if not path.is_file():
        raise NotFound(f"no checkpoint at {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged bytes make torch raise
        raise ConfigError(f"{path} cannot be read as a checkpoint: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def average(weights: Sequence[Weights]) -> Weights:
    """Mean of several checkpoints' weights, in float64."""
    return {
        name: torch.stack([one[name].double() for one in weights]).mean(0).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in weights[-1].items()
    }


def build_model(config: Config, codec: SentencePieceCodec) -> Model:
    """A model with fresh weights."""
    sizes = Sizes(
        source_vocabulary=codec.size,
        target_vocabulary=codec.size,
        source_limit=config.limits.source,
        target_limit=config.limits.target,
        special=codec.special,
    )
    model_class = find_architecture(config.model["architecture"])
    return cast(Any, model_class)(config.architecture_config(), sizes)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model with all that belongs to it. `details` says what it was trained on and what it reached."""

    model: Model
    codec: SentencePieceCodec
    vocabulary: bytes
    config: Config
    details: dict[str, Any]


def load_trained(path: Path) -> Trained:
    """Load a run's best model from its folder, or the weights of a given file inside it, in evaluation mode.

    Raises:
        NotFound: no run there, or it has no evaluated model yet.
        ConfigError: a file cannot be read, or the weights do not fit the configuration.
    """
    weights_file = path / "best.pt" if path.is_dir() else path
    run = weights_file.parent.parent if weights_file.parent.name == "snapshots" else weights_file.parent
    for name in ("config.json", "vocabulary.model", "details.json"):
        if not (run / name).is_file():
            raise NotFound(f"{path} is not a training run: {run} has no {name}")
    if not weights_file.is_file():
        raise NotFound(f"{weights_file} is not there: the run has not been evaluated yet; let it train on")
    config = parse_config(read_json(run / "config.json"))
    vocabulary = (run / "vocabulary.model").read_bytes()
    codec = SentencePieceCodec(vocabulary)
    saved = load_tensors(weights_file)
    model = build_model(config, codec)
    try:
        model.load_state_dict(saved["weights"] if "weights" in saved else saved["model"])
    except (RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"{weights_file} does not fit {run / 'config.json'}: {_one_line(error)}") from error
    details = read_json(run / "details.json")
    details.update(step=saved.get("step", saved.get("progress", {}).get("step")), scores=saved.get("scores", {}))
    return Trained(model.eval(), codec, vocabulary, config, details)
