"""Who runs next: the queue, admission under free rows and a token budget, cancellation and deadlines.

The scheduler only decides. `schedule` returns a plan, the runner carries it out, `update` closes the loop. It knows
no graphs, no threads and no clock.

Admission is first come, first served with two exceptions, both bounded: sources as long as an admitted one come
along, since the encoder takes equal lengths in one call, and a group that needs more rows than are free lets others
pass. Once a group has been passed by `bypass` younger ones, nobody passes it any more.

Groups that want alignments stay in the queue while as many as there are rows wait for theirs: what comes faster than
alignments are drawn is refused by a full queue, not gathered behind it. Others pass them, since no row would help.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from serving.core.errors import Cancelled, DeadlineExceeded, FuseqError
from serving.engine.jobs import Group

WINDOW = 64  # waiting groups that admission looks at in one round

Ended = tuple[Group, FuseqError]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order."""

    answers: list[Ended]  # ended while waiting, or after decoding
    leave: list[Ended]  # ended while running: their rows are freed
    encode: list[list[Group]]  # admitted; the sources of a list have one length
    step: bool  # whether rows are left to decode


@dataclass(slots=True)
class Executed:
    """What became of a plan."""

    finished: list[Group] = field(default_factory=list)  # decoded to the end
    failed: list[Ended] = field(default_factory=list)


class Scheduler:
    """Groups on their way: waiting, running, finishing (decoded, not answered yet)."""

    def __init__(self, rows: int, encode_tokens: int, bypass: int) -> None:
        """Start empty.

        Args:
            rows: rows that may be reserved at once.
            encode_tokens: source tokens that one plan admits at most, unless one source alone is longer.
            bypass: younger groups that may be admitted before a waiting one.
        """
        self.rows = rows
        self.encode_tokens = encode_tokens
        self.bypass = bypass
        self.waiting: OrderedDict[Group, None] = OrderedDict()
        self.running: dict[Group, None] = {}
        self.finishing: dict[Group, None] = {}
        self.reserved = 0  # rows that the running groups can grow to
        self.next_deadline = math.inf  # no deadline of a group in here is earlier
        self._cancelled: list[Group] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not self.running and next(self._admissible(), None) is None

    def add(self, group: Group) -> None:
        """Queue a group."""
        self.waiting[group] = None
        self.next_deadline = min(self.next_deadline, _deadline(group))

    def cancel(self, group: Group) -> None:
        """Drop the group in the next plan."""
        self._cancelled.append(group)

    def drain(self) -> list[Group]:
        """Forget and return every group."""
        groups = [*self.finishing, *self.running, *self.waiting]
        for held in (self.finishing, self.running, self.waiting):
            held.clear()
        self.reserved, self.next_deadline, self._cancelled = 0, math.inf, []
        return groups

    def schedule(self, now: float) -> Plan:
        """Decide what to do at `now` (time.monotonic seconds)."""
        answers, leave = self._drop(now)
        by_length: dict[int, list[Group]] = {}
        for group in self._admit():
            group.started_at = now
            by_length.setdefault(group.length, []).append(group)
        return Plan(answers, leave, list(by_length.values()), step=bool(self.running))

    def update(self, executed: Executed) -> None:
        """Take note of what became of the plan: the rows of finished and failed groups are free again."""
        for group in executed.finished:
            self._end(group)
            self.finishing[group] = None
        for group, _ in executed.failed:
            self._end(group)

    def answered(self, group: Group) -> None:
        """A finishing group got its answer."""
        self.finishing.pop(group, None)

    def _end(self, group: Group) -> None:
        if group in self.running:
            del self.running[group]
            self.reserved -= group.rows_reserved

    def _drop(self, now: float) -> tuple[list[Ended], list[Ended]]:
        """Take out what was cancelled or has expired: those that hold no rows, and those that do."""
        ended: list[Ended] = [(group, Cancelled("the caller cancelled the request")) for group in self._cancelled]
        self._cancelled.clear()
        if now >= self.next_deadline:
            left = (*self.waiting, *self.running, *self.finishing)
            late = [group for group in left if _deadline(group) <= now]
            ended += [(group, DeadlineExceeded("the deadline passed before the work was done")) for group in late]
            self.next_deadline = min((d for d in map(_deadline, left) if d > now), default=math.inf)
        answers: list[Ended] = []
        leave: list[Ended] = []
        for group, error in ended:
            if group in self.running:
                self._end(group)
                leave.append((group, error))
            elif group in self.waiting or group in self.finishing:
                self.waiting.pop(group, None)
                self.finishing.pop(group, None)
                answers.append((group, error))
        return answers, leave

    def _admissible(self) -> Iterator[Group]:
        """The waiting groups that may be given rows, oldest first."""
        if len(self.finishing) < self.rows:
            return iter(self.waiting)
        return (group for group in self.waiting if not group.job.align)

    def _admit(self) -> list[Group]:
        """Take the groups that start now out of the queue."""
        free, tokens = self.rows - self.reserved, self.encode_tokens
        if not self.waiting or free < 1:
            return []
        window = list(islice(self._admissible(), WINDOW))
        overdue = next((i for i, group in enumerate(window) if group.passed_by >= self.bypass), len(window))
        del window[overdue + 1 :]
        admitted: dict[Group, None] = {}
        for group in _with_mates(window):
            if tokens < self.encode_tokens and group.length > tokens:
                break
            if group.rows_reserved > free:
                continue
            free -= group.rows_reserved
            tokens -= group.length
            admitted[group] = None
            if free < 1 or tokens < 1:
                break
        self._count_passed(window, admitted)
        for group in admitted:
            del self.waiting[group]
            self.running[group] = None
            self.reserved += group.rows_reserved
        return list(admitted)

    @staticmethod
    def _count_passed(window: list[Group], admitted: dict[Group, None]) -> None:
        younger = 0
        for group in reversed(window):
            if group in admitted:
                younger += 1
            else:
                group.passed_by += younger


def _deadline(group: Group) -> float:
    return math.inf if group.job.deadline is None else group.job.deadline


def _with_mates(window: list[Group]) -> list[Group]:
    """The window in order, but sources of equal length directly after the oldest of that length."""
    by_length: dict[int, list[Group]] = {}
    for group in window:
        by_length.setdefault(group.length, []).append(group)
    return [group for mates in by_length.values() for group in mates]
