"""The commands `serve` and `translate`."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.config import env_name, make_settings, settings_options
from serving.core.errors import DeadlineExceeded, FuseqError, InvalidInput, Unavailable

if TYPE_CHECKING:
    from rich.progress import Progress

    from fuseq.translation import Translation

BUNDLE_VARIABLE = env_name("bundle")
WINDOW = 64  # inputs in flight
PATIENCE = 2.0  # seconds before a progress bar appears


def default_bundle() -> Path:
    """The bundle that FUSEQ_BUNDLE names, else the one installed with fuseq."""
    from fuseq import bundled_model

    named = os.environ.get(BUNDLE_VARIABLE)
    return Path(named) if named else bundled_model()


@click.command()
@click.argument("bundles", metavar="[BUNDLE]...", nargs=-1, type=click.Path(path_type=Path))
@settings_options
def serve(bundles: tuple[Path, ...], **values: Any) -> None:
    """Serve BUNDLEs over gRPC, the first as the default model; the bundled model if none is named.

    The environment variable FUSEQ_BUNDLE names a bundle to serve instead of the bundled one. SIGTERM and SIGINT
    drain: calls in flight may finish, new ones are refused.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said by us, in one line
    from serving.rpc.server import run

    run(make_settings(values), bundles or (default_bundle(),))


@dataclass(frozen=True, slots=True)
class Line:
    """One input: its number from 1, its text, its bytes in the source, and what is wrong with it if anything."""

    number: int
    text: str
    size: int
    error: InvalidInput | None = None


def _lines(texts: tuple[str, ...]) -> Iterator[Line]:
    """The arguments, or standard input line by line."""
    if texts:
        for number, text in enumerate(texts, 1):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:  # bytes that the shell passed and that are no text
                yield Line(number, os.fsencode(text).decode("utf-8", "replace"), 0, InvalidInput("not valid UTF-8"))
            else:
                yield Line(number, text, 0)
        return
    # A reader of our own: the interpreter would wait for a thread that holds sys.stdin when it leaves.
    with open(sys.stdin.fileno(), "rb", closefd=False) as source:
        for number, raw in enumerate(source, 1):
            try:
                yield Line(number, raw.decode("utf-8").rstrip("\r\n"), len(raw))
            except UnicodeDecodeError as error:
                wrong = InvalidInput(f"not valid UTF-8 at byte {error.start}")
                yield Line(number, raw.decode("utf-8", "replace").rstrip("\r\n"), len(raw), wrong)


Submit = Callable[..., "Future[Translation]"]


def _submit_to(stack: ExitStack, bundle: Path | None, server: str | None, timeout: float) -> Submit:
    """What starts the translation of one text: a client of a server, or the bundle in this process."""
    if server is not None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from fuseq.client import Client

        return stack.enter_context(Client(server, timeout=timeout, attempts=5, retry_overloaded=True)).submit
    from serving.local import LocalTranslator

    return stack.enter_context(LocalTranslator(bundle or default_bundle(), timeout=timeout)).submit


def _progress(wanted: bool) -> Progress | None:
    """A bar on standard error, for people who sent the output elsewhere."""
    if not wanted or sys.stdout.isatty() or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[lines]} lines, {task.fields[rate]:.0f}/s"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _size_of_stdin() -> int | None:
    """Bytes to come, where standard input is a file."""
    found = os.fstat(sys.stdin.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else None


def _print_plain(translation: Translation, alignments: bool) -> None:
    for hypothesis in translation.hypotheses:
        text = " ".join(hypothesis.text.split("\n"))
        click.echo(f"{hypothesis.score:.4f}\t{text}" if len(translation.hypotheses) > 1 else text)
        if alignments and hypothesis.alignment is not None:
            from rich.console import Console

            from fuseq.drawing import draw_alignment

            Console(soft_wrap=True).print(draw_alignment(hypothesis.alignment), end="\n\n")


def _print_outcome(line: Line, outcome: Translation | FuseqError, alignments: bool, as_json: bool) -> None:
    if isinstance(outcome, FuseqError):
        click.echo(f"fuseq: line {line.number}: {outcome}", err=True)
        click.echo(json.dumps({"input": line.text, "error": str(outcome)}, ensure_ascii=False) if as_json else "")
    elif as_json:
        click.echo(json.dumps({"input": line.text, **outcome.to_json()}, ensure_ascii=False))
    else:
        _print_plain(outcome, alignments)


@click.command()
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--bundle", type=click.Path(path_type=Path), help="Translate in this process with this bundle.")
@click.option("--server", metavar="HOST:PORT", help="Translate on this server.")
@click.option("--model", help="Model of the server; its default if left out.")
@click.option("--beam", type=click.IntRange(min=1), help="Rows that search in parallel; 1 is greedy.")
@click.option("--nbest", type=click.IntRange(min=1), help="Hypotheses per input; printed as score, tab, text.")
@click.option("--length-penalty", type=float, help="Exponent of the length penalty.")
@click.option("--max-length-ratio", type=float, help="At most ratio * source tokens + margin tokens come out.")
@click.option("--max-length-margin", type=click.IntRange(min=0), help="See --max-length-ratio.")
@click.option("--prefix", default="", help="How every translation must begin.")
@click.option("--alignments", is_flag=True, help="Show how the translation attends to the source.")
@click.option("--truncate", is_flag=True, help="Cut texts over the model's limit instead of refusing them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per input.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds that one input may take.")
def translate(
    texts: tuple[str, ...],
    bundle: Path | None,
    server: str | None,
    alignments: bool,
    as_json: bool,
    prefix: str,
    timeout: float,
    **options: Any,
) -> int:
    """Translate each TEXT, or standard input line by line; one output per input, in order, blank ones included.

    With neither --bundle nor --server, the bundle that FUSEQ_BUNDLE names or the bundled model is used in this
    process. An input that fails is reported on standard error, gives an empty line (with --json: an object with
    `error`), and the exit status is 1 at the end.
    """
    from fuseq.stream import in_order

    if bundle is not None and server is not None:
        raise click.UsageError("--bundle and --server exclude each other")
    if server is not None and not re.search(r":\d+$", server):
        raise click.UsageError(f"--server {server}: must be HOST:PORT, as localhost:50051")
    if not texts and sys.stdin is None:
        raise click.UsageError("standard input is closed; give the texts as arguments, or a file: < FILE")
    asked = {name: value for name, value in options.items() if value is not None}
    asked |= {name: True for name, value in (("alignments", alignments), ("truncate", asked.pop("truncate"))) if value}
    failures = 0
    with ExitStack() as stack:
        translate_one = _submit_to(stack, bundle, server, timeout)
        try:
            translate_one("", **asked).result()  # what is wrong with every input is said once
        except (Unavailable, DeadlineExceeded) as error:
            if server is None:
                raise
            raise Unavailable(f"no answer from {server}; does `fuseq serve` run there? ({error})") from None

        def submit(line: Line) -> Future[Translation]:
            if line.error is not None:
                raise line.error
            return translate_one(line.text, prefix=prefix, **asked)

        follow = _follow(stack, wanted=not texts)
        for line, outcome in in_order(_lines(texts), submit, WINDOW):
            failures += isinstance(outcome, FuseqError)
            _print_outcome(line, outcome, alignments, as_json)
            sys.stdout.flush()
            follow(line)
    return 1 if failures else 0


def _follow(stack: ExitStack, wanted: bool) -> Any:
    """A function that takes each finished line and, on long input, shows how far it is."""
    progress = _progress(wanted)
    if progress is None:
        return lambda line: None
    started = time.monotonic()
    task = progress.add_task("", total=_size_of_stdin(), lines=0, rate=0.0)

    def follow(line: Line) -> None:
        spent = time.monotonic() - started
        progress.update(task, advance=line.size, lines=line.number, rate=line.number / max(spent, 1e-9))
        if spent > PATIENCE and not progress.live.is_started:
            progress.start()
            stack.callback(progress.stop)

    return follow
