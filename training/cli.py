"""`fuseq data`, `fuseq train`, `fuseq evaluate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from training.config import load_config
from training.data_command import data
from training.loop import Tick
from training.runner import train as run_training

__all__ = ["data", "train"]

REPORT_SECONDS = 10.0  # between lines where there is no terminal to draw a bar on


class Reporter:
    """Progress of a training on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.reported = self.started
        self.first: Tick | None = None

    def note(self, text: str) -> None:
        """A line of its own."""
        click.echo(("\r\x1b[K" if sys.stderr.isatty() else "") + text, err=True)

    def step(self, tick: Tick) -> None:
        """Show where the run stands: rate in tokens per second, time left."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.started = tick, now
        interval = 0.5 if sys.stderr.isatty() else REPORT_SECONDS
        if now - self.reported < interval or tick.step == self.first.step:
            return
        self.reported = now
        elapsed = max(1e-9, now - self.started)
        speed = (tick.tokens - self.first.tokens) / elapsed
        left = (tick.steps - tick.step) * elapsed / (tick.step - self.first.step)
        line = (
            f"step {tick.step:,}/{tick.steps:,}  loss {tick.loss:.3f}  rate x{tick.rate:.2f}  "
            f"{speed:,.0f} tokens/s  {left / 60:.0f} min left"
        )
        click.echo(("\r\x1b[K" if sys.stderr.isatty() else "") + line, err=True, nl=not sys.stderr.isatty())


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "run", type=click.Path(path_type=Path), help="Folder of the run [default: runs/NAME].")
@click.option("--resume", is_flag=True, help="Go on from the run's last save.")
def train(config: Path, overrides: tuple[str, ...], run: Path | None, resume: bool) -> None:
    """Train the model that CONFIG describes; KEY=VALUE overrides a key, as in schedule.steps=1000."""
    settings = load_config(config, overrides)
    reporter = Reporter()
    folder = run or Path("runs") / settings.name
    progress = run_training(settings, folder, resume=resume, on_step=reporter.step, on_note=reporter.note)
    best = progress.best
    reporter.note(f"best BLEU {best.get('bleu', 0):.2f} at step {best.get('step', 0):,.0f}; model in {folder}")
