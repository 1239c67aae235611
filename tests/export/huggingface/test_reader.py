"""What a checkpoint's folder may hold, and what is said of one that cannot be imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from export.huggingface.reader import NEVER, Checkpoint, read_tensors
from export.importing import import_
from serving.core.errors import FuseqError
from serving.core.types import LengthNormalisation, SearchOptions
from tests.export.huggingface.reference import MAX_LENGTH, TINY, generated, sentences, write_random
from training.decode import decode
from training.layers import sinusoids
from training.models.transformer import Transformer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_random(folder, TINY, renormalize_logits=True)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(tree | changes), encoding="utf-8")

    return change


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def truncate(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:100])


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
EXTRA = {"7": {"content": "<x>"}, "0": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is no folder"),
        (remove(CONFIG), "has no config.json; copy the whole checkpoint"),
        (remove("source.spm"), "has no source.spm"),
        (remove("vocab.json"), "has no vocab.json"),
        (remove("model.safetensors"), "has neither model.safetensors nor pytorch_model.bin"),
        (truncate(CONFIG), "config.json is no JSON"),
        (truncate("model.safetensors"), "model.safetensors cannot be read"),
        (truncate("target.spm"), "target.spm, vocab.json: the SentencePiece model cannot be read"),
        (edit(CONFIG, model_type="bart"), r'is of model_type "bart"; only "marian" \(MarianMTModel, OPUS-MT\)'),
        (edit(CONFIG, d_model="wide"), "config.json: d_model: .*integer"),
        (edit(CONFIG, d_model=16), r"is \d+ x 32, but config.json asks for \d+ x 16"),
        (edit(CONFIG, encoder_layers=2), "no tensor model.encoder.layers.1"),
        (edit(CONFIG, normalize_before=True), "normalize_before true is not supported"),
        (edit(CONFIG, activation_function="gelu_new"), "'gelu_new' is not supported, only relu, swish, silu, gelu"),
        (edit(CONFIG, decoder_attention_heads=2), "encoder_attention_heads 4 and decoder_attention_heads 2"),
        (edit(CONFIG, decoder_ffn_dim=64), "encoder_ffn_dim 48 and decoder_ffn_dim 64"),
        (edit(CONFIG, vocab_size=50), "ids must differ and be below the 50 of config.json"),
        (edit(GENERATION, no_repeat_ngram_size=3), "generation_config.json: no_repeat_ngram_size 3 is not supported"),
        (edit(GENERATION, bad_words_ids=[[3, 4]]), "only single ids can be banned"),
        (edit(GENERATION, bad_words_ids=[[9999]]), r"bad_words_ids \[9999\] are outside of the vocabulary"),
        (edit(GENERATION, length_penalty=-1.0), "length_penalty -1 is not supported, only 0 to 10"),
        (edit(GENERATION, forced_eos_token_id=5), "forced_eos_token_id 5 is not the eos_token_id 0"),
        (edit(GENERATION, max_length=1), "max_length 1 leaves no room"),
        (edit(GENERATION, eos_token_id=1, forced_eos_token_id=1), "</s> must be eos_token_id 1"),
        (edit(TOKENIZER, unk_token="<nothing>"), "has no <nothing>"),
        (edit(TOKENIZER, sp_model_kwargs={"alpha": 0.1}), "sp_model_kwargs"),
        (edit(TOKENIZER, added_tokens_decoder=EXTRA), r"added tokens \['<x>'\] are not supported"),
        (edit("vocab.json", other=0), "'other' has the id 0; ids must differ"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(copy: Path, change: Any, message: str) -> None:
    change(copy)
    result = CliRunner().invoke(import_, ["hf", str(copy), "-o", str(copy.parent / "bundle"), "--no-gate"])
    assert isinstance(result.exception, FuseqError), result.exception
    with pytest.raises(FuseqError, match=message):
        raise result.exception
    assert "\n" not in str(result.exception)
    assert not (copy.parent / "bundle").exists()


def test_a_place_that_is_taken_is_refused_before_anything_is_read(copy: Path) -> None:
    result = CliRunner().invoke(import_, ["hf", "nowhere", "-o", str(copy)])
    assert "exists and is no bundle" in str(result.exception)


def test_int8_without_a_development_set_says_what_to_give(copy: Path) -> None:
    result = CliRunner().invoke(import_, ["hf", str(copy), "-o", str(copy.parent / "bundle")])
    assert "give --dev SOURCE TARGET, or --no-gate" in str(result.exception)


def test_older_checkpoints_are_the_same(whole: Path, copy: Path) -> None:
    """Before 2023: pickled float16 weights with their positions, and config.json says how to search."""
    tensors = {name: tensor.half() for name, tensor in read_tensors(whole / "model.safetensors").items()}
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = sinusoids(64, 32, "halves")
    tensors["lm_head.weight"] = tensors["model.shared.weight"]
    torch.save(tensors, copy / "pytorch_model.bin")
    edit(CONFIG, **json.loads((copy / GENERATION).read_text("utf-8")))(copy)
    for file in ("model.safetensors", GENERATION, TOKENIZER):
        (copy / file).unlink()
    old, new = Checkpoint.open(copy), Checkpoint.open(whole)
    assert old.search() == new.search()
    (before, after) = (one.subject() for one in (old, new))
    assert before.codecs == after.codecs
    assert before.source_language == ""
    for name, tensor in after.model.state_dict().items():
        torch.testing.assert_close(before.model.state_dict()[name], tensor, atol=2e-3, rtol=2e-3)


def test_the_search_is_that_of_the_checkpoint(copy: Path) -> None:
    search = Checkpoint.open(copy).search()
    assert (search.beam, search.length_penalty, search.end_at_limit) == (4, 1.0, True)
    assert search.length_normalisation is LengthNormalisation.POWER
    assert search.banned == ()  # renormalised: the model itself gives pad no likelihood
    edit(GENERATION, renormalize_logits=False, num_beams=None, length_penalty=0.5, forced_eos_token_id=None)(copy)
    search = Checkpoint.open(copy).search()
    pad = Checkpoint.open(copy).special.pad
    assert (search.beam, search.length_penalty, search.end_at_limit, search.banned) == (1, 0.5, False, (pad,))
    assert Checkpoint.open(copy).search(beam=6).beam == 6


def test_what_is_banned_is_never_likely_where_likelihoods_are_renormalised(whole: Path) -> None:
    model, pad = Checkpoint.open(whole).subject().model, Checkpoint.open(whole).special.pad
    assert isinstance(model, Transformer)
    assert model.projection.bias[pad] == NEVER
    assert model.projection.bias.log_softmax(0).exp()[pad] == 0


def test_the_card_names_the_licence(copy: Path) -> None:
    assert Checkpoint.open(copy).subject().provenance.licence == ""
    (copy / "README.md").write_text("---\nlanguage: [en, de]\nlicense: cc-by-4.0\n---\n\n# A model\n", encoding="utf-8")
    assert Checkpoint.open(copy).subject().provenance.licence == "cc-by-4.0"
    (copy / "README.md").write_text("---\nlicense: [\n---\n", encoding="utf-8")
    assert Checkpoint.open(copy).subject().provenance.licence == ""


def test_a_vocabulary_for_each_side(tmp_path: Path) -> None:
    write_random(tmp_path, TINY, separate=True, renormalize_logits=True)
    subject = Checkpoint.open(tmp_path).subject()
    entries = [codec.entry for codec in (subject.codecs.source, subject.codecs.target)]
    assert [entry.vocabulary for entry in entries] == ["vocabulary.json", "target_vocabulary.json"]
    assert subject.codecs.source.codec().pieces(range(20)) != subject.codecs.target.codec().pieces(range(20))
    texts = sentences(40)
    codec = subject.codecs.source.codec()
    options = SearchOptions(max_length_ratio=0, max_length_margin=MAX_LENGTH - 2, stop_repetition=False)
    found = decode(subject.model, [codec.encode(text) for text in texts], options)
    assert [best[0].tokens for best in found] == [one.tokens for one in generated(tmp_path, texts, num_beams=1)]
