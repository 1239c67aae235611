"""What `transformers` makes of a checkpoint, and what a bundle makes of it, as ids that can be compared."""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from serving.core.manifest import Bundle
from serving.engine.engine import Engine
from serving.engine.jobs import Job, Outcome, Result
from serving.engine.sessions import open_stages
from serving.engine.translator import Translator
from tests.support.marian import ENGLISH, write_tokenizer
from tests.support.toy import toy_pairs

TINY = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "ffn": 48, "heads": 4}
MAX_LENGTH = 30


def sentences(count: int) -> list[str]:
    """Texts of the toy language, with some of real English, of other scripts and of odd spacing among them."""
    odd = [
        *ENGLISH,
        "ÄÖ straße 日本語 ok",
        "  one   two ",
        "cat\tdog\n",
        "👩‍👩‍👧 dog",
        "x",
        ">>deu<< one dog",
        "3.14 % (red)",
    ]
    return [*odd, *(source for source, _ in toy_pairs(count - len(odd), seed=9, longest=14))][:count]


def write_random(
    folder: Path, shape: dict[str, int], seed: int = 0, separate: bool = False, extra: int = 0, **options: Any
) -> None:
    """A checkpoint of a random model, sharp enough to end its sentences, now early and now late.

    Args:
        shape: keys as in `TINY`.
        separate: a vocabulary for each side.
        extra: so many words more, in a joint vocabulary.
        options: of its generation_config.json, beside a `max_length`, a beam of 4 and no pad.
    """
    source, target = write_tokenizer(folder, separate, extra)
    pad = min(source, target) - 1
    torch.manual_seed(seed)
    sides = {
        f"{side}_{name}": shape[key]
        for side in ("encoder", "decoder")
        for name, key in (("attention_heads", "heads"), ("ffn_dim", "ffn"))
    }
    settings: dict[str, Any] = {
        "vocab_size": source,
        "decoder_vocab_size": target,
        "share_encoder_decoder_embeddings": not separate,
        **{key: shape[key] for key in ("d_model", "encoder_layers", "decoder_layers")},
        **sides,
        "activation_function": "swish",
        "scale_embedding": True,
        "max_position_embeddings": 64,
        "init_std": 2.8 * shape["d_model"] ** -0.5,  # logits with a standard deviation of 2.8
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }
    model = MarianMTModel(MarianConfig(**settings)).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] = 2 * (2 * math.log(target)) ** 0.5  # the end symbol, often among the best
    search = {"max_length": MAX_LENGTH, "num_beams": 4, "bad_words_ids": [[pad]], "early_stopping": "never", **options}
    for name, value in search.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Output:
    """Ids without control symbols around them, the text, and the score of a beam search."""

    tokens: tuple[int, ...]
    text: str
    score: float


def generated(folder: Path, texts: Sequence[str], **options: Any) -> list[Output]:
    """By `transformers`, in batches."""
    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    found = []
    for start in range(0, len(texts), 50):
        fed = tokenizer(list(texts[start : start + 50]), return_tensors="pt", padding=True)
        made = model.generate(**fed, return_dict_in_generate=True, output_scores=True, **options)
        scores = made.sequences_scores.tolist() if "sequences_scores" in made else [0.0] * len(made.sequences)
        for ids, score in zip(made.sequences.tolist(), scores, strict=True):
            ended = [*ids[1:], tokenizer.eos_token_id]
            tokens = tuple(ended[: ended.index(tokenizer.eos_token_id)])
            found.append(Output(tokens, tokenizer.decode(tokens, skip_special_tokens=True), score))
    return found


def served(bundle: Bundle, precision: str, texts: Sequence[str], **options: Any) -> list[Output]:
    """By the engine, with the bundle's own search but for the limit, which is the one of `generate`."""
    answers: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    with Engine(bundle, open_stages(bundle, precision, "cpu", 1)) as engine:
        translator = Translator(bundle, engine)
        asked = replace(
            translator.default_options, max_length_ratio=0, max_length_margin=MAX_LENGTH - 1, stop_repetition=False
        )
        asked = replace(asked, **options)
        for place, text in enumerate(texts):
            done = partial(lambda place, outcome: answers.put((place, outcome)), place)
            engine.submit(Job(translator.prepare(text).source, asked, done))
        found: dict[int, Output] = {}
        while len(found) < len(texts):
            place, outcome = answers.get(timeout=60)
            assert isinstance(outcome, Result), outcome
            best = outcome.hypotheses[0]
            found[place] = Output(best.tokens, translator.target_codec.decode(best.tokens), best.score)
    return [found[place] for place in range(len(texts))]


def differences(ours: Sequence[Output], theirs: Sequence[Output]) -> list[int]:
    """Places where the ids differ."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [place for place, (one, other) in pairs if one.tokens != other.tokens]
