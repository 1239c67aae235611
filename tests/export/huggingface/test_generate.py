"""At the size of a real small model: 200 sentences, and how other ways to stop a beam search differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.core.manifest import Bundle
from tests.export.huggingface.reference import Output, differences, generated, sentences, served, write_random
from tests.export.huggingface.test_import import imported

pytestmark = pytest.mark.slow

SMALL = {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "ffn": 1024, "heads": 8}
TEXTS = sentences(200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_random(folder, SMALL, extra=7868)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return imported(checkpoint, tmp_path_factory.mktemp("bundles") / "small", "--precision", "fp32")


@pytest.fixture(scope="module")
def never(checkpoint: Path) -> list[Output]:
    return generated(checkpoint, TEXTS, num_beams=4, early_stopping="never")


def test_greedy_is_that_of_generate(checkpoint: Path, bundle: Bundle) -> None:
    assert differences(served(bundle, "fp32", TEXTS, beam=1), generated(checkpoint, TEXTS, num_beams=1)) == []


def test_beam_search_is_that_of_generate(bundle: Bundle, never: list[Output]) -> None:
    ours = served(bundle, "fp32", TEXTS, beam=4)
    assert differences(ours, never) == []
    # Random weights as sharp as these make 1e-4 of float32's rounding; both are as far from the scores in float64.
    assert [one.score for one in ours] == pytest.approx([one.score for one in never], abs=1e-3)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_an_earlier_stop_never_finds_a_better_output(
    checkpoint: Path, never: list[Output], early_stopping: Any
) -> None:
    """The share of sentences with other tokens is printed (pytest -s)."""
    found = generated(checkpoint, TEXTS, num_beams=4, early_stopping=early_stopping)
    assert all(one.score >= other.score - 1e-5 for one, other in zip(never, found, strict=True))
    other = differences(found, never)
    print(f"\nearly_stopping={early_stopping}: {len(other)} of {len(TEXTS)} sentences have other tokens")
