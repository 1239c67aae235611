"""CTranslate2 models of a subject, by its own converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.formats import huggingface
from benchmarks.peers.base import Weights

QUANTIZATIONS = ("float32", "int8", "int8_float32", "int16")
VOCABULARY = "tokens.json"  # id -> the string that CTranslate2 knows it by


def folder_of(weights: Weights, quantization: str) -> Path:
    """Where the subject in a quantization lies."""
    return weights.path(f"ctranslate2-{quantization}")


def convert(weights: Weights, quantizations: tuple[str, ...] = QUANTIZATIONS) -> None:
    """Write the subject in every quantization, once."""
    for quantization in quantizations:
        folder = folder_of(weights, quantization)
        if not (folder / VOCABULARY).is_file():
            tokens = _convert(weights, folder, quantization)
            (folder / VOCABULARY).write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")


def _convert(weights: Weights, folder: Path, quantization: str) -> list[str]:
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters.transformers import M2M100Loader

    stored = None if quantization == "float32" else quantization
    if weights.form == "marian":
        source = huggingface.folder_of(weights)
        huggingface.quiet()
        TransformersConverter(str(source)).convert(str(folder), quantization=stored, force=True)
        pieces = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
        return sorted(pieces, key=pieces.__getitem__)

    class Loader(M2M100Loader):  # type: ignore[misc]
        """Ours start at the row after the padding's, wherever that is."""

        def set_position_encodings(self, spec: Any, module: Any) -> None:
            spec.encodings = module.weights[module.padding_idx + 1 :]

    spec = Loader().get_model_spec(huggingface.load(weights))
    tokens = [f"<{index}>" for index in range(weights.vocabulary)]  # only ids go in and out
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = tokens[weights.start]
    spec.config.eos_token = tokens[weights.eos]
    spec.config.unk_token = tokens[3]
    spec.validate()
    spec.optimize(quantization=stored)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    return tokens
