"""The continuous-batching engine: jobs in from any thread, answers out from its own.

One thread runs the loop: take what arrived, let the scheduler plan, let the runner carry the plan out, answer who
has finished. A turn of the loop holds at most one step call, so whoever arrives during a step is in the next one,
and whoever is cancelled during a step is out of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from types import TracebackType

from serving.core.errors import (
    FuseqError,
    InvalidInput,
    ModelFailure,
    Overloaded,
    Unavailable,
    Unsupported,
)
from serving.core.manifest import Bundle
from serving.core.search import SearchTask, start_search
from serving.core.types import SearchOptions
from serving.engine.align import Aligned, Aligner
from serving.engine.jobs import Group, Job, Outcome, Result
from serving.engine.observer import Guarded, Observer, Silent, Snapshot, Tally
from serving.engine.runner import Runner
from serving.engine.scheduler import Scheduler
from serving.engine.sessions import Stages
from serving.engine.settings import DEFAULT_MEMORY, EngineSettings

__all__ = ["Engine", "EngineSettings", "Job", "Observer", "Result", "Silent", "Snapshot"]

logger = logging.getLogger(__name__)

Answer = tuple[Group, Outcome]


class Engine:
    """Decodes jobs of one bundle. `submit`, `cancel`, `stop` and `snapshot` may be called from any thread."""

    def __init__(
        self,
        bundle: Bundle,
        stages: Stages,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Allocate everything; nothing runs before `start`.

        Raises:
            BundleError: the graphs do not fit the bundle's state.
            ConfigError: the memory allowed does not hold one row.
        """
        self.bundle = bundle
        self.stages = stages
        self.settings = settings or EngineSettings()
        self._manifest = bundle.manifest
        self._special = bundle.manifest.special_ids()
        self._rules = bundle.manifest.search.rules()
        self._observer = Guarded(observer or Silent())
        self._runner = Runner(
            bundle,
            stages,
            rows=self.settings.rows,
            memory_bytes=self.settings.memory_bytes or DEFAULT_MEMORY,
            observer=self._observer,
        )
        self.capacity = self._runner.slots.capacity
        self._scheduler = Scheduler(self.capacity, self.settings.encode_tokens, self.settings.bypass)
        self._aligner = Aligner(stages.align, bundle.manifest, self._on_aligned) if stages.align else None
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()  # guards everything below
        self._submitted: list[Group] = []
        self._cancelled: list[Group] = []
        self._aligned: list[tuple[Group, Aligned]] = []
        self._groups: dict[Job, Group] = {}  # that have no answer yet
        self._waiting = 0
        self._load = 0
        self._accepting = False
        self._stop_at: float | None = None
        self._finished_all = True
        self._received = self._rejected = 0
        self._tally = Tally()
        self._published = (0, 0, 0, 0, 0)

    # What callers use.

    def start(self) -> None:
        """Run each graph once and begin to take jobs. An engine is started once.

        Raises:
            BundleError: a graph fails.
            Unavailable: the engine was started before.
        """
        if self._thread is not None:
            raise Unavailable("an engine is started once; make a new one")
        self._runner.warm_up(self._warm_up_group())
        self._thread = threading.Thread(target=self._loop, name="fuseq-engine", daemon=True)
        with self._condition:
            self._accepting = True
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its `on_done` is called once, unless this raises.

        Raises:
            InvalidInput: the source, the prefix or an option cannot be served.
            Unsupported: alignments of a model that has none.
            Overloaded: the queue is full.
            Unavailable: the engine is not started, draining or stopped.
        """
        try:
            group = self._make_group(job)
            with self._condition:
                self._queue(group)
        except FuseqError as error:
            with self._condition:
                self._received += 1
                self._rejected += 1
            self._observer.rejected(job, error)
            raise

    def cancel(self, job: Job) -> None:
        """Give a job up: its rows are free before the next step, its answer is Cancelled. Too late does no harm."""
        with self._condition:
            group = self._groups.get(job)
            if group is not None:
                self._cancelled.append(group)
                self._condition.notify()

    def stop(self, grace_seconds: float = 0.0) -> bool:
        """Take no more jobs, finish those there are, and end; returns whether all of them finished.

        What has not finished within `grace_seconds` is answered with Unavailable.
        """
        with self._condition:
            self._accepting = False
            stop_at = time.monotonic() + grace_seconds
            self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return self._finished_all

    @property
    def waiting(self) -> int:
        """Jobs that wait for rows."""
        return self._waiting

    @property
    def load(self) -> int:
        """Rows that the jobs without an answer can grow to."""
        return self._load

    def snapshot(self) -> Snapshot:
        """The engine's state at the end of its last action; all figures belong together."""
        with self._condition:
            running, aligning, rows, steps, encodes = self._published
            return Snapshot(
                queued=self._waiting,
                running=running,
                aligning=aligning,
                rows=rows,
                capacity=self.capacity,
                steps=steps,
                encodes=encodes,
                received=self._received,
                ok=self._tally.ok,
                failed=self._tally.failed,
                cancelled=self._tally.cancelled,
                expired=self._tally.expired,
                rejected=self._rejected,
                accepting=self._accepting,
            )

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # What callers' calls come down to.

    def _make_group(self, job: Job) -> Group:
        """Check a job and start its search."""
        limits = self._manifest.limits
        if not 1 <= len(job.source) <= limits.source:
            raise InvalidInput(f"the source has {len(job.source)} tokens; 1 to {limits.source} can be served")
        if not 0 <= min(job.source) <= max(job.source) < self._manifest.source_codec.size:
            raise InvalidInput(f"source ids must be 0 to {self._manifest.source_codec.size - 1}")
        if job.prefix and not 0 <= min(job.prefix) <= max(job.prefix) < self._manifest.target_codec.size:
            raise InvalidInput(f"prefix ids must be 0 to {self._manifest.target_codec.size - 1}")
        if {self._special.pad, self._special.bos, self._special.eos} & set(job.prefix):
            raise InvalidInput("the prefix holds a control symbol")
        if job.align and self._aligner is None:
            raise Unsupported(f"model {self._manifest.name!r} has no alignments")
        task = SearchTask(job.source, job.options, self._special, limits.target, job.prefix, self._rules)
        search = start_search(task)
        if search.most_rows > self.capacity:
            raise InvalidInput(f"a beam of {search.most_rows} is over the limit of {self.capacity} rows")
        return Group(job, search, time.monotonic())

    def _warm_up_group(self) -> Group:
        job = Job([self._special.eos], SearchOptions(), lambda outcome: None)
        return Group(job, start_search(SearchTask(job.source, job.options, self._special, 1)), time.monotonic())

    def _queue(self, group: Group) -> None:
        if not self._accepting:
            raise Unavailable("the engine is starting, draining or stopped; try again later")
        if self._waiting >= self.settings.queue:
            raise Overloaded(f"{self._waiting} jobs are waiting, as many as may; try again later")
        if group.job in self._groups:
            raise InvalidInput("the job was submitted before; make a new one")
        self._received += 1
        self._waiting += 1
        self._load += group.rows_reserved
        self._groups[group.job] = group
        self._submitted.append(group)
        self._condition.notify()

    def _on_aligned(self, group: Group, aligned: Aligned) -> None:
        with self._condition:
            self._aligned.append((group, aligned))
            self._condition.notify()

    # The loop, in the engine's thread.

    def _loop(self) -> None:
        while True:
            try:
                if not self._turn():
                    break
            except Exception:
                logger.exception("a turn of the engine failed; every job in it is given up")
                self._give_up(ModelFailure("the engine had to give up what it was doing"))
        if self._aligner is not None:
            self._aligner.stop()

    def _turn(self) -> bool:
        """Take what arrived, plan, run, answer; false once the engine is to end."""
        aligned = self._take()
        now = time.monotonic()
        scheduler, runner = self._scheduler, self._runner
        if self._stop_at is not None and (now >= self._stop_at or not self._groups):
            self._finished_all = not self._groups
            self._give_up(Unavailable("the server is shutting down"))
            return False
        plan = scheduler.schedule(now)
        answers: list[Answer] = [*plan.answers, *plan.leave]
        if plan.leave:
            runner.drop(plan)
        answers += self._with_alignments(aligned, now)
        if answers or plan.encode:
            self._answer(answers)
        for groups in plan.encode:
            for group in groups:
                self._observer.started(group.job, group.started_at - group.queued_at)
        if not plan.step:
            return True
        executed = runner.run(plan)
        scheduler.update(executed)
        answers = list(executed.failed)
        for group in executed.finished:
            if group.job.align and self._aligner is not None:
                self._aligner.add(group)
            else:
                scheduler.answered(group)
                answers.append((group, group.result(group.finished_at, group.search.hypotheses())))
        self._answer(answers)
        return True

    def _take(self) -> list[tuple[Group, Aligned]]:
        """Wait for something to do, and hand what callers brought to the scheduler."""
        with self._condition:
            while not (self._submitted or self._cancelled or self._aligned or not self._scheduler.idle):
                if self._stop_at is not None and not self._groups:
                    break
                wake = min(self._scheduler.next_deadline, math.inf if self._stop_at is None else self._stop_at)
                left = wake - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(None if wake == math.inf else left)
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            aligned, self._aligned = self._aligned, []
        for group in submitted:
            self._scheduler.add(group)
        for group in cancelled:
            self._scheduler.cancel(group)
        return aligned

    def _with_alignments(self, aligned: list[tuple[Group, Aligned]], now: float) -> list[Answer]:
        answers: list[Answer] = []
        for group, drawn in aligned:
            if group.answered or group not in self._scheduler.finishing:
                continue  # cancelled or expired meanwhile
            self._scheduler.answered(group)
            answers.append((group, drawn if isinstance(drawn, FuseqError) else group.result(now, drawn)))
        return answers

    def _give_up(self, error: FuseqError) -> None:
        """Answer everything there is with `error`, and free every row."""
        self._scheduler.drain()
        self._runner.clear()
        with self._condition:
            groups = list(self._groups.values())
            self._submitted, self._cancelled = [], []
        self._answer([(group, error) for group in groups])

    def _answer(self, answers: list[Answer]) -> None:
        """Publish the engine's state, then tell the callers: who asks after its answer sees itself gone."""
        with self._condition:
            for group, outcome in answers:
                group.answered = True
                self._load -= group.rows_reserved
                del self._groups[group.job]
                self._tally.add(outcome)
            self._waiting = len(self._submitted) + len(self._scheduler.waiting)
            self._published = (
                len(self._scheduler.running),
                len(self._scheduler.finishing),
                self._runner.slots.count,
                self._runner.steps,
                self._runner.encodes,
            )
        for group, outcome in answers:
            if isinstance(outcome, ModelFailure):
                logger.error("a job failed: %s", outcome)
            self._observer.finished(group.job, outcome)
            try:
                group.job.on_done(outcome)
            except Exception:
                logger.exception("the callback of a job failed")
