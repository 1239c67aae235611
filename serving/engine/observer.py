"""What an engine reports while it works, for metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.core.errors import Cancelled, DeadlineExceeded, FuseqError
from serving.engine.jobs import Job, Outcome

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Callbacks of an engine, from its own thread (`rejected` from the caller's). They must be quick."""

    def rejected(self, job: Job, error: FuseqError) -> None:
        """`submit` refused the job."""

    def started(self, job: Job, queue_seconds: float) -> None:
        """The job left the queue."""

    def encoded(self, rows: int, tokens: int, seconds: float) -> None:
        """One call of the encoder."""

    def stepped(self, rows: int, seconds: float) -> None:
        """One step call, with the search and the moves of rows that follow it."""

    def finished(self, job: Job, outcome: Outcome) -> None:
        """The job is about to be answered."""


class Silent:
    """Observes nothing. A base for observers that want some of the callbacks only."""

    def rejected(self, job: Job, error: FuseqError) -> None: ...
    def started(self, job: Job, queue_seconds: float) -> None: ...
    def encoded(self, rows: int, tokens: int, seconds: float) -> None: ...
    def stepped(self, rows: int, seconds: float) -> None: ...
    def finished(self, job: Job, outcome: Outcome) -> None: ...


class Guarded:
    """Passes everything on to an observer, whose errors are logged and hurt nobody."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def rejected(self, job: Job, error: FuseqError) -> None:
        self._call(self._observer.rejected, job, error)

    def started(self, job: Job, queue_seconds: float) -> None:
        self._call(self._observer.started, job, queue_seconds)

    def encoded(self, rows: int, tokens: int, seconds: float) -> None:
        self._call(self._observer.encoded, rows, tokens, seconds)

    def stepped(self, rows: int, seconds: float) -> None:
        self._call(self._observer.stepped, rows, seconds)

    def finished(self, job: Job, outcome: Outcome) -> None:
        self._call(self._observer.finished, job, outcome)

    @staticmethod
    def _call(callback: Callable[..., None], *values: object) -> None:
        try:
            callback(*values)
        except Exception:
            logger.exception("an observer failed")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment.

    received = ok + failed + cancelled + expired + rejected + queued + running + aligning.
    """

    queued: int  # waiting for rows
    running: int  # jobs in rows
    aligning: int  # decoded, their alignments not drawn yet
    rows: int  # active rows
    capacity: int  # rows that there are
    steps: int  # step calls so far
    encodes: int  # encoder calls so far
    received: int  # calls of `submit`
    ok: int
    failed: int
    cancelled: int
    expired: int
    rejected: int
    accepting: bool  # whether `submit` takes jobs


class Tally:
    """Answers counted by kind."""

    __slots__ = ("cancelled", "expired", "failed", "ok")

    def __init__(self) -> None:
        self.ok = self.failed = self.cancelled = self.expired = 0

    def add(self, outcome: Outcome) -> None:
        """Count an answer."""
        if isinstance(outcome, Cancelled):
            self.cancelled += 1
        elif isinstance(outcome, DeadlineExceeded):
            self.expired += 1
        elif isinstance(outcome, FuseqError):
            self.failed += 1
        else:
            self.ok += 1
