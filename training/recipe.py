"""Recipes: how published files become a split on disk. `training.datasets` has the named ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.core.errors import InvalidInput, NotFound
from training.cleaning import CleaningRules, DropReport, clean
from training.corpus import Pair
from training.split import Split, SplitRecord, split_by_source, write_split

Watch = Callable[[Iterator[Pair]], Iterator[Pair]]
"""Wraps the stream of raw pairs, to show progress."""


@dataclass(frozen=True)
class PublishedFile:
    """A file where it is published, and where it may lie in a folder that someone has filled."""

    name: str
    """What the recipe calls it."""
    url: str
    """Empty for a user's own file."""
    places: tuple[str, ...]
    """Relative paths to look for; the first is its published name."""
    needed: bool = True

    def find(self, folder: Path) -> Path | None:
        """The file in `folder`, if it is there."""
        return next((folder / place for place in self.places if (folder / place).is_file()), None)


@dataclass(frozen=True)
class Provenance:
    """Where data comes from and what its use is bound to. A bundle's manifest repeats it."""

    name: str
    published: str
    licence: str
    attribution: str
    note: str = ""
    redistributable: bool = True
    """Whether a model trained on it may be shipped."""


@dataclass(frozen=True)
class Sizes:
    """How a corpus without a split of its own is split: the seed, and the sentences of the judged parts."""

    seed: int = 2026
    dev: int = 1000
    test: int = 2000


Make = Callable[["Recipe", Mapping[str, Path], Sizes, DropReport, Watch], Split]


@dataclass(frozen=True)
class Recipe:
    """A data set in one direction of translation."""

    name: str
    source: str
    target: str
    provenance: Provenance
    files: tuple[PublishedFile, ...]
    """The first one has a line for every training pair."""
    make: Make
    """Reads the files, found by `PublishedFile.name`, into a split."""
    method: str
    """How the split is made, in words."""
    drawn: bool = True
    """Whether the split is drawn here, by `Sizes`; otherwise it is as the data has it."""
    rules: CleaningRules = field(default_factory=CleaningRules)

    def locate(self, place: Path) -> dict[str, Path]:
        """The files in a folder that someone has filled; `place` may also be the file itself if there is only one.

        Raises:
            NotFound: one is not there; names it and where it is published.
        """
        if place.is_file() and len(self.files) == 1:
            return {self.files[0].name: place}
        if not place.is_dir():
            raise NotFound(f"no folder {place}")
        found = {file.name: path for file in self.files if (path := file.find(place)) is not None}
        for file in self.files:
            if file.needed and file.name not in found:
                raise NotFound(f"no {' or '.join(file.places)} in {place}; it is published at {file.url}")
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
    files = [
        {"name": paths[file.name].name, "url": file.url, "sha256": sha256_of(paths[file.name])}
        for file in recipe.files
        if file.name in paths
    ]
    return write_split(
        split,
        folder,
        recipe=recipe.name,
        source=recipe.source,
        target=recipe.target,
        method=recipe.method,
        seed=sizes.seed if recipe.drawn else None,
        cleaning={"rules": vars(recipe.rules), **report.as_dict()},
        provenance={**vars(recipe.provenance), "files": files},
        replace=replace,
    )


BY_SOURCE = "unique source sentences (case, spaces and punctuation folded), drawn by SHA-256 of seed and sentence"


def draw(recipe: Recipe, pairs: Iterator[Pair], sizes: Sizes, report: DropReport, watch: Watch) -> Split:
    """Clean a corpus that has no split of its own, and split it `BY_SOURCE`."""
    cleaned = clean(watch(pairs), recipe.source, recipe.target, report, recipe.rules)
    return split_by_source(cleaned, seed=sizes.seed, sizes={"dev": sizes.dev, "test": sizes.test})


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
