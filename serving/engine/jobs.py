"""What is asked of the engine and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serving.core.errors import FuseqError
from serving.core.search import Search
from serving.core.types import Hypothesis, SearchOptions


@dataclass(frozen=True, slots=True)
class Result:
    """A decoded source. Times in seconds; queue, encode, decode and align add up to total.

    `first_step` and `last_step` number the step calls that the job took part in, counted from the engine's start.
    """

    hypotheses: list[Hypothesis]
    queue_seconds: float
    encode_seconds: float
    decode_seconds: float
    align_seconds: float
    total_seconds: float
    first_step: int
    last_step: int


Outcome = Result | FuseqError


@dataclass(eq=False, slots=True)
class Job:
    """One source to decode. `on_done` is called exactly once, from the engine's thread, and must not block."""

    source: Sequence[int]  # ids, end symbol included
    options: SearchOptions
    on_done: Callable[[Outcome], None]
    prefix: tuple[int, ...] = ()  # target ids that every hypothesis begins with
    align: bool = False
    deadline: float | None = None  # time.monotonic() seconds


@dataclass(eq=False, slots=True)
class Group:
    """A job inside the engine: its search, the rows it holds, and when what happened to it."""

    job: Job
    search: Search
    queued_at: float
    length: int = field(init=False)  # of the source
    rows_reserved: int = field(init=False)  # as many as the search can grow to
    slots: list[int] = field(default_factory=list)  # of the search's live rows, in the search's order
    passed_by: int = 0  # younger groups that were admitted before this one
    started_at: float = 0.0
    encoded_at: float = 0.0
    finished_at: float = 0.0
    first_step: int = -1
    last_step: int = -1
    answered: bool = False

    def __post_init__(self) -> None:
        self.length = len(self.job.source)
        self.rows_reserved = self.search.most_rows

    def result(self, now: float, hypotheses: list[Hypothesis]) -> Result:
        """The answer, once decoding has finished."""
        return Result(
            hypotheses=hypotheses,
            queue_seconds=self.started_at - self.queued_at,
            encode_seconds=self.encoded_at - self.started_at,
            decode_seconds=self.finished_at - self.encoded_at,
            align_seconds=now - self.finished_at,
            total_seconds=now - self.queued_at,
            first_step=self.first_step,
            last_step=self.last_step,
        )
