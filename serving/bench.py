"""The command `bench`: how fast a bundle is here, or on a server, and what that costs."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from serving.core.errors import ConfigError

if TYPE_CHECKING:
    from fuseq.translation import Translation

BATCHES = (1, 8, 32, 128)
SECONDS_PER_HOUR = 3600
LONGEST_RANDOM = 32  # tokens of a random text
RANDOM_TEXTS = 256

Submit = Callable[..., "Future[Translation]"]


@dataclass(frozen=True, slots=True)
class Work:
    """One text, and how many tokens its translation must have; None lets the model end."""

    text: str
    forced_length: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one batch size. A batch is handed over whole and waited for; latencies are of batches."""

    batch: int
    beam: int
    sentences_per_s: float
    tokens_per_s: float  # of the target
    words_per_s: float  # of the source
    p50_ms: float
    p95_ms: float
    batches: int
    rss_mib: float | None  # resident memory of this process; None for a server's
    words_per_price: float | None = None  # source words for one unit of the price's currency


def measure(submit: Submit, works: Sequence[Work], batch: int, beam: int, seconds: float, local: bool = True) -> Row:
    """Translate batches of `batch` texts for so many seconds, at least three of them after one that is not counted.

    Raises:
        FuseqError: a text cannot be translated.
    """
    taken = 0

    def run() -> tuple[float, int, int]:
        """Seconds, target tokens and source words of one batch."""
        nonlocal taken
        chosen = [works[(taken + index) % len(works)] for index in range(batch)]
        taken += batch
        begin = time.perf_counter()
        futures = [_submit(submit, work, beam) for work in chosen]
        answers = [future.result() for future in futures]
        spent = time.perf_counter() - begin
        return spent, sum(len(answer.tokens) for answer in answers), sum(len(work.text.split()) for work in chosen)

    run()
    found: list[tuple[float, int, int]] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        found.append(run())
    times = [spent for spent, _, _ in found]
    total = sum(times)
    return Row(
        batch,
        beam,
        sentences_per_s=batch * len(found) / total,
        tokens_per_s=sum(tokens for _, tokens, _ in found) / total,
        words_per_s=sum(words for _, _, words in found) / total,
        p50_ms=1e3 * float(np.percentile(times, 50)),
        p95_ms=1e3 * float(np.percentile(times, 95)),
        batches=len(found),
        rss_mib=_rss_mib() if local else None,
    )


def _submit(submit: Submit, work: Work, beam: int) -> Future[Translation]:
    forced = {} if work.forced_length is None else {"forced_length": work.forced_length}
    return submit(work.text, beam=beam, truncate=True, **forced)


def _rss_mib() -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # another system
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


def read_texts(path: Path) -> list[Work]:
    """The lines of a file that hold something.

    Raises:
        ConfigError: there are none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {path}: {error}") from None
    works = [Work(line) for line in lines if line.strip()]
    if not works:
        raise ConfigError(f"--input {path}: it has no text")
    return works


def random_texts(bundle: Path, seed: int = 0) -> list[Work]:
    """Texts of random pieces of the bundle's vocabulary, translated to as many tokens as they have: fit for any model.

    Raises:
        FuseqError: the bundle cannot be opened.
    """
    from serving.core.codecs import open_codec
    from serving.core.manifest import open_bundle

    opened = open_bundle(bundle)
    codec, limits = open_codec(opened, opened.manifest.source_codec), opened.manifest.limits
    draw = random.Random(seed)
    longest = min(LONGEST_RANDOM, limits.source - 1, limits.target)
    works: list[Work] = []
    while len(works) < RANDOM_TEXTS:
        text = codec.decode(draw.choices(range(codec.size), k=draw.randint(1, longest))).strip()
        length = len(codec.encode(text)) if text.isprintable() and text else 0
        if 0 < length <= longest:
            works.append(Work(text, length))
    return works


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that names what runs; nothing where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not wanted) as progress:
        task = progress.add_task("", total=total)
        first = True

        def begin(what: str) -> None:
            nonlocal first
            progress.update(task, description=what, advance=0 if first else 1)
            first = False

        yield begin


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    priced = any(row.words_per_price is not None for row in rows)
    table = Table(
        "batch", "beam", "sentences/s", "tokens/s", "p50 ms", "p95 ms", "MiB", title=title, title_justify="left"
    )
    if priced:
        table.add_column("words for 1")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [f"{row.batch}", f"{row.beam}", f"{row.sentences_per_s:,.1f}", f"{row.tokens_per_s:,.0f}"]
        cells += [f"{row.p50_ms:,.2f}", f"{row.p95_ms:,.2f}", "–" if row.rss_mib is None else f"{row.rss_mib:,.0f}"]
        if row.words_per_price is not None:
            cells.append(f"{row.words_per_price:,.0f}")
        table.add_row(*cells)
    Console(soft_wrap=not sys.stdout.isatty()).print(table)


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--server", metavar="HOST:PORT", help="Measure this server, which serves BUNDLE, instead of this process."
)
@click.option("--input", "source", type=click.Path(path_type=Path), help="Texts to translate, one a line.")
@click.option("--beam", type=click.IntRange(min=1), default=1, show_default=True, help="1 is greedy.")
@click.option(
    "--batch", "batches", type=click.IntRange(min=1), multiple=True, help="May be repeated.  [default: 1 8 32 128]"
)
@click.option("--seconds", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Of each batch size.")
@click.option("--price-per-hour", type=click.FloatRange(min=0, min_open=True), help="Of this machine, in any currency.")
@click.option("--precision", default="", help="Precision of the graphs; the bundle's default if left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per batch size.")
def bench(
    bundle: Path | None,
    server: str | None,
    source: Path | None,
    beam: int,
    batches: tuple[int, ...],
    seconds: float,
    price_per_hour: float | None,
    precision: str,
    as_json: bool,
) -> None:
    """Measure BUNDLE (the bundled model if left out): sentences and tokens a second, latency, memory, price.

    Without --input the texts are random pieces of the bundle's vocabulary, translated to exactly as many tokens as
    they have: comparable between machines and settings. With --input they are yours, translated as always.
    """
    if server is not None and precision:
        raise click.UsageError("--precision belongs to the server; start it with that")
    from serving.cli import default_bundle

    path = bundle or default_bundle()
    works = read_texts(source) if source is not None else random_texts(path)
    rows = []
    with ExitStack() as stack:
        submit = _open(stack, path, server, precision)
        begin = stack.enter_context(_bar(len(batches or BATCHES), sys.stderr.isatty()))
        for size in batches or BATCHES:
            begin(f"batches of {size}")
            row = measure(submit, works, size, beam, seconds, server is None)
            rows.append(_priced(row, price_per_hour))
            if as_json:
                click.echo(json.dumps({"bundle": path.name, "texts": _kind(source), **_rounded(rows[-1])}))
    if not as_json:
        show(rows, f"{path.name}{f' on {server}' if server else ''}, {_kind(source)}")


def _open(stack: ExitStack, bundle: Path, server: str | None, precision: str) -> Submit:
    if server is not None:
        from fuseq.client import Client

        client = stack.enter_context(Client(server, attempts=5, retry_overloaded=True))
        client.models()  # whoever is not there is not there at once
        return client.submit
    from serving.config import Settings
    from serving.local import LocalTranslator

    return stack.enter_context(LocalTranslator(bundle, settings=Settings(precision=precision))).submit


def _kind(source: Path | None) -> str:
    return "random texts, forced length" if source is None else source.name


def _priced(row: Row, price_per_hour: float | None) -> Row:
    if price_per_hour is None:
        return row
    return Row(**{**asdict(row), "words_per_price": row.words_per_s * SECONDS_PER_HOUR / price_per_hour})


def _rounded(row: Row) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()}
