"""docs/export.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from click import Option

from export.bundle import MANIFEST_NAME
from export.calibrate import SENTENCES
from export.cli import export
from export.huggingface.reader import (
    CODEC_VOCABULARIES,
    MAX_LENGTH_MARGIN,
    MAX_LENGTH_RATIO,
    SENTENCEPIECE,
    VOCABULARY,
    WEIGHTS,
)
from export.importing import hf
from export.pipeline import FILES, Options
from export.quantize import BLOCKS, LARGEST_CODE
from export.subject import CODEC_FILE
from export.verify import BATCHES, LENGTHS, LONG, TOLERANCE

TEXT = " ".join((Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8").split())


def test_every_option_is_documented() -> None:
    for parameter in (*export.params, *hf.params):
        if isinstance(parameter, Option):
            assert parameter.opts[0] in TEXT, parameter.name


def test_files_are_those_that_are_written() -> None:
    for name in (MANIFEST_NAME, CODEC_FILE, *(f"{file}.*.onnx" for file in FILES.values()), "weights.*.bin"):
        assert f"`{name}`" in TEXT


def test_numbers_are_those_of_the_code() -> None:
    assert BATCHES == (1, 2, 7)
    assert LENGTHS == (1, 2, 6, 7, 50)
    assert "batches of 1, 2 and 7, lengths of 1, 2, 6, 7 and 50" in TEXT
    assert TOLERANCE == 1e-4
    assert "at most 1e-4 apart" in TEXT
    assert f"{LONG} steps of cached decoding" in TEXT
    assert f"`--max-loss` BLEU ({Options().max_loss})" in TEXT
    assert BLOCKS == (64, 128, 32, 16)
    assert "block of 64 inputs (or the largest of 128, 32 and 16 that divides them)" in TEXT
    assert f"whole numbers of at most {LARGEST_CODE}" in TEXT
    assert f"up to {SENTENCES} sentences" in TEXT


def test_the_files_and_limits_of_an_import_are_those_of_the_code() -> None:
    for name in (*WEIGHTS, *SENTENCEPIECE.values(), *CODEC_VOCABULARIES, CODEC_VOCABULARIES[VOCABULARY]):
        assert f"`{name}`" in TEXT
    assert f"at most {MAX_LENGTH_RATIO:g} tokens for each of the source" in TEXT
    assert f"and {MAX_LENGTH_MARGIN} more" in TEXT
