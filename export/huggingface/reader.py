"""A checkpoint's folder as something to export: model, codecs, and how it searches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from export.huggingface.config import (
    ACTIVATIONS,
    Generation,
    ModelConfig,
    Tokenizer,
    read_generation,
    read_model_config,
    read_object,
    read_tokenizer,
)
from export.huggingface.weights import build_model
from export.subject import CodecFiles, Codecs, DevelopmentSet, Subject
from serving.core.codecs import VocabularyCodec
from serving.core.errors import BundleError, ConfigError, NotFound
from serving.core.manifest import CodecEntry, Provenance, SearchDefaults, sha256_of
from serving.core.types import LengthNormalisation, SpecialIds
from training.checkpoint import load_tensors
from training.models.base import Sizes
from training.models.transformer import Config, Transformer

FORMAT = "Hugging Face MarianMT"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # preferred first
SENTENCEPIECE = {"source": "source.spm", "target": "target.spm"}
VOCABULARY, TARGET_VOCABULARY, CARD = "vocab.json", "target_vocab.json", "README.md"
CODEC_VOCABULARIES = {VOCABULARY: "vocabulary.json", TARGET_VOCABULARY: "target_vocabulary.json"}  # in a bundle
# Where an output ends that does not end by itself: Marian's own factor (--max-length-factor), and ours for short texts.
MAX_LENGTH_RATIO, MAX_LENGTH_MARGIN = 3.0, 12
NEVER = -1e4  # a logit whose likelihood is exactly 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder says, before its weights are read."""

    folder: Path
    config: ModelConfig
    generation: Generation
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the configuration of the checkpoint in `folder`.

        Raises:
            NotFound: the folder or a file is missing.
            ConfigError: it is no MarianMT checkpoint, or one with options that are not supported.
        """
        if not folder.is_dir():
            raise NotFound(f"{folder} is no folder; name one with the files of a MarianMT checkpoint")
        config = read_model_config(folder)
        return cls(folder, config, read_generation(folder), read_tokenizer(folder))

    @property
    def special(self) -> SpecialIds:
        """Control symbols, but for the unknown one; the decoder begins with `bos`, which for Marian's is pad."""
        config, generation = self.config, self.generation

        def first(one: int | None, other: int) -> int:
            return other if one is None else one

        return SpecialIds(
            pad=first(generation.pad_token_id, config.pad_token_id),
            bos=first(generation.decoder_start_token_id, config.decoder_start_token_id),
            eos=first(generation.eos_token_id, config.eos_token_id),
        )

    @property
    def positions(self) -> int:
        """Most tokens that `generate` makes, the end symbol included. Its max_length counts the begin symbol, too."""
        generation, table = self.generation, self.config.max_position_embeddings
        new = generation.max_new_tokens or (generation.max_length or table) - 1
        if new < 1:
            raise ConfigError(f"{self.folder}: max_length {generation.max_length} leaves no room for a token")
        return min(new, table)

    @property
    def banned(self) -> set[int]:
        """Ids that are never generated, the end symbol never being one."""
        banned = {word for [word] in self.generation.bad_words_ids or []} - {self.special.eos}
        size = self.config.target_vocabulary
        if outside := sorted(word for word in banned if not 0 <= word < size):
            raise ConfigError(f"{self.folder}: bad_words_ids {outside} are outside of the vocabulary of {size}")
        return banned

    def search(self, beam: int | None = None) -> SearchDefaults:
        """How a bundle of the checkpoint searches: as `generate` does with early_stopping="never".

        Args:
            beam: for None that of the checkpoint.

        Raises:
            ConfigError: the checkpoint forces another token than the end symbol.
        """
        generation = self.generation
        if generation.forced_eos_token_id not in (None, self.special.eos):
            raise ConfigError(
                f"{self.folder}: forced_eos_token_id {generation.forced_eos_token_id} is not the eos_token_id "
                f"{self.special.eos}, which is not supported"
            )
        return SearchDefaults(
            beam=beam or generation.num_beams or 1,
            length_penalty=1.0 if generation.length_penalty is None else generation.length_penalty,
            max_length_ratio=MAX_LENGTH_RATIO,
            max_length_margin=MAX_LENGTH_MARGIN,
            length_normalisation=LengthNormalisation.POWER,
            end_at_limit=generation.forced_eos_token_id is not None,
            # Renormalised likelihoods leave nothing to what is banned: then the model's own bias sees to it.
            banned=() if generation.renormalize_logits else tuple(sorted(self.banned)),
        )

    def subject(self, dev: DevelopmentSet | None = None, name: str | None = None) -> Subject:
        """All that is exported; reads the weights.

        Args:
            dev: judges the precisions.
            name: of the bundle; for None the folder's.

        Raises:
            NotFound: a file is missing.
            ConfigError: files do not fit each other.
        """
        codecs = self.codecs()
        weights = self._weights_file()
        model = self._model(codecs.target.codec().special, weights)
        return Subject(
            model,
            codecs,
            "transformer",
            asdict(model.config),
            name or self.folder.resolve().name,
            self.tokenizer.source_lang or "",
            self.tokenizer.target_lang or "",
            self._provenance(weights, codecs),
            dev,
        )

    def _weights_file(self) -> Path:
        for name in WEIGHTS:
            if (self.folder / name).is_file():
                return self.folder / name
        raise NotFound(f"{self.folder} has neither {' nor '.join(WEIGHTS)}; copy the whole checkpoint")

    def _model(self, special: SpecialIds, weights: Path) -> Transformer:
        config = self.config
        ours = Config(
            size=config.d_model,
            feed_forward=config.encoder_ffn_dim,
            heads=config.encoder_attention_heads,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            dropout=0.0,
            pre_norm=False,
            tied=config.tie_word_embeddings,
            activation=ACTIVATIONS[config.activation_function],  # type: ignore[arg-type]
            positions="halves",
            scale_embeddings=config.scale_embedding,
            output_bias=True,
        )
        sizes = Sizes(
            source_vocabulary=config.vocab_size,
            target_vocabulary=config.target_vocabulary,
            source_limit=int(min(self.tokenizer.model_max_length, config.max_position_embeddings)),
            target_limit=self.positions,
            special=special,
            shared_vocabulary=config.share_encoder_decoder_embeddings,
        )
        model = build_model(ours, sizes, read_tensors(weights), str(weights))
        if self.generation.renormalize_logits:
            with torch.no_grad():
                model.projection.bias[sorted(self.banned)] = NEVER
        return model

    def codecs(self) -> Codecs:
        """One codec for each side; they share what is the same for both.

        Raises:
            NotFound: a file is missing.
            ConfigError: files do not fit each other.
        """
        separate = self.tokenizer.separate_vocabs
        if separate is None:
            separate = (self.folder / TARGET_VOCABULARY).is_file()
        source = self._codec("source", VOCABULARY, self.config.vocab_size)
        target = self._codec("target", TARGET_VOCABULARY if separate else VOCABULARY, self.config.target_vocabulary)
        if source.codec().special != target.codec().special:
            raise ConfigError(f"{self.folder}: {self.tokenizer.unk_token} must have one id in both vocabularies")
        if list(source.contents.values()) == list(target.contents.values()):
            target = source
        return Codecs(source, target)

    def _codec(self, side: str, vocabulary: str, size: int) -> CodecFiles:
        """A side's SentencePiece model, and its vocabulary as `VocabularyCodec` has it."""
        path = self.folder / SENTENCEPIECE[side]
        if not path.is_file():
            raise NotFound(f"{self.folder} has no {path.name}; copy the whole checkpoint")
        ids = read_object(self.folder / vocabulary)
        pieces: list[str | None] = [None] * size
        for piece, index in ids.items():
            if not isinstance(index, int) or not 0 <= index < size or pieces[index] is not None:
                raise ConfigError(
                    f"{self.folder / vocabulary}: {piece!r} has the id {index!r}; "
                    f"ids must differ and be below the {size} of config.json"
                )
            pieces[index] = piece
        special, tokenizer = self.special, self.tokenizer
        if tokenizer.unk_token not in ids:
            raise ConfigError(f"{self.folder / vocabulary} has no {tokenizer.unk_token}")
        if ids.get(tokenizer.eos_token) != special.eos:
            raise ConfigError(f"{self.folder / vocabulary}: {tokenizer.eos_token} must be eos_token_id {special.eos}")
        named = {"pad": special.pad, "bos": special.bos, "eos": special.eos, "unk": ids[tokenizer.unk_token]}
        content = json.dumps({**named, "pieces": pieces}, ensure_ascii=False, separators=(",", ":"))
        entry = CodecEntry(
            kind=VocabularyCodec.kind, file=f"{side}.model", vocabulary=CODEC_VOCABULARIES[vocabulary], size=size
        )
        try:
            made = CodecFiles(entry, {entry.file: path.read_bytes(), entry.vocabulary: content.encode()})
            made.codec()
        except (BundleError, UnicodeEncodeError) as error:
            raise ConfigError(f"{path}, {vocabulary}: {error}") from None
        return made

    def _provenance(self, weights: Path, codecs: Codecs) -> Provenance:
        codec = codecs.source.codec()
        assert isinstance(codec, VocabularyCodec)
        details = {
            "format": FORMAT,
            "folder": self.folder.resolve().name,
            "weights": weights.name,
            "SHA-256": sha256_of(weights),
            "transformers": self.config.transformers_version,
            "language tokens": " ".join(codec.language_tokens),
        }
        licence = read_card(self.folder).get("license") or ""
        named = licence if isinstance(licence, list) else [licence]
        return Provenance(licence=", ".join(map(str, named)), details={"import": details})


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a weights file by name; never runs code from it.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    tensors = load_tensors(path)
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds something else than tensors by name")
    return tensors


def read_card(folder: Path) -> Mapping[str, Any]:
    """What the head of the model card says; nothing where there is none that can be read."""
    path = folder / CARD
    if not path.is_file():
        return {}
    parts = path.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return {}
    return head if isinstance(head, dict) else {}
