"""`fuseq evaluate`: scores of a training run or a bundle on a test set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from export.evaluation import Outputs, Report, TestSet, measure, open_files, open_part, translate
from serving.core.errors import ConfigError
from training.bars import bar
from training.metrics import Scores

__all__ = ["evaluate"]

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("target", type=FILE)
@click.option("--data", type=FILE, help="Folder of a split, as `fuseq data` makes it.")
@click.option("--part", help="Part of the split.  [default: test]")
@click.option("--source", type=FILE, help="Instead of --data: sentences, one a line, plain or .gz.")
@click.option("--reference", "references", type=FILE, multiple=True, help="Their translations; may be repeated.")
@click.option("--beam", type=click.IntRange(1), help="Rows that search in parallel.  [default: the model's]")
@click.option("--precision", help="Precision of a bundle.  [default: the bundle's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--output", type=FILE, help="Write the translations to a file, one a line.")
def evaluate(
    target: Path,
    data: Path | None,
    part: str | None,
    source: Path | None,
    references: tuple[Path, ...],
    beam: int | None,
    precision: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Translate a test set with TARGET and score it.

    TARGET is a training run, a weights file in one (both decoded with PyTorch), or a bundle (decoded by the engine that
    serves it). BLEU and chrF are sacreBLEU's; where sentences have several references, both scores are given.
    """
    test = _test_set(data, part, source, references)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"--output {output} is a folder, or in none")  # now, not after the work
    with bar() as progress:
        task = progress.add_task("translating", total=len(test.sources))
        made = translate(target, test, beam, precision, lambda done: progress.advance(task, done))
    report = measure(test, made.outputs)
    if output is not None:
        _write(output, [one.text for one in made.outputs])
    if as_json:
        click.echo(json.dumps(_as_dict(target, test, made, report), ensure_ascii=False))
    else:
        _print(target, test, made, report)


def _write(path: Path, texts: list[str]) -> None:
    """One text a line: a line break inside one becomes a space."""
    try:
        path.write_text("".join(" ".join(text.split("\n")) + "\n" for text in texts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _test_set(data: Path | None, part: str | None, source: Path | None, references: tuple[Path, ...]) -> TestSet:
    if data is not None and source is None and not references:
        return open_part(data, part or "test")
    if data is None and part is None and source is not None and references:
        return open_files(source, references)
    raise click.UsageError("say what to measure on: --data FOLDER [--part test], or --source FILE --reference FILE ...")


def _as_dict(target: Path, test: TestSet, made: Outputs, report: Report) -> dict[str, Any]:
    named = {"target": str(target), **made.how, "set": test.name, "sha256": test.sha256, "sentences": len(test.sources)}
    timed = {"seconds": round(made.seconds, 3), "sentences_per_second": round(_rate(test, made), 1)}
    return {**named, **report.as_dict(), **timed}


def _rate(test: TestSet, made: Outputs) -> float:
    return len(test.sources) / max(made.seconds, 1e-9)


def _print(target: Path, test: TestSet, made: Outputs, report: Report) -> None:
    how = ", ".join(text if isinstance(text, str) else f"{name} {text:,}" for name, text in made.how.items())
    click.echo(f"{target}: {how}")
    click.echo(f"{test.name}: {len(test.sources):,} sentences" + (f", split {test.sha256[:16]}" if test.sha256 else ""))
    _print_scores("one reference", report.scores)
    if report.all_references is not None:
        _print_scores("all references", report.all_references)
    shares = {"empty": report.empty, "copied": report.copied, "looping": report.looping, "together": report.faulty}
    click.echo("  ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    if report.truncated:
        click.echo(f"{report.truncated:,} sentences were over the model's limit and cut")
    if made.how["kind"] == "bundle":  # PyTorch's time would say nothing of serving
        click.echo(f"{made.seconds:.1f} s, {_rate(test, made):,.1f} sentences/s")


def _print_scores(against: str, scores: Scores) -> None:
    click.echo(f"{against}: BLEU {scores.bleu:.2f}  chrF {scores.chrf:.2f}")
    click.echo(f"  {scores.bleu_signature}\n  {scores.chrf_signature}")
