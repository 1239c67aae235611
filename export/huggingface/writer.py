"""One of our models as a MarianMT checkpoint, for whatever reads that format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece

from export.huggingface.config import CONFIG, GENERATION, TOKENIZER
from export.huggingface.reader import SENTENCEPIECE, VOCABULARY, WEIGHTS
from export.huggingface.weights import tensors_of
from serving.core.errors import ConfigError
from training.models.transformer import Config, Transformer


def write_checkpoint(model: Transformer, codec: bytes, folder: Path, languages: tuple[str, str] = ("", "")) -> None:
    """Write config, weights and tokenizer to `folder`, which is made; files that are there are replaced.

    Args:
        model: trained with pre_norm false.
        codec: the SentencePiece model of both languages.
        folder: of the checkpoint.
        languages: of sources and targets.

    Raises:
        ConfigError: MarianMT cannot express the model.
    """
    from safetensors.torch import save_file

    tensors = tensors_of(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=codec)
    if len(processor) != model.sizes.target_vocabulary:
        raise ConfigError(f"the codec has {len(processor)} pieces, the model {model.sizes.target_vocabulary}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    for file in SENTENCEPIECE.values():
        (folder / file).write_bytes(codec)
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    _write(folder / VOCABULARY, {piece: index for index, piece in enumerate(pieces)})
    config, generation = _config(model), _generation(model)
    _write(folder / CONFIG, config)
    _write(folder / GENERATION, generation)
    special = model.sizes.special
    names = {"unk_token": special.unk, "eos_token": special.eos, "pad_token": special.pad}
    tokenizer = {name: pieces[index] for name, index in names.items()}
    source, target = languages
    tokenizer |= {"source_lang": source, "target_lang": target}
    _write(folder / TOKENIZER, {**tokenizer, "model_max_length": model.sizes.source_limit, "separate_vocabs": False})


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _ids(model: Transformer) -> dict[str, Any]:
    special = model.sizes.special
    return {
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
        "decoder_start_token_id": special.bos,
        "forced_eos_token_id": special.eos,
    }


def _config(model: Transformer) -> dict[str, Any]:
    config: Config = model.config
    sizes = model.sizes
    sides = {
        name: value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for name, value in (
            (f"{side}_layers", layers),
            (f"{side}_attention_heads", config.heads),
            (f"{side}_ffn_dim", config.feed_forward),
        )
    }
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": sizes.source_vocabulary,
        "decoder_vocab_size": sizes.target_vocabulary,
        "d_model": config.size,
        **sides,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "max_position_embeddings": max(sizes.source_limit, sizes.target_limit),
        "scale_embedding": config.scale_embeddings,
        "share_encoder_decoder_embeddings": model.source_embedding is model.target_embedding,
        "tie_word_embeddings": config.tied,
        **_ids(model),
    }


def _generation(model: Transformer) -> dict[str, Any]:
    """Pad and begin are never generated, and what is left has all of the likelihood."""
    special = model.sizes.special
    banned = [[index] for index in sorted({special.pad, special.bos} - {special.eos})]
    ids = _ids(model)
    return {**ids, "max_length": model.sizes.target_limit + 1, "bad_words_ids": banned, "renormalize_logits": True}
