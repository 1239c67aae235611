"""Decoding in batches equals a naive search that knows no caches, no batches and no early stop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.core.search import length_penalty
from serving.core.types import Hypothesis, SearchOptions, StopReason
from training.decode import decode
from training.models.bahdanau import Bahdanau
from training.models.base import Model, Sizes
from training.models.transformer import Transformer

SIZES = Sizes(source_vocabulary=14, target_vocabulary=14, source_limit=24, target_limit=24)
BOS, EOS = 1, 2
SOURCES = [[random.Random(n).randint(4, 13) for _ in range(1 + n % 11)] for n in range(33)]


def make_model(kind: str) -> Model:
    torch.manual_seed(5)
    model: Any
    if kind == "transformer":
        config = Transformer.Config(size=16, feed_forward=24, heads=2, encoder_layers=1, decoder_layers=2, dropout=0.3)
        model = Transformer(config, SIZES)
    else:
        model = Bahdanau(Bahdanau.Config(embedding=12, hidden=12, attention=8, dropout=0.3), SIZES)
    for parameter in model.parameters():  # sharper than fresh weights, so that choices are clear
        parameter.data.mul_(2.0 if kind == "transformer" else 3.0)
    if isinstance(model, Bahdanau):
        model.projection.bias.data[EOS] += 2.0  # or it would seldom end
    return model.eval()


@pytest.fixture(scope="module", params=["transformer", "bahdanau"])
def model(request: pytest.FixtureRequest) -> Model:
    return make_model(request.param)


def next_scores(model: Model, source: list[int], past: list[int]) -> list[float]:
    """Log-probabilities of the next token by a whole forward of one sentence."""
    ended = [*source, EOS]
    logits = model(torch.tensor([ended]), torch.tensor([len(ended)], dtype=torch.int32), torch.tensor([[BOS, *past]]))
    values: list[float] = logits[0, -1].log_softmax(-1).tolist()
    return values


def naive_greedy(model: Model, source: list[int], limit: int) -> tuple[list[int], float]:
    past: list[int] = []
    total = 0.0
    while len(past) < limit:
        scores = next_scores(model, source, past)
        best = max(range(len(scores)), key=scores.__getitem__)
        total += scores[best]
        if best == EOS:
            return past, total
        past.append(best)
    return past, total


def naive_beam(model: Model, source: list[int], limit: int, beam: int, alpha: float) -> tuple[list[int], float]:
    """Runs every beam to the limit, keeps all that ends, and takes the best of it at the end."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []  # (score, tokens)
    for length in range(1, limit + 1):
        extensions = sorted(
            (
                (total + s, past, token)
                for total, past in live
                for token, s in enumerate(next_scores(model, source, past))
            ),
            key=lambda extension: -extension[0],
        )
        for total, past, token in extensions[:beam]:
            if token == EOS:
                ended.append((total / length_penalty(length, alpha), past))
        live = [(total, [*past, token]) for total, past, token in extensions if token != EOS][:beam]
    ended += [(total / length_penalty(limit, alpha), past) for total, past in live]
    score, tokens = max(ended)
    return tokens, score


OPTIONS = {"max_length_ratio": 0.0, "max_length_margin": 9, "stop_repetition": False}


@torch.inference_mode()
def test_greedy_is_the_naive_search(model: Model) -> None:
    found = decode(model, SOURCES, SearchOptions(**OPTIONS))  # type: ignore[arg-type]
    lengths = set()
    for source, (hypothesis,) in zip(SOURCES, found, strict=True):
        tokens, total = naive_greedy(model, source, 9)
        assert list(hypothesis.tokens) == tokens
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-4)
        lengths.add((len(tokens), hypothesis.stop_reason))
    assert len(lengths) > 3  # or the sentences would say little


@torch.inference_mode()
@pytest.mark.parametrize("beam", [2, 4])
def test_case_47_beam_is_the_naive_search(model: Model, beam: int) -> None:
    found = decode(model, SOURCES[:12], SearchOptions(beam=beam, nbest=2, **OPTIONS))  # type: ignore[arg-type]
    for source, hypotheses in zip(SOURCES[:12], found, strict=True):
        tokens, score = naive_beam(model, source, 9, beam, 0.6)
        assert list(hypotheses[0].tokens) == tokens
        assert hypotheses[0].score == pytest.approx(score, abs=1e-4)
        assert hypotheses[0].score >= hypotheses[1].score


def tokens_of(found: list[list[Hypothesis]]) -> list[list[tuple[tuple[int, ...], StopReason]]]:
    return [[(hypothesis.tokens, hypothesis.stop_reason) for hypothesis in hypotheses] for hypotheses in found]


@pytest.mark.parametrize("beam", [1, 4])
def test_case_48_batch_sizes_agree(model: Model, beam: int) -> None:
    options = SearchOptions(beam=beam, nbest=beam, max_length_ratio=0.5, max_length_margin=5)
    alone = decode(model, SOURCES, options, batch=1)
    for batch in (2, 7, 32):
        together = decode(model, SOURCES, options, batch=batch)
        assert tokens_of(together) == tokens_of(alone), batch
        for one, other in zip(alone, together, strict=True):
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)


def test_nothing_runs_for_empty_sources(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_between = [[], SOURCES[3], [], SOURCES[8], []]
    found = decode(model, empty_between, SearchOptions())
    assert tokens_of(found[1::2]) == tokens_of(decode(model, [SOURCES[3], SOURCES[8]], SearchOptions()))
    assert found[::2] == [[], [], []]

    def forbidden(*arguments: Tensor) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(model, "encode", forbidden)
    assert decode(model, [[], []], SearchOptions()) == [[], []]
    assert decode(model, [], SearchOptions()) == []


def test_progress_counts_every_source(model: Model) -> None:
    done: list[int] = []
    decode(model, SOURCES, SearchOptions(max_length_ratio=0, max_length_margin=1), batch=10, progress=done.append)
    assert done == [10, 10, 10, 3]


def test_case_33_dropout_is_off_in_evaluation_mode(model: Model) -> None:
    options = SearchOptions(beam=2)
    assert decode(model, SOURCES[:5], options) == decode(model, SOURCES[:5], options)
    before = torch.get_rng_state()
    decode(model, SOURCES[:5], options)
    assert torch.equal(torch.get_rng_state(), before)
    source, lengths, target = torch.tensor([[5, 6, 2]]), torch.tensor([3], dtype=torch.int32), torch.tensor([[1, 5]])
    try:
        model.train()
        assert not torch.equal(model(source, lengths, target), model(source, lengths, target))
    finally:
        model.eval()


def test_every_tensor_is_made_on_the_device_of_the_model(model: Model) -> None:
    expected = decode(model, SOURCES[:6], SearchOptions(beam=3))
    with torch.device("meta"):  # where a tensor lands that is made without naming a device: it has no values
        assert decode(model, SOURCES[:6], SearchOptions(beam=3)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_cuda_decodes_the_same(model: Model) -> None:
    expected = decode(model, SOURCES, SearchOptions(beam=3))
    try:
        assert tokens_of(decode(model.cuda(), SOURCES, SearchOptions(beam=3))) == tokens_of(expected)
    finally:
        model.cpu()
