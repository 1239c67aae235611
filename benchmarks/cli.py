"""`python -m benchmarks PART`: one command for each part, the same options for all."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import machine
from benchmarks.models import NAMES, Options, Subject, make
from benchmarks.records import ROOT, Recorder
from benchmarks.report import show
from serving.core.errors import FuseqError

WORK = ROOT / "build" / "bench"
FILE_WIDTH = 220
DATA = ROOT / "data" / "en-de"


@dataclass
class Session:
    """What every part is given."""

    console: Console
    recorder: Recorder
    cpus: tuple[int, ...]
    quick: bool
    options: Options
    names: tuple[str, ...]

    def subjects(self, *default: str) -> list[Subject]:
        """The subjects asked for, or the part's own."""
        return [make(name, self.options) for name in self.names or default]


def part(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the common options and a `Session`, and write its records."""

    @click.option("--quick", is_flag=True, help="Few rounds and few cells: to see that it works.")
    @click.option("--tiny", is_flag=True, help="Models of toy size: to see in seconds that everything runs.")
    @click.option("--json", "output", type=click.Path(path_type=Path), help="Write the records to this file, too.")
    @click.option("--cpus", default="", help="Processors measured on, as 0,1 or 0-3.  [default: all]")
    @click.option("--force", is_flag=True, help="Measure although others use the processors.")
    @click.option("--subject", "names", multiple=True, type=click.Choice(NAMES), help="Only this one; may be repeated.")
    @click.option(
        "--work", type=click.Path(path_type=Path), default=WORK, show_default="build/bench", help="Keeps models."
    )
    @click.option(
        "--data",
        type=click.Path(path_type=Path),
        help="Test set: a folder with test.en and test.de.  [default: data/en-de if there]",
    )
    @click.option(
        "--run",
        type=click.Path(path_type=Path),
        help="Training of the bundled model, if its weights shall come from there.",
    )
    @click.option("--bundle", type=click.Path(path_type=Path), help="Measure this bundle as `bundled`.")
    @functools.wraps(command)
    def run(
        quick: bool, tiny: bool, output: Path | None, cpus: str, force: bool, names: tuple[str, ...], work: Path,
        data: Path | None, run: Path | None, bundle: Path | None, **arguments: Any,
    ) -> None:  # fmt: skip
        console = Console(stderr=True)
        chosen = machine.parse_cpus(cpus)
        machine.pin(chosen)

        def say(text: str) -> None:
            console.print(text, highlight=False)

        load = machine.require_idle(chosen, force=force or tiny, warn=say, seconds=0.2 if tiny else 2.0)
        found = data or (DATA if (DATA / "test.en").is_file() else None)
        options = Options(work.absolute(), found, run, bundle, tiny, say=say)
        recorder = Recorder(output, machine.describe(chosen), part=command.__name__, quick=quick, tiny=tiny,
                            foreign_load=round(load, 3), data=found.name if found else "")  # fmt: skip
        try:
            command(Session(console, recorder, chosen, quick or tiny, options, names), **arguments)
        finally:  # what was found is shown even where it is complained of
            recorder.close()
            if len(recorder.records) > 1:
                show(recorder.records, tables())

    return run


def tables() -> Console:
    """Where tables go; in a file they are as wide as they need."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure fuseq beside other engines: same weights, same machine, same run."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command, that of the command line for None; an error of ours is one line and a non-zero exit status."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = cli.main(arguments, prog_name="python -m benchmarks", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FuseqError as error:
        click.echo(f"benchmarks: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@cli.command()
@part
@click.option("--beam", "beams", type=int, multiple=True, help="Only this beam; may be repeated.")
@click.option("--batch", "batches", type=int, multiple=True, help="Only this batch size; may be repeated.")
@click.option("--peer", "peers", multiple=True, help="Only this peer; may be repeated.")
@click.option("--no-sweep", is_flag=True, help="Take each peer's first setting.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Of each pair of engines in a cell.")
def offline(
    session: Session, beams: tuple[int, ...], batches: tuple[int, ...], peers: tuple[str, ...], no_sweep: bool,
    seconds: float,
) -> None:  # fmt: skip
    """Batches: greedy and beam 4; 1, 8, 32 and 128 sentences."""
    from benchmarks.offline import Plan, measure, quality

    plan = Plan(session.cpus, beams or (1, 4), batches or (1, 8, 32, 128), 400, seconds, not no_sweep, peers)
    if session.quick:
        plan = Plan(session.cpus, beams or (1, 4), batches or (1, 8), 3, 1.0, False, peers)
    subjects = session.subjects("base", "small", "bundled", "bahdanau")
    measure(subjects, plan, session.recorder, session.console)
    for subject in subjects:
        quality(subject, plan.beams, plan, session.recorder)


@cli.command()
@part
@click.option("--inputs", type=int, multiple=True, help="Sentences a call; may be repeated.  [default: 1 and 16]")
@click.option("--beam", type=int, default=1, show_default=True)
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Of each load.")
@click.option("--no-sweep", is_flag=True, help="Take each server's first setting.")
def online(session: Session, inputs: tuple[int, ...], beam: int, seconds: float, no_sweep: bool) -> None:
    """Servers under Poisson load: calls a second within 50, 200 and 500 ms."""
    from benchmarks.online import Plan, measure

    plan = Plan(session.cpus, inputs or (1, 16), seconds, sweep=not no_sweep, beam=beam)
    if session.quick:
        plan = Plan(session.cpus, inputs or (1,), 1.0, 3, 1, False, beam, in_flight=16)
    measure(session.subjects("small", "bundled"), plan, session.recorder, session.console)


@cli.command()
@part
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Under load.")
def overhead(session: Session, seconds: float) -> None:
    """Processor time outside ONNX Runtime, idle processor time, memory, time to the first answer."""
    from benchmarks.overhead import Plan, measure

    plan = Plan(session.cpus, 1.0, 16, 1, 0.5) if session.quick else Plan(session.cpus, seconds)
    measure(session.subjects("small", "bundled"), plan, session.recorder, session.console)


@cli.command()
@part
@click.option("--requests", type=int, default=10_000, show_default=True, help="Over which memory must not grow.")
def growth(session: Session, requests: int) -> None:
    """Cost against concurrency and output length; memory over many requests."""
    from benchmarks.growth import Plan, measure

    plan = Plan(session.cpus, requests=requests)
    if session.quick:
        plan = Plan(session.cpus, (1, 8), (4, 8), 0.5, 2, 40, 4, 4, 24, 2)
    measure(session.subjects("small", "base"), plan, session.recorder, session.console)


@cli.command()
@part
def floor(session: Session) -> None:
    """The roofline of the decoder's step, the share reached, and a profile by operator."""
    from benchmarks.floor import Plan, measure

    plan = Plan(session.cpus, (1, 4), 1) if session.quick else Plan(session.cpus)
    measure(session.subjects("base", "small", "bundled"), plan, session.recorder, session.console)


@cli.command()
@part
def quick(session: Session) -> None:
    """Three minutes: the ratios that floors.toml holds; fails where one is broken."""
    from benchmarks.quick import Plan, measure, read_floors

    floors = [f for f in read_floors() if not session.names or f.subject in session.names]
    plan = Plan(session.cpus, 3, 1.0) if session.quick else Plan(session.cpus)
    measure(floors, session.options, plan, session.recorder, session.console)


@cli.command("gpu-check")
@part
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--minutes", type=float, default=7.5, show_default=True, help="At most; what is left out is named.")
def gpu_check(session: Session, device: str, minutes: float) -> None:
    """Parity, independence of neighbours and speed on a CUDA device; `--device cpu --quick` rehearses."""
    from benchmarks.gpu_check import Plan, measure

    plan = Plan(session.cpus, device, minutes=minutes)
    if session.quick:
        plan = Plan(session.cpus, device, (1, 4), 8, 3, 1.0, minutes, compiled=False)
    names = ("small", "bahdanau") if session.quick else ("base", "small", "bahdanau")
    measure(session.subjects(*names), plan, session.recorder, session.console)


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="Print Markdown instead of tables for the terminal.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw latency against load into this file.")
def report(files: tuple[Path, ...], markdown: bool, figure: Path | None) -> None:
    """Tables and figures from FILES of records."""
    from benchmarks import report as writer
    from benchmarks.records import read

    records = [record for file in files for record in read(file)]
    if markdown:
        click.echo(writer.markdown(records), nl=False)
    else:
        writer.show(records, tables())
    if figure is not None:
        writer.figure(records, figure)


@cli.command("all", context_settings={"ignore_unknown_options": True})
@click.option(
    "--results", type=click.Path(path_type=Path), default=WORK / "results", show_default="build/bench/results"
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def everything(results: Path, options: tuple[str, ...]) -> int:
    """Every part, one after the other, each in a process of its own, with the OPTIONS that all parts know.

    Leaves a file of records for each part in --results, and there report.md and load.svg.
    """
    import subprocess

    from benchmarks import report as writer
    from benchmarks.records import read

    results.mkdir(parents=True, exist_ok=True)
    failed, records = [], []
    for name in ("offline", "online", "overhead", "growth", "floor"):
        output = results / f"{name}.jsonl"
        command = [sys.executable, "-m", "benchmarks", name, "--json", str(output), *options]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        elif output.exists():
            records += read(output)
    if records:
        (results / "report.md").write_text(writer.markdown(records), encoding="utf-8")
        if writer.of_kind(records, "online-load"):
            writer.figure(records, results / "load.svg")
        click.echo(f"{results}: report.md")
    if failed:
        raise FuseqError(f"failed: {', '.join(failed)}; what they said stands above")
    return 0
