"""What a checkpoint says of itself: config.json, generation_config.json and tokenizer_config.json.

Defaults are those of `transformers`, so that a key that is left out means here what it means there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serving.core.errors import ConfigError, NotFound

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}  # theirs -> ours

# Keys that change what is computed, and the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "normalize_before": (False, None),
    "normalize_embedding": (False, None),
    "add_final_layer_norm": (False, None),
    "static_position_embeddings": (True, None),
}
NEUTRAL_GENERATION: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (None, []),
    "diversity_penalty": (0, None),
    "do_sample": (False, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "encoder_repetition_penalty": (1, None),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "guidance_scale": (1, None),
    "min_length": (0, 1, None),
    "min_new_tokens": (0, None),
    "no_repeat_ngram_size": (0, None),
    "num_beam_groups": (1, None),
    "repetition_penalty": (1, None),
    "sequence_bias": (None, {}),
    "suppress_tokens": (None, []),
}


def _single(value: Any) -> Any:
    """A list of one as what is in it."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _content(value: Any) -> Any:
    """The text of a token, which may be written with its properties."""
    return value.get("content") if isinstance(value, dict) else value


Id = Annotated[int, BeforeValidator(_single), Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Token = Annotated[str, BeforeValidator(_content)]


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ModelConfig(_File):
    """The architecture."""

    vocab_size: Size
    decoder_vocab_size: Size | None = None
    d_model: Size
    encoder_layers: Size
    decoder_layers: Size
    encoder_attention_heads: Size
    decoder_attention_heads: Size
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    max_position_embeddings: Size = 1024
    activation_function: str = "gelu"
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: Id
    eos_token_id: Id
    decoder_start_token_id: Id
    transformers_version: str = ""

    @property
    def target_vocabulary(self) -> int:
        """Words that the decoder knows."""
        if self.share_encoder_decoder_embeddings:
            return self.vocab_size
        return self.decoder_vocab_size or self.vocab_size


class Generation(_File):
    """How `generate` searches."""

    max_length: Size | None = None
    max_new_tokens: Size | None = None
    num_beams: Size | None = None
    length_penalty: float | None = None
    bad_words_ids: list[list[int]] | None = None
    forced_eos_token_id: Id | None = None
    renormalize_logits: bool | None = None
    pad_token_id: Id | None = None
    eos_token_id: Id | None = None
    decoder_start_token_id: Id | None = None


class Tokenizer(_File):
    """How text becomes pieces."""

    source_lang: str | None = None
    target_lang: str | None = None
    unk_token: Token = "<unk>"
    eos_token: Token = "</s>"
    model_max_length: float = 512
    separate_vocabs: bool | None = None
    sp_model_kwargs: dict[str, Any] | None = None
    added_tokens_decoder: dict[str, Any] = Field(default_factory=dict)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is none.
    """
    if not path.is_file():
        raise NotFound(f"{path.parent} has no {path.name}; copy the whole checkpoint")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no JSON object")
    return value


_T = TypeVar("_T", bound=_File)


def _parse(path: Path, kind: type[_T], tree: Mapping[str, Any]) -> _T:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}") from None


def _refuse_options(path: Path, tree: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in neutral.items():
        if key in tree and tree[key] not in values:
            raise ConfigError(
                f"{path}: {key} {json.dumps(tree[key])} is not supported; remove it if the model can do without"
            )


def read_model_config(folder: Path) -> ModelConfig:
    """The architecture of the checkpoint in `folder`.

    Raises:
        NotFound: there is no config.json.
        ConfigError: it is not a MarianMT model's, or has an option that is not supported.
    """
    path = folder / CONFIG
    tree = read_object(path)
    if tree.get("model_type") != "marian":
        found = json.dumps(tree.get("model_type", "none at all"))
        raise ConfigError(f'{path} is of model_type {found}; only "marian" (MarianMTModel, OPUS-MT) can be imported')
    _refuse_options(path, tree, NEUTRAL)
    config = _parse(path, ModelConfig, tree)
    if config.activation_function not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{path}: activation_function {config.activation_function!r} is not supported, only {known}")
    for name in ("attention_heads", "ffn_dim"):
        ours, theirs = getattr(config, f"encoder_{name}"), getattr(config, f"decoder_{name}")
        if ours != theirs:
            raise ConfigError(f"{path}: encoder_{name} {ours} and decoder_{name} {theirs} must be the same")
    return config


def read_generation(folder: Path) -> Generation:
    """How the checkpoint's `generate` searches; checkpoints from before 2023 say it in config.json.

    Raises:
        NotFound, ConfigError: as `read_model_config`.
    """
    path = folder / GENERATION
    if path.is_file():
        tree = read_object(path)
    else:
        path = folder / CONFIG
        tree = {"forced_eos_token_id": 0, **read_object(path)}  # the default of a MarianConfig
    _refuse_options(path, tree, NEUTRAL_GENERATION)
    generation = _parse(path, Generation, tree)
    for words in generation.bad_words_ids or []:
        if len(words) != 1:
            raise ConfigError(f"{path}: bad_words_ids {words} is not supported: only single ids can be banned")
    if generation.length_penalty is not None and not 0 <= generation.length_penalty <= 10:
        raise ConfigError(f"{path}: length_penalty {generation.length_penalty:g} is not supported, only 0 to 10")
    return generation


def read_tokenizer(folder: Path) -> Tokenizer:
    """How the checkpoint cuts text; the file may be missing.

    Raises:
        ConfigError: it has an option that is not supported.
    """
    path = folder / TOKENIZER
    tokenizer = _parse(path, Tokenizer, read_object(path) if path.is_file() else {})
    if tokenizer.sp_model_kwargs:
        raise ConfigError(f"{path}: sp_model_kwargs {json.dumps(tokenizer.sp_model_kwargs)} are not supported")
    added = {_content(token) for token in tokenizer.added_tokens_decoder.values()}
    if extra := added - {tokenizer.unk_token, tokenizer.eos_token, "<pad>", "<s>"}:
        raise ConfigError(f"{path}: added tokens {sorted(map(str, extra))} are not supported")
    return tokenizer
