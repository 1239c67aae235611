"""The console script: mounts the commands of the other packages and loads each only when it is called."""

from __future__ import annotations

import importlib
import keyword
import os
import sys
from typing import NoReturn

import click

from fuseq import __version__
from serving.core.errors import FuseqError

# Command -> the module that holds it and the line that `fuseq --help` shows without loading it.
COMMANDS = {
    "data": ("training.cli", "Fetch or convert a corpus."),
    "train": ("training.cli", "Train a model."),
    "evaluate": ("export.evaluate", "Measure a checkpoint or bundle on a test set."),
    "export": ("export.cli", "Turn a checkpoint into a bundle."),
    "import": ("export.importing", "Turn a model that was trained elsewhere into a bundle."),
    "inspect": ("export.cli", "Show what is in a bundle."),
    "translate": ("serving.cli", "Translate text, in process or on a server."),
    "serve": ("serving.cli", "Serve bundles over gRPC."),
    "bench": ("serving.bench", "Measure the speed of a bundle, here or on a server."),
    "demo": ("fuseq.demo", "Serve the bundled model and translate five sentences."),
}

# Optional package -> the extra that brings it.
EXTRAS = {
    "matplotlib": "train",
    "onnx": "train",
    "onnxscript": "train",
    "onnxruntime": "cpu",
    "sacrebleu": "train",
    "safetensors": "train",
    "torch": "train",
    "yaml": "train",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        variable = cmd_name + "_" * keyword.iskeyword(cmd_name)
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), variable)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="fuseq")
def cli() -> None:
    """Train sequence models, export them to ONNX, serve them over gRPC."""


def main() -> None:
    """Run a command; an error of ours is one line and a non-zero exit status."""
    try:
        code = cli.main(prog_name="fuseq", standalone_mode=False)
    except click.exceptions.Abort:
        fail("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:  # `fuseq` alone
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "fuseq"
        fail(f"{error.format_message()} (see `{command} --help`)", error.exit_code)
    except click.ClickException as error:
        fail(error.format_message(), error.exit_code)
    except FuseqError as error:
        fail(str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        fail(f"this needs {package}, which is not installed: pip install 'fuseq[{EXTRAS[package]}]'", 1)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written
        if error.errno is None:
            raise
        fail(": ".join(str(part) for part in (error.filename, error.strerror) if part), 1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    """Say what is wrong in one line and leave."""
    click.echo(f"fuseq: {' '.join(message.split())}", err=True)
    sys.exit(code)
