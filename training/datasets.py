"""Data sets by name: where they are published, under which licence, and how they are read; and a user's own pairs.

Nothing of a data set is part of this package: the files are fetched from where they are published, or read from a
folder that the user has filled.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from serving.core.errors import NotFound
from training.cleaning import DropReport, clean, normalise
from training.corpus import find_text, read_lines, read_manythings, read_parallel, read_tsv, text_stems
from training.recipe import BY_SOURCE, Provenance, PublishedFile, Recipe, Sizes, Watch, draw
from training.split import Entry, Split

# --- Tatoeba, as selected by manythings.org ---------------------------------------------------------------------------

TATOEBA = Provenance(
    name="Tatoeba sentence pairs, selected by manythings.org",
    published="https://www.manythings.org/anki/",
    licence="CC BY 2.0 FR",
    attribution="www.manythings.org/anki and tatoeba.org",
)
TATOEBA_FILES = {"de": "deu-eng.zip", "fr": "fra-eng.zip", "es": "spa-eng.zip", "zh": "cmn-eng.zip"}
TATOEBA_NOTES = {"zh": "mixes traditional and simplified characters"}


def _make_tatoeba(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    return draw(recipe, read_manythings(paths["pairs"], english_first=recipe.source == "en"), sizes, report, watch)


def _tatoeba(source: str, target: str) -> Recipe:
    other = target if source == "en" else source
    archive = TATOEBA_FILES[other]
    file = PublishedFile("pairs", TATOEBA.published + archive, (archive, f"tatoeba/{archive}"))
    provenance = replace(TATOEBA, note=TATOEBA_NOTES.get(other, ""))
    return Recipe(f"tatoeba-{source}-{target}", source, target, provenance, (file,), _make_tatoeba, BY_SOURCE)


# --- Multi30k, task 1, with its published split -----------------------------------------------------------------------

MULTI30K = Provenance(
    name="Multi30k task 1, raw",
    published="https://github.com/multi30k/dataset",
    licence="not stated for the text; for non-commercial research and education",
    attribution="Elliott et al. 2016 (en, de), Elliott et al. 2017 (fr, test 2017), Barrault et al. 2018 (cs)",
    note="measure on it; do not ship it, nor a model trained on it",
    redistributable=False,
)
MULTI30K_BASE = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1"
MULTI30K_PARTS = {"train": "train", "dev": "val", "test": "test_2016_flickr", "test_2017_flickr": "test_2017_flickr"}
"""Our part names to the published ones."""


def _published(name: str, place: str, needed: bool = True) -> PublishedFile:
    base = place.rsplit("/", 1)[1]
    places = (base, f"multi30k/{base}", place) + ((base.removesuffix(".gz"),) if base.endswith(".gz") else ())
    return PublishedFile(name, f"{MULTI30K_BASE}/{place}", places, needed)


def _multi30k(source: str, target: str) -> Recipe:
    files = []
    for ours, part in MULTI30K_PARTS.items():
        if part == "test_2017_flickr" and "cs" in (source, target):
            continue  # Never translated to Czech
        files += [_published(f"{ours}.{side}", f"raw/{part}.{side}.gz") for side in (source, target)]
        if part.startswith("test"):
            # What published scores were computed with. Without it the other scores can still be computed.
            files.append(_published(f"{ours}.tokenized", f"tok/{part}.lc.norm.tok.{target}", needed=False))
    name, method = f"multi30k-{source}-{target}", "as published"
    return Recipe(name, source, target, MULTI30K, tuple(files), _make_given, method, drawn=False)


def _make_given(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    """A split as the data has it. Only the training part is cleaned: the judged parts must stay comparable."""
    source, target = recipe.source, recipe.target
    train = read_parallel(paths[f"train.{source}"], paths[f"train.{target}"])
    split = Split(list(clean(watch(train), source, target, report, recipe.rules)), {})
    for part in (name.removesuffix(f".{source}") for name in paths if name.endswith(f".{source}")):
        if part != "train":
            pairs = read_parallel(paths[f"{part}.{source}"], paths[f"{part}.{target}"])
            split.judged[part] = [Entry(normalise(pair.source), (normalise(pair.target),)) for pair in pairs]
        if f"{part}.tokenized" in paths:
            split.tokenized[part] = list(read_lines(paths[f"{part}.tokenized"]))
    return split


# --- A user's own sentence pairs --------------------------------------------------------------------------------------

OWN = "own"
GIVEN_PARTS = {"dev": ("dev", "val", "valid"), "test": ("test",)}
"""Part names to the names of files that make a folder a split of its own, beside "train"."""


def _make_own(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    if "pairs" in paths:
        return draw(recipe, read_tsv(paths["pairs"]), sizes, report, watch)
    return draw(recipe, read_parallel(paths[recipe.source], paths[recipe.target]), sizes, report, watch)


def own_recipe(
    place: Path, source: str, target: str, *, licence: str = "", attribution: str = ""
) -> tuple[Recipe, dict[str, Path]]:
    """A recipe for sentence pairs of the user, and its files, each plain or .gz.

    `place` is a TSV file (source, target), or a folder with one pair of files NAME.<source> and NAME.<target>, or a
    folder with train, dev (or val, valid) and test, each in both languages, which is then the split.

    Raises:
        NotFound: `place` is none of these.
    """
    paths, drawn = {"pairs": place}, True
    if not place.is_file():
        paths, drawn = _own_files(place, source, target)
    provenance = Provenance(place.resolve().name, "", licence or "not stated", attribution)
    files = tuple(PublishedFile(name, "", (path.name,)) for name, path in paths.items())
    make, method = (_make_own, BY_SOURCE) if drawn else (_make_given, "as given")
    return Recipe(f"own-{source}-{target}", source, target, provenance, files, make, method, drawn), paths


def _own_files(folder: Path, source: str, target: str) -> tuple[dict[str, Path], bool]:
    stems = text_stems(folder, source) & text_stems(folder, target)
    if len(stems) == 1:
        (stem,) = stems
        return {language: find_text(folder, stem, language) for language in (source, target)}, True
    parts = {part: next((n for n in names if n in stems), None) for part, names in GIVEN_PARTS.items()}
    if "train" in stems and None not in parts.values():
        named = {"train": "train", **parts}
        return {
            f"{p}.{side}": find_text(folder, str(n), side) for p, n in named.items() for side in (source, target)
        }, False
    found = ", ".join(sorted(stems)) or "none"
    raise NotFound(
        f"{folder} must hold one pair of files NAME.{source} and NAME.{target} (plain or .gz), or three pairs named "
        f"train, dev and test; found: {found}"
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        *(_tatoeba("en", other) for other in TATOEBA_FILES),
        *(_tatoeba(other, "en") for other in TATOEBA_FILES),
        *(_multi30k(source, target) for source, target in permutations(("en", "de", "fr", "cs"), 2)),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        NotFound: there is none; names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    (nearest,) = difflib.get_close_matches(name, [*RECIPES, OWN], n=1, cutoff=0.0)
    raise NotFound(f"no data set {name!r}; the nearest is {nearest} (`fuseq data --list` shows all)")
