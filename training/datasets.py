"""Data sets by name: where they are published, under which licence, and how they become a split.

A recipe reads the published files from a folder (`--from`) or fetches them, cleans the pairs and splits them.
Nothing of a data set is part of this package.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.core.errors import InvalidInput, NotFound
from training.cleaning import CleaningRules, DropReport, clean, normalise
from training.corpus import Pair, find_parallel, read_lines, read_manythings, read_parallel, read_tsv
from training.split import Entry, Split, SplitRecord, split_by_source, write_split

DEFAULT_SEED = 2026
DEFAULT_DEV = 1000
DEFAULT_TEST = 2000

Watch = Callable[[Iterator[Pair]], Iterator[Pair]]
"""Wraps the stream of raw pairs, to show progress."""


@dataclass(frozen=True)
class PublishedFile:
    """A file where it is published, and the names under which it may lie in a `--from` folder."""

    name: str
    """What the recipe calls it."""
    url: str
    """Empty for a user's own file."""
    places: tuple[str, ...]
    """Relative paths to look for, the first is where a download is kept."""

    def find(self, folder: Path) -> Path | None:
        """The file in `folder`, if it is there."""
        return next((folder / place for place in self.places if (folder / place).is_file()), None)


@dataclass(frozen=True)
class Provenance:
    """Where data comes from and what its use is bound to."""

    name: str
    published: str
    licence: str
    attribution: str
    note: str = ""
    redistributable: bool = True
    """Whether a model trained on it may be shipped."""


@dataclass(frozen=True)
class Sizes:
    """How a corpus without a published split is split."""

    seed: int = DEFAULT_SEED
    dev: int = DEFAULT_DEV
    test: int = DEFAULT_TEST


@dataclass(frozen=True)
class Recipe:
    """A data set in a direction of translation."""

    name: str
    source: str
    target: str
    provenance: Provenance
    files: tuple[PublishedFile, ...]
    method: str
    make: Callable[[Recipe, Mapping[str, Path], Sizes, DropReport, Watch], Split]
    """Reads the files, found by `PublishedFile.name`, into a split."""
    seeded: bool = True
    """Whether the split is drawn here; otherwise it is published and sizes are not asked for."""
    rules: CleaningRules = field(default_factory=CleaningRules)

    def locate(self, folder: Path) -> dict[str, Path]:
        """The files in a folder that someone has filled.

        Raises:
            NotFound: one is not there; names it and where it is published.
        """
        if not folder.is_dir():
            raise NotFound(f"no folder {folder}")
        found = {}
        for file in self.files:
            path = file.find(folder)
            if path is None:
                raise NotFound(f"no {' or '.join(file.places)} in {folder}; it is published at {file.url}")
            found[file.name] = path
        return found


def prepare(
    recipe: Recipe,
    paths: Mapping[str, Path],
    folder: Path,
    sizes: Sizes | None = None,
    *,
    replace: bool = False,
    watch: Watch = lambda pairs: pairs,
) -> SplitRecord:
    """Files of a recipe (see `Recipe.locate`) to a split in `folder`, in the layout of `training.split`.

    Raises:
        InvalidInput: a file is damaged, the corpus is too small, or `folder` holds another split.
    """
    sizes = sizes or Sizes()
    report = DropReport()
    split = recipe.make(recipe, paths, sizes, report, watch)
    if not split.train:
        raise InvalidInput(f"nothing is left to train on: {report.kept} of {report.seen} pairs passed the cleaning")
    provenance: dict[str, Any] = {
        **vars(recipe.provenance),
        "files": [{"name": paths[f.name].name, "url": f.url, "sha256": sha256_of(paths[f.name])} for f in recipe.files],
    }
    return write_split(
        split,
        folder,
        recipe=recipe.name,
        source=recipe.source,
        target=recipe.target,
        method=recipe.method,
        seed=sizes.seed if recipe.seeded else None,
        cleaning={"rules": vars(recipe.rules), **report.as_dict()},
        provenance=provenance,
        replace=replace,
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


BY_SOURCE = "unique source sentences (case, spaces and punctuation folded), drawn by SHA-256 of seed and sentence"


def _drawn(recipe: Recipe, pairs: Iterator[Pair], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    cleaned = clean(watch(pairs), recipe.source, recipe.target, report, recipe.rules)
    return split_by_source(cleaned, seed=sizes.seed, sizes={"dev": sizes.dev, "test": sizes.test})


# --- Tatoeba, as selected by manythings.org ---------------------------------------------------------------------------

TATOEBA = Provenance(
    name="Tatoeba sentence pairs, selected by manythings.org",
    published="https://www.manythings.org/anki/",
    licence="CC BY 2.0 FR",
    attribution="www.manythings.org/anki and tatoeba.org",
)
TATOEBA_LANGUAGES = {"de": "deu", "fr": "fra", "es": "spa", "zh": "cmn"}


def _make_tatoeba(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    return _drawn(recipe, read_manythings(paths["pairs"], english_first=recipe.source == "en"), sizes, report, watch)


def _tatoeba(source: str, target: str) -> Recipe:
    archive = f"{TATOEBA_LANGUAGES[target if source == 'en' else source]}-eng.zip"
    file = PublishedFile("pairs", f"https://www.manythings.org/anki/{archive}", (archive, f"tatoeba/{archive}"))
    return Recipe(f"tatoeba-{source}-{target}", source, target, TATOEBA, (file,), BY_SOURCE, _make_tatoeba)


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
MULTI30K_PARTS = {"dev": "val", "test": "test_2016_flickr", "test_2017_flickr": "test_2017_flickr"}
"""Our part names to the published ones; Czech has no test of 2017."""


def _multi30k_parts(source: str, target: str) -> dict[str, str]:
    czech = "cs" in (source, target)
    return {ours: part for ours, part in MULTI30K_PARTS.items() if not (czech and part == "test_2017_flickr")}


def _make_multi30k(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    """The training part is cleaned; the judged parts stay whole, so scores compare with published ones."""
    source, target = recipe.source, recipe.target
    raw = read_parallel(paths[f"train.{source}"], paths[f"train.{target}"])
    split = Split(list(clean(watch(raw), source, target, report, recipe.rules)), {})
    for ours, part in _multi30k_parts(source, target).items():
        pairs = read_parallel(paths[f"{part}.{source}"], paths[f"{part}.{target}"])
        split.judged[ours] = [Entry(normalise(p.source), (normalise(p.target),)) for p in pairs]
        if f"{part}.tokenized" in paths:
            split.tokenized[ours] = list(read_lines(paths[f"{part}.tokenized"]))
    return split


def _multi30k(source: str, target: str) -> Recipe:
    def published(name: str, place: str) -> PublishedFile:
        base = place.rsplit("/", 1)[1]
        return PublishedFile(name, f"{MULTI30K_BASE}/{place}", (base, f"multi30k/{base}", place))

    parts = _multi30k_parts(source, target)
    files = [
        published(f"{part}.{language}", f"raw/{part}.{language}.gz")
        for part in ("train", *parts.values())
        for language in (source, target)
    ]
    # Czech references were published in this form too, but not for every mirror of the data, and no score needs them.
    if target != "cs":
        files += [
            published(f"{part}.tokenized", f"tok/{part}.lc.norm.tok.{target}")
            for part in parts.values()
            if part.startswith("test")
        ]
    name = f"multi30k-{source}-{target}"
    return Recipe(name, source, target, MULTI30K, tuple(files), "as published", _make_multi30k, seeded=False)


# --- A user's own sentence pairs --------------------------------------------------------------------------------------


def _make_own(recipe: Recipe, paths: Mapping[str, Path], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    if "pairs" in paths:
        return _drawn(recipe, read_tsv(paths["pairs"]), sizes, report, watch)
    return _drawn(recipe, read_parallel(paths["source"], paths["target"]), sizes, report, watch)


def own_recipe(
    place: Path, source: str, target: str, *, licence: str = "", attribution: str = ""
) -> tuple[Recipe, dict[str, Path]]:
    """A recipe for a TSV file (source, target; plain or .gz), or for a folder with NAME.<source> and NAME.<target>.

    Raises:
        NotFound: `place` is neither a file nor a folder with exactly one such pair.
    """
    if place.is_file():
        paths = {"pairs": place}
    else:
        paths = dict(zip(("source", "target"), find_parallel(place, source, target), strict=True))
    provenance = Provenance(place.name, "", licence or "not stated", attribution)
    files = tuple(PublishedFile(name, "", (path.name,)) for name, path in paths.items())
    return Recipe(f"own-{source}-{target}", source, target, provenance, files, BY_SOURCE, _make_own), paths


MULTI30K_DIRECTIONS = [(a, b) for a in ("en", "de", "fr", "cs") for b in ("en", "de", "fr", "cs") if a != b]
TATOEBA_DIRECTIONS = [d for other in TATOEBA_LANGUAGES for d in (("en", other), (other, "en"))]
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (*(_tatoeba(*d) for d in TATOEBA_DIRECTIONS), *(_multi30k(*d) for d in MULTI30K_DIRECTIONS))
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        NotFound: there is none; names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)
    raise NotFound(f"no data set {name!r}; nearest: {near[0]} (`fuseq data --list` shows all)")
