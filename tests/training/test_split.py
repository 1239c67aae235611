"""Splits: nothing that is judged on stands in training, and the same sentences always split the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import InvalidInput, NotFound
from training.corpus import Pair, read_lines
from training.split import (
    ASCII_KEY,
    Split,
    SplitFolder,
    SplitRecord,
    sentence_key,
    split_by_source,
    split_hash,
    write_split,
)

SIZES = {"dev": 2, "test": 3}
FROZEN = "422f9d6c8b70f64e7b63be5b610453786cbf1a3ea4dcd12e40fdc60f5e23a06f"
# Few different letters, so that sentences repeat in other spellings and with several translations.
TEXTS = st.text("abB .!", min_size=1, max_size=4).map(str.strip).filter(bool)
CORPORA = st.lists(st.builds(Pair, TEXTS, st.text("xyz", min_size=1, max_size=3)), min_size=1, max_size=60)


def corpus(sentences: int = 40) -> list[Pair]:
    """Sentences with one to three translations, every fifth also in another spelling."""
    pairs = []
    for i in range(sentences):
        pairs += [Pair(f"Sentence {i}.", f"Satz {i}, Fassung {j}.") for j in range(1 + i % 3)]
        pairs += [Pair(f"sentence {i}!", f"Satz {i}!")] * (i % 5 == 0)
    return pairs


def write(split: Split, folder: Path, seed: int = 7, **options: Any) -> SplitRecord:
    about = {"recipe": "toy", "source": "en", "target": "de", "method": "drawn", "cleaning": {}, "provenance": {}}
    return write_split(split, folder, seed=seed, **about, **options)


@pytest.mark.parametrize(
    "texts",
    [("Hi.", "hi!", "  HI ", "Ｈｉ", "H-i"), ("Straße", "STRASSE"), ("Is it?", "is\u00a0it…"), ("Café", "cafe\u0301")],
)
def test_spellings_of_one_key(texts: tuple[str, ...]) -> None:
    assert len({sentence_key(text) for text in texts}) == 1


def test_keys_that_differ() -> None:
    texts = ["It is 5 $.", "It is 5 €.", "?", "!", "...", "1+1", "1-1", "I am.", "I'm."]
    assert len({sentence_key(text) for text in texts}) == len(texts)


@given(st.text(st.characters(max_codepoint=127)))
def test_the_key_of_ascii_is_that_of_the_general_rule(text: str) -> None:
    # The snowman takes the general way and is a symbol, so it stays.
    assert sentence_key(text + "☃") == text.translate(ASCII_KEY).lower() + "☃"


@given(CORPORA, st.integers(0, 3))
def test_no_judged_sentence_is_trained_on_and_no_pair_is_lost(pairs: list[Pair], seed: int) -> None:
    keys = {sentence_key(pair.source) for pair in pairs}
    if len(keys) <= sum(SIZES.values()):
        with pytest.raises(InvalidInput, match=f"has {len(keys)} unique source sentences"):
            split_by_source(pairs, seed=seed, sizes=SIZES)
        return
    split = split_by_source(pairs, seed=seed, sizes=SIZES)
    trained = {sentence_key(pair.source) for pair in split.train}
    judged = [sentence_key(entry.source) for part in SIZES for entry in split.judged[part]]
    assert {part: len(entries) for part, entries in split.judged.items()} == SIZES
    assert len(judged) == len(set(judged))
    assert trained.isdisjoint(judged)
    assert trained | set(judged) == keys
    for entry in (entry for entries in split.judged.values() for entry in entries):
        assert sorted(entry.references) == sorted({p.target for p in pairs if p.source == entry.source})
    references = sum(len(entry.references) for entries in split.judged.values() for entry in entries)
    assert len(split.train) + references + split.withheld == len(set(pairs))


@given(st.permutations(corpus(20)))
@settings(max_examples=25)
def test_the_order_of_the_corpus_does_not_matter(pairs: list[Pair]) -> None:
    expected = split_by_source(corpus(20), seed=1, sizes=SIZES)
    assert split_by_source(pairs + pairs[:5], seed=1, sizes=SIZES) == expected


def test_seeds_draw_different_sentences() -> None:
    drawn = {tuple(split_by_source(corpus(), seed=seed, sizes=SIZES).judged["test"]) for seed in range(10)}
    assert len(drawn) == 10


def test_a_growing_corpus_moves_few_sentences() -> None:
    """A sentence's rank depends on itself alone: new sentences can push it out, but not shuffle the others."""
    before = split_by_source(corpus(200), seed=1, sizes={"test": 50})
    after = split_by_source([*corpus(200), Pair("A new one.", "Ein neuer.")], seed=1, sizes={"test": 50})
    kept = {entry.source for entry in before.judged["test"]} & {entry.source for entry in after.judged["test"]}
    assert len(kept) >= 49


def test_the_split_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Neither Python's string hashing nor the order of a set may decide anything, so the hash is frozen."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path;"
        "from tests.training import test_split as t;"
        "print(t.write(t.split_by_source(t.corpus(), seed=7, sizes=t.SIZES), Path(sys.argv[1])).sha256)"
    )
    root = str(Path(__file__).parents[2])
    for number in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": number}
        answer = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / number), root],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == FROZEN


def test_the_folder_is_as_documented(tmp_path: Path) -> None:
    split = split_by_source(corpus(), seed=7, sizes=SIZES)
    record = write(split, tmp_path / "new" / "toy")
    folder = SplitFolder.open(tmp_path / "new" / "toy")
    names = {"train.en", "train.de", "dev.en", "dev.de", "dev.refs.jsonl", "test.en", "test.de", "test.refs.jsonl"}
    assert {path.name for path in folder.folder.iterdir()} == names | {"split.json"}
    assert folder.record == record
    assert set(record.files) == names
    assert record.sha256 == split_hash(record.files)
    assert folder.parts() == ["train", "dev", "test"]
    folder.verify()
    assert list(folder.pairs("train")) == split.train
    for part in SIZES:
        entries = split.judged[part]
        assert list(folder.pairs(part)) == [(entry.source, entry.references[0]) for entry in entries]
        assert folder.references(part) == [list(entry.references) for entry in entries]
        lines = [json.loads(line) for line in read_lines(folder.folder / f"{part}.refs.jsonl")]
        assert [line["source"] for line in lines] == list(read_lines(folder.path(part, "en")))
        counts = record.parts[part]
        assert counts["pairs"] == counts["unique_sources"] == SIZES[part]
        assert counts["references"] == sum(len(entry.references) for entry in entries)
        assert counts["sources_in_train"] == 0
    assert record.withheld == split.withheld
    assert folder.tokenized_references("test") is None


def test_counts_say_what_training_has_seen(tmp_path: Path) -> None:
    split = split_by_source([Pair(f"Sentence {i}.", "Satz.") for i in range(9)], seed=7, sizes=SIZES)
    split.train.append(Pair(split.judged["dev"][0].source.upper(), "Anders."))
    counts = write(split, tmp_path).parts
    assert (counts["dev"]["sources_in_train"], counts["test"]["sources_in_train"]) == (1, 0)
    assert (counts["dev"]["references_in_train"], counts["test"]["references_in_train"]) == (2, 3)


def test_another_split_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    first = write(split_by_source(corpus(), seed=7, sizes=SIZES), tmp_path)
    other = split_by_source(corpus(), seed=8, sizes=SIZES)
    with pytest.raises(InvalidInput, match=r"holds another split \(toy, seed 7\)"):
        write(other, tmp_path, seed=8)
    SplitFolder.open(tmp_path).verify()
    assert write(split_by_source(corpus(), seed=7, sizes=SIZES), tmp_path) == first
    assert write(other, tmp_path, seed=8, replace=True).sha256 != first.sha256
    SplitFolder.open(tmp_path).verify()


def test_altered_and_missing_files_are_named(tmp_path: Path) -> None:
    write(split_by_source(corpus(), seed=7, sizes=SIZES), tmp_path)
    folder = SplitFolder.open(tmp_path)
    with (tmp_path / "test.de").open("a") as file:
        file.write("Noch einer.\n")
    with pytest.raises(InvalidInput, match=r"test\.de was altered"):
        folder.verify()
    (tmp_path / "test.de").unlink()
    with pytest.raises(NotFound, match=r"test\.de is missing"):
        folder.verify()
    with pytest.raises(NotFound, match=r"has no valid\.de; it has dev\.de, "):
        folder.path("valid", "de")


def test_a_sentence_with_a_line_break_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    split = Split([Pair("Fine.", "Gut."), Pair("Two\nlines.", "Zwei.")], {})
    with pytest.raises(InvalidInput, match=r"line 2 of train\.en holds a line break"):
        write(split, tmp_path / "toy")
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read"), ('{"schema": 99}', "is not of schema 1")])
def test_records_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(NotFound, match=r"no split\.json in .*; make a split with"):
        SplitFolder.open(tmp_path)
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        SplitFolder.open(tmp_path)
