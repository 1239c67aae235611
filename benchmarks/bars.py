"""How far a run has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str], None]


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A bar of `total` steps with its rate and the time left; the function yielded ends a step and names the next."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, note="", rate="")

        def advance(note: str) -> None:
            progress.advance(task)
            speed = progress.tasks[0].speed
            progress.update(task, note=note, rate=f"{60 * speed:.1f}/min" if speed else "")

        yield advance
