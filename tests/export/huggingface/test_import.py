"""Bundles of MarianMT checkpoints say what `generate` says, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from export.huggingface.writer import write_checkpoint
from export.importing import import_
from serving.core.manifest import Bundle, open_bundle
from serving.core.types import SearchOptions
from tests.export.huggingface.reference import MAX_LENGTH, TINY, differences, generated, sentences, served, write_random
from tests.support.toy import toy_config, toy_pairs
from training.checkpoint import Trained, load_trained
from training.config import parse_config
from training.decode import decode
from training.models.transformer import Transformer
from training.runner import train

TEXTS = sentences(200)


def import_checkpoint(folder: Path, output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(import_, ["hf", str(folder), "-o", str(output), *arguments])


def imported(folder: Path, output: Path, *arguments: str) -> Bundle:
    result = import_checkpoint(folder, output, *arguments)
    assert result.exit_code == 0, result.output
    return open_bundle(output)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose pad keeps its share of the likelihood, as `generate` has it by default."""
    folder = tmp_path_factory.mktemp("random") / "opus-mt-xx-yy"
    write_random(folder, TINY)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return imported(checkpoint, tmp_path_factory.mktemp("bundles") / "random", "--precision", "fp32")


def test_greedy_is_that_of_generate(checkpoint: Path, bundle: Bundle) -> None:
    ours, theirs = served(bundle, "fp32", TEXTS, beam=1), generated(checkpoint, TEXTS, num_beams=1)
    assert differences(ours, theirs) == []
    assert [one.text for one in ours] == [one.text for one in theirs]
    lengths = {len(one.tokens) for one in ours}
    assert len(lengths) > 5  # some end early, some late


@pytest.mark.parametrize("length_penalty", [1.0, 0.4])
def test_beam_search_is_that_of_generate(checkpoint: Path, bundle: Bundle, length_penalty: float) -> None:
    texts = TEXTS if length_penalty == 1 else TEXTS[:40]
    ours = served(bundle, "fp32", texts, beam=4, length_penalty=length_penalty)
    theirs = generated(checkpoint, texts, num_beams=4, early_stopping="never", length_penalty=length_penalty)
    assert differences(ours, theirs) == []
    assert [one.text for one in ours] == [one.text for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)


def test_the_manifest_holds_what_the_checkpoint_says(checkpoint: Path, bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert (manifest.name, manifest.source_language, manifest.target_language) == ("opus-mt-xx-yy", "en", "de")
    assert manifest.special.bos == manifest.special.pad == manifest.source_codec.size - 1
    assert manifest.search.banned == (manifest.special.pad,)
    assert manifest.search.end_at_limit
    assert (manifest.search.beam, manifest.search.length_penalty, manifest.search.length_normalisation) == (
        4,
        1,
        "power",
    )
    assert (manifest.limits.source, manifest.limits.target) == (64, 29)
    assert {"source.model", "target.model", "vocabulary.json"} < set(manifest.files)
    origin = manifest.provenance.details["import"]
    assert (origin["format"], origin["weights"]) == ("Hugging Face MarianMT", "model.safetensors")
    assert set(origin["language tokens"].split()) == {">>deu<<", ">>nld<<"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training here of what MarianMT can express; its positions are interleaved, so the widths change their order."""
    folder = tmp_path_factory.mktemp("trained")
    model = {
        "architecture": "transformer",
        "size": 32,
        "feed_forward": 64,
        "heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "dropout": 0.0,
        "pre_norm": False,
        "output_bias": True,
    }
    schedule = {"steps": 250, "warmup": 25}
    settings = {"schedule": schedule, "evaluation": {"every": 250}, "optimiser": {"rate": 0.005}}
    train(parse_config(toy_config(folder / "data", model, **settings)), folder / "run")
    return load_trained(folder / "run")


@pytest.fixture(scope="module")
def written(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    assert isinstance(trained.model, Transformer)
    write_checkpoint(trained.model, trained.vocabulary, folder, ("xx", "yy"))
    return folder


def test_a_trained_model_is_the_same_as_checkpoint_and_as_bundle(
    trained: Trained, written: Path, tmp_path: Path
) -> None:
    texts = [*TEXTS[:20], *(source for source, _ in toy_pairs(180, seed=3))]
    for side in (0, 1):
        lines = [pair[side] + "\n" for pair in toy_pairs(20, seed=2)]
        (tmp_path / f"dev.{side}").write_text("".join(lines), encoding="utf-8")
    dev = ["--dev", str(tmp_path / "dev.0"), str(tmp_path / "dev.1")]
    bundle = imported(written, tmp_path / "bundle", *dev, "--max-loss", "100", "--name", "toy", "--beam", "2")
    assert set(bundle.manifest.precisions) == {"fp32", "int8"}
    assert (bundle.manifest.name, bundle.manifest.search.beam) == ("toy", 2)

    greedy = served(bundle, "fp32", texts, beam=1)
    assert differences(greedy, generated(written, texts, num_beams=1, max_length=MAX_LENGTH)) == []
    assert len({one.tokens for one in greedy}) > 100
    beam = served(bundle, "fp32", texts, beam=4)
    reference = generated(written, texts, num_beams=4, early_stopping="never", max_length=MAX_LENGTH)
    assert differences(beam, reference) == []
    plain = [place for place, text in enumerate(texts) if not text.startswith(">>")]  # no language token to Marian's
    sources = [trained.codec.encode(texts[place]) for place in plain]
    options = SearchOptions(max_length_ratio=0, max_length_margin=MAX_LENGTH - 2, stop_repetition=False)
    original = [found[0].tokens for found in decode(trained.model, sources, options)]
    assert [greedy[place].tokens for place in plain] == original
    assert len(served(bundle, "int8", texts[:5])) == 5
