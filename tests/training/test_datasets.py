"""Named data sets: each says where it is published and what its use is bound to, and becomes a documented split."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from serving.core.errors import InvalidInput, NotFound
from tests.support.archives import zipped
from training.corpus import Pair
from training.datasets import RECIPES, find_recipe, own_recipe
from training.recipe import Sizes, prepare
from training.split import SplitFolder

SIZES = Sizes(seed=3, dev=4, test=6)
TATOEBA_TABLE = "".join(f"Sentence {i}.\tSatz {i}.\nSentence {i}.\tEs ist Satz {i}.\n" for i in range(30)).encode()


def multi30k(folder: Path, languages: tuple[str, ...]) -> Path:
    folder.mkdir()
    for part, size in {"train": 8, "val": 3, "test_2016_flickr": 4, "test_2017_flickr": 2}.items():
        for language in languages:
            lines = "".join(f"{part}\u00a0{language} number {i} .\n" for i in range(size))
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.mark.parametrize("name", ["tatoeba-en-de", "tatoeba-en-fr", "tatoeba-en-es", "tatoeba-en-zh", "multi30k-en-de"])
def test_data_sets_that_must_exist(name: str) -> None:
    assert find_recipe(name).name == name


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_data_set_says_where_it_is_published_and_who_is_to_be_credited(recipe) -> None:
    assert recipe.name.endswith(f"-{recipe.source}-{recipe.target}")
    provenance = recipe.provenance
    assert provenance.name
    assert provenance.licence
    assert provenance.attribution
    assert provenance.redistributable or provenance.note
    for file in recipe.files:
        assert file.url.startswith("https://")
        assert file.url.endswith(file.places[0])
    assert len({file.places[0] for file in recipe.files}) == len(recipe.files)


def test_only_the_nearest_name_is_offered() -> None:
    with pytest.raises(NotFound, match=r"no data set 'tatoeba-ende'; the nearest is tatoeba-en-de \("):
        find_recipe("tatoeba-ende")


@pytest.mark.parametrize("place", ["", "tatoeba"])
def test_tatoeba(tmp_path: Path, place: str) -> None:
    (tmp_path / "data" / place).mkdir(parents=True)
    archive = zipped(tmp_path / "data" / place / "deu-eng.zip", {"deu.txt": TATOEBA_TABLE, "_about.txt": b"About"})
    recipe = find_recipe("tatoeba-en-de")
    record = prepare(recipe, recipe.locate(tmp_path / "data"), tmp_path / "out", SIZES)
    assert record.provenance["licence"] == "CC BY 2.0 FR"
    assert record.provenance["attribution"] == "www.manythings.org/anki and tatoeba.org"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    url = "https://www.manythings.org/anki/deu-eng.zip"
    assert record.provenance["files"] == [{"name": "deu-eng.zip", "url": url, "sha256": digest}]
    assert record.seed == 3
    assert {part: counts["pairs"] for part, counts in record.parts.items()} == {"train": 40, "dev": 4, "test": 6}
    assert record.parts["test"]["references"] == 12
    assert recipe.locate(archive) == {"pairs": archive}


def test_tatoeba_to_english_splits_by_the_other_language(tmp_path: Path) -> None:
    zipped(tmp_path / "deu-eng.zip", {"deu.txt": TATOEBA_TABLE})
    recipe = find_recipe("tatoeba-de-en")
    record = prepare(recipe, recipe.locate(tmp_path), tmp_path / "out", SIZES)
    assert record.parts["train"] == {"pairs": 50, "unique_sources": 50}
    assert all(pair.source.endswith(pair.target[-3:]) for pair in SplitFolder.open(tmp_path / "out").pairs("test"))


def test_multi30k_keeps_its_published_split(tmp_path: Path) -> None:
    folder = multi30k(tmp_path / "multi30k", ("en", "de"))
    (folder / "test_2016_flickr.lc.norm.tok.de").write_text("".join(f"tok {i} .\n" for i in range(4)))
    recipe = find_recipe("multi30k-en-de")
    record = prepare(recipe, recipe.locate(tmp_path), tmp_path / "out", SIZES)
    split = SplitFolder.open(tmp_path / "out")
    split.verify()
    assert record.seed is None
    assert record.method == "as published"
    assert not record.provenance["redistributable"]
    assert {part: counts["pairs"] for part, counts in record.parts.items()} == {
        "train": 8,
        "dev": 3,
        "test": 4,
        "test_2017_flickr": 2,
    }
    assert next(split.pairs("dev")) == ("val en number 0 .", "val de number 0 .")
    assert [pair.source[-3:] for pair in split.pairs("test")] == ["0 .", "1 .", "2 .", "3 ."]
    assert split.tokenized_references("test") == [f"tok {i} ." for i in range(4)]
    assert split.tokenized_references("test_2017_flickr") is None
    assert "test_2016_flickr.lc.norm.tok.de" in [file["name"] for file in record.provenance["files"]]


def test_judged_parts_stay_whole_and_only_training_is_cleaned(tmp_path: Path) -> None:
    folder = multi30k(tmp_path / "multi30k", ("en", "de"))
    for part in ("train", "test_2016_flickr"):
        for language in ("en", "de"):
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(b"Two dogs .\nSame .\nSame .\n"))
    recipe = find_recipe("multi30k-en-de")
    with pytest.raises(InvalidInput, match="nothing is left to train on: 0 of 3 pairs"):
        prepare(recipe, recipe.locate(folder), tmp_path / "out")
    (folder / "train.de.gz").write_bytes(gzip.compress(b"Zwei Hunde .\nGleich .\nGleich .\n"))
    record = prepare(recipe, recipe.locate(folder), tmp_path / "out")
    assert (record.parts["train"]["pairs"], record.parts["test"]["pairs"]) == (2, 3)
    assert record.cleaning["dropped"] == {"duplicate": 1}
    assert record.parts["test"]["sources_in_train"] == 3


def test_multi30k_has_no_czech_test_of_2017(tmp_path: Path) -> None:
    folder = multi30k(tmp_path / "multi30k", ("en", "cs"))
    recipe = find_recipe("multi30k-cs-en")
    assert "test_2017_flickr" not in prepare(recipe, recipe.locate(folder), tmp_path / "out").parts


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    message = (
        r"no deu-eng\.zip or tatoeba/deu-eng\.zip in .*; it is published at https://www\.manythings\.org/anki/deu-eng"
    )
    with pytest.raises(NotFound, match=message):
        find_recipe("tatoeba-en-de").locate(tmp_path)
    with pytest.raises(NotFound, match="no folder"):
        find_recipe("multi30k-en-de").locate(tmp_path / "gone")


def numbered(path: Path, word: str, size: int) -> None:
    content = "".join(f"{word} {i}\n" for i in range(size)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_own_pairs_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text("".join(f"house {i}\tHaus {i}\n" for i in range(20)))
    recipe, paths = own_recipe(tmp_path / "mine.tsv", "en", "de", licence="CC0", attribution="The makers")
    record = prepare(recipe, paths, tmp_path / "out", SIZES)
    assert (record.recipe, record.parts["train"]["pairs"]) == ("own-en-de", 10)
    assert record.provenance["licence"] == "CC0"
    assert record.provenance["attribution"] == "The makers"
    assert record.provenance["name"] == "mine.tsv"


def test_own_pairs_in_two_files(tmp_path: Path) -> None:
    numbered(tmp_path / "corpus.en", "house", 20)
    numbered(tmp_path / "corpus.de.gz", "Haus", 20)
    (tmp_path / "notes.txt").write_text("not a corpus")
    recipe, paths = own_recipe(tmp_path, "de", "en")
    record = prepare(recipe, paths, tmp_path / "out", SIZES)
    assert record.parts["train"]["pairs"] == 10
    assert record.provenance["licence"] == "not stated"
    assert next(SplitFolder.open(tmp_path / "out").pairs("test")).source.startswith("Haus ")


def test_own_pairs_that_are_split_already(tmp_path: Path) -> None:
    for part, size in {"train": 9, "valid": 3, "test": 2, "extra": 1}.items():
        numbered(tmp_path / f"{part}.en", f"{part} house", size)
        numbered(tmp_path / f"{part}.de", f"{part} Haus", size)
    recipe, paths = own_recipe(tmp_path, "en", "de")
    record = prepare(recipe, paths, tmp_path / "out", SIZES)
    assert (record.method, record.seed) == ("as given", None)
    assert {part: counts["pairs"] for part, counts in record.parts.items()} == {"train": 9, "dev": 3, "test": 2}
    assert list(SplitFolder.open(tmp_path / "out").pairs("dev"))[2] == Pair("valid house 2", "valid Haus 2")


def test_own_pairs_that_are_not_clear(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"must hold one pair of files NAME\.en and NAME\.de .*; found: none"):
        own_recipe(tmp_path, "en", "de")
    for stem in ("a", "b"):
        for language in ("en", "de"):
            numbered(tmp_path / f"{stem}.{language}", "x", 1)
    with pytest.raises(NotFound, match="found: a, b"):
        own_recipe(tmp_path, "en", "de")
    with pytest.raises(NotFound, match="no file or folder"):
        own_recipe(tmp_path / "gone.tsv", "en", "de")


@pytest.mark.corpora
@pytest.mark.parametrize(
    ("name", "train", "seen"),
    [
        ("tatoeba-en-de", 164015, 167805),
        ("multi30k-en-de", 28979, 29000),
    ],
)
def test_real_corpora(corpora: Path, tmp_path: Path, name: str, train: int, seen: int) -> None:
    recipe = find_recipe(name)
    record = prepare(recipe, recipe.locate(corpora), tmp_path)
    assert record.cleaning["seen"] == seen
    assert record.parts["train"]["pairs"] == train
    assert record.parts["test"]["pairs"] == (2000 if recipe.drawn else 1000)
    SplitFolder.open(tmp_path).verify()
