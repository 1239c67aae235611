"""The commands `data` and `train`."""

from __future__ import annotations

from pathlib import Path

import click

from serving.core.errors import FuseqError
from training.bars import Reporter
from training.data_command import data

__all__ = ["data", "train"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=click.Path(path_type=Path), help="Folder of the run [default: runs/NAME].")
@click.option("--resume", is_flag=True, help="Go on from the run's last save, or begin if there is none.")
def train(config: Path, overrides: tuple[str, ...], run: Path | None, resume: bool) -> None:
    """Train the model that CONFIG describes; KEY=VALUE overrides a key, as in schedule.steps=1000.

    A run that was stopped, killed or cut off goes on with --resume and ends as if nothing had happened.
    """
    # Here, not above: `fuseq data` needs no torch, which takes seconds to load.
    from training.config import load_config
    from training.runner import train as run_training

    settings = load_config(config, overrides)
    folder = run or Path("runs") / settings.name
    with Reporter() as reporter:
        try:
            progress = run_training(settings, folder, resume=resume, on_step=reporter.step, on_note=reporter.note)
        except OSError as error:
            raise FuseqError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error
        best = progress.best
        reporter.note(f"best BLEU {best['bleu']:.2f} at step {best['step']:,.0f}; model in {folder}")
