"""`fuseq data`: a named data set, or a user's own sentence pairs, to a split on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from serving.core.errors import ConfigError, InvalidInput, Unavailable
from training.bars import bar
from training.corpus import Pair, count_lines
from training.datasets import OWN, RECIPES, find_recipe, own_recipe
from training.download import download
from training.recipe import PublishedFile, Recipe, Sizes, prepare
from training.split import SplitRecord

LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
COUNTS = ("pairs", "unique_sources", "references", "references_in_train")
DEFAULTS = Sizes()


@click.command("data")
@click.argument("name", required=False)
@click.option("--to", type=click.Path(path_type=Path), help="Folder for the split.")
@click.option(
    "--from",
    "origin",
    type=click.Path(path_type=Path),
    help="Folder with the published files; without it they are downloaded. For `own`: a TSV file or a folder.",
)
@click.option("--seed", default=DEFAULTS.seed, show_default=True, help="Seed of the split.")
@click.option("--dev", default=DEFAULTS.dev, show_default=True, type=click.IntRange(1), help="Development sentences.")
@click.option("--test", default=DEFAULTS.test, show_default=True, type=click.IntRange(1), help="Test sentences.")
@click.option("--languages", metavar="SRC-TGT", help="For `own`: the languages, as en-de.")
@click.option("--licence", default="", help="For `own`: the licence, to be named in bundles.")
@click.option("--attribution", default="", help="For `own`: who is to be credited in bundles.")
@click.option("--replace", is_flag=True, help="Replace another split in the folder.")
@click.option("--list", "show_list", is_flag=True, help="Show the data sets and leave.")
@click.pass_context
def data(
    context: click.Context,
    name: str | None,
    to: Path | None,
    origin: Path | None,
    seed: int,
    dev: int,
    test: int,
    languages: str | None,
    licence: str,
    attribution: str,
    replace: bool,
    show_list: bool,
) -> None:
    """Fetch, clean and split the data set NAME into a folder.

    NAME is one of `fuseq data --list`, or `own` for your own sentence pairs, plain or .gz: a TSV file (source, target);
    or a folder with NAME.SRC and NAME.TGT, line by line translations of each other; or a folder with train, dev and
    test, each in both languages.
    """
    if show_list:
        _print_list()
        return
    if name is None or to is None:
        raise ConfigError("say which data set and where to put it: fuseq data NAME --to DIR (`--list` shows the names)")
    published = ("seed", "dev", "test")  # What a split that is there already leaves no choice about
    try:
        if name == OWN:
            recipe, paths = own_recipe(*_own_arguments(origin, languages), licence=licence, attribution=attribution)
            _refuse_unused(context, () if recipe.drawn else published, "a folder that is split already")
        else:
            recipe = find_recipe(name)
            _refuse_unused(context, ("languages", "licence", "attribution"), name)
            _refuse_unused(context, () if recipe.drawn else published, name)
            paths = recipe.locate(origin) if origin is not None else _fetched(recipe, to)
        total = count_lines(paths[recipe.files[0].name])
        with bar() as progress:
            sizes = Sizes(seed, dev, test)
            record = prepare(recipe, paths, to, sizes, replace=replace, watch=lambda p: _watched(p, total, progress))
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename or to}: {error.strerror or error}") from error
    _print_record(record, to)


def _refuse_unused(context: click.Context, options: tuple[str, ...], what: str) -> None:
    """An option that would have no effect is an error, not a surprise."""
    for option in options:
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{option} has no effect on {what}; leave it out")


def _own_arguments(origin: Path | None, languages: str | None) -> tuple[Path, str, str]:
    if origin is None or languages is None:
        raise ConfigError("your own sentence pairs need both --from FILE_OR_FOLDER and --languages SRC-TGT")
    source, _, target = languages.partition("-")
    if not LANGUAGE.fullmatch(source) or not LANGUAGE.fullmatch(target) or source == target:
        raise ConfigError(f"--languages {languages!r} must be two different codes joined by a dash, as en-de")
    return origin, source, target


def _watched(pairs: Iterator[Pair], total: int, progress: Progress) -> Iterator[Pair]:
    task = progress.add_task("cleaning pairs", total=total)
    number = 0
    for number, pair in enumerate(pairs, start=1):
        if number % 1000 == 0:
            progress.update(task, completed=number)
        yield pair
    progress.update(task, completed=number, total=number)
    progress.add_task("splitting and writing", total=None)


def _fetched(recipe: Recipe, to: Path) -> dict[str, Path]:
    """The published files, downloaded to `to`/published unless they are there already."""
    paths = {}
    with bar(DownloadColumn(), TransferSpeedColumn()) as progress:
        for file in recipe.files:
            path = paths[file.name] = to / "published" / file.places[0]
            if not path.is_file():
                task = progress.add_task(file.places[0], total=None)
                download(file.url, path, partial(_show, progress, task))
                _check(file, path)
    return paths


def _check(file: PublishedFile, path: Path) -> None:
    """A page that says "not found" with status 200 is not a corpus: do not keep it."""
    try:
        count_lines(path)
    except InvalidInput as error:
        path.unlink()
        raise Unavailable(
            f"what came from {file.url} is not the published file; fetch it another way: {error}"
        ) from error


def _show(progress: Progress, task: TaskID, done: int, total: int | None) -> None:
    progress.update(task, completed=done, total=total)


def _print_list() -> None:
    families: dict[str, list[Recipe]] = {}
    for recipe in RECIPES.values():
        families.setdefault(recipe.provenance.name, []).append(recipe)
    for family, recipes in families.items():
        provenance = recipes[0].provenance
        click.echo(f"{family}\n  {provenance.published}\n  licence: {provenance.licence}")
        click.echo("".join(f"    {recipe.name}\n" for recipe in recipes))
    click.echo(f"Your own sentence pairs\n    {OWN} --from FILE_OR_FOLDER --languages SRC-TGT")


def _print_record(record: SplitRecord, folder: Path) -> None:
    table = Table("part", *(name.replace("_", " ") for name in COUNTS), title=Text(f"{record.recipe} in {folder}"))
    for part, counts in record.parts.items():
        table.add_row(part, *(f"{counts[k]:,}" if k in counts else "" for k in COUNTS))
    Console().print(table)
    cleaning, provenance = record.cleaning, record.provenance
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in cleaning["dropped"].items()) or "none"
    click.echo(f"read {cleaning['seen']:,} pairs, kept {cleaning['kept']:,}; dropped: {dropped}")
    if record.withheld:
        click.echo(f"withheld {record.withheld:,} pairs: other spellings of judged sentences")
    click.echo(f"split sha256 {record.sha256}")
    for part, counts in record.parts.items():
        if shared := counts.get("sources_in_train"):
            click.echo(f"note: source sentences of {part} that also stand in train: {shared:,}")
    click.echo(f"licence: {provenance['licence']}. Credit: {provenance['attribution'] or 'nobody named'}")
    if provenance["note"]:
        click.echo(f"note: {provenance['note']}")
