"""`fuseq import`: models that were trained elsewhere, as bundles."""

from __future__ import annotations

from pathlib import Path

import click

from export.options import bundle_options
from serving.core.errors import MissingDependency

__all__ = ["import_"]


@click.group(name="import")
def import_() -> None:
    """Turn a model that was trained elsewhere into a bundle that `fuseq serve` serves."""


@import_.command()
@click.argument("folder", type=click.Path(path_type=Path))
@bundle_options
@click.option(
    "--dev",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="SOURCE TARGET",
    help="Development set that calibrates int8 and judges it: sentences and their translations, one a line.",
)
@click.option("--name", help="Name of the model.  [default: that of the folder]")
@click.option("--beam", type=click.IntRange(1), help="Beam of requests that name none.  [default: the checkpoint's]")
def hf(
    folder: Path,
    output: Path,
    precisions: tuple[str, ...],
    dev: tuple[Path, Path] | None,
    name: str | None,
    version: str,
    beam: int | None,
    max_loss: float,
    no_gate: bool,
    force: bool,
) -> None:
    """Import FOLDER, a MarianMT checkpoint in Hugging Face's format (OPUS-MT's models are such).

    It holds config.json, model.safetensors or pytorch_model.bin, source.spm, target.spm and vocab.json. The package
    `transformers` is not needed.
    """
    from export.bundle import check_place
    from export.report import Bar, show

    check_place(output, force)
    try:
        from export.huggingface.reader import Checkpoint
        from export.pipeline import BOTH, Options, export_bundle
        from export.subject import read_development_set
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"import needs {(error.name or '').split('.')[0]}, which is not installed: pip install 'fuseq[cpu,train]'"
        ) from None
    checkpoint = Checkpoint.open(folder)
    options = Options(
        precisions=tuple(precisions) or BOTH,  # type: ignore[arg-type]
        version=version,
        search=checkpoint.search(beam),
        max_loss=max_loss,
        gate=not no_gate,
        force=force,
    )
    with Bar() as bar:
        bar.begin("Reading the checkpoint")
        subject = checkpoint.subject(read_development_set(*dev) if dev else None, name)
        bundle = export_bundle(subject, output, options, bar)
    show(bundle)
