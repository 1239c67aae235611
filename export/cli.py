"""`fuseq export` and `fuseq inspect`. PyTorch is loaded only when something is exported."""

from __future__ import annotations

from pathlib import Path

import click

from export.options import bundle_options
from serving.core.errors import MissingDependency
from serving.core.manifest import Bundle, open_bundle

__all__ = ["export", "inspect"]


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@bundle_options
@click.option(
    "--dev",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="SOURCE TARGET",
    help="Development set that judges the precisions.  [default: the one of the training]",
)
@click.option("--name", help="Name of the model.  [default: that of the training]")
@click.option("--beam", type=click.IntRange(1), default=1, show_default=True, help="Beam of requests that name none.")
def export(
    checkpoint: Path,
    output: Path,
    precisions: tuple[str, ...],
    dev: tuple[Path, Path] | None,
    name: str | None,
    version: str,
    beam: int,
    max_loss: float,
    no_gate: bool,
    force: bool,
) -> None:
    """Turn CHECKPOINT, a training run or a weights file in it, into a bundle that `fuseq serve` serves."""
    from export.bundle import check_place
    from export.report import Bar, show
    from serving.core.manifest import SearchDefaults

    check_place(output, force)
    try:
        from export.pipeline import BOTH, Options, export_bundle
        from export.subject import load_subject
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"export needs {(error.name or '').split('.')[0]}, which is not installed: pip install 'fuseq[cpu,train]'"
        ) from None
    subject = load_subject(checkpoint, dev or None, name)
    options = Options(
        precisions=tuple(precisions) or BOTH,  # type: ignore[arg-type]
        version=version,
        search=SearchDefaults(beam=beam),
        max_loss=max_loss,
        gate=not no_gate,
        force=force,
    )
    with Bar() as bar:
        bundle = export_bundle(subject, output, options, bar)
    show(bundle)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in BUNDLE: graphs, operators, sizes, parity, quality, provenance. Checks every hash."""
    opened: Bundle = open_bundle(bundle)
    if as_json:
        click.echo(opened.manifest.model_dump_json(indent=2))
        return
    from export.report import show

    show(opened)
