"""The command-line options of everything that writes a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the bundle."),
    click.option(
        "--precision",
        "precisions",
        type=click.Choice(["fp32", "int8"]),
        multiple=True,
        help="May be repeated; the last one is the default of the server.  [default: fp32 int8]",
    ),
    click.option("--version", default="1", show_default=True, help="Version of the model."),
    click.option(
        "--max-loss", type=float, default=0.5, show_default=True, help="BLEU that int8 may lose against fp32."
    ),
    click.option("--no-gate", is_flag=True, help="Measure no quality; say so in the manifest."),
    click.option("--force", is_flag=True, help="Replace a bundle that is there."),
)


def bundle_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command the options, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
