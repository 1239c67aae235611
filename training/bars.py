"""Progress of long work on standard error."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:  # a command that trains nothing loads no torch
    from training.loop import Tick

LINE_SECONDS = 30.0  # between lines where there is no terminal to draw a bar on
BAR_SECONDS = 0.2
WINDOW_SECONDS = 60.0  # that rates are taken over


class RateColumn(ProgressColumn):
    """Things a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s", style="progress.data.speed")


def bar(*measures: ProgressColumn, console: Console | None = None) -> Progress:
    """A bar that goes when the work is done: description, bar, measures (count and rate by default), time left.

    Where there is no terminal it writes nothing.
    """
    shown = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *(measures or (MofNCompleteColumn(), RateColumn())))
    return Progress(*columns, TimeRemainingColumn(), console=shown, transient=True, disable=not shown.is_terminal)


class Pace:
    """Rate and time left, by what the last `window` seconds brought."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self.window = window
        self.points: deque[tuple[float, int, int]] = deque()  # (time, steps, tokens)

    def add(self, now: float, steps: int, tokens: int) -> None:
        """Note where things stand at `now` (seconds)."""
        self.points.append((now, steps, tokens))
        while len(self.points) > 2 and now - self.points[1][0] >= self.window:
            self.points.popleft()

    def rate(self) -> float:
        """Tokens a second; 0 as long as nothing is known."""
        (begin, _, few), (end, _, many) = self.points[0], self.points[-1]
        return (many - few) / (end - begin) if end > begin else 0.0

    def left(self, steps: int) -> timedelta | None:
        """Time that `steps` more steps take, to the second; None as long as nothing is known."""
        (begin, first, _), (end, last, _) = self.points[0], self.points[-1]
        return timedelta(seconds=round(steps * (end - begin) / (last - first))) if last > first else None


class Reporter:
    """Shows a training: a bar on a terminal, a line now and then elsewhere. A context manager."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self.clock = clock
        self.pace = Pace()
        self.shown = clock()
        state = TextColumn("{task.fields[state]}")
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), state, console=self.console, transient=True)
        self.task = self.bar.add_task("", total=None, state="", visible=False)

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop() if self.console.is_terminal else None

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def step(self, tick: Tick) -> None:
        """Show where the training stands."""
        now = self.clock()
        self.pace.add(now, tick.step, tick.tokens)
        if now - self.shown < (BAR_SECONDS if self.console.is_terminal else LINE_SECONDS):
            return
        self.shown = now
        left = self.pace.left(tick.steps - tick.step)
        state = f"loss {tick.loss:.3f}  rate x{tick.rate:.2f}  {self.pace.rate():,.0f} tokens/s  {left or '?'} left"
        description = f"step {tick.step:,}/{tick.steps:,}"
        if self.console.is_terminal:
            self.bar.update(
                self.task, description=description, completed=tick.step, total=tick.steps, state=state, visible=True
            )
        else:
            self.note(f"{description}  {state}")
