"""Rates are those of the last minute; a terminal gets a bar, a file a line now and then."""

from __future__ import annotations

import io
from datetime import timedelta

from rich.console import Console

from training.bars import Pace, Reporter, bar
from training.loop import Tick


def test_rate_and_time_left_are_those_of_the_window() -> None:
    pace = Pace(window=10)
    pace.add(0.0, 1, 100)
    assert (pace.rate(), pace.left(99)) == (0.0, None)
    pace.add(5.0, 2, 200)
    assert (pace.rate(), pace.left(98)) == (20.0, timedelta(seconds=490))
    for second in range(6, 100):  # it became faster
        pace.add(float(second), second, 1000 * second)
    assert pace.rate() == 1000.0
    assert pace.left(60) == timedelta(seconds=60)
    assert len(pace.points) == 11


def test_a_step_longer_than_the_window_still_has_a_rate() -> None:
    pace = Pace(window=10)
    for n in range(3):
        pace.add(100.0 * n, n, 50 * n)
    assert (pace.rate(), pace.left(1)) == (0.5, timedelta(seconds=100))


def test_a_bar_writes_nothing_where_there_is_no_terminal() -> None:
    for terminal in (False, True):
        written = io.StringIO()
        with bar(console=Console(file=written, force_terminal=terminal, width=100)) as progress:
            progress.update(progress.add_task("cleaning", total=10), completed=5)
        assert ("cleaning" in written.getvalue()) == terminal
        assert bool(written.getvalue()) == terminal


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(terminal: bool) -> str:
    written, clock = io.StringIO(), Clock()
    console = Console(file=written, force_terminal=terminal, width=150, soft_wrap=True, highlight=False)
    with Reporter(console, clock) as reporter:
        reporter.note("400 pairs [of words]")
        for step in range(1, 91):
            clock.now = float(step)
            reporter.step(Tick(step=step, steps=100, loss=9.0 / step, tokens=2000 * step, rate=0.5))
    return written.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    assert run(terminal=False).splitlines() == [
        "400 pairs [of words]",
        "step 30/100  loss 0.300  rate x0.50  2,000 tokens/s  0:01:10 left",
        "step 60/100  loss 0.150  rate x0.50  2,000 tokens/s  0:00:40 left",
        "step 90/100  loss 0.100  rate x0.50  2,000 tokens/s  0:00:10 left",
    ]


def test_a_terminal_has_a_bar_that_goes_at_the_end() -> None:
    written = run(terminal=True)
    assert "400 pairs [of words]" in written
    assert "step 90/100" in written
    assert "2,000 tokens/s  0:00:10 left" in written
    assert "\x1b[2K" in written  # the bar was wiped away
    assert written.endswith("\x1b[?25h") or written.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))
